"""Which of several schedulers schedules: a lock in a Kubernetes Lease or in etcd."""

from sglang_sbs.router.election.candidate import ElectionTimes
from sglang_sbs.router.election.election import Election
from sglang_sbs.router.election.urls import parse_election

__all__ = ["Election", "ElectionTimes", "parse_election"]
