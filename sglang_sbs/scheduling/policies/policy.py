"""The interface of prefill policies: :class:`PrefillPolicy` and :class:`Plan`. Must not know how
the queue works, decode, or how the state of instances is kept."""

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
"""Function that returns whether any decode rank has room for a request now."""


class Placement(NamedTuple):
    """Assignment of one request to a prefill instance and DP rank."""

    request: Request
    instance: PrefillInstance
    rank: int


@dataclass(slots=True)
class Plan:
    """Result of one decision: the requests to dispatch now, and ``wake_s``, the time to plan again
    if no event comes before (infinity: only then)."""

    placements: list[Placement] = field(default_factory=list)
    reason: str = ""
    wake_s: float = math.inf
    passed_over: list[Request] = field(default_factory=list)
    """Requests that took part in this decision and were not placed: Q_next of Algorithm 2."""
    spends: PrefillInstance | None = None
    """Instance whose readiness this plan uses up, even if it gets no request: it must send another
    EndForward first. None: no instance."""
    batch: BatchRecord | None = None
    """Record of the decision for explanations; None if none was made."""


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Arguments for the creation of a policy, which may keep all of them."""

    config: SchedulerConfig
    """Scheduler flags. Seed random choices with ``config.seed``, so that runs can be repeated."""
    interval: IntervalController
    """Learned times: mean forward time and dispatch latency (L_net)."""
    offered: OfferedLoad
    """Arrival rate and load."""


class PrefillPolicy(ABC):
    """Base of policies, which decide which waiting requests leave now, for which instance and DP
    rank. By default the queue is first come first served, and the ``on_`` methods do nothing."""

    holds: bool
    """Whether requests may wait in the scheduler. If False, not even for decode room."""
    explains = False
    """Whether each plan records its reasons in :attr:`Plan.batch`."""
    fills_the_way = False
    """Whether every instance is kept busy even if the dispatch latency is a pass or more."""
    literal_interval = False
    """Whether the mean forward time includes outliers, as in Algorithm 1
    (:attr:`.IntervalController.literal`)."""
    opening = Opening.AT_ONCE
    """Why batches of this policy leave, for the explanation of plans without :attr:`Plan.batch`."""

    def key_of(self, request: Request) -> float:
        """Return the request's sort key in the queue, smallest first. Called once, on arrival."""
        return request.arrived_s

    def on_topology_change(self, instances: Instances) -> None:  # noqa: B027
        """Handle a change of the prefill instances that are up; ``instances``: all of them."""

    def on_dispatched(self, now_s: float) -> None:  # noqa: B027
        """Handle that the batch of the last plan was dispatched."""

    def on_landing(self, seen: Observation, ranks: int, now_s: float) -> None:  # noqa: B027
        """Learn from the samples of a rank's report. ``ranks``: DP size of its instance."""

    def on_forward_learned(self, instance: PrefillInstance) -> None:  # noqa: B027
        """Handle a change of the instance's forward model."""

    def explain(self, wanted: bool) -> None:
        """Switch the recording of reasons (:attr:`Plan.batch`) on or off."""
        self.explains = wanted

    def note_waiting(self, request: Request, now_s: float) -> None:  # noqa: B027
        """Record what a request that has just arrived and was not placed waits for."""

    def explained(self, plan: Plan, instances: int, waiting: int, now_s: float) -> BatchRecord:
        """Return the record of a plan without :attr:`Plan.batch`; it describes only the instance of
        the first placement. ``instances``, ``waiting``: their numbers."""
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
        """Decide once: return requests to dispatch now, for one batch. The scheduler calls this
        again until nothing is placed. ``queue`` and ``instances`` are not empty."""
