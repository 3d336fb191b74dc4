"""A discrete-event cluster that drives the router's own scheduler object."""

from sglang_sbs.simulator.cluster import simulate
from sglang_sbs.simulator.cost import COSTS, PassCost
from sglang_sbs.simulator.outcome import RequestRecord
from sglang_sbs.simulator.spec import ClusterSpec, InstanceSpec, TopologyChange

__all__ = [
    "COSTS",
    "ClusterSpec",
    "InstanceSpec",
    "PassCost",
    "RequestRecord",
    "TopologyChange",
    "simulate",
]
