"""What prefill would do if requests were placed by another rule: an estimate, sans-I/O.

A model of queues and passes per DP rank: first come first served up to the chunk, all ranks of an
instance in step, a pass as long as the scheduler's own forward model says. KV transfer, decode,
failures and pages are left out; :mod:`.ttft` shows how far the model is off for what was really
done. The simulator's engine is not used: it needs pages, caches and handshakes that a router does
not know."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MAX_REQUESTS = 20_000
"""A shadow with more unfinished requests has lost touch: it is emptied and starts again."""


@dataclass(slots=True)
class Shape:
    """What must be known of an instance."""

    dp_size: int
    chunk_tokens: int
    predict_s: Callable[[Sequence[int], Sequence[float]], float]
    """Forward time of a pass, from tokens and attention pairs per rank (``ForwardModel``)."""
    worker: str = ""
    """What a gateway knows the instance by, where that is not the instance itself."""


@dataclass(slots=True)
class _Prompt:
    rid: str
    left_tokens: int
    context_tokens: int
    ready_s: float


@dataclass(slots=True)
class ShadowRank:
    prompts: deque[_Prompt] = field(default_factory=deque)
    outstanding_tokens: int = 0


@dataclass(slots=True)
class ShadowInstance:
    shape: Shape
    ranks: list[ShadowRank]
    free_s: float
    ends_s: float | None = None
    """Of the pass that runs."""
    finishing: list[str] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)


Place = tuple[str, int]
"""Instance and DP rank."""
Rule = Callable[[dict[str, ShadowInstance]], Place]


class RoundRobin:
    """Workers in turn, DP ranks in turn: a gateway's default over SGLang's own round robin."""

    def __init__(self) -> None:
        self._turn = 0
        self._ranks: dict[str, int] = {}

    def __call__(self, instances: dict[str, ShadowInstance]) -> Place:
        workers: dict[str, list[Place]] = {}
        for name, one in instances.items():
            ranks = workers.setdefault(one.shape.worker or name, [])
            ranks += [(name, rank) for rank in range(one.shape.dp_size)]
        worker = list(workers)[self._turn % len(workers)]
        self._turn += 1
        number = self._ranks.get(worker, 0) % len(workers[worker])
        self._ranks[worker] = number + 1
        return workers[worker][number]


def least_tokens(instances: dict[str, ShadowInstance]) -> Place:
    """The DP rank with the fewest unfinished prompt tokens: a gateway whose count is never late."""
    return min(
        ((name, rank) for name, one in instances.items() for rank in range(len(one.ranks))),
        key=lambda place: instances[place[0]].ranks[place[1]].outstanding_tokens,
    )


class ShadowCluster:
    """Place requests, then :meth:`advance`; times must not go back."""

    def __init__(self) -> None:
        self.instances: dict[str, ShadowInstance] = {}
        self.requests = 0
        """Placed and not finished."""

    def follow(self, shapes: dict[str, Shape], now_s: float) -> None:
        """These instances are up now; what one that went had is dropped."""
        for name, known in list(self.instances.items()):
            shape = shapes.get(name)
            if shape is None or shape.dp_size != known.shape.dp_size:
                del self.instances[name]
                waiting = [prompt.rid for rank in known.ranks for prompt in rank.prompts]
                self.requests -= sum(rid != "" for rid in (*waiting, *known.finishing))
        for name, shape in shapes.items():
            if name in self.instances:
                self.instances[name].shape = shape
            else:
                ranks = [ShadowRank() for _ in range(shape.dp_size)]
                self.instances[name] = ShadowInstance(shape, ranks, free_s=now_s)

    def preload(self, name: str, backlog_tokens: Sequence[int], free_s: float) -> None:
        """What an instance is busy with when watching begins."""
        instance = self.instances[name]
        instance.free_s = free_s
        for rank, tokens in zip(instance.ranks, backlog_tokens, strict=True):
            if tokens > 0:
                rank.prompts.append(_Prompt("", tokens, 0, free_s))
                rank.outstanding_tokens += tokens

    def place(self, rid: str, where: Place, tokens: int, ready_s: float, cached: int = 0) -> None:
        """A request becomes runnable at ``ready_s``; ``tokens`` without the ``cached`` ones."""
        instance = self.instances.get(where[0])
        if instance is None or where[1] >= len(instance.ranks):
            return
        if self.requests >= MAX_REQUESTS:
            shapes = {name: one.shape for name, one in self.instances.items()}
            self.instances.clear()
            self.requests = 0
            self.follow(shapes, ready_s)
            instance = self.instances[where[0]]
        rank = instance.ranks[where[1]]
        rank.prompts.append(_Prompt(rid, max(1, tokens), cached, ready_s))
        rank.outstanding_tokens += max(1, tokens)
        self.requests += 1

    def advance(self, now_s: float) -> list[tuple[str, float]]:
        """Let passes happen until now; the requests that finished, and when."""
        finished: list[tuple[str, float]] = []
        for instance in self.instances.values():
            while _step(instance, now_s, finished):
                pass
        self.requests -= len(finished)
        return finished


def _step(instance: ShadowInstance, now_s: float, finished: list[tuple[str, float]]) -> bool:
    """End or begin one pass; False if nothing more happens until ``now_s``."""
    if instance.ends_s is not None:
        if instance.ends_s > now_s:
            return False
        ended_s, instance.ends_s = instance.ends_s, None
        instance.free_s = ended_s
        finished.extend((rid, ended_s) for rid in instance.finishing if rid)
        for rank, tokens in zip(instance.ranks, instance.taken, strict=True):
            rank.outstanding_tokens -= tokens
    heads = [rank.prompts[0].ready_s for rank in instance.ranks if rank.prompts]
    start_s = max(instance.free_s, min(heads, default=math.inf))
    if start_s > now_s or not heads:
        return False
    instance.finishing = []
    chunk, finishing = instance.shape.chunk_tokens, instance.finishing
    computed = [_compute(rank, chunk, start_s, finishing) for rank in instance.ranks]
    instance.taken, pairs = [tokens for tokens, _ in computed], [some for _, some in computed]
    instance.ends_s = start_s + instance.shape.predict_s(instance.taken, pairs)
    return True


def _compute(
    rank: ShadowRank, room_tokens: int, start_s: float, finishing: list[str]
) -> tuple[int, float]:
    """Take a chunk's worth from the queue: tokens and attention pairs."""
    taken, pairs = 0, 0.0
    while rank.prompts and taken < room_tokens and rank.prompts[0].ready_s <= start_s:
        prompt = rank.prompts[0]
        part = min(room_tokens - taken, prompt.left_tokens)
        pairs += part * (prompt.context_tokens + part / 2)
        taken += part
        prompt.left_tokens -= part
        prompt.context_tokens += part
        if prompt.left_tokens:
            break
        rank.prompts.popleft()
        finishing.append(prompt.rid)
    return taken, pairs
