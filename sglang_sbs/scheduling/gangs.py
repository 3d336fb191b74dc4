"""Turns a plan into dispatches: each request of a batch gets its decode rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_sbs.scheduling import events as ev
from sglang_sbs.scheduling.decode.admission import DecodeAdmission
from sglang_sbs.scheduling.decode.rules import DecodeRuleFunction, schedule_decode
from sglang_sbs.scheduling.explained.decisions import RecentDecisions, note
from sglang_sbs.scheduling.membership import Membership
from sglang_sbs.scheduling.policies.policy import Placement, Plan, PrefillPolicy
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.prefix_caches import PrefixCaches
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.reasons import WaitReason
from sglang_sbs.scheduling.request import Request


@dataclass(slots=True)
class Gangs:
    members: Membership
    queue: RequestQueue
    prefix: PrefixCaches
    interval: IntervalController
    admission: DecodeAdmission
    choose_decode: DecodeRuleFunction
    policy: PrefillPolicy
    decisions: RecentDecisions
    count: int = 0
    """Number of batches dispatched so far."""

    @property
    def holds(self) -> bool:
        """Whether requests may wait for room in decode."""
        return self.policy.holds

    def commit(self, plan: Plan, now_s: float, out: list[ev.Command]) -> list[str]:
        """Choose a decode rank for each placement of the plan and dispatch it. Return the ids of
        requests without a decode rank, which stay in the queue."""
        if plan.spends is not None:
            plan.spends.ready = False
        if not plan.placements:
            return []
        for placement in plan.placements:
            request = placement.request
            request.total_tokens = self.admission.outputs.total_tokens(request)
            request.decode_hits = self.prefix.decode_hits(request, self.members.decode_targets)
        if plan.batch is None and self.decisions.wanted:
            up = len(self.members.up_prefill)
            plan.batch = self.policy.explained(plan, up, len(self.queue), now_s)
        if plan.batch is not None:
            placed = [(rank, request.uncached_tokens) for request, _, rank in plan.placements]
            plan.batch.placed = tuple(placed)
        left = self._send(plan.placements, plan, now_s, out)
        if plan.batch is not None:
            plan.batch.costs_s = {}
        for placement in left:
            self.admission.on_refused(placement.request.total_tokens)
            if placement.request.waits_for is not WaitReason.NO_DECODE_ROOM:
                note(placement.request, WaitReason.NO_DECODE_ROOM, now_s)
        self.admission.changed()
        return [placement.request.rid for placement in left]

    def _send(
        self, placements: Sequence[Placement], plan: Plan, now_s: float, out: list[ev.Command]
    ) -> list[Placement]:
        """Dispatch requests that get a decode rank as one batch; return the other placements."""
        targets = self._decode_ranks(placements)
        self.count += bool(targets)
        left = []
        for placement in placements:
            index = targets.get(placement.request.rid)
            if index is None:
                left.append(placement)
            else:
                out.append(self._dispatch(placement, index, plan.reason, now_s))
                batches = self.count - 1 - placement.request.first_batch
                self.decisions.record_dispatched(placement.request, plan.batch, batches)
        return left

    def _decode_ranks(self, placements: Sequence[Placement]) -> dict[str, int]:
        """Return the decode rank of each request that gets one, by request id, as an index into
        ``Membership.decode_targets``."""
        members = self.members
        loads = [load for decode in members.up_decode for load in decode.loads()]
        holds = self.holds

        def allowed(request: Request, index: int) -> bool:
            decode, rank = members.decode_targets[index]
            if holds and not self.admission.is_open(request, decode, rank):
                return False
            return request.may_use(decode, members.up_decode)

        requests = [placement.request for placement in placements]
        return schedule_decode(
            requests, loads, self.choose_decode, allowed, admit=holds, first=self.count
        )

    def _dispatch(
        self,
        placement: Placement,
        target: int,
        reason: str,
        now_s: float,
    ) -> ev.Dispatch:
        """Move a request from the queue to its ranks, and return the command. ``target``: its
        decode rank, as an index into ``Membership.decode_targets``."""
        request, instance, rank = placement
        decode, decode_rank = self.members.decode_targets[target]
        self.queue.dispatch(request)
        self.queue.look_up(request)
        request.cached_tokens = request.hit_tokens(instance.id, rank)
        request.prefill = (instance.id, rank)
        request.decode = (decode.id, decode_rank)
        instance.on_dispatched(
            request.rid,
            rank,
            request.prompt_tokens,
            now_s,
            request.cached_tokens,
            self.interval.serial_s,
            fetches=request.fetch_tokens(instance.id, rank) > 0,
        )
        if request.blocks:
            computed_s = instance.free_at_s(now_s, self.interval.latency_s)
            if instance.passes:
                computed_s += instance.next_pass_s()
            self.prefix.sent(request, visible_s=computed_s)
        decode.on_dispatched(
            request.rid, decode_rank, request.prompt_tokens, request.total_tokens, now_s
        )
        place = self.members.lone.outside(instance.id, rank, instance.dp_size)
        return ev.Dispatch(
            rid=request.rid,
            prefill=place.worker,
            prefill_rank=place.rank,
            decode=decode.id,
            decode_rank=decode_rank,
            batch=self.count,
            held_s=now_s - request.arrived_s,
            reason=reason,
            cached_tokens=request.cached_tokens,
            decode_cached_tokens=request.decode_hits.get(target, 0),
            barrier=place.worker == instance.id,
            joins=instance.joins_batch,
        )
