"""A simulated SGLang prefill instance with DP attention: chunked prefill behind a barrier.

Its owner has the clock: it calls :meth:`SimulatedPrefill.step` where SGLang begins an iteration of
its event loop, and :meth:`SimulatedPrefill.finish` where a pass ends.

It reproduces these parts of SGLang 0.5.23 (``disaggregation/prefill.py``, ``schedule_policy.py``):

- Requests are ingested only at the start of an iteration; an idle instance launches on the first
  request it sees. A request is schedulable once its handshake with decode is done.
- Each rank fills its chunk first come first served, and each request is charged in whole pages. The
  last request that does not fit is cut, and its rest goes first in the next pass (one chunked
  request per rank). All ranks pass the barrier together. ``--prefill-max-requests`` limits the
  requests of a rank in a pass; the rest of a cut one counts as one.
- With prefill CUDA graphs a pass takes the time of the padded one (``padded``).
- Overlap (``event_loop_overlap_disagg_prefill``): an iteration forms a batch, hands it to the
  device, and then waits for the pass *before* it. If any request is left over at the launch of a
  pass, the next pass is queued behind it at once, however small, and runs without a gap; requests
  that arrive later have to wait for the pass after it. If none is left over, the loop waits for the
  pass to end. Then it launches the requests that have arrived by that time, after a gap.
- Without overlap (``event_loop_normal_disagg_prefill``) an iteration waits for its own pass.
- With a radix cache (``kv_cache``) a request is matched when it is first put into a batch
  (``init_next_round_input``), and only the rest is computed.

  - The computed blocks of a cut request are available to others once the next batch is formed, and
    those of its last part once that pass ends (``checkpoint_kv_cache``). So requests of one pass
    with a new prefix in common all compute it. The default policy ``fcfs`` does not look for such
    requests; ``lpm`` would hold all but one of them back.
  - A request without room for its whole prompt waits, and so do the requests behind it.
  - Waiting requests are reported with their whole prompts, because ``fcfs`` does not match them
    before.
"""

from __future__ import annotations

import math
import random
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from sglang_sbs.scheduling.events import BlocksRemoved, BlocksStored
from sglang_sbs.scheduling.paging import padded
from sglang_sbs.scheduling.prefill.completion import Chunk, RankPrompt
from sglang_sbs.simulator.cluster.kv_cache import BlockCache, Blocks, Hold
from sglang_sbs.simulator.cluster.spec import ClusterSpec, InstanceSpec
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.endforward import Accepted, Kind

_MOST_FETCHES = 3
"""Limit on fetches from storage per request; after that the missing blocks are computed."""


@dataclass(slots=True, eq=False)
class SimulatedRequest(RankPrompt):
    """A request at a simulated instance. ``context_tokens``: tokens that have KV after the passes
    in progress."""

    rank: int = 0
    blocks: Blocks = ()
    cached_tokens: int = 0
    """Tokens found in the cache when it was first scheduled."""
    hold: Hold | None = None
    """Reference to the request's blocks in the rank's cache; None before it is first scheduled."""
    loaded_tokens: int = 0
    """Part of ``cached_tokens`` that was in host memory."""
    fetching: Blocks = ()
    """Blocks on their way from storage; requests behind this one go first."""
    fetched: Blocks = ()
    """Blocks that came from storage, until it is scheduled."""
    fetched_tokens: int = 0
    fetches: int = 0
    sent_tokens: int = 0
    """Tokens handed to the KV transfer, or already in decode."""

    @property
    def prompt_tokens(self) -> int:
        return self.left_tokens + self.context_tokens


Parts = list[tuple[SimulatedRequest, int]]


@dataclass(slots=True)
class DevicePass:
    """A pass on the device, running or queued behind another."""

    forward_id: int
    launch_s: float
    """Time when it was handed to the device."""
    start_s: float
    end_s: float
    tokens: list[int]
    requests: list[int]
    """Number of requests per rank in the pass."""
    completed: list[SimulatedRequest]
    """Requests completed by this pass: it computes the end of their prompts."""
    cached_tokens: list[int]
    """Cached tokens per rank of the requests first scheduled in it."""
    parts: Parts
    """Requests in the pass, and the computed part of each prompt at its end."""


