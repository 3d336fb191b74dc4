"""The snapshot on which one decision of the default policy is based: :func:`observe` takes it, and
the other steps only read it. Must not decide anything."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from sglang_sbs.scheduling.policies.adaptive.dispatch_lead import DispatchLead
from sglang_sbs.scheduling.policies.adaptive.lineup import Lineup, Moment, PlannedStarts, Starts
from sglang_sbs.scheduling.policies.adaptive.long_prompts import LongPrompts
from sglang_sbs.scheduling.policies.offered_load import OfferedLoad
from sglang_sbs.scheduling.policies.policy import Admissible
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.queue.priority import Urgency
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.reasons import Opening
from sglang_sbs.scheduling.request import Request


class Learned(NamedTuple):
    """State that the default policy keeps from one decision to the next."""

    interval: IntervalController
    offered: OfferedLoad
    lineup: Lineup
    lead: DispatchLead
    long: LongPrompts
    urgency: Urgency
    planned: PlannedStarts
    max_hold_s: float

    @property
    def lead_s(self) -> float:
        """Dispatch lead: seconds before the predicted end of a pass at which a batch leaves."""
        return self.lead.lead_s(self.interval.lone_s)

    @property
    def hold_s(self) -> float:
        """Longest hold of a request, in seconds."""
        return max(self.max_hold_s, TUNING.most_hold_passes * self.interval.mean_forward_s)


class View(NamedTuple):
    """Snapshot of the cluster, the queue and the learned times at one decision."""

    learned: Learned
    queue: RequestQueue
    instances: Instances
    admissible: Admissible
    at: Moment
    lead_s: float
    """Dispatch lead of a batch of all waiting requests, in seconds."""
    hold_until_s: float
    """Time at which the hold of the oldest request with decode room ends; infinity: none has."""
    overdue: bool
    """The time ``hold_until_s`` has come: the first instance that can take the oldest request gets
    it."""
    by_forecast: bool
    """Whether each request is placed by forecast of its cost, because prompts of several chunks
    matter (:meth:`.LongPrompts.matter`)."""
    early: Collection[PrefillInstance]
    """Instances for which requests may leave before a batch could
    (:meth:`.LongPrompts.leave_early`)."""
    all_suit: bool
    """Whether no request should wait for an instance with a larger chunk: all chunks are equal, or
    the oldest request is overdue."""
    urgent: bool
    """Whether no batch may leave early, because an urgent request that arrives later would miss the
    next pass."""
    starts: Starts
    """Start of a batch sent now, on each instance."""

    def in_one_pass(self, request: Request, instance: PrefillInstance) -> list[PrefillInstance]:
        """Return the instances where a request takes one pass and for which it should wait; empty
        if it takes one on ``instance``, or should not wait (``all_suit``)."""
        if self.all_suit:
            return []
        return self.learned.long.in_one_pass(request, instance, self.instances)


class OpenPass(NamedTuple):
    """A pass of an instance that may get a batch now, with the reason (``kind``)."""

    instance: PrefillInstance
    kind: Opening
    joins_left: float = math.inf
    """Number of requests that can still join the batch on its way to this pass."""
    passes: int = 1
    """Number of passes, from the instance's next one on, whose room the batch may fill."""


def observe(
    learned: Learned,
    queue: RequestQueue,
    instances: Instances,
    admissible: Admissible,
    now_s: float,
) -> View:
    """Collect the snapshot that all steps of a decision read (step 1)."""
    interval, lineup, long, waiting = learned.interval, learned.lineup, learned.long, len(queue)
    lead_s = learned.lead_s + learned.offered.leaving_s(waiting, interval.serial_s)
    # With fewer waiting than usual a batch arrives sooner than the usual one.
    at = Moment(now_s, min(interval.latency_s, lead_s))
    # The oldest that decode has room for: the hold of no other request could end now.
    oldest = queue.oldest_of(admissible, TUNING.most_refused)
    hold_until_s = (math.inf if oldest is None else oldest.arrived_s) + learned.hold_s
    overdue = now_s + TUNING.epsilon_s >= hold_until_s
    by_forecast = long.matter(queue, lineup.most_chunks)
    return View(
        learned,
        queue,
        instances,
        admissible,
        at,
        lead_s,
        hold_until_s,
        overdue,
        by_forecast,
        long.leave_early(instances) if by_forecast else (),
        overdue or not long.uneven_chunks,
        not by_forecast and learned.urgency.matters(now_s),
        lineup.starts(at),
    )
