"""The picture of one decision of the default policy: :func:`observe` takes it, and the other steps
only read it. Must not decide anything."""

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
    """The state that the policy keeps from one decision to the next."""

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
        """Time from the next batch's dispatch to the predicted end of the running pass."""
        return self.lead.lead_s(self.interval.lone_s)

    @property
    def hold_s(self) -> float:
        """The longest hold."""
        return max(self.max_hold_s, TUNING.most_hold_passes * self.interval.mean_forward_s)

    def passes_away(self, waiting_tokens: int) -> int:
        """How many passes an instance begins until a request that is sent now arrives there.

        Above 1, holding gains nothing: the state at the end of a pass does not help a request that
        will be in a later one, and one batch per pass would be one per latency. Half a pass of
        latency is enough when all instances together cannot take what waits."""
        passes = self.interval.lone_s / self.interval.mean_forward_s
        return 1 + int(passes + (TUNING.slack * waiting_tokens >= self.offered.capacity_tokens) / 2)


class View(NamedTuple):
    """The cluster, the queue and the learned times at one moment."""

    learned: Learned
    queue: RequestQueue
    instances: Instances
    admissible: Admissible
    at: Moment
    lead_s: float
    """The dispatch lead of a batch of all that wait."""
    hold_until_s: float
    """Time at which the hold of the oldest request ends."""
    overdue: bool
    """The hold is over: the first instance that can take the oldest request gets it."""
    by_forecast: bool
    """Prompts of several chunks decide where requests go."""
    early: Collection[PrefillInstance]
    """Instances for which requests may leave before a batch could: see
    :meth:`.LongPrompts.leave_early`."""
    all_suit: bool
    """No request waits for an instance with a larger chunk."""
    urgent: bool
    """No batch is committed early, because an urgent request that arrives later would miss the next
    pass."""
    passes_away: int
    """See :meth:`Learned.passes_away`."""
    starts: Starts
    """Start times of a batch that is sent now, on each instance."""

    def in_one_pass(self, request: Request, instance: PrefillInstance) -> list[PrefillInstance]:
        """The instances where a request takes one pass, if it takes several on ``instance`` and may
        wait for them."""
        if self.all_suit:
            return []
        return self.learned.long.in_one_pass(request, instance, self.instances)


class OpenPass(NamedTuple):
    """A pass of an instance that may get a batch now."""

    instance: PrefillInstance
    kind: Opening
    joins_left: float = math.inf
    """Number of requests that can still join the batch on its way to this pass."""
    passes: int = 1
    """Number of passes for which requests are sent at once."""


def observe(
    learned: Learned,
    queue: RequestQueue,
    instances: Instances,
    admissible: Admissible,
    now_s: float,
) -> View:
    """Step 1: collect the state that all steps of a decision read."""
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
        learned.passes_away(queue.tokens),
        lineup.starts(at),
    )