@dataclass(slots=True)
class SimulatedRank:
    cache: BlockCache
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    waiting_tokens: int = 0
    """Tokens of ``waiting``, including the rest of the chunked request."""
    bootstrapping: dict[str, SimulatedRequest] = field(default_factory=dict)
    bootstrapping_tokens: int = 0
    unreported: list[Accepted] = field(default_factory=list)
    seq: int = 0
    accepted_requests: int = 0
    accepted_tokens: int = 0
    computed_tokens: int = 0
    transfer_free_s: float = 0.0
    """Time when everything handed to the transfer is at decode."""

    def enqueue(self, request: SimulatedRequest) -> None:
        self.waiting.append(request)
        self.waiting_tokens += request.left_tokens


@dataclass(eq=False)
class SimulatedPrefill:
    """A simulated instance. Its owner calls :meth:`deliver`, :meth:`handshaken`, :meth:`step` and
    :meth:`finish`."""

    name: str
    shape: InstanceSpec
    spec: ClusterSpec
    _: KW_ONLY
    rng: random.Random
    """Random numbers for ``pass_jitter``."""
    boot_id: str = ""
    caches: Sequence[BlockCache] = ()
    """One cache per rank; empty for an engine without a radix cache, which has unlimited KV."""
    lone_rank: tuple[int, int] | None = None
    """Rank and DP size in its messages, if it is one rank of an instance without a barrier."""

    def __post_init__(self) -> None:
        shape, cost = self.shape, self.spec.cost
        self._cost = cost if shape.speed == 1 else cost.at_speed(shape.speed)
        caches = self.caches or [BlockCache(sys.maxsize, 1) for _ in range(shape.dp_size)]
        self.ranks = [SimulatedRank(cache) for cache in caches]
        self.device: deque[DevicePass] = deque()
        """Passes on the device: at most two with overlap, one without. The first one runs."""
        self.asleep = True
        """True: the event loop sleeps until a request comes."""
        self._inbox: list[SimulatedRequest] = []
        self._early: set[str] = set()
        """Ids of requests whose handshake ended before the rank read them from its socket."""
        self._last_launched = False
        self._forward_id = 0
        self._free_s = -math.inf
        self.fetches: list[SimulatedRequest] = []
        """Requests for which ranks began to load blocks from storage in the last step;
        :meth:`fetched` ends it."""

    def deliver(
        self, rid: str, rank: int, tokens: int, blocks: Blocks = (), *, handshaken: bool = True
    ) -> None:
        """Deliver a request to the socket of a rank (of its instance); the next iteration reads
        it."""
        at = 0 if self.lone_rank else rank
        self._inbox.append(SimulatedRequest(rid, tokens, rank=at, blocks=blocks))
        if handshaken:
            self._early.add(rid)

    def handshaken(self, rid: str, rank: int) -> None:
        """Record that decode has room for the request, so that it may be scheduled."""
        at = self.ranks[0 if self.lone_rank else rank]
        request = at.bootstrapping.pop(rid, None)
        if request is None:
            self._early.add(rid)
            return
        at.bootstrapping_tokens -= request.left_tokens
        at.enqueue(request)

    def step(self, launch_s: float) -> tuple[DevicePass | None, list[EndForward]]:
        """Run the first half of an iteration: ingest, form a batch and hand it to the device, which
        gets it at ``launch_s`` (now plus the preparation time). Returns the launched pass, if any,
        and the ranks' reports. The owner must call :meth:`waits_for` next."""
        self._ingest()
        launched = self._launch(launch_s) if any(rank.waiting for rank in self.ranks) else None
        messages: list[EndForward] = []
        if launched is not None:
            messages = self.messages("launch", launched)
            self.device.append(launched)
        elif any(rank.bootstrapping or rank.waiting for rank in self.ranks):
            messages = [] if self.device else self.messages("heartbeat")
        elif not self.device and not self.asleep:
            messages = self.messages("idle")
        return launched, messages

    def waits_for(self, launched: DevicePass | None) -> DevicePass | None:
        """Run the second half of the iteration: return the pass that the loop waits for before the
        next iteration. None: the next one starts at once if a pass was launched; otherwise the loop
        sleeps."""
        wait = self._last_launched or (launched is not None and not self.spec.overlap)
        self._last_launched = launched is not None and self.spec.overlap
        self.asleep = launched is None and not wait
        return self.device[0] if wait else None

    def finish(self) -> tuple[DevicePass, list[EndForward]]:
        ended = self.device.popleft()
        for rank, tokens in zip(self.ranks, ended.tokens, strict=True):
            rank.computed_tokens += tokens
        for request in ended.completed:
            assert request.hold is not None
            self.ranks[request.rank].cache.publish(request.hold, request.prompt_tokens)
        return ended, self.messages("forward", ended)

    def transfer(self, request: SimulatedRequest, tokens: int, now_s: float) -> float:
        """Send this part of a prompt's KV to decode, unless already sent; return its arrival
        time."""
        rank = self.ranks[request.rank]
        new = max(0, tokens - request.sent_tokens)
        request.sent_tokens += new
        rank.transfer_free_s = max(rank.transfer_free_s, now_s) + new * self.spec.transfer_token_s
        return rank.transfer_free_s

    def sent(self, request: SimulatedRequest) -> None:
        """Record that the KV of a completed request has reached decode, so that its blocks may be
        evicted."""
        assert request.hold is not None
        self.ranks[request.rank].cache.end(request.hold)

    def take_block_events(self) -> list[BlocksRemoved | BlocksStored]:
        """Return the cache events of all ranks, once per pass."""
        first = self.lone_rank[0] if self.lone_rank else 0
        return [
            message
            for rank, cache in enumerate(self.caches, first)
            for message in cache.take_messages(self.name, rank)
        ]

    @staticmethod
    def fetched(request: SimulatedRequest) -> None:
        """Record that the blocks have arrived, so that the request may be scheduled."""
        request.fetched, request.fetching = [*request.fetched, *request.fetching], ()

    def _ingest(self) -> None:
        for request in self._inbox:
            rank = self.ranks[request.rank]
            rank.unreported.append(Accepted(request.rid, request.prompt_tokens))
            rank.accepted_requests += 1
            rank.accepted_tokens += request.prompt_tokens
            self._fetch(rank, request)
            if request.rid in self._early:
                self._early.discard(request.rid)
                rank.enqueue(request)
            else:
                rank.bootstrapping[request.rid] = request
                rank.bootstrapping_tokens += request.left_tokens
        self._inbox.clear()

    def _fetch(self, rank: SimulatedRank, request: SimulatedRequest) -> bool:
        """Start loading blocks that only storage has; return whether there are any."""
        if request.fetches == _MOST_FETCHES:
            return False
        request.fetching = rank.cache.to_fetch(request.blocks, request.prompt_tokens)
        if request.fetching:
            request.fetches += 1
            request.fetched_tokens += len(request.fetching) * rank.cache.block_tokens
            self.fetches.append(request)
        return bool(request.fetching)

    def _launch(self, launch_s: float) -> DevicePass | None:
        """Launch a pass; None if no rank has cache room for a waiting request."""
        parts: Parts = []
        filled = zip(*(self._fill(rank, parts) for rank in self.ranks), strict=True)
        tokens, requests, pairs, cached, loads_s = map(list, filled)
        if not any(requests):
            return None
        computed = padded(tokens, self.spec.captured_tokens)
        start_s = max(launch_s, self._free_s)
        forward_s = self._cost.pass_s(computed, pairs, requests, loads_s)
        if self.shape.recorded:
            forward_s *= _nearest(self.shape.recorded, start_s)
        elif self.spec.pass_jitter:
            forward_s *= math.exp(self.rng.gauss(0.0, self.spec.pass_jitter))
        if self._forward_id == 0:
            forward_s += self.spec.first_pass_s
        self._forward_id += 1
        self._free_s = start_s + forward_s
        end_s = self._free_s
        completed = [request for request, _ in parts if not request.left_tokens]
        return DevicePass(
            self._forward_id, launch_s, start_s, end_s, tokens, requests, completed, cached, parts
        )

    def _fill(self, rank: SimulatedRank, parts: Parts) -> tuple[int, int, float, int, float]:
        """Form the rank's batch; return its tokens, requests, attention pairs and cached tokens,
        and the seconds of loading."""
        cache, spec = rank.cache, self.spec
        chunk = Chunk(self.shape.chunk_tokens, spec.page_size, spec.prefill_max_requests)
        cached, loaded = 0, 0
        for request in list(rank.waiting):
            if chunk.full:
                break
            if request.fetching:
                continue
            if request.hold is None:
                if request.fetched:
                    cache.fetched(request.blocks, request.fetched)
                if self._fetch(rank, request):
                    continue  # it has lost blocks that it would have found while waiting
            hit, load = _look_up(cache, request)
            if not chunk.takes(request.left_tokens - hit):
                break
            if request.hold is None:
                request.hold = cache.start(
                    request.blocks, (hit - load) // cache.block_tokens, request.prompt_tokens
                )
                if request.hold is None:
                    break
                if load:
                    cache.publish(request.hold, hit)
                request.cached_tokens = hit
                request.loaded_tokens = load
                loaded += load
                request.advance(hit)
                rank.waiting_tokens -= hit
                cached += hit
            [(_, part)] = chunk.fill([request])
            request.advance(part)
            rank.waiting.remove(request)
            parts.append((request, request.context_tokens))
            if request.left_tokens:
                rank.waiting.appendleft(request)
                break
        rank.waiting_tokens -= chunk.tokens
        return chunk.tokens, chunk.requests, chunk.pairs, cached, loaded * spec.tiers.host_load_s

    def messages(self, kind: Kind, about: DevicePass | None = None) -> list[EndForward]:
        """Return a report from every rank. ``about``: the pass that was launched or has ended,
        which is not in ``device``."""
        return [self._message(index, kind, about) for index in range(self.shape.dp_size)]

    def _message(self, index: int, kind: Kind, about: DevicePass | None) -> EndForward:
        rank = self.ranks[index]
        first = rank.waiting[0] if rank.waiting else None
        remainder = first.left_tokens if first and first.left_tokens < first.prompt_tokens else 0
        ended = about is not None and kind == "forward"
        message = EndForward(
            instance_id=self.name,
            boot_id=self.boot_id or self.name,
            role="prefill",
            dp_rank=self.lone_rank[0] if self.lone_rank else index,
            dp_size=self.lone_rank[1] if self.lone_rank else self.shape.dp_size,
            seq=rank.seq,
            kind=kind,
            forward_id=self._forward_id if about is None else about.forward_id,
            mode="extend" if about is not None and about.tokens[index] else "idle",
            launch_s=0.0 if about is None else about.launch_s,
            end_s=about.end_s if about is not None and ended else 0.0,
            forward_s=about.end_s - about.start_s if about is not None and ended else 0.0,
            extend_tokens=0 if about is None else about.tokens[index],
            cached_tokens=0 if about is None else about.cached_tokens[index],
            batch_size=0 if about is None else about.requests[index],
            tokens_per_rank=None if about is None or self.lone_rank else list(about.tokens),
            inflight_passes=len(self.device),
            inflight_tokens=sum(a_pass.tokens[index] for a_pass in self.device),
            inflight_requests=sum(a_pass.requests[index] for a_pass in self.device),
            waiting_requests=len(rank.waiting) - (remainder > 0),
            waiting_tokens=rank.waiting_tokens - remainder,
            bootstrapping_requests=len(rank.bootstrapping),
            bootstrapping_tokens=rank.bootstrapping_tokens,
            chunk_remainder_tokens=remainder,
            chunk_tokens=self.shape.chunk_tokens,
            accepted_requests=rank.accepted_requests,
            accepted_tokens=rank.accepted_tokens,
            computed_tokens=rank.computed_tokens,
            rids=[request.rid for request in rank.unreported],
            accepted=rank.unreported,
        )
        rank.seq += 1
        rank.unreported = []
        return message


def _nearest(recorded: Sequence[tuple[float, float]], start_s: float) -> float:
    """Return the factor of the recorded pass that began nearest to ``start_s``."""
    at = bisect_left(recorded, (start_s, 0.0))
    near = recorded[max(0, at - 1) : at + 1]
    return min(near, key=lambda recorded_pass: abs(recorded_pass[0] - start_s))[1]


def _look_up(cache: BlockCache, request: SimulatedRequest) -> tuple[int, int]:
    """Return the prompt tokens found in the cache (host memory included), and how many of them must
    be loaded from host memory. For a request that a chunk has cut, publish its computed blocks and
    return (0, 0)."""
    if request.hold is not None:
        cache.publish(request.hold, request.context_tokens)
        return 0, 0
    hit = cache.match(request.blocks, request.prompt_tokens)
    load = cache.loadable(request.blocks, hit, request.prompt_tokens)
    return (hit + load) * cache.block_tokens, load * cache.block_tokens
