"""The default trigger: late binding to the instance that is about to be ready.

Must not know decode or flow control.

Theory of operation
-------------------
An SGLang prefill instance takes in new requests only when a pass ends, and an idle one starts on
the first request it sees. So a batch must arrive shortly *before* the predicted end of the running
pass: later it misses the pass or is split over two, earlier it gives away the choice. How much
before is learned from what either costs (``dispatch_lead``). Then, per decision:

1. candidates: idle instances, busy ones within the lead of their predicted end (of the pass before,
   where the next one is formed when that ends), and any with room when more waits than it and all
   that start before it can hold (nothing is lost by committing early), in the order in which a
   batch sent now would start. Under overlap scheduling and with
   more waiting than all can take, first those that could run on without a gap (``lookahead``).
   A request may also follow a batch that is on its way while it would most likely still be there
   in time: one that leaves alone can leave later than a batch can;
2. spacing: instances are kept apart in phase by a fraction of the pass time that the arrival rate
   calls for. Never while all are idle, the queue is long, or the candidate will run anyway; and
   less where idle instances start with a part of what is sent to them;
3. order: urgent (``priority``) and short first, with an ageing that bounds how long anything is
   overtaken. A prompt of several chunks counts as one chunk;
4. share: how much of the queue to send now and how much to leave for the instances that are ready
   next, so that the sum of predicted completion times is smallest (``few_requests``). With prompts
   of several chunks about, where a request goes matters more than how much: only those leave that
   cost least here (``pass_forecast``), and nothing is spaced, as passes differ too much for phases;
5. placement: longest first into the emptiest rank, whole requests only, and split requests to fill
   the pass only when more is left than the other instances can take in theirs.

Where the way takes a pass or more, none of this helps: requests leave when they come. Where batches
do not arrive whole, they leave at once as under ``eta`` (``hold_guard``).

Tokens are uncached ones. A request of whose prompt some rank holds a part may be left for that
instance, or for one that is computing the same (``cache_affinity``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from sglang_sbs.scheduling.paging import paged
from sglang_sbs.scheduling.policies.adaptive.cache_affinity import BatchAffinity, CacheAffinity
from sglang_sbs.scheduling.policies.adaptive.decision import Decision
from sglang_sbs.scheduling.policies.adaptive.dispatch_lead import DispatchLead
from sglang_sbs.scheduling.policies.adaptive.explained import (
    batch_of,
    note_left,
    note_opening,
    note_skipped,
)
from sglang_sbs.scheduling.policies.adaptive.few_requests import Waiting, cut_of
from sglang_sbs.scheduling.policies.adaptive.hold_guard import MOST_LOAD, HoldGuard, place_at_once
from sglang_sbs.scheduling.policies.adaptive.lineup import (
    Lineup,
    Moment,
    PlannedStarts,
    idle_in_turn,
)
from sglang_sbs.scheduling.policies.adaptive.long_prompts import LongPrompts, early_homes, may_take
from sglang_sbs.scheduling.policies.adaptive.lookahead import lookahead
from sglang_sbs.scheduling.policies.immediate import Eta
from sglang_sbs.scheduling.policies.offered_load import OfferedLoad
from sglang_sbs.scheduling.policies.pbaa import place_fitting, top_up
from sglang_sbs.scheduling.policies.policy import Admissible, Placement, Plan, PrefillPolicy
from sglang_sbs.scheduling.policies.tuning import AGEING, SLACK
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.prefill.observation import Observation
from sglang_sbs.scheduling.queue.priority import Urgency
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.reasons import WaitReason
from sglang_sbs.scheduling.request import Request, uncached_tokens_of

MOST_HOLD_PASSES = 5.0
"""A hold ends after so many mean forward times, or what is configured if that is longer: passes of
large chunks take seconds."""
MOST_JOINING = 64
"""With more waiting nobody joins a batch on its way: they were left for later passes on purpose."""
MAX_TRIED = 2
"""Candidates asked for a batch per decision, those that are free first."""
MOST_REFUSED = 256
"""A decision looks no further when decode has no room for so many of the queue."""
MAX_DEFERRED = 32
"""A batch is formed of what was found when so many requests were left for other instances."""
RETRY_S = 0.01
"""After a decision that was expensive and sent nothing the next comes so much later at least."""
_EPSILON_S = 1e-9
_BEYOND_S = 1e-6
"""More than the difference that the order of adding times makes."""


class AdaptiveTrigger(PrefillPolicy):
    """See the module's theory of operation."""

    holds = True

    def __init__(
        self, interval: IntervalController, load: OfferedLoad, max_hold_s: float, urgency: Urgency
    ) -> None:
        self._interval = interval
        self._offered = load
        self._lineup = Lineup()
        self._urgency = urgency
        self._max_hold_s = max_hold_s
        self.starts = PlannedStarts()
        self._planned_s: float | None = None
        """Of the batch that was planned last; None: it joins one that left."""
        self._long = LongPrompts(self._offered, interval)
        self._lead = DispatchLead()
        self._eta = Eta(interval, knows_caches=True)
        self.guard = HoldGuard()
        self._retry_s = float("-inf")
        self._decision: CacheAffinity | None = None
        self._decision_s = float("-inf")
        self._one: Decision | None = None
        """The last one."""

    @property
    def lead_s(self) -> float:
        """How long before the predicted end of a pass its successor's batch leaves."""
        return self._lead.lead_s(self._interval.lone_s)

    def on_dispatched(self, now_s: float) -> None:
        if self._planned_s is not None:
            self.starts.add(self._planned_s, forget_s=now_s - self._offered.pass_s)

    def on_landing(self, seen: Observation, ranks: int, now_s: float) -> None:
        if self._under_way() > 1 and seen.soonest_s < math.inf:
            # Nobody is idle while so much is on its way, and only that would tell of L_net: so it
            # is what it was, if it is no more than this.
            self._interval.observe([min(seen.soonest_s, self._interval.lone_s)], now_s)
        self._lead.observe(
            seen,
            now_s,
            ranks=ranks,
            load=self._offered.load,
            latency_s=self._interval.lone_s,
            pass_s=self._interval.mean_forward_s,
        )

    def on_forward_learned(self, instance: PrefillInstance) -> None:
        self._offered.forget_speed(instance)

    def key_of(self, request: Request) -> float:
        """Short first with ageing: a chunk of length is worth ``_ageing_s`` of waiting. What is
        longer takes several passes as it is, and would be the tail if it started last."""
        chunks = request.uncached_tokens / self._long.chunk_tokens
        shift_s = self._urgency.shift_s(request, chunks)
        return request.arrived_s + self._ageing_s() * min(1.0, chunks) + shift_s

    def _under_way(self, waiting_tokens: int = 0) -> int:
        """How many passes an instance begins until what is sent is there. If over 1, nothing is won
        by holding it: what is known when a pass ends is no help for the one it will be in, and one
        batch per pass would be one per latency. Half a pass is enough with as much waiting as all
        can take."""
        passes = self._interval.lone_s / self._interval.mean_forward_s
        return 1 + int(passes + 0.5 * (SLACK * waiting_tokens >= self._offered.capacity_tokens))

    def _hold_s(self) -> float:
        return max(self._max_hold_s, MOST_HOLD_PASSES * self._interval.mean_forward_s)

    def _ageing_s(self) -> float:
        """With many instances a batch leaves often, and being passed over must count for more."""
        batches_s = self._interval.mean_forward_s / max(1, self._interval.active)
        return AGEING * batches_s

    def on_topology_change(self, instances: Instances) -> None:
        self._long.on_topology_change(instances)
        self._decision = None
        self._offered.on_topology_change(instances)
        self._lineup.on_topology_change(instances)

    def plan(
        self, queue: RequestQueue, instances: Instances, admissible: Admissible, now_s: float
    ) -> Plan:
        if now_s + _EPSILON_S < self._retry_s:
            return Plan(wake_s=self._retry_s)
        self._offered.measure(instances, now_s)
        self._lineup.refresh()
        if self._sends_at_once(queue, now_s):
            self._planned_s = None
            return place_at_once(queue, instances, admissible, self._eta, now_s)
        self._one = one = self._look(queue, instances, admissible, now_s)
        self._open(one)
        self._choose(one)
        if not one.candidates and self._decision_s != now_s:
            return self._later(one)
        affinity = self._decision_at(one)
        tried = 0
        for instance in one.candidates:
            every = self._long.uneven_chunks or one.chunked
            if not (tried < MAX_TRIED or every or affinity.is_wanted(instance)):
                continue
            plan = self._batch_for(instance, one, affinity)
            if plan is None:
                continue
            tried += 1
            if plan.placements:
                joins = instance.id in one.starts.in_time
                self._planned_s = None if joins else one.starts.begin_s(instance)
                affinity.dispatched(instance)
                return plan
        one.wake_s = min(one.wake_s, affinity.wake_s)
        return self._later(one, affinity.deferred)

    def note_waiting(self, request: Request, now_s: float) -> None:
        if self._one is not None:
            note_opening(request, self._one, now_s)

    @property
    def holding(self) -> bool:
        """False while batches do not arrive whole, so that requests leave at once."""
        return not self.guard.on

    def _sends_at_once(self, queue: RequestQueue, now_s: float) -> bool:
        excess_s = self.lead_s - self._interval.lone_s
        if self.guard.update(excess_s / self._interval.mean_forward_s, now_s):
            self._lead.forget()
        return (
            self.guard.on
            and self._offered.load < MOST_LOAD
            and queue.tokens < self._offered.capacity_tokens
        )

    def _later(self, one: Decision, deferred: int = 0) -> Plan:
        if max(deferred, len(one.home_of or ())) >= MAX_DEFERRED:
            self._retry_s = one.at.now_s + RETRY_S
            one.wake_s = min(one.wake_s, self._retry_s)
        return Plan(wake_s=one.wake_s)

    def _look(
        self, queue: RequestQueue, instances: Instances, admissible: Admissible, now_s: float
    ) -> Decision:
        """Who has waited too long, and when a batch would start where."""
        whole_s = self.lead_s + self._offered.leaving_s(len(queue), self._interval.serial_s)
        # With fewer waiting than usual a batch is there sooner than the usual one.
        at = Moment(now_s, min(self._interval.latency_s, whole_s))
        # Of those that decode has room for: no other hold could end now.
        oldest = next(filter(admissible, islice(queue, MOST_REFUSED)), None)
        oldest_s = math.inf if oldest is None else oldest.arrived_s
        hold_until_s = oldest_s + self._hold_s()
        chunked = self._long.matter(queue, self._lineup.most_chunks)
        return Decision(
            queue,
            instances,
            admissible,
            at,
            whole_s,
            overdue=at.now_s + _EPSILON_S >= hold_until_s,
            chunked=chunked,
            late=self._urgency.matters(now_s) and not chunked,
            all_idle=self._lineup.all_idle,
            starts=self._lineup.starts(at),
            under_way=self._under_way(queue.tokens),
            wake_s=hold_until_s if at.now_s + _EPSILON_S < hold_until_s else math.inf,
        )

    def _open(self, one: Decision) -> None:
        """The instances that may get a batch, or a part of one, at this moment."""
        if one.under_way > 1:
            in_order = [one.instances[number] for _, _, number in one.starts]
            one.candidates = [i for i in in_order if i.has_room_in(one.under_way)]
            return
        now_s, serial_s, queue = one.at.now_s, self._interval.serial_s, one.queue
        whole_s = one.whole_s
        beyond_s = whole_s + _BEYOND_S
        few = len(queue) <= MOST_JOINING
        join_s = self._interval.lone_s  # one that comes late is one request in the next pass
        ahead_tokens = 0.0
        wake_s = one.wake_s
        for start_s, _, number in one.starts:
            instance = one.instances[number]
            if one.soonest is None:
                one.soonest = instance
            ahead_tokens += self._offered.capacity_of(instance)
            long_queue = not one.late and SLACK * queue.tokens >= ahead_tokens
            if not long_queue:
                # Who starts later is open later, and wakes nobody sooner.
                one.starts.until_s = max(now_s, wake_s) + beyond_s
            if not may_take(instance, long_queue):
                if few and instance.has_flight and instance.has_room and instance.passes:
                    # What came after the batch may join it, once a batch could leave for that pass.
                    left_s = one.at.forms_at_s(instance) - now_s
                    spare_s = left_s - join_s - max(0.0, instance.left_s - now_s) - serial_s
                    if left_s > whole_s + _EPSILON_S:
                        wake_s = min(wake_s, now_s + left_s - whole_s)
                    elif instance.last_dispatch_s < now_s and spare_s >= 0:
                        one.candidates.append(instance)
                        one.starts.in_time[instance.id] = 1 + spare_s / max(_EPSILON_S, serial_s)
                continue
            open_s = now_s
            if not (instance.idle or long_queue):
                forms_s = one.at.forms_at_s(instance)
                if forms_s < one.at.arrives_s:
                    forms_s = start_s  # too late for that one
                open_s = forms_s - whole_s
            if open_s <= now_s + _EPSILON_S:
                one.candidates.append(instance)
            else:
                wake_s = min(wake_s, open_s)
        one.wake_s = wake_s

    def _choose(self, one: Decision) -> None:
        """Of those that may get a batch the ones that should, the most urgent first."""
        queue, instances, at = one.queue, one.instances, one.at
        lineup = self._lineup
        if not one.late and lineup.overlap and queue.tokens >= lineup.room_tokens:
            mean_tokens = self._offered.mean_tokens
            one.ahead, due_s = lookahead(
                instances, queue.tokens, mean_tokens, one.whole_s, at.now_s
            )
            if due_s is not None:
                one.wake_s = min(one.wake_s, due_s)
        chunked = one.chunked
        early = chunked and lineup.overlap and self._long.are_cached(instances)
        early = early and any(i.forms_ahead and i.has_room for i in instances)
        if not (one.candidates or one.ahead or early):
            return
        one.candidates = idle_in_turn(one.candidates, queue.oldest)
        if chunked:
            one.ahead = []  # prompts of many chunks keep every pass full as it is
        elif not one.overdue and not one.all_idle and one.under_way == 1:
            one.candidates = self._spaced(one)
        one.candidates = list(dict.fromkeys([*one.ahead, *one.candidates]))
        if chunked:
            in_order = (instances[number] for _, _, number in one.starts)
            one.home_of = self._long.homes(
                *(one.candidates, instances, in_order, queue, one.overdue, at),
                early=early,
                costs_s=one.costs_s,
            )
            if early:
                in_order = (instances[number] for _, _, number in one.starts)
                others = (i for i in in_order if i not in one.candidates)
                one.candidates += early_homes(one.home_of.values(), others)

    def _decision_at(self, one: Decision) -> CacheAffinity:
        """One for all batches that leave at the same moment."""
        at = one.at
        first = one.candidates[0] if one.candidates else one.instances[0]
        if self._decision is None or self._decision_s != at.now_s:
            self._decision_s = at.now_s
            self._decision = CacheAffinity(
                self._lineup.by_id,
                first,
                lambda instance: at.starts_s(instance)[0],
                load=self._offered.load_with(one.queue.tokens),
            )
        self._decision.first = first
        return self._decision

    # Candidates ---------------------------------------------------------------------------

    def _spaced(self, one: Decision) -> list[PrefillInstance]:
        """Soft stagger: a start is a pass over the number of instances away from any other that is
        planned, whichever comes first. Of many instances several are planned at once, and passes
        of the same length would stay as near to each other as they once were. How long a pass is
        comes from the model and the arrival rate, not from measured times, which would feed back
        into themselves. Who joins a batch starts with it."""
        share_s = self._offered.pass_s / len(one.instances)
        if SLACK * one.queue.tokens >= max(1.0, self._offered.token_rate * share_s):
            return one.candidates
        # An instance that falls idle meanwhile would start with a part of the next batch.
        apart_s = self._lead.whole * share_s
        spaced, due_s = [], math.inf
        for instance in one.candidates:
            begin_s = one.starts.begin_s(instance)
            free_s = self.starts.first_apart(begin_s, apart_s)
            if free_s > begin_s and not instance.backlog_tokens:
                due_s = min(due_s, free_s)
            else:
                spaced.append(instance)
        one.wake_s = min(one.wake_s, due_s - one.at.latency_s)
        return spaced

    # One batch ----------------------------------------------------------------------------

    def _batch_for(
        self, instance: PrefillInstance, one: Decision, decision: CacheAffinity
    ) -> Plan | None:
        """None if nothing that waits may go there."""
        passes = one.passes_of(instance)
        c_avail = instance.c_avail(passes)
        places = instance.places(passes)
        # Splitting a prompt costs it a pass. That pays when more is left than the others can take;
        # under overlap only when the rest, which runs at once and all but alone, does not matter.
        all_tokens = self._offered.capacity_tokens
        keep_tokens = all_tokens - instance.capacity_of(self._offered.mean_tokens)
        if instance.overlap:
            keep_tokens += all_tokens
        if one.home_of is None and self._urgency.matters(one.at.now_s):
            keep_tokens = math.inf  # the rest would be formed at once, without the batch after it
        affinity = BatchAffinity(decision, instance, one.home_of)
        gathered = self._gather(instance, one, affinity, c_avail, places, keep_tokens)
        if gathered is None:
            return None
        if gathered == ([], []):
            return Plan()
        head, rest = self._shared(instance, one, *gathered)
        allocation = place_fitting(
            head,
            c_avail,
            instance.chunk_tokens,
            affinity.hits_of,
            affinity.rank_of,
            [rank.received_tokens for rank in instance.ranks],
            instance.page,
            places,
        )
        if allocation.placed:
            note_left(allocation.left, WaitReason.DOES_NOT_FIT, one.at.now_s)
            note_left(rest, WaitReason.SHARE_FULL, one.at.now_s)
        beyond = one.queue.tokens - uncached_tokens_of(head) - uncached_tokens_of(rest)
        allocation = top_up(
            allocation._replace(left=allocation.left + rest),
            c_avail,
            instance.chunk_tokens,
            keep_tokens=keep_tokens - beyond,
            hits_of=affinity.hits_of,
            page=instance.page,
            places=places,
        )
        ahead_ms = 1e3 * (one.at.free_at_s(instance) - one.at.now_s)
        return Plan(
            placements=[Placement(r, instance, rank) for r, rank in allocation.placed],
            reason=(
                f"{instance.id} idle"
                if instance.idle
                else f"{ahead_ms:.0f} ms before the predicted launch on {instance.id}"
            ),
            passed_over=allocation.left,
            batch=batch_of(instance, one) if self.explains and allocation.placed else None,
        )

    def _gather(
        self,
        instance: PrefillInstance,
        one: Decision,
        affinity: BatchAffinity,
        c_avail: Sequence[int],
        places: Sequence[int] | None,
        keep_tokens: float,
    ) -> tuple[list[Request], list[Request]] | None:
        """In order, those that fit into the pass, and those of which a part might if more than
        ``keep_tokens`` wait. None if nothing that waits may go there."""
        room = sum(c for c in c_avail if c > 0)
        most = math.inf if places is None else sum(places)
        most = min(most, one.starts.in_time.get(instance.id, math.inf))
        spare = room if one.queue.tokens > keep_tokens else 0
        # Whatever was predicted, nobody waits for a cached prefix longer than this.
        patient_s = one.at.now_s + _EPSILON_S - self._hold_s()
        home_of, page = one.home_of, instance.page
        even = not self._long.uneven_chunks
        head: list[Request] = []
        rest: list[Request] = []
        taken = refused = forbidden = 0
        most_taken, most_both = room + spare, 2 * most if spare else most
        full = most_taken <= 0 or most_both <= 0
        for request in one.queue.in_order():
            if full or affinity.deferred >= MAX_DEFERRED or refused >= MOST_REFUSED:
                break
            if request.exclude and not request.may_use(instance, one.instances):
                forbidden, left = forbidden + 1, WaitReason.EXCLUDED
            elif not one.admissible(request):
                refused, left = refused + 1, WaitReason.NO_DECODE_ROOM
            elif not (even or one.overdue or self._long.suits(request, instance, one.instances)):
                left = WaitReason.DOES_NOT_FIT
            elif not (
                home_of is None or affinity.is_home_of(request) or request.arrived_s <= patient_s
            ):
                left = WaitReason.BETTER_ELSEWHERE
            elif not (
                not request.blocks
                or request.arrived_s <= patient_s
                or affinity.belongs_here(request)
            ):
                left = affinity.left_for
            else:
                (head if taken < room and len(head) < most else rest).append(request)
                taken += paged(request.uncached_tokens_on(instance.id), page)
                full = taken >= most_taken or len(head) + len(rest) >= most_both
                continue
            if request.waits_for is not left:
                note_skipped(request, left, one, affinity)
        return None if forbidden == len(one.queue) else (head, rest)

    def _shared(
        self, instance: PrefillInstance, one: Decision, head: list[Request], rest: list[Request]
    ) -> tuple[list[Request], list[Request]]:
        """The instance's share of them, and what is left for those that start later."""
        alone = len(one.instances) == 1 or one.passes_of(instance) > 1
        if one.home_of is not None or alone or one.overdue:
            return head, rest
        waiting = Waiting(one.at.now_s, one.queue.tokens, one.starts, self._lead.whole)
        cut = cut_of(instance, head, waiting, self._offered)
        if one.all_idle:
            # A prompt longer than the share is not divisible: later it would be no better off.
            cut = max(cut, 1)
        return head[:cut], head[cut:] + rest
