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
"""KV capacity of a DeepSeek-V3 prefill rank on H800, calculated for the paper's instances of 32
GPUs: attention TP 4 x DP 8, EP 32. SGLang keeps 0.8 of 80 GB for weights and KV
(``mem_fraction_static``). The weights take 28 GB of it in FP8: 23 GB for a 32nd of 288 experts per
layer, and a quarter of all other weights. A token of MLA's KV takes 61 layers x 576 x 2 bytes =
70272 bytes on each of the rank's four GPUs."""
Action = Literal["up", "drain", "down"]
"""``up``: the instance joins, comes back from a drain, or starts anew after a death (InstanceUp).
``drain``: no new requests, those it has run to their end (InstanceDown, as for a worker that is
removed from the router). ``down``: it dies with everything in it (InstanceDown)."""
ACTIONS: tuple[str, ...] = get_args(Action)
DecodeCache = Literal["off", "unseen", "seen"]
"""Whether decode ranks keep the KV of requests that ended, and whether the scheduler knows."""
DECODE_CACHES: tuple[str, ...] = get_args(DecodeCache)
PoolBalance = Literal["least", "random", "session"]
"""Choice of the pool for a request: the one with the fewest in flight, a random one, or that of its
conversation (random without one)."""
POOL_BALANCES: tuple[str, ...] = get_args(PoolBalance)
_ALLOWED: dict[str, tuple[str, ...]] = {
    "up": ("drain", "down"),
    "drain": ("up", "down"),
    "down": ("up",),
}
"""Changes of an instance that may follow each change."""


class TopologyError(ValueError):
    """Changes are in an impossible order, or of an unknown instance; the message names the
    change."""


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True):
    dp_size: int = 8
    chunk_tokens: int = 3072
    """Chunk per DP rank, in tokens (``--chunked-prefill-size`` divided by the DP size)."""
    speed: float = 1.0
    """Speed factor: its passes take the cost model's time divided by this."""
    recorded: tuple[tuple[float, float], ...] = ()
    """Starts of a real instance's passes, ascending, in seconds, and the duration of each over that
    of the cost model. If set, it replaces ``pass_jitter``: a simulated pass takes the cost model's
    time multiplied by the ratio of the recorded pass nearest to its start."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens of a pass with a full chunk on every rank."""
        return self.dp_size * self.chunk_tokens


class TierSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and speeds of the tiers below the radix caches (:mod:`.kv_cache`)."""

    host_kv_tokens: int = 1_000_000
    """Tokens of host memory per prefill rank: twice its device memory (``--hicache-ratio 2``). 0:
    neither host memory nor storage."""
    host_load_s: float = 1.5e-6
    """Seconds per token from host memory to the device: 70272 bytes at 47 GB/s."""
    storage: bool = True
    """Whether there is storage, shared by all prefill ranks and unlimited in size."""
    storage_load_s: float = 7e-6
    """Seconds per token from storage to host memory: 70272 bytes at 10 GB/s."""

    @property
    def has_storage(self) -> bool:
        """Whether storage is used: it is reached through host memory only."""
        return self.storage and self.host_kv_tokens > 0


NO_TIERS = TierSpec(host_kv_tokens=0)


class TopologyChange(msgspec.Struct, frozen=True):
    """A change of an instance. If its first change is ``up``, it joins then; all other instances
    exist from the start."""

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
    """Different prefill instances; if set, they replace the three fields above (equal
    instances)."""
    changes: tuple[TopologyChange, ...] = ()
    """Changes in order of time; instances are called p0, p1, ..."""
    first_instance: int = 0
    """Number in the name of the first instance."""
    detection_s: float = 0.2
    """Time from the death of an instance until the scheduler learns of it."""
    decode_dp_size: int = 32
    dispatch_latency_s: float = 0.005
    """Time from the router to the rank's socket: HTTP, tokenization, handshake."""
    dispatch_jitter: float = 0.0
    """Lognormal sigma of the dispatch latency, per request."""
    feedback_latency_s: float = 0.002
    """Time from EndForward's sending to the router."""
    gang_jitter: float = 0.0
    """Like ``dispatch_jitter``, but shared by the requests of a batch, which are sent back to
    back."""
    dispatch_serial_s: float = 0.0
    """Part of the dispatch that an instance performs for one request after another."""
    intake_s: float = 0.0
    """Time per request of a single intake for all instances: a tokenizer, or a router or host short
    of CPU."""
    intake_until_s: float = math.inf
    """Time when the intake stops being slow."""
    gang_gate_s: float = 0.0
    """Longest time that the arrived part of a batch waits for the rest, as with the plugin's batch
    gate."""
    launch_gap_s: float = 0.0
    """Engine's work between the end of a pass and the launch of the next."""
    rank_pause_s: float = 0.0
    """Mean of an additional exponential pause of each DP rank; the barrier waits for the longest
    (garbage collection, a host short of CPU)."""
    prepare_s: float = 0.0
    """Part of the gap after requests were read; later ones have to wait. An idle instance spends it
    as well, in addition to the dispatch latency."""
    overlap: bool = False
    """Whether engines use SGLang's overlap scheduling, which forms the next batch while a pass
    runs."""
    barrier: bool = True
    """All DP ranks of an instance run each pass together. False: each runs its own passes (as with
    DWDP), which take as long as one in which all ranks have the same load."""
    page_size: int = 1
    """Tokens per KV page; a request is charged whole pages of the chunk. The scheduler knows it."""
    captured_tokens: tuple[int, ...] = ()
    """Token counts of the engines' prefill CUDA graphs, ascending. The scheduler knows them."""
    prefill_max_requests: int = 0
    """Limit on requests of a rank in one pass; 0: none. The scheduler knows it."""
    block_tokens: int = 0
    """Tokens per block of the radix caches, which the scheduler gets as the page size of KV events.
    0: no radix cache (``--disable-radix-cache``), and unlimited KV."""
    kv_capacity_tokens: int = KV_CAPACITY_TOKENS
    """KV tokens per prefill DP rank, cached or in use; only with a radix cache."""
    prefix_source: PrefixSource = "events"
    """The scheduler's source for cached prefixes."""
    tiers: TierSpec = NO_TIERS
    """Host memory and storage below the radix caches."""
    handshake_s: float = 0.0
    """Time from a request's arrival at the rank, or from when decode has room, until it may run."""
    first_token_s: float = 0.0
    """Time from the end of the prefill to the first token at the router: KV transfer, admission."""
    transfer_token_s: float = 0.0
    """KV transfer time per token. A prefill rank sends one part after another: the cached part when
    it schedules the request, the rest after the pass."""
    decode_cache: DecodeCache = "off"
    """``--disaggregation-decode-enable-radix-cache``: the part of a prompt cached in decode is not
    sent. Needs a radix cache in prefill."""
    pass_jitter: float = 0.0
    """Lognormal sigma of the forward time."""
    first_pass_s: float = 0.0
    """Additional time of the first pass after an engine's start: kernels, graphs."""
    length_error: float = 0.0
    """The scheduler gets each prompt length times a uniform random factor between 1 - this and 1 +
    this."""
    length_factor: float = 1.0
    """Factor on each prompt length that the scheduler gets."""
    endforward_loss: float = 0.0
    """Share of EndForward messages that are lost; with 1 the scheduler has only HTTP responses."""
    endforward_delay_s: float = 0.0
    """Mean of an exponential delay in addition to ``feedback_latency_s``, unknown to the scheduler.
    Messages of one rank stay in order, those of different ranks do not."""
    endforward_duplicates: float = 0.0
    """Share of EndForward messages that arrive a second time, later and in any order."""
    decode_s: float = 1.0
    """Time that a request spends in decode."""
    decode_token_s: float = 0.0
    """Additional time per generated token."""
    decode_kv_capacity_tokens: int = 0
    """KV tokens per decode rank; 0: unlimited. A request that does not fit waits in the prefill's
    bootstrap queue, because decode reserves its KV before the prefill."""
    output_tokens: int = 200
    """Tokens generated per request. Decode reserves room for them in addition to the prompt."""
    decode_max_running_requests: int = 0
    """Limit on running requests per decode rank; 0: unlimited."""
    max_new_tokens: int | None = None
    """``max_new_tokens`` of requests; None: not given."""
    ttft_slo_s: float | None = None
    """SLO of every request; None: none."""
    short_pool: int = 0
    """Number of instances that take only short prompts, while the others take long ones
    (:mod:`.arrangements`). 0: all take all."""
    pools: int = 0
    """Number of pools, with equally many instances and a scheduler each; decode is divided as well.
    0: one scheduler, and its CPU time is not measured."""
    pool_balance: PoolBalance = "least"
    deflect_tokens: int = 0
    """Longest prompt, in tokens, that decode computes as well, as an additional last instance. 0:
    none."""
    seed: int = 0

    def __post_init__(self) -> None:
        _check_changes(self.changes, [name for name, _ in self.prefill])

    def engines(self, instance: InstanceSpec) -> int:
        return 1 if self.barrier else instance.dp_size

    @property
    def decode_caches(self) -> bool:
        return self.block_tokens > 0 and self.decode_cache != "off"

    @property
    def publishes_blocks(self) -> bool:
        return self.block_tokens > 0 and self.prefix_source == "events"

    @property
    def cluster_kv_tokens(self) -> int:
        """KV capacity of all prefill ranks, including host memory; storage is unlimited."""
        if self.tiers.has_storage:
            return sys.maxsize
        ranks = sum(instance.dp_size for _, instance in self.prefill)
        return (self.kv_capacity_tokens + self.tiers.host_kv_tokens) * ranks

    @property
    def prefill(self) -> tuple[tuple[str, InstanceSpec], ...]:
        same = InstanceSpec(dp_size=self.dp_size, chunk_tokens=self.chunk_tokens)
        listed = self.instances or (same,) * self.prefill_instances
        return tuple(
            (f"p{index}", instance) for index, instance in enumerate(listed, self.first_instance)
        )

    def up_s(self, instance: str, from_s: float, to_s: float) -> float:
        """Return the time within a window in which an instance accepts new requests."""
        mine = [change for change in self.changes if change.instance == instance]
        up = not joins_late(mine)
        total_s, since_s = 0.0, from_s
        for change in mine:
            at_s = min(max(change.at_s, from_s), to_s)
            total_s += (at_s - since_s) * up
            up, since_s = change.action == "up", at_s
        return total_s + (to_s - since_s) * up


def joins_late(changes: Sequence[TopologyChange]) -> bool:
    """Return whether an instance with these changes is absent at the start."""
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
