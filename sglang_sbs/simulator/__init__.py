"""A discrete-event cluster that drives the router's own scheduler object."""

from sglang_sbs.simulator.cluster import ClusterSpec, RequestRecord, simulate
from sglang_sbs.simulator.cost import COSTS, PassCost

__all__ = ["COSTS", "ClusterSpec", "PassCost", "RequestRecord", "simulate"]
