"""The prefix caches of the cluster: one index for prefill ranks, one for decode ranks.

Owns which index an event or a request concerns. Must not know placement, queues or time beyond what
it is told. A decode engine has an index of its own because a prefix there saves KV transfer and
space (``--disaggregation-decode-enable-radix-cache``), never prefill work.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_sbs.scheduling import events as ev
from sglang_sbs.scheduling.decode.instance import DecodeInstance
from sglang_sbs.scheduling.prefix.index import PrefixIndex
from sglang_sbs.scheduling.request import Request

BlockEvent = ev.BlocksStored | ev.BlocksRemoved | ev.BlocksCleared


class PrefixCaches:
    """``prefill`` and ``decode`` are fed and corrected here, and read by whoever places."""

    def __init__(self, *, max_blocks: int) -> None:
        self.prefill = PrefixIndex(max_blocks=max_blocks)
        self.decode = PrefixIndex(max_blocks=max_blocks)
        self._decode_ids: set[ev.InstanceId] = set()

    def on_up(self, event: ev.InstanceUp) -> None:
        """An instance may be used, in this role; what it had in another is forgotten."""
        if event.role == "decode":
            self.prefill.gone(event.instance)
            self._decode_ids.add(event.instance)
        else:
            self.decode.gone(event.instance)
            self._decode_ids.discard(event.instance)
        self._index_of(event.instance).up(
            event.instance,
            dp_size=event.dp_size,
            block_tokens=max(1, event.page_size),
            source=event.prefix_source,
            capacity_tokens=event.kv_capacity_tokens,
            shares_storage=event.shares_storage,
        )

    def on_down(self, instance: ev.InstanceId) -> None:
        """Not to be used for now."""
        self._index_of(instance).down(instance)

    def forget(self, instance: ev.InstanceId) -> None:
        """It was removed for good."""
        self._index_of(instance).gone(instance)
        self._decode_ids.discard(instance)

    def on_blocks(self, event: BlockEvent) -> None:
        """A rank published what happened to its cache."""
        index = self._index_of(event.instance)
        match event:
            case ev.BlocksStored():
                index.stored(event.instance, event.dp_rank, event.blocks, event.tier)
            case ev.BlocksRemoved():
                index.removed(event.instance, event.dp_rank, event.blocks, event.tier)
            case ev.BlocksCleared():
                index.clear(event.instance, event.dp_rank)

    def on_restart(self, instance: ev.InstanceId, rank: int) -> None:
        """Its EndForward has another boot id; without KV events nobody else would say so."""
        index = self._index_of(instance)
        if index.source_of(instance) == "approximate":
            index.clear(instance, rank)

    def sent(self, request: Request, visible_s: float) -> None:
        """A request was dispatched; others find its blocks from ``visible_s`` on."""
        if not request.blocks or request.prefill is None or request.decode is None:
            return
        for index, (instance, rank) in (
            (self.prefill, request.prefill),
            (self.decode, request.decode),
        ):
            index.sent(
                request.rid,
                instance,
                rank,
                request.blocks,
                request.block_tokens,
                visible_s=visible_s,
            )

    def prefilled(self, request: Request, now_s: float, cached_tokens: int | None) -> None:
        """Prefill answered, with what it had found if it says so."""
        self.prefill.prefilled(
            request.rid,
            now_s,
            expected_tokens=request.cached_tokens,
            cached_tokens=cached_tokens,
        )
        self.decode.prefilled(request.rid, now_s)

    def dropped(self, rid: str) -> None:
        """The request is over."""
        self.prefill.dropped(rid)
        self.decode.dropped(rid)

    def advance(self, now_s: float) -> None:
        """Time has passed."""
        self.prefill.advance(now_s)
        self.decode.advance(now_s)

    @property
    def unfinished(self) -> bool:
        """Whether :meth:`advance` has something left to do right now."""
        return self.prefill.unfinished or self.decode.unfinished

    def decode_hits(
        self, request: Request, targets: Sequence[tuple[DecodeInstance, int]]
    ) -> dict[int, int]:
        """Tokens of the prompt that decode ranks hold, by position in ``targets``."""
        if not len(self.decode):
            return {}
        hits = self.decode.find(
            request.blocks, request.block_tokens, request.prompt_tokens
        ).by_instance
        return {
            position: hits[decode.id][rank]
            for position, (decode, rank) in enumerate(targets)
            if decode.id in hits and hits[decode.id][rank]
        }

    def _index_of(self, instance: ev.InstanceId) -> PrefixIndex:
        return self.decode if instance in self._decode_ids else self.prefill
