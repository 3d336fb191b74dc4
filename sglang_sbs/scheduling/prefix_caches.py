"""The prefix caches of the cluster: one index for prefill ranks and one for decode ranks. A prefix
on decode saves KV transfer and space (``--disaggregation-decode-enable-radix-cache``), never
prefill work. An index ignores instances of the other one."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_sbs.scheduling import events as ev
from sglang_sbs.scheduling.decode.instance import DecodeInstance
from sglang_sbs.scheduling.prefix.index import PrefixIndex
from sglang_sbs.scheduling.request import Request

BlockEvent = ev.BlocksStored | ev.BlocksRemoved | ev.BlocksCleared


class PrefixCaches:
    """Feeds and corrects the ``prefill`` and ``decode`` indexes, which placement reads."""

    def __init__(self, *, max_blocks: int) -> None:
        self.prefill = PrefixIndex(max_blocks=max_blocks)
        self.decode = PrefixIndex(max_blocks=max_blocks)
        self._both = self.prefill, self.decode

    def on_up(self, event: ev.InstanceUp) -> None:
        """An instance can be used in this role; forget its cache in another role."""
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
        """The instance cannot be reached. A decode engine may come back empty, and no answer of
        decode would correct the claims about its cache."""
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
        """A request was dispatched; others can match its blocks from ``visible_s`` on."""
        for index, place in zip(self._both, (request.prefill, request.decode), strict=True):
            if place is not None:
                index.sent(request.rid, *place, request.blocks, request.block_tokens, visible_s)

    def moved(self, request: Request, visible_s: float) -> None:
        """The engine moved a request to another prefill rank; others can match its blocks there
        from ``visible_s`` on."""
        self.prefill.dropped(request.rid)
        if request.prefill is not None:
            blocks = request.blocks, request.block_tokens
            self.prefill.sent(request.rid, *request.prefill, *blocks, visible_s)

    def on_prefilled(self, request: Request, now_s: float, cached_tokens: int | None) -> None:
        """Prefill responded, possibly with the number of cached tokens."""
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
        """Return cached tokens of the prompt on decode ranks, by position in ``targets``."""
        if not len(self.decode):
            return {}
        hits = self.decode.find(request.blocks, request.block_tokens, request.prompt_tokens)
        return {
            position: tokens[rank]
            for position, (decode, rank) in enumerate(targets)
            if (tokens := hits.by_instance.get(decode.id)) and tokens[rank]
        }
