"""The Staggered Batch Scheduler: events and ``now_s`` in, commands out.

All state changes are in this file or called from it. It uses no sockets, clocks, asyncio or SGLang;
the router, the simulator and the tests drive this same object.

Theory of operation
-------------------
A request is *queued* from :class:`RequestArrived` until it is dispatched or refused, *dispatched*
until :class:`PrefillDone`, *decoding* until :class:`RequestEnded`. RequestEnded may come in any
state, and is the only end of a dispatched request; a queued one may also be refused. Everything
else is an estimate of instances' states (``prefill.instance``, ``decode.instance``), which engines'
reports replace and never add to.

After an event, at once or a moment later (:class:`Replan`), the same loop runs. Timeouts come
first. Then the policy is asked for one batch at a time until it has none or the event's share is
used, and each batch gets its decode ranks (Algorithm 3 or the potential). The earliest time at
which anything could change by itself becomes :class:`WakeAt`. A request that no decode rank can
admit is not dispatched: its prefill would hold a bootstrap slot and compute nothing. It waits for
room, and a rank is reserved for the oldest such request before smaller ones starve it
(``decode.admission``). While a role has no instance all requests wait, for a bounded time
(``outage``).

There are two additions. A request may also enter as *dispatched* (:class:`RequestAdopted`), placed
by another scheduler. It counts as in flight until the next report of its ranks, which includes it
and is assumed to echo its id. An instance that goes down keeps its requests until their
RequestEnded, because only the relay knows whether they survive. An unknown rid is ignored
everywhere, so a late or repeated event is harmless."""

from __future__ import annotations

import math

import msgspec

from sglang_sbs.scheduling import events as ev
from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.decode.admission import (
    RESERVE_AFTER_PASSES,
    DecodeAdmission,
    ExpectedOutput,
)
from sglang_sbs.scheduling.decode.rules import UNLIMITED
from sglang_sbs.scheduling.explained.decisions import RecentDecisions, Why, why_waiting
from sglang_sbs.scheduling.gangs import Gangs
from sglang_sbs.scheduling.membership import Membership
from sglang_sbs.scheduling.policies.selection import Policies
from sglang_sbs.scheduling.prefill.agenda import Agenda
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.prefill.observation import Observation
from sglang_sbs.scheduling.prefix_caches import PrefixCaches
from sglang_sbs.scheduling.queue.fairness import TenantTurns
from sglang_sbs.scheduling.queue.flow_control import (
    Refusal,
    limiting_role,
    refusal_of,
    refuse,
    slo_refusal_of,
)
from sglang_sbs.scheduling.queue.length_correction import LengthCorrection
from sglang_sbs.scheduling.queue.outage import Outage
from sglang_sbs.scheduling.queue.request import RequestQueue, arrived
from sglang_sbs.scheduling.received.report_cursor import SILENT_S
from sglang_sbs.scheduling.request import Request
from sglang_sbs.scheduling.snapshot import Snapshot, snapshot_of
from sglang_sbs.scheduling.timers import Replan, Timers

_OVERLOAD = ("queue_full", "flow_control")
_MOST_UNPLACED = 64
"""Limit on requests that one planning leaves out because no decode rank took them; then it ends."""
_MOST_BATCHES = 8
"""Limit on batches planned per event; the rest follows at an immediate wake-up. In a burst of
thousands of requests the first ones leave early, and reports are handled in between."""
_MOST_ADOPTED = 64


