"""The simulated cluster as data: its instances, latencies, faults and scripted topology changes."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from sglang_sbs.scheduling.events import PrefixSource
from sglang_sbs.simulator.cluster.cost import PassCost

KV_CAPACITY_TOKENS = 500_000
"""Of a DeepSeek-V3 prefill rank on H800, calculated: 32 GPUs per instance, attention TP 4 x DP 8,
EP 32 (the paper's). Of 80 GB, SGLang keeps 0.8 for weights and KV (``mem_fraction_static``). The
weights take 28 GB of it (FP8: a 32nd of 288 experts per layer 23 GB, a quarter of the rest), a
token of MLA's KV 61 layers x 576 x 2 bytes = 70272, on each of the four GPUs."""
Action = Literal["up", "drain", "down"]
"""``up``: the instance joins, comes back from a drain, or starts anew after a death (InstanceUp).
``drain``: no new requests, those it has run to their end (InstanceDown, as for a worker that is
removed from the router). ``down``: it dies with everything in it (InstanceDown)."""
ACTIONS: tuple[str, ...] = get_args(Action)
DecodeCache = Literal["off", "unseen", "seen"]
"""Whether decode ranks keep the KV of requests that ended, and whether the scheduler knows."""
DECODE_CACHES: tuple[str, ...] = get_args(DecodeCache)
PoolBalance = Literal["least", "random", "session"]
"""Which pool a request goes to: the one with the fewest in flight, any, or that of its conversation
(any where it has none)."""
POOL_BALANCES: tuple[str, ...] = get_args(PoolBalance)
_ALLOWED: dict[str, tuple[str, ...]] = {
    "up": ("drain", "down"),
    "drain": ("up", "down"),
    "down": ("up",),
}
"""What may come after what."""


class TopologyError(ValueError):
    """Changes that cannot follow one another, or of no instance; the message names the change."""


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True):
    dp_size: int = 8
    chunk_tokens: int = 3072
    """C_chunk per DP rank."""
    speed: float = 1.0
    """Its passes take the cost model's time divided by this."""
    recorded: tuple[tuple[float, float], ...] = ()
    """Passes of a real instance, by their start in ascending seconds: each with its time over that
    of the cost model. A simulated pass takes the cost model's time multiplied by this, of the
    recorded pass nearest to its start, instead of ``pass_jitter``."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens of a pass with a full chunk on every rank."""
        return self.dp_size * self.chunk_tokens


class TierSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and speeds of what is below the radix caches (:mod:`.kv_cache`)."""

    host_kv_tokens: int = 1_000_000
    """Of each prefill rank: twice its device memory (``--hicache-ratio 2``). 0: no such tier, and
    none below it."""
    host_load_s: float = 1.5e-6
    """Per token, from host memory to the device: 70272 bytes at 50 GB/s."""
    storage: bool = True
    """Of all prefill ranks together, and as large as it takes."""
    storage_load_s: float = 7e-6
    """Per token, from storage to host memory: 70272 bytes at 10 GB/s."""

    @property
    def has_storage(self) -> bool:
        """Storage is reached through host memory only."""
        return self.storage and self.host_kv_tokens > 0


NO_TIERS = TierSpec(host_kv_tokens=0)


class TopologyChange(msgspec.Struct, frozen=True):
    """An instance whose first change is ``up`` joins then, all others are there from the start."""

    at_s: float
    action: Action
    instance: str


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated cluster; times in seconds."""

    cost: PassCost
    prefill_instances: int = 3
    dp_size: int = 8
    chunk_tokens: int = 3072
    instances: tuple[InstanceSpec, ...] = ()
    """Prefill instances that differ; instead of the three fields above."""
    changes: tuple[TopologyChange, ...] = ()
    """In the order of time; instances are called p0, p1, ..."""
    first_instance: int = 0
    """The number in the name of the first."""
    detection_s: float = 0.2
    """From the death of an instance until the scheduler hears of it."""
    decode_dp_size: int = 32
    dispatch_latency_s: float = 0.005
    """Router to the rank's socket: HTTP, tokenization, handshake."""
    dispatch_jitter: float = 0.0
    """Lognormal sigma of the dispatch latency, per request."""
    feedback_latency_s: float = 0.002
    """EndForward to the router."""
    gang_jitter: float = 0.0
    """As ``dispatch_jitter``, shared by the requests of a batch, which leave back to back."""
    dispatch_serial_s: float = 0.0
    """Part of the dispatch that an instance spends on one request after the other."""
    intake_s: float = 0.0
    """Time that the one intake of all instances spends on each request, one after the other: a
    tokenizer, a router or host short of CPU."""
    intake_until_s: float = math.inf
    """When the intake stops being slow."""
    gang_gate_s: float = 0.0
    """What arrives of a batch waits so long at most for the rest of it: the plugin's gang gate."""
    launch_gap_s: float = 0.0
    """Engine work between the end of a pass and the launch of the next."""
    rank_pause_s: float = 0.0
    """Mean of an exponential pause of each DP rank on top of it; the barrier waits for the longest
    (garbage collection, a host short of CPU)."""
    prepare_s: float = 0.0
    """Part of it after requests were taken in: what comes later has to wait. An idle instance
    spends it too, on top of the dispatch latency."""
    overlap: bool = False
    """One-batch lookahead of SGLang's overlap scheduling."""
    barrier: bool = True
    """All DP ranks of an instance make each pass together. False: each makes passes of its own (as
    under DWDP), which take as long as one in which all ranks have as much."""
    page_size: int = 1
    """Tokens per KV page; a request is charged whole pages of the chunk. The scheduler is told."""
    captured_tokens: tuple[int, ...] = ()
    """Token counts of the engines' prefill CUDA graphs, ascending. The scheduler is told."""
    prefill_max_requests: int = 0
    """Most requests of a rank in one pass; 0: no limit. The scheduler is told."""
    block_tokens: int = 0
    """Tokens per block of the radix caches, which the scheduler is told as the page size of KV
    events. 0: no radix cache (``--disable-radix-cache``), and unbounded KV."""
    kv_capacity_tokens: int = KV_CAPACITY_TOKENS
    """Per prefill DP rank, cached or in use; only with a radix cache."""
    prefix_source: PrefixSource = "events"
    """How the scheduler knows what the ranks have cached."""
    tiers: TierSpec = NO_TIERS
    """Host memory and storage below the radix caches."""
    handshake_s: float = 0.0
    """From a request's arrival at the rank, or from when decode has room, until it may run."""
    first_token_s: float = 0.0
    """From the end of the prefill to the first token at the router: KV transfer, admission."""
    transfer_token_s: float = 0.0
    """KV transfer of a token to decode. A prefill rank sends one part after the other: what it
    found in its cache when it schedules the request, the rest when its pass has ended."""
    decode_cache: DecodeCache = "off"
    """``--disaggregation-decode-enable-radix-cache``: what a decode rank has of a prompt is not
    sent. Only with a radix cache in prefill."""
    pass_jitter: float = 0.0
    """Lognormal sigma of the forward time."""
    first_pass_s: float = 0.0
    """What the first pass of an engine that starts takes on top: kernels, graphs."""
    length_error: float = 0.0
    """The scheduler is told each prompt length times a uniform factor in 1 -/+ this."""
    length_factor: float = 1.0
    """The scheduler is told each prompt length times this."""
    endforward_loss: float = 0.0
    """Share of EndForward messages that never arrive; 1: the scheduler hears HTTP answers only."""
    endforward_delay_s: float = 0.0
    """Mean of an exponential delay on top of ``feedback_latency_s``, unknown to the scheduler.
    Messages of one rank stay in order, those of different ranks do not."""
    endforward_duplicates: float = 0.0
    """Share of EndForward messages that arrive once more, later and in any order."""
    decode_s: float = 1.0
    """How long a request stays in decode."""
    decode_token_s: float = 0.0
    """How much longer for each token that it generates."""
    decode_kv_capacity_tokens: int = 0
    """Per decode rank; 0: unbounded. A request that does not fit waits in the prefill's bootstrap
    queue, as decode reserves its KV before the prefill."""
    output_tokens: int = 200
    """What every request generates. Decode reserves room for it beside the prompt."""
    decode_max_running_requests: int = 0
    """Per decode rank; 0: unbounded."""
    max_new_tokens: int | None = None
    """What requests ask for; None: they do not say."""
    ttft_slo_s: float | None = None
    """The SLO that every request brings; None: none does."""
    short_pool: int = 0
    """So many of the instances take short prompts only, the others long ones
    (:mod:`.arrangements`). 0: all take all."""
    pools: int = 0
    """So many pools of equally many instances, each with a scheduler of its own; decode is divided,
    too. 0: one scheduler, of which no time is taken."""
    pool_balance: PoolBalance = "least"
    deflect_tokens: int = 0
    """Decode computes prompts of at most so many tokens, too: the last instance. 0: none."""
    seed: int = 0

    def __post_init__(self) -> None:
        _check_changes(self.changes, [name for name, _ in self.prefill])

    def engines(self, one: InstanceSpec) -> int:
        """How many passes an instance makes at a time."""
        return 1 if self.barrier else one.dp_size

    @property
    def decode_caches(self) -> bool:
        return self.block_tokens > 0 and self.decode_cache != "off"

    @property
    def publishes_blocks(self) -> bool:
        """Whether the ranks publish KV events, and somebody listens."""
        return self.block_tokens > 0 and self.prefix_source == "events"

    @property
    def cluster_kv_tokens(self) -> int:
        """KV capacity of all prefill ranks, host memory included; storage has no end."""
        if self.tiers.has_storage:
            return sys.maxsize
        ranks = sum(one.dp_size for _, one in self.prefill)
        return (self.kv_capacity_tokens + self.tiers.host_kv_tokens) * ranks

    @property
    def prefill(self) -> tuple[tuple[str, InstanceSpec], ...]:
        same = InstanceSpec(dp_size=self.dp_size, chunk_tokens=self.chunk_tokens)
        listed = self.instances or (same,) * self.prefill_instances
        return tuple((f"p{index}", one) for index, one in enumerate(listed, self.first_instance))

    def up_s(self, instance: str, from_s: float, to_s: float) -> float:
        """Within a window, for how long new requests may go to an instance."""
        mine = [change for change in self.changes if change.instance == instance]
        up = not joins_late(mine)
        total_s, since_s = 0.0, from_s
        for change in mine:
            at_s = min(max(change.at_s, from_s), to_s)
            total_s += (at_s - since_s) * up
            up, since_s = change.action == "up", at_s
        return total_s + (to_s - since_s) * up


def joins_late(changes: Sequence[TopologyChange]) -> bool:
    """Whether an instance with these changes is absent at the start."""
    return bool(changes) and changes[0].action == "up"


def _check_changes(changes: Sequence[TopologyChange], names: Sequence[str]) -> None:
    last: dict[str, str] = {}
    for change in changes:
        label = f"{change.at_s:g}:{change.action}:{change.instance}"
        if change.instance not in names:
            raise TopologyError(f"{label}: no such instance; there are {', '.join(names)}")
        before = last.get(change.instance)
        if before is not None and change.action not in _ALLOWED[before]:
            may = " or ".join(_ALLOWED[before])
            raise TopologyError(f"{label}: after {before} comes {may}, not {change.action}")
        last[change.instance] = change.action
