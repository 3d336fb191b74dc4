"""From a plan to dispatches: each request of a batch gets its decode rank, and leaves.

Owns the gang: what of a plan leaves together, and how the books are told. Must not know which
requests a policy chooses, or what happens to those that have left.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_sbs.scheduling import events as ev
from sglang_sbs.scheduling.decode.admission import DecodeAdmission
from sglang_sbs.scheduling.decode.expected_output import ExpectedOutput
from sglang_sbs.scheduling.decode.instance import DecodeInstance
from sglang_sbs.scheduling.decode.rules import DecodeRuleFunction, schedule_decode
from sglang_sbs.scheduling.membership import Membership
from sglang_sbs.scheduling.paging import paged
from sglang_sbs.scheduling.policies.pbaa import first_part
from sglang_sbs.scheduling.policies.policy import Placement, Plan
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.prefix_caches import PrefixCaches
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.request import Request


class Gangs:
    """Of one scheduler."""

    def __init__(
        self,
        members: Membership,
        queue: RequestQueue,
        prefix: PrefixCaches,
        interval: IntervalController,
        outputs: ExpectedOutput,
        admission: DecodeAdmission,
        choose_decode: DecodeRuleFunction,
        *,
        holds: bool,
    ) -> None:
        """``holds``: requests may wait for room in decode."""
        self._members = members
        self._queue = queue
        self._prefix = prefix
        self._interval = interval
        self._outputs = outputs
        self._admission = admission
        self.choose_decode = choose_decode
        self._holds = holds
        self.count = 0
        """Dispatched so far."""

    def commit(self, plan: Plan, now_s: float, out: list[ev.Command]) -> list[str]:
        """Choose decode ranks and dispatch; the requests for which there was none."""
        if not plan.placements:
            return []
        targets = self._members.decode_targets
        for placement in plan.placements:
            request = placement.request
            request.total_tokens = self._outputs.total_tokens(request)
            request.decode_hits = self._prefix.decode_hits(request, targets)
        left = self._send(plan.placements, plan.reason, now_s, out)
        # Only where ranks are coupled does prefill's matter: another one may have room behind it.
        if left and any(decode.rank_choice == "by_room" for decode in self._members.up_decode):
            left = [p for p in left if not self._send_elsewhere(p, plan.reason, now_s, out)]
        for placement in left:
            self._admission.refused(placement.request.total_tokens)
        self._admission.changed()
        return [placement.request.rid for placement in left]

    def _send(
        self,
        placements: Sequence[Placement],
        reason: str,
        now_s: float,
        out: list[ev.Command],
    ) -> list[Placement]:
        """Dispatch as one batch what decode has a rank for; returns the others."""
        assigned = self._assign(placements)
        if assigned:
            self.count += 1
        left = []
        for placement in placements:
            index = assigned.get(placement.request.rid)
            if index is None:
                left.append(placement)
            else:
                self._dispatch(placement, self._members.decode_targets[index], reason, now_s, out)
        return left

    def _send_elsewhere(
        self, placement: Placement, reason: str, now_s: float, out: list[ev.Command]
    ) -> bool:
        """The same on another rank of the prefill worker; whether there was one."""
        request, instance, rank = placement
        charged = paged(request.prompt_tokens, instance.page)
        need = first_part(charged, instance.chunk_tokens)
        others = [
            (-tokens, number, Placement(request, one, d))
            for number, one in enumerate(self._members.up_prefill)
            if one.worker == instance.worker
            for d, tokens in enumerate(one.c_avail())
            if tokens >= need and (one, d) != (instance, rank)
        ]
        return any(
            not self._send([other], reason, now_s, out)
            for _, _, other in sorted(others, key=lambda one: one[:2])
        )

    def _assign(self, placements: Sequence[Placement]) -> dict[str, int]:
        """The decode rank of each request, as an index into all, for which there is one."""
        targets = self._members.decode_targets
        loads = [load for decode in self._members.up_decode for load in decode.loads()]
        ids = {decode.id for decode in self._members.up_decode}
        coupled = any(decode.rank_choice == "by_room" for decode in self._members.up_decode)
        placed = {placement.request.rid: placement for placement in placements}

        def allowed(request: Request, index: int) -> bool:
            decode, rank = targets[index]
            if coupled:
                _, prefill, prefill_rank = placed[request.rid]
                place = self._members.lone.outside(prefill.id, prefill_rank, prefill.dp_size)
                if not decode.goes_with(rank, place.rank, place.dp_size):
                    return False
            if self._holds and not self._admission.is_open(request, decode, rank):
                return False
            return decode.id not in request.exclude or ids <= set(request.exclude)

        return schedule_decode(
            [placement.request for placement in placements],
            loads,
            self.choose_decode,
            allowed=allowed,
            admit=self._holds,
        )

    def _dispatch(
        self,
        placement: Placement,
        decode: tuple[DecodeInstance, int],
        reason: str,
        now_s: float,
        out: list[ev.Command],
    ) -> None:
        request, instance, rank = placement
        self._queue.dispatch(request)
        self._queue.look_up(request)
        request.cached_tokens = request.hit_tokens(instance.id, rank)
        request.prefill = (instance.id, rank)
        request.decode = (decode[0].id, decode[1])
        request.dispatched_s = now_s
        instance.dispatched(
            request.rid,
            rank,
            request.prompt_tokens,
            now_s,
            request.cached_tokens,
            self._interval.serial_s,
            fetches=request.fetch_tokens(instance.id, rank) > 0,
        )
        if request.blocks:
            computed_s = instance.free_at_s(now_s, self._interval.latency_s)
            if instance.passes:
                computed_s += instance.next_pass_s()
            self._prefix.sent(request, visible_s=computed_s)
        decode[0].dispatched(
            request.rid, decode[1], request.prompt_tokens, request.total_tokens, now_s
        )
        place = self._members.lone.outside(instance.id, rank, instance.dp_size)
        out.append(
            ev.Dispatch(
                rid=request.rid,
                prefill=place.worker,
                prefill_rank=place.rank,
                decode=decode[0].id,
                decode_rank=decode[1],
                batch=self.count,
                held_s=now_s - request.arrived_s,
                reason=reason,
                cached_tokens=request.cached_tokens,
                barrier=place.worker == instance.id,
                joins=instance.joins_batch,
            )
        )