class Scheduler:
    """Decides when and where each request goes: events in, commands out (:meth:`handle`)."""

    def __init__(self, config: SchedulerConfig | None = None, *, remembers: int = 0) -> None:
        """Create a scheduler; ``remembers`` is the number of dispatched and refused requests that
        :meth:`why` can still explain."""
        self.config = config or SchedulerConfig()
        self.interval = IntervalController(
            t_default_s=self.config.t_default_s,
            window=self.config.window,
            latency_s=self.config.initial_latency_s,
        )
        self.prefix = PrefixCaches(max_blocks=self.config.prefix_index_blocks)
        self._policies = Policies(self.interval, explains=remembers > 0)
        self.policy, choose_decode = self._policies.choose(self.config)
        self._members = Membership(self.config, self.prefix)
        self.prefill = self._members.prefill
        self.decode = self._members.decode
        self.lone = self._members.lone
        turns = TenantTurns(self.config.tenant_weights)
        self.queue = RequestQueue(self.policy.key_of, self.prefix.prefill, turns)
        self._requests: dict[str, Request] = {}
        self._adopted: dict[tuple[ev.InstanceId, int], list[str]] = {}
        """Ids of requests adopted since a rank's last report, which does not count them yet, by
        (instance, rank)."""
        self._agenda = Agenda()
        self._outage = Outage(self.config.outage_hold_s)
        self._arrivals = 0
        self._lengths = LengthCorrection()
        self._timers = Timers()
        self._silent_s = math.inf
        """No decode rank counts as silent before this time."""
        self._fresh: Request | None = None
        """The request that arrived with the current event; None: none."""
        self._abandoned_s = -math.inf
        """Time of the last planning that an abandoned request caused."""
        self._admission = DecodeAdmission(ExpectedOutput(self.config.default_output_tokens))
        self.gangs = Gangs(
            members=self._members,
            queue=self.queue,
            prefix=self.prefix,
            interval=self.interval,
            admission=self._admission,
            choose_decode=choose_decode,
            policy=self.policy,
            decisions=RecentDecisions(remembers),
        )

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Command]:
        """Handle one event and return the commands in order. ``now_s``: the driver's time, which
        must not decrease. The last :class:`WakeAt` stays in force until another replaces it."""
        out: list[ev.Command] = []
        event = self.lone.inside(event)
        self.prefix.advance(now_s)
        replan = Replan.NOW
        match event:
            case ev.RequestArrived():
                self._on_arrived(event, now_s, out)
            case ev.PrefillDone():
                replan = self._on_prefill_done(event, now_s)
            case ev.RequestEnded():
                replan = self._on_ended(event, now_s)
            case ev.RequestAdopted():
                self._on_adopted(event, now_s)
                replan = Replan.ADOPTED
            case ev.ForwardEnded():
                replan = self._on_report(event, now_s)
            case ev.LoadPolled():
                for poll in self.lone.polls(event):
                    self._on_load_polled(poll, now_s)
            case ev.InstanceUp():
                self._on_up(event, now_s)
            case ev.InstanceDown():
                if self._members.down(event, now_s):
                    self._on_topology_change(now_s)
            case ev.BlocksStored() | ev.BlocksRemoved() | ev.BlocksCleared():
                self.prefix.on_blocks(event)
            case ev.PolicySwitched():
                self._on_switched(event)
            case ev.TimerFired():
                replan = self._timers.fired(now_s, unfinished=self.prefix.unfinished)
        if replan is Replan.NOW or self._timers.plan_s <= now_s:
            self._drive(now_s, out)
        else:
            self._timers.plan_by(now_s + replan, out)
        if self.prefix.unfinished:
            self._timers.go_on(now_s, out)
        return out

    def snapshot(self, now_s: float) -> Snapshot:
        return snapshot_of(self, now_s)

    def why(self, rid: str, now_s: float) -> Why | None:
        """Explain why a request was sent when and where it was, or why it waits. None: it is
        unknown or forgotten."""
        waiting = self._requests.get(rid)
        if waiting is not None and waiting.prefill is None:
            return why_waiting(waiting, self.gangs.count - waiting.first_batch, now_s)
        return self.gangs.decisions.why(rid)

    @property
    def throttled(self) -> bool:
        """Whether flow control refuses new requests: one has waited more than N_limit cycles."""
        return self.queue.over_limit

    @property
    def in_flight_requests(self) -> int:
        """Number of requests dispatched and not ended."""
        return len(self._requests) - len(self.queue)

    def is_up(self, instance: ev.InstanceId) -> bool:
        """Return whether new requests may go to the instance."""
        return instance not in self._members.down_s

    def is_drained(self, instance: ev.InstanceId) -> bool:
        """Return whether the instance works but takes no new requests."""
        return instance in self._members.drained

    # Requests -----------------------------------------------------------------------------

    def _on_arrived(self, event: ev.RequestArrived, now_s: float, out: list[ev.Command]) -> None:
        if event.rid in self._requests:
            return
        prefill = self._members.up_prefill
        decode = self._members.up_decode or [*self._members.decode.values()]
        largest = max([instance.kv_capacity_tokens for instance in decode], default=UNLIMITED)
        if event.estimated and event.prompt_tokens > largest:
            event = msgspec.structs.replace(event, prompt_tokens=largest)
        missing = self._outage.refusal(now_s)
        refusal = missing or refusal_of(event, self.config, self.queue, largest)
        request = arrived(event, self._arrivals, now_s, self.config.default_timeout_s)
        self._lengths.correct(request, now_s, largest)
        if refusal is None and self.config.refuse_missed_slo and prefill:
            self.queue.look_at(request)
            refusal = slo_refusal_of(request, self.queue, prefill, now_s, self.interval.latency_s)
        if refusal is not None:
            limit = limiting_role(self.queue.oldest) if refusal[0] in _OVERLOAD else None
            out.append(refuse(event.rid, refusal, self.queue, prefill, limit))
            return
        self._arrivals += 1
        request.first_batch = self.gangs.count
        self._requests[event.rid] = self._fresh = request
        self.queue.add(request)
        self._outage.note([request], now_s)
        self._policies.offered.on_arrived(request.uncached_tokens, now_s)

    def _on_prefill_done(self, event: ev.PrefillDone, now_s: float) -> Replan:
        request = self._requests.get(event.rid)
        if request is None or request.prefill is None or request.prefilled:
            return Replan.REPEATED
        request.prefilled = True
        self._lengths.learn(request, request.prefill[0], event.prompt_tokens, now_s)
        instance = self.prefill.get(request.prefill[0])
        if event.aborted:
            self.prefix.dropped(event.rid)
            if instance is not None:
                instance.dropped(request.rid, request.prefill[1])
            return Replan.NOW
        self.prefix.on_prefilled(request, now_s, event.cached_tokens)
        if instance is None:
            return Replan.NOW
        seen = instance.on_prefilled(request.rid, request.prefill[1], now_s)
        self._learn(seen, now_s, instance)
        # An instance that reports its passes has reported the end of this one already.
        return Replan.REPEATED if instance.tier == "endforward" else Replan.NOW

    def _on_ended(self, event: ev.RequestEnded, now_s: float) -> Replan:
        request = self._requests.pop(event.rid, None)
        if request is None:
            return Replan.NO
        self.queue.remove(event.rid)
        self.prefix.dropped(event.rid)
        if request.prefill is not None and not request.prefilled:
            name, rank = request.prefill
            if (prefill := self.prefill.get(name)) is not None:
                prefill.dropped(request.rid, rank)
        tokens = self._admission.outputs.answered_tokens(event, request, self._members.up_decode)
        name, rank = request.decode or ("", 0)
        if (decode := self.decode.get(name)) is not None:
            decode.on_ended(request.rid, rank, request.prompt_tokens + tokens)
        if event.outcome == "completed" and event.completion_tokens is not None:
            self._admission.outputs.learn(tokens)
        if request.prefilled and (request.decode is None or not self._makes_room(name)):
            return Replan.NO
        if event.outcome != "completed":
            if now_s < self._abandoned_s + Replan.ABANDONED:
                return Replan.ABANDONED
            self._abandoned_s = now_s
        return Replan.NOW

    def _makes_room(self, instance: ev.InstanceId) -> bool:
        """Return whether a change of this instance may let a waiting request leave. For a decode
        instance: whether it may have room for a request that found none. In a large cluster most
        events are decode reports, so planning is skipped after the others."""
        decode = self.decode.get(instance)
        return decode is None or self._admission.may_admit_now(decode)

    def _on_adopted(self, event: ev.RequestAdopted, now_s: float) -> None:
        known = self._requests.get(event.rid)
        if known is not None and known.prefill is not None:
            return
        self.queue.remove(event.rid)
        request = Request(
            rid=event.rid,
            order=self._arrivals,
            prompt_tokens=max(1, event.prompt_tokens),
            max_new_tokens=event.max_new_tokens,
            arrived_s=now_s,
            deadline_s=now_s,
            prefill=(event.prefill, event.prefill_rank),
            decode=(event.decode, event.decode_rank),
            prefilled=event.prefilled,
        )
        request.total_tokens = self._admission.outputs.total_tokens(request)
        self._arrivals += 1
        self._requests[event.rid] = request
        self._count_in(request, now_s)

    def _count_in(self, request: Request, now_s: float, only: ev.InstanceId | None = None) -> None:
        """Count an adopted request as dispatched to its instances, or with ``only`` to that one."""
        rid, tokens, total = request.rid, request.prompt_tokens, request.total_tokens
        name, rank = request.prefill or ("", 0)
        prefill = self.prefill.get(name) if only in (None, name) else None
        if prefill is not None and not request.prefilled and 0 <= rank < prefill.dp_size:
            prefill.adopted(rid, rank, tokens, now_s)
            self._await_report((name, rank), rid)
        name, rank = request.decode or ("", 0)
        decode = self.decode.get(name) if only in (None, name) else None
        if decode is not None and 0 <= rank < decode.dp_size:
            decode.on_dispatched(rid, rank, tokens, total, now_s)
            self._await_report((name, rank), rid)

    def _await_report(self, rank: tuple[ev.InstanceId, int], rid: str) -> None:
        """Remember an adopted request until the next report of the (instance, rank) includes it."""
        rids = self._adopted.setdefault(rank, [])
        rids.append(rid)
        if len(rids) > _MOST_ADOPTED + 2 * len(self._requests):
            # The rank never reports.
            self._adopted[rank] = [rid for rid in rids if rid in self._requests]

    # Instances ----------------------------------------------------------------------------

    def _on_up(self, event: ev.InstanceUp, now_s: float) -> None:
        ranks = self.lone.ranks_of(event.instance)
        for name in self._members.up(event):
            for request in self._requests.values():  # adopted before the instance was up
                if request.prefill is not None:
                    place = ranks.get(request.prefill[0], request.prefill)
                    request.prefill = self.lone.place(*place)
                self._count_in(request, now_s, only=name)
        self._on_topology_change(now_s)

    def _on_topology_change(self, now_s: float) -> None:
        up = self._members.refresh(now_s)
        self._agenda.on_topology_change(self.prefill.values())
        self.interval.on_topology_change(len(up))
        self.policy.on_topology_change(up)
        self._outage.on_topology_change(up, self._members.up_decode, self.queue, now_s)

    def _on_report(self, event: ev.ForwardEnded, now_s: float) -> Replan:
        report = event.report
        here = event.instance, report.dp_rank
        for accepted in report.accepted:
            counted = self._requests.get(accepted.rid)
            self._lengths.learn(counted, event.instance, accepted.prompt_tokens, now_s)
        adopted = self._adopted.pop(here, None)
        if adopted is not None:
            adopted = [rid for rid in adopted if not self._is_elsewhere(rid, here)]
            report = msgspec.structs.replace(report, rids=[*report.rids, *adopted])
        prefill = self.prefill.get(event.instance)
        if prefill is not None:
            before = prefill.stage
            strays = self._members.strays(event.report, prefill, self._requests)
            observation = prefill.on_report(report, now_s, strays)
            if observation.restarted:
                self.prefix.on_restart(*here)
            for rid in observation.moved:
                request = self._requests[rid]
                request.prefill, request.cached_tokens = here, request.hit_tokens(*here)
                free_s = prefill.free_at_s(now_s, self.interval.latency_s)
                self.prefix.moved(request, visible_s=free_s + prefill.next_pass_s())
            self._learn(observation, now_s, prefill)
            # Without progress it is one more rank of a known pass.
            return Replan.NOW if prefill.stage != before else Replan.REPEATED
        decode = self.decode.get(event.instance)
        if decode is not None:
            if decode.on_report(report, now_s):
                self.prefix.on_restart(*here)
            self._silent_s = min(self._silent_s, now_s + SILENT_S)
        return Replan.NOW if self._makes_room(event.instance) else Replan.NO

    def _is_elsewhere(self, rid: str, place: tuple[ev.InstanceId, int]) -> bool:
        """Return whether an adopted request was found elsewhere than at this (instance, rank)."""
        request = self._requests.get(rid)
        return request is not None and place not in (request.prefill, request.decode)

    def _on_load_polled(self, event: ev.LoadPolled, now_s: float) -> None:
        prefill = self.prefill.get(event.instance)
        if prefill is not None:
            prefill.on_load_poll(event.queued_tokens, now_s)
        decode = self.decode.get(event.instance)
        if decode is not None:
            decode.on_load_poll(event.running_requests, event.kv_tokens, now_s)
            self._silent_s = min(self._silent_s, now_s + SILENT_S)

    def _learn(self, observation: Observation, now_s: float, source: PrefillInstance) -> None:
        interval = self.interval
        interval.observe(observation.latencies_s, now_s, observation.requests)
        if self.policy.fills_the_way:
            interval.on_flight(observation.in_flight_s, now_s)
            interval.on_landing(observation.soonest_s, now_s)
        self.policy.on_landing(observation, source.dp_size, now_s)
        if observation.forward_s is not None:
            interval.on_end_forward(observation.forward_s)
            self.policy.on_forward_learned(source)
            for instance in self.prefill.values():
                instance.watchdog.on_cluster(interval.mean_forward_s)

    def _on_switched(self, event: ev.PolicySwitched) -> None:
        """Switch the policy. The new one places waiting requests in the next planning; an immediate
        policy places some at each planning until none wait."""
        if event.policy == self.config.policy:
            return
        config = msgspec.structs.replace(self.config, policy=event.policy)
        # May be third-party code.
        self.policy, self.gangs.choose_decode = self._policies.choose(config)
        self.config = config
        self.gangs.policy = self.policy
        self.policy.on_topology_change(self._members.up_prefill)
        self.queue.order_by(self.policy.key_of)

    # The loop -----------------------------------------------------------------------------

    def _drive(self, now_s: float, out: list[ev.Command]) -> None:
        if len(self.queue):
            self._end_waits(now_s, out)
        latency_s = self.interval.latency_s
        wake_s, again = self._agenda.advance(now_s, latency_s)
        if now_s >= self._silent_s:
            self._fall_silent(now_s)
        self.queue.reorder()
        self._admission.begin(self._members.up_decode, self.queue)
        if len(self.queue):
            wake_s = min(wake_s, self._plan(again, now_s, out))
        for instance in again:
            wake_s = min(wake_s, instance.advance(now_s, latency_s))
        fresh, self._fresh = self._fresh, None
        if fresh is not None and fresh.prefill is None and not fresh.waits:
            self.policy.note_waiting(fresh, now_s)
        if len(self.queue):
            wake_s = min(wake_s, self.queue.next_deadline_s(), self._outage.until_s)
        self._timers.plan_at(wake_s, out)

    def _plan(self, again: set[PrefillInstance], now_s: float, out: list[ev.Command]) -> float:
        """Dispatch what can leave now. Adds the instances used to ``again``; returns the time of
        the next planning without another event (infinity: none)."""
        instances, wake_s = self._members.up_prefill, math.inf
        unplaced: set[str] = set()
        holds, admits = self.policy.holds, self._admission.admits

        def admissible(request: Request) -> bool:
            return not holds or (request.rid not in unplaced and admits(request))

        for _ in range(_MOST_BATCHES):
            if not (instances and self._members.up_decode and len(self.queue)):
                break
            # Called often, for all waiting requests.
            asked = admissible if unplaced or not holds else admits
            plan = self.policy.plan(self.queue, instances, asked, now_s)
            left = self.gangs.commit(plan, now_s, out)
            if len(left) < len(plan.placements):
                self.policy.on_dispatched(now_s)
            self.queue.count_batch(plan.passed_over, len(instances), self.config.n_limit)
            again.update(placement.instance for placement in plan.placements)
            unplaced.update(left)
            nothing_left = len(left) == len(plan.placements)
            if nothing_left and not (left and holds and len(unplaced) < _MOST_UNPLACED):
                wake_s = plan.wake_s
                break
        else:
            wake_s = now_s
        old_s = now_s - RESERVE_AFTER_PASSES * self.interval.mean_forward_s
        self._admission.reserve(self.queue, old_s)
        if self._admission.least_refused_tokens < math.inf:
            self._fall_silent(now_s)
            wake_s = min(wake_s, self._silent_s)
        return wake_s

    def _end_waits(self, now_s: float, out: list[ev.Command]) -> None:
        """Refuse requests that are past their deadline, or all of them in an outage."""
        for request in self.queue.expired(now_s):
            late = f"not scheduled within {now_s - request.arrived_s:.1f} s"
            self._give_up(request, ("deadline", late), now_s, out)
        if (missing := self._outage.refusal(now_s)) is not None:
            for request in list(self.queue):
                self._give_up(request, missing, now_s, out)

    def _fall_silent(self, now_s: float) -> None:
        """Discard old reports of silent decode ranks, and set when the next rank becomes silent."""
        times_s = [decode.advance(now_s) for decode in self.decode.values()]
        self._silent_s = min(times_s, default=math.inf)

    def _give_up(self, request: Request, why: Refusal, now_s: float, out: list[ev.Command]) -> None:
        """Refuse a waiting request: remove it, record the reason and add the command to ``out``."""
        self.queue.remove(request.rid)
        del self._requests[request.rid]
        self.gangs.decisions.record_refused(request, self.gangs.count - request.first_batch, now_s)
        limit = limiting_role(request) if why[0] == "deadline" else None
        out.append(refuse(request.rid, why, self.queue, self._members.up_prefill, limit))
