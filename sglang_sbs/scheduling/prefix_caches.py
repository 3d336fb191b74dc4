"""The prefix caches of the cluster: one index for prefill ranks and one for decode ranks. A prefix
on decode saves KV transfer and space (``--disaggregation-decode-enable-radix-cache``), never
prefill work. Each index ignores events of instances that only the other one knows."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_sbs.scheduling import events as ev
from sglang_sbs.scheduling.decode.instance import DecodeInstance
from sglang_sbs.scheduling.prefix.index import PrefixIndex
from sglang_sbs.scheduling.request import Request

BlockEvent = ev.BlocksStored | ev.BlocksRemoved | ev.BlocksCleared


class PrefixCaches:
    """Keeps the ``prefill`` and ``decode`` indexes up to date; placement reads them."""

    def __init__(self, *, max_blocks: int) -> None:
        self.prefill = PrefixIndex(max_blocks=max_blocks)
        self.decode = PrefixIndex(max_blocks=max_blocks)
        self._both = self.prefill, self.decode

    def on_up(self, event: ev.InstanceUp) -> None:
        """Add or update an instance in the index of its role, and remove it from the other one."""
        mine, other = self._both if event.role == "prefill" else (self.decode, self.prefill)
        other.gone(event.instance)
        mine.up(
            event.instance,
            dp_size=event.dp_size,
            block_tokens=max(1, event.page_size),
            source=event.prefix_source,
            capacity_tokens=event.kv_capacity_tokens,
            shares_storage=event.shares_storage,
        )

    def on_down(self, instance: ev.InstanceId) -> None:
        """Record that an instance is unreachable. Blocks that are only assumed at a decode instance
        are forgotten: it may come back empty, and decode's answers would not correct that."""
        self.prefill.down(instance)
        self.decode.down(instance, forget_claims=True)

    def forget(self, instance: ev.InstanceId) -> None:
        for index in self._both:
            index.gone(instance)

    def on_blocks(self, event: BlockEvent) -> None:
        for index in self._both:
            match event:
                case ev.BlocksStored():
                    index.stored(event.instance, event.dp_rank, event.blocks, event.tier)
                case ev.BlocksRemoved():
                    index.removed(event.instance, event.dp_rank, event.blocks, event.tier)
                case ev.BlocksCleared():
                    index.clear(event.instance, event.dp_rank)

    def on_restart(self, instance: ev.InstanceId, rank: int) -> None:
        for index in self._both:
            index.restarted(instance, rank)

    def sent(self, request: Request, visible_s: float) -> None:
        """Record a dispatch. Other requests can match its blocks from ``visible_s`` on."""
        for index, place in zip(self._both, (request.prefill, request.decode), strict=True):
            if place is not None:
                index.sent(request.rid, *place, request.blocks, request.block_tokens, visible_s)

    def moved(self, request: Request, visible_s: float) -> None:
        """Record that the engine moved a request to another prefill rank, where other requests can
        match its blocks from ``visible_s`` on."""
        self.prefill.dropped(request.rid)
        if request.prefill is not None:
            blocks = request.blocks, request.block_tokens
            self.prefill.sent(request.rid, *request.prefill, *blocks, visible_s)

    def on_prefilled(self, request: Request, now_s: float, cached_tokens: int | None) -> None:
        """Record that a prompt is computed. ``cached_tokens``: the reported hit, if any."""
        self.prefill.on_prefilled(
            request.rid, now_s, expected_tokens=request.cached_tokens, cached_tokens=cached_tokens
        )
        self.decode.on_prefilled(request.rid, now_s)

    def dropped(self, rid: str) -> None:
        for index in self._both:
            index.dropped(rid)

    def advance(self, now_s: float) -> None:
        self.prefill.advance(now_s)
        self.decode.advance(now_s)

    @property
    def unfinished(self) -> bool:
        return bool(self.prefill.claiming or self.decode.claiming)

    def decode_hits(
        self, request: Request, targets: Sequence[tuple[DecodeInstance, int]]
    ) -> dict[int, int]:
        """Return the prompt's cached tokens on decode ranks, by index in ``targets``; ranks without
        any are missing."""
        if not len(self.decode):
            return {}
        hits = self.decode.find(request.blocks, request.block_tokens, request.prompt_tokens)
        return {
            position: tokens[rank]
            for position, (decode, rank) in enumerate(targets)
            if (tokens := hits.by_instance.get(decode.id)) and tokens[rank]
        }
