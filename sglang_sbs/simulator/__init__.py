"""A discrete-event cluster that drives the router's own scheduler object."""

from sglang_sbs.simulator.cluster.cost import COSTS, PassCost
from sglang_sbs.simulator.cluster.outcome import RequestRecord
from sglang_sbs.simulator.cluster.simulation import simulate
from sglang_sbs.simulator.cluster.spec import ClusterSpec, InstanceSpec, TopologyChange

__all__ = [
    "COSTS",
    "ClusterSpec",
    "InstanceSpec",
    "PassCost",
    "RequestRecord",
    "TopologyChange",
    "simulate",
]
