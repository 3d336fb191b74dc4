"""The interface of prefill policies: :class:`PrefillPolicy` and :class:`Plan`. Must not know the
queue's bookkeeping, decode, or how instances keep their state true."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.explained.decisions import BatchRecord, look_at
from sglang_sbs.scheduling.policies.offered_load import OfferedLoad
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.prefill.observation import Observation
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.reasons import Opening, Term
from sglang_sbs.scheduling.request import Request

Admissible = Callable[[Request], bool]
"""Whether some decode rank has room for the request now."""


class Placement(NamedTuple):
    """One request on one prefill DP rank."""

    request: Request
    instance: PrefillInstance
    rank: int


@dataclass(slots=True)
class Plan:
    """The requests to dispatch now, and the time to plan again if no event comes before."""

    placements: list[Placement] = field(default_factory=list)
    reason: str = ""
    wake_s: float = math.inf
    passed_over: list[Request] = field(default_factory=list)
    """Requests that took part in this cycle and were not allocated: Q_next of Algorithm 2."""
    spends: PrefillInstance | None = None
    """Its EndForward is spent on this plan, whether or not it gets a request."""
    batch: BatchRecord | None = None
    """State of the cluster at the decision, for explanations."""


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Arguments for the creation of a policy, which may keep all of them."""

    config: SchedulerConfig
    """Flags. Draws at random are seeded with ``config.seed``, so that runs can be repeated."""
    interval: IntervalController
    """Learned times: mean forward time and L_net."""
    offered: OfferedLoad
    """The arrival rate."""


class PrefillPolicy(ABC):
    """Decides which waiting requests leave now, for which instance and DP rank. Unless overridden,
    the queue is first come first served and events are ignored."""

    holds: bool
    """Whether requests may wait in the scheduler. If not, decode admission does not hold either."""
    explains = False
    """Whether each plan records its reasons in :attr:`Plan.batch`."""
    fills_the_way = False
    """Whether it keeps every instance busy if the dispatch latency is a pass or more."""
    literal_interval = False
    """Whether the mean forward time is exactly Algorithm 1's (``IntervalController``)."""
    opening = Opening.AT_ONCE
    """Explanation of when its batches leave, for plans without one of their own."""

    def key_of(self, request: Request) -> float:
        """Return the request's sort key in the queue, smallest first. Called once, on arrival."""
        return request.arrived_s

    def on_topology_change(self, instances: Instances) -> None:  # noqa: B027
        """``instances``: the prefill instances that are up now."""

    def on_dispatched(self, now_s: float) -> None:  # noqa: B027
        """A batch of the last plan has left."""

    def on_landing(self, seen: Observation, ranks: int, now_s: float) -> None:  # noqa: B027
        """A rank launched. ``ranks``: DP ranks of its instance."""

    def on_forward_learned(self, instance: PrefillInstance) -> None:  # noqa: B027
        """The forward model of the instance has changed."""

    def explain(self, wanted: bool) -> None:
        """Switch the recording of reasons (:attr:`Plan.batch`) on or off."""
        self.explains = wanted

    def note_waiting(self, request: Request, now_s: float) -> None:  # noqa: B027
        """Record what a request that has just arrived and was not placed waits for."""

    def explained(self, plan: Plan, instances: int, waiting: int, now_s: float) -> BatchRecord:
        """Return a record of a plan that has none of its own: the batch's destination only."""
        instance = plan.placements[0].instance
        # The length of the pass about to be launched is computed only when a reader asks for it.
        waits = instance.launching and not instance.ranks.takes_nothing
        at_s = instance.launches_s(0.0) if waits else instance.free_at_s(now_s, 0.0)
        looks = (look_at(instance, max(now_s, at_s), waits=waits),)
        return BatchRecord(now_s, self.opening, Term.RULE, looks, instances, waiting)

    @abstractmethod
    def plan(
        self, queue: RequestQueue, instances: Instances, admissible: Admissible, now_s: float
    ) -> Plan:
        """Decide once. Called again until it places nothing. ``queue`` and ``instances`` have at
        least one element each."""
