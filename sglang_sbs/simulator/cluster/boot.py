"""How simulated instances start, and what a prefill cluster sees of decode: who has to wait."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

import msgspec

from sglang_sbs.scheduling.events import InstanceUp
from sglang_sbs.simulator.cluster.engine import SimulatedPrefill
from sglang_sbs.simulator.cluster.kv_cache import BlockCache, SharedStorage
from sglang_sbs.simulator.cluster.outcome import RequestRecord
from sglang_sbs.simulator.cluster.spec import ClusterSpec, InstanceSpec

DECODE = "decode"


@dataclass(slots=True)
class DecodeRank:
    """KV and slots of one decode DP rank; admits first come first served."""

    free_tokens: float
    free_slots: float
    output_tokens: int
    """Reserved for each request beside its prompt."""
    waiting: deque[tuple[str, RequestRecord]] = field(default_factory=deque)

    def admit(self) -> list[str]:
        """Reserve for those at the head of the queue that fit now."""
        admitted = []
        while (
            self.waiting
            and self.free_slots >= 1
            and self.free_tokens >= self.waiting[0][1].prompt_tokens + self.output_tokens
        ):
            rid, record = self.waiting.popleft()
            self.free_slots -= 1
            self.free_tokens -= record.prompt_tokens + self.output_tokens
            record.reserved = True
            admitted.append(rid)
        return admitted

    def release(self, rid: str, record: RequestRecord) -> None:
        """The attempt is over, whether it was admitted, waits, or is still on its way."""
        if record.reserved:
            record.reserved = False
            self.free_slots += 1
            self.free_tokens += record.prompt_tokens + self.output_tokens
        else:
            self.waiting = deque(entry for entry in self.waiting if entry[0] != rid)


def prefill_up(name: str, one: InstanceSpec, spec: ClusterSpec) -> InstanceUp:
    """What the scheduler is told of an instance."""
    return InstanceUp(
        instance=name,
        role="prefill",
        dp_size=one.dp_size,
        chunk_tokens=one.chunk_tokens,
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
    return InstanceUp(
        instance=DECODE,
        role="decode",
        dp_size=spec.decode_dp_size,
        kv_capacity_tokens=spec.decode_kv_capacity_tokens,
        max_running_requests=spec.decode_max_running_requests,
    )


def decode_ranks(spec: ClusterSpec) -> list[DecodeRank]:
    room = spec.decode_kv_capacity_tokens or math.inf
    slots = spec.decode_max_running_requests or math.inf
    return [DecodeRank(room, slots, spec.output_tokens) for _ in range(spec.decode_dp_size)]


def boot_engines(
    name: str,
    one: InstanceSpec,
    spec: ClusterSpec,
    *,
    index: int,
    boot: int,
    storage: SharedStorage | None,
) -> list[SimulatedPrefill]:
    """The engine of an instance; without a barrier one for each DP rank. ``index``: of the
    instance. ``boot``: how often it was started before."""
    engines = spec.engines(one)
    shape = msgspec.structs.replace(one, dp_size=one.dp_size // engines)
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
            lone_rank=None if spec.barrier else (number, one.dp_size),
        )
        for number in range(engines)
    ]
