"""Starts simulated instances, and models decode as seen by a prefill cluster."""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from sglang_sbs.scheduling.events import InstanceUp
from sglang_sbs.simulator.cluster.engine import SimulatedPrefill
from sglang_sbs.simulator.cluster.kv_cache import BlockCache, Blocks, Hold, SharedStorage
from sglang_sbs.simulator.cluster.outcome import RequestRecord
from sglang_sbs.simulator.cluster.spec import ClusterSpec, InstanceSpec

DECODE = "decode"


class Asking(NamedTuple):
    rid: str
    record: RequestRecord
    blocks: Blocks
    """Block names of prompt and answer; empty if decode has no cache."""
    total_tokens: int
    """Tokens for which decode reserves KV: prompt and answer."""


@dataclass(slots=True)
class SimulatedDecodeRank:
    """KV and slots of one decode DP rank; admits first come first served."""

    free_slots: float
    cache: BlockCache
    """The rank's KV. Without a radix cache, requests have no named blocks in it."""
    waiting: deque[Asking] = field(default_factory=deque)
    holds: dict[str, Hold] = field(default_factory=dict)
    """Reserved KV by request id."""

    def admit(self) -> list[str]:
        """Reserve room for the requests at the head of the queue that fit now, and return their
        ids."""
        admitted = []
        while self.waiting and self.free_slots >= 1 and self._reserve(self.waiting[0]):
            rid, record, _, _ = self.waiting.popleft()
            self.free_slots -= 1
            record.reserved = True
            admitted.append(rid)
        return admitted

    def _reserve(self, asking: Asking) -> bool:
        rid, record, blocks, total_tokens = asking
        hit = self.cache.match(blocks, record.prompt_tokens)
        hold = self.cache.start(blocks, hit, total_tokens)
        if hold is None:
            return False
        self.holds[rid] = hold
        record.decode_cached_tokens = hit * self.cache.block_tokens
        return True

    def has(self, rid: str, tokens: int) -> None:
        """Record that this much KV of the request has arrived, so that others can use it."""
        self.cache.publish(self.holds[rid], tokens)

    def release(self, rid: str, record: RequestRecord) -> None:
        """Record the end of an attempt, whether it was admitted, waits, or is still on its way."""
        if not record.reserved:
            self.waiting = deque(entry for entry in self.waiting if entry.rid != rid)
            return
        record.reserved = False
        self.free_slots += 1
        self.cache.end(self.holds.pop(rid))


def prefill_up(name: str, instance: InstanceSpec, spec: ClusterSpec) -> InstanceUp:
    return InstanceUp(
        instance=name,
        role="prefill",
        dp_size=instance.dp_size,
        chunk_tokens=instance.chunk_tokens,
        page_size=spec.block_tokens or spec.page_size,
        kv_capacity_tokens=spec.kv_capacity_tokens if spec.block_tokens else 0,
        prefix_source=spec.prefix_source if spec.block_tokens else "off",
        overlap=spec.overlap,
        charged_page=spec.page_size,
        barrier=spec.barrier,
        prefill_max_requests=spec.prefill_max_requests,
        captured_tokens=spec.captured_tokens,
        shares_storage=spec.tiers.has_storage,
    )


def decode_up(spec: ClusterSpec) -> InstanceUp:
    seen = spec.decode_caches and spec.decode_cache == "seen"
    return InstanceUp(
        instance=DECODE,
        role="decode",
        dp_size=spec.decode_dp_size,
        page_size=spec.block_tokens or 1,
        prefix_source=spec.prefix_source if seen else "off",
        kv_capacity_tokens=spec.decode_kv_capacity_tokens,
        max_running_requests=spec.decode_max_running_requests,
    )


def decode_ranks(spec: ClusterSpec) -> list[SimulatedDecodeRank]:
    slots = spec.decode_max_running_requests or math.inf
    tokens = spec.decode_kv_capacity_tokens or sys.maxsize
    block_tokens = spec.block_tokens if spec.decode_caches else 1
    return [
        SimulatedDecodeRank(slots, BlockCache(tokens, block_tokens))
        for _ in range(spec.decode_dp_size)
    ]


def boot_engines(
    name: str,
    instance: InstanceSpec,
    spec: ClusterSpec,
    *,
    index: int,
    boot: int,
    storage: SharedStorage | None,
) -> list[SimulatedPrefill]:
    """Return the engine of an instance; without a barrier, one per DP rank. ``index``: number of
    the instance. ``boot``: number of its earlier starts."""
    engines = spec.engines(instance)
    shape = msgspec.structs.replace(instance, dp_size=instance.dp_size // engines)
    return [
        SimulatedPrefill(
            name,
            shape,
            spec,
            rng=random.Random(spec.seed * 1000 + index + 1_000_000_007 * (boot + 1_000 * number)),
            boot_id=f"{name}-{boot}",
            caches=[
                BlockCache(
                    spec.kv_capacity_tokens,
                    spec.block_tokens,
                    host_tokens=spec.tiers.host_kv_tokens,
                    storage=storage,
                )
                for _ in range(shape.dp_size if spec.block_tokens else 0)
            ],
            lone_rank=None if spec.barrier else (number, instance.dp_size),
        )
        for number in range(engines)
    ]
