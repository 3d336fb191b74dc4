"""A simulated SGLang prefill instance with DP attention: chunked prefill behind a barrier.

Owns the engine's queues, passes and EndForward messages. Must not know the scheduler, the router
or the workload, nor when things happen: its owner calls :meth:`SimulatedPrefill.step` where SGLang
begins an iteration of its event loop, and :meth:`SimulatedPrefill.finish` where a pass ends.

What it reproduces of SGLang 0.5.23 (``disaggregation/prefill.py``, ``schedule_policy.py``):

- Requests are ingested only at the start of an iteration; an idle instance launches on the first
  request it sees. A request is schedulable once its handshake with decode is done.
- Each rank fills its chunk first come first served, each request charged in whole pages, and cuts
  the last one that does not fit; the rest of it goes first in the next pass (one chunked request
  per rank). All ranks pass the barrier together.
- Overlap (``event_loop_overlap_disagg_prefill``): an iteration forms a batch, hands it to the
  device, and then waits for the pass *before* it. So with something left over at the launch of a
  pass, the next one is queued behind it at once, whatever little that is, and runs without a gap;
  what arrives later has to wait for the one after. With nothing left over, the loop waits for the
  pass to end and launches what has come by then after a gap.
- Without overlap (``event_loop_normal_disagg_prefill``) an iteration waits for its own pass.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

from sglang_sbs.simulator.cost import PassCost
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.endforward import Kind


@dataclass(slots=True, eq=False)
class Waiting:
    """A request at a rank."""

    rid: str
    prompt_tokens: int
    remaining: int


@dataclass(slots=True)
class DevicePass:
    """A pass on the device, running or queued behind the one before."""

    forward_id: int
    launch_s: float
    """When it was handed to the device."""
    start_s: float
    end_s: float
    tokens: list[int]
    """Extend tokens per rank."""
    requests: list[int]
    """Requests per rank."""
    completed: list[str]
    """Requests whose prompt ends in it."""


@dataclass(slots=True)
class Rank:
    """One DP rank."""

    waiting: deque[Waiting] = field(default_factory=deque)
    waiting_tokens: int = 0
    """Of ``waiting``, with what is left of the chunked request."""
    bootstrapping: dict[str, Waiting] = field(default_factory=dict)
    bootstrapping_tokens: int = 0
    unreported: list[str] = field(default_factory=list)
    seq: int = 0
    accepted_requests: int = 0
    accepted_tokens: int = 0
    computed_tokens: int = 0


class SimulatedPrefill:
    """Driven by its owner: :meth:`deliver`, :meth:`handshaken`, :meth:`step`, :meth:`finish`."""

    def __init__(
        self,
        name: str,
        *,
        dp_size: int,
        chunk_tokens: int,
        cost: PassCost,
        jitter: float,
        rng: random.Random,
        page_size: int = 1,
        overlap: bool = False,
        boot_id: str = "",
    ) -> None:
        self.name = name
        self.boot_id = boot_id or name
        self.dp_size = dp_size
        self.chunk_tokens = chunk_tokens
        self.page_size = page_size
        self.overlap = overlap
        self.ranks = [Rank() for _ in range(dp_size)]
        self.device: deque[DevicePass] = deque()
        """At most two with overlap, one without; the first one runs."""
        self.asleep = True
        """The loop has nothing to do until a request comes."""
        self._inbox: list[tuple[int, Waiting]] = []
        self._early: set[str] = set()
        """Handshake done before the rank read the request from its socket."""
        self._last_launched = False
        self._cost = cost
        self._jitter = jitter
        self._rng = rng
        self._forward_id = 0
        self._free_s = -math.inf

    def deliver(self, rid: str, rank: int, tokens: int, *, handshaken: bool = True) -> None:
        """A request reached the rank's socket; it is ingested by the next iteration."""
        self._inbox.append((rank, Waiting(rid, tokens, tokens)))
        if handshaken:
            self._early.add(rid)

    def handshaken(self, rid: str, rank: int) -> None:
        """Decode has room for the request and has said so: it may be scheduled."""
        request = self.ranks[rank].bootstrapping.pop(rid, None)
        if request is None:
            self._early.add(rid)
            return
        self.ranks[rank].bootstrapping_tokens -= request.remaining
        self._enqueue(self.ranks[rank], request)

    def step(self, launch_s: float) -> tuple[DevicePass | None, list[EndForward]]:
        """The first half of an iteration: ingest, form a batch and hand it to the device.

        Args:
            launch_s: when the device gets it, that is now plus the time preparing it takes.

        Returns:
            The pass if one was launched, and what the ranks say. Afterwards the owner asks
            :meth:`waits_for`.
        """
        self._ingest()
        launched = self._launch(launch_s) if any(rank.waiting for rank in self.ranks) else None
        if launched is not None:
            messages = [self._message(d, "launch", launch_s, launched) for d in range(self.dp_size)]
            self.device.append(launched)
            return launched, messages
        if self.device:
            return None, []
        if any(rank.bootstrapping for rank in self.ranks):
            return None, [
                self._message(d, "heartbeat", launch_s, None) for d in range(self.dp_size)
            ]
        if self.asleep:
            return None, []
        return None, [self._message(d, "idle", launch_s, None) for d in range(self.dp_size)]

    def waits_for(self, launched: DevicePass | None) -> DevicePass | None:
        """The second half of the iteration: the pass at whose end the next one begins.

        None: it begins at once if something was launched; else the loop sleeps.
        """
        wait = self._last_launched or (launched is not None and not self.overlap)
        self._last_launched = launched is not None and self.overlap
        self.asleep = launched is None and not wait
        return self.device[0] if wait else None

    def finish(self, now_s: float) -> tuple[DevicePass, list[EndForward]]:
        """The device is done with the running pass."""
        ended = self.device.popleft()
        for rank, tokens in zip(self.ranks, ended.tokens, strict=True):
            rank.computed_tokens += tokens
        return ended, [self._message(d, "forward", now_s, ended) for d in range(self.dp_size)]

    def _ingest(self) -> None:
        for index, request in self._inbox:
            rank = self.ranks[index]
            rank.unreported.append(request.rid)
            rank.accepted_requests += 1
            rank.accepted_tokens += request.prompt_tokens
            if request.rid in self._early:
                self._early.discard(request.rid)
                self._enqueue(rank, request)
            else:
                rank.bootstrapping[request.rid] = request
                rank.bootstrapping_tokens += request.remaining
        self._inbox.clear()

    def _enqueue(self, rank: Rank, request: Waiting) -> None:
        rank.waiting.append(request)
        rank.waiting_tokens += request.remaining

    def _launch(self, launch_s: float) -> DevicePass:
        tokens, requests, pairs, completed = [], [], [], []
        for rank in self.ranks:
            used, count, rank_pairs, done = self._fill(rank)
            tokens.append(used)
            requests.append(count)
            pairs.append(rank_pairs)
            completed += done
        forward_s = self._cost.pass_s(tokens, pairs)
        if self._jitter:
            forward_s *= math.exp(self._rng.gauss(0.0, self._jitter))
        self._forward_id += 1
        start_s = max(launch_s, self._free_s)
        self._free_s = start_s + forward_s
        return DevicePass(
            self._forward_id, launch_s, start_s, self._free_s, tokens, requests, completed
        )

    def _fill(self, rank: Rank) -> tuple[int, int, float, list[str]]:
        """Tokens, requests, attention pairs and completed requests of the rank's batch."""
        page = self.page_size
        room, tokens, count, pairs = self.chunk_tokens, 0, 0, 0.0
        completed: list[str] = []
        while rank.waiting and room > 0:
            request = rank.waiting[0]
            part = request.remaining if request.remaining <= room else room // page * page
            if part == 0:
                break
            context = request.prompt_tokens - request.remaining
            pairs += part * (context + part / 2)
            request.remaining -= part
            tokens += part
            count += 1
            room -= -(-part // page) * page
            if request.remaining:
                break
            completed.append(request.rid)
            rank.waiting.popleft()
        rank.waiting_tokens -= tokens
        return tokens, count, pairs, completed

    def _message(
        self, index: int, kind: Kind, now_s: float, about: DevicePass | None
    ) -> EndForward:
        """``about``: the pass that was launched or has ended; it is not in ``device``."""
        rank = self.ranks[index]
        first = rank.waiting[0] if rank.waiting else None
        remainder = first.remaining if first and first.remaining < first.prompt_tokens else 0
        ended = about is not None and kind == "forward"
        message = EndForward(
            instance_id=self.name,
            boot_id=self.boot_id,
            role="prefill",
            dp_rank=index,
            dp_size=self.dp_size,
            seq=rank.seq,
            kind=kind,
            forward_id=self._forward_id if about is None else about.forward_id,
            mode="extend" if about is not None and about.tokens[index] else "idle",
            launch_s=0.0 if about is None else about.launch_s,
            end_s=about.end_s if about is not None and ended else 0.0,
            forward_s=about.end_s - about.start_s if about is not None and ended else 0.0,
            extend_tokens=0 if about is None else about.tokens[index],
            batch_size=0 if about is None else about.requests[index],
            tokens_per_rank=None if about is None else list(about.tokens),
            inflight_passes=len(self.device),
            inflight_tokens=sum(one.tokens[index] for one in self.device),
            inflight_requests=sum(one.requests[index] for one in self.device),
            waiting_requests=len(rank.waiting) - (remainder > 0),
            waiting_tokens=rank.waiting_tokens - remainder,
            bootstrapping_requests=len(rank.bootstrapping),
            bootstrapping_tokens=rank.bootstrapping_tokens,
            chunk_remainder_tokens=remainder,
            chunk_tokens=self.chunk_tokens,
            accepted_requests=rank.accepted_requests,
            accepted_tokens=rank.accepted_tokens,
            computed_tokens=rank.computed_tokens,
            rids=rank.unreported,
        )
        rank.seq += 1
        rank.unreported = []
        return message
