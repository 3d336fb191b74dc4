"""A simulated SGLang prefill instance with DP attention: chunked prefill behind a barrier.

Owns the engine's queues, passes and EndForward messages. Must not know the scheduler, the router
or the workload.

What it reproduces of SGLang 0.5.23 (``disaggregation/prefill.py``, ``schedule_policy.py``):
requests are ingested only between passes; an idle instance launches on the first request it sees;
each rank fills its chunk first come first served and splits the last request; all ranks pass the
barrier together; a pass is launched ``launch_gap_s`` after the previous one ended.
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
class RunningPass:
    """The pass on the device."""

    forward_id: int
    start_s: float
    end_s: float
    tokens: list[int]
    completed: list[str]


@dataclass(slots=True)
class Rank:
    """One DP rank."""

    waiting: deque[Waiting] = field(default_factory=deque)
    unreported: list[str] = field(default_factory=list)
    seq: int = 0
    accepted_requests: int = 0
    accepted_tokens: int = 0
    computed_tokens: int = 0


class SimulatedPrefill:
    """Driven by its owner: :meth:`deliver`, then :meth:`launch` / :meth:`finish` when told to."""

    def __init__(
        self,
        name: str,
        *,
        dp_size: int,
        chunk_tokens: int,
        cost: PassCost,
        jitter: float,
        rng: random.Random,
    ) -> None:
        self.name = name
        self.dp_size = dp_size
        self.chunk_tokens = chunk_tokens
        self.ranks = [Rank() for _ in range(dp_size)]
        self.running: RunningPass | None = None
        self.launch_at_s: float | None = None
        """A launch is scheduled for this time."""
        self._inbox: list[tuple[int, Waiting]] = []
        self._cost = cost
        self._jitter = jitter
        self._rng = rng
        self._forward_id = 0

    @property
    def has_work(self) -> bool:
        """Whether another pass could be launched."""
        return bool(self._inbox) or any(rank.waiting for rank in self.ranks)

    def deliver(self, rid: str, rank: int, tokens: int) -> None:
        """A request reached the rank's socket; it is ingested before the next launch."""
        self._inbox.append((rank, Waiting(rid, tokens, tokens)))

    def launch(self, now_s: float) -> list[EndForward]:
        """Ingest, form a batch and hand it to the device. There must be work."""
        self.launch_at_s = None
        for index, request in self._inbox:
            rank = self.ranks[index]
            rank.waiting.append(request)
            rank.unreported.append(request.rid)
            rank.accepted_requests += 1
            rank.accepted_tokens += request.prompt_tokens
        self._inbox.clear()
        tokens, pairs, completed = [], [], []
        for rank in self.ranks:
            used, rank_pairs, done = self._fill(rank)
            tokens.append(used)
            pairs.append(rank_pairs)
            completed += done
        forward_s = self._cost.pass_s(tokens, pairs)
        if self._jitter:
            forward_s *= math.exp(self._rng.gauss(0.0, self._jitter))
        self._forward_id += 1
        self.running = RunningPass(self._forward_id, now_s, now_s + forward_s, tokens, completed)
        return [self._message(d, "launch", now_s) for d in range(self.dp_size)]

    def finish(self, now_s: float) -> tuple[RunningPass, list[EndForward]]:
        """The device is done with the running pass."""
        assert self.running is not None
        ended = self.running
        for rank, tokens in zip(self.ranks, ended.tokens, strict=True):
            rank.computed_tokens += tokens
        messages = [self._message(d, "forward", now_s) for d in range(self.dp_size)]
        self.running = None
        return ended, messages

    def idle_messages(self, now_s: float) -> list[EndForward]:
        """What the ranks say when they find nothing to do after a pass."""
        return [self._message(d, "idle", now_s) for d in range(self.dp_size)]

    def _fill(self, rank: Rank) -> tuple[int, float, list[str]]:
        room, pairs = self.chunk_tokens, 0.0
        completed = []
        while rank.waiting and room > 0:
            request = rank.waiting[0]
            part = min(request.remaining, room)
            context = request.prompt_tokens - request.remaining
            pairs += part * (context + part / 2)
            request.remaining -= part
            room -= part
            if request.remaining == 0:
                completed.append(request.rid)
                rank.waiting.popleft()
        return self.chunk_tokens - room, pairs, completed

    def _message(self, index: int, kind: Kind, now_s: float) -> EndForward:
        rank = self.ranks[index]
        running = self.running
        chunked = rank.waiting[0] if rank.waiting else None
        partly = chunked is not None and chunked.remaining < chunked.prompt_tokens
        remainder = chunked.remaining if chunked is not None and partly else 0
        waiting_tokens = sum(w.remaining for w in rank.waiting) - remainder
        message = EndForward(
            instance_id=self.name,
            boot_id=self.name,
            role="prefill",
            dp_rank=index,
            dp_size=self.dp_size,
            seq=rank.seq,
            kind=kind,
            forward_id=self._forward_id,
            mode="extend" if running is not None and running.tokens[index] else "idle",
            launch_s=running.start_s if running is not None else 0.0,
            end_s=now_s if kind == "forward" else 0.0,
            forward_s=now_s - running.start_s if running is not None and kind == "forward" else 0.0,
            extend_tokens=running.tokens[index] if running is not None else 0,
            tokens_per_rank=list(running.tokens) if running is not None else None,
            waiting_requests=len(rank.waiting) - (1 if partly else 0),
            waiting_tokens=waiting_tokens,
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
