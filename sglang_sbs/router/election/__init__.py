"""Elects the active one of several schedulers with a lock: a Kubernetes Lease or a key in etcd."""

from sglang_sbs.router.election.candidate import ElectionTimes
from sglang_sbs.router.election.election import Election
from sglang_sbs.router.election.urls import parse_election

__all__ = ["Election", "ElectionTimes", "parse_election"]
