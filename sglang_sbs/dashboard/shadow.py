"""Shadow clusters: estimate when prefill would finish if another rule placed the requests.
Sans-I/O.

A shadow models the queue and the passes of each DP rank: first come first served up to the chunk,
all ranks of an instance in step, each pass as long as the scheduler's forward model predicts. With
overlap scheduling an engine forms the next batch while a pass runs, so a request that arrives later
waits for one more pass (see ``simulator/cluster/engine.py``). KV transfer, decode, failures and
pages are not modelled. :mod:`.ttft` measures the error of the model for the real placements. The
simulator's engine is unsuitable here, because it needs pages, caches and handshakes, which a router
does not have.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from sglang_sbs.scheduling.prefill.completion import Chunk, PassFormula, RankPrompt

MAX_REQUESTS = 20_000
"""Limit on unfinished requests of a shadow. With more it no longer resembles the cluster, and
restarts empty."""

_UNKNOWN = PassFormula(0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class Shape:
    """Properties of an instance that the model needs."""

    dp_size: int
    chunk_tokens: int
    predict_s: Callable[[Sequence[int], Sequence[float]], float]
    """Forward time of a pass, from tokens and attention pairs per rank (``ForwardModel``)."""
    worker: str = ""
    """Id of the instance in a gateway, if different."""
    overlap: bool = False
    """The engine has overlap scheduling: it forms a batch while the pass before runs."""
    pause_s: float = 0.0
    """Seconds from the end of a pass until the engine looks for the next batch."""
    formula: PassFormula = _UNKNOWN
    """Simplified cost of a pass, used by :func:`eta`."""


@dataclass(slots=True, eq=False)
class _Prompt(RankPrompt):
    ready_s: float = 0.0


@dataclass(slots=True)
class _ShadowPass:
    end_s: float
    taken: list[int]
    """Tokens per rank."""
    finishing: list[str]


@dataclass(slots=True)
class ShadowInstance:
    shape: Shape
    free_s: float
    """Time when the device can begin a new pass."""
    prompts: list[deque[_Prompt]] = field(init=False)
    queued: list[int] = field(init=False)
    """Tokens per rank that are not in a pass yet."""
    outstanding: list[int] = field(init=False)
    """Tokens per rank not computed yet, in passes or queued."""
    passes: deque[_ShadowPass] = field(default_factory=deque)
    """Passes on the device: at most two with overlap scheduling, otherwise one."""
    due_s: float = math.inf
    """Time of the next event: an iteration of the engine's event loop, or the end of the pass it
    waits for. Infinity: the loop sleeps and nothing is queued."""
    waits: bool = False
    """True: the next event is the end of a pass."""
    _launched: bool = False
    """True: the previous iteration launched a pass."""
    _asleep: bool = True
    """The event loop sleeps until a prompt is ready."""

    def __post_init__(self) -> None:
        ranks = range(self.shape.dp_size)
        self.prompts = [deque() for _ in ranks]
        self.queued = [0 for _ in ranks]
        self.outstanding = [0 for _ in ranks]

    def place(self, rank: int, prompt: _Prompt) -> None:
        self.prompts[rank].append(prompt)
        self.queued[rank] += prompt.left_tokens
        self.outstanding[rank] += prompt.left_tokens
        if self._asleep:
            due_s = prompt.ready_s if prompt.ready_s > self.free_s else self.free_s
            self.due_s = min(self.due_s, due_s)

    def advance(self, now_s: float, finished: list[tuple[str, float]]) -> None:
        """Let the engine's event loop run until ``now_s``."""
        while self.due_s <= now_s:
            if self.waits:
                self._finish(finished)
            else:
                self._iterate()

    def _finish(self, finished: list[tuple[str, float]]) -> None:
        ended = self.passes.popleft()
        finished.extend((rid, ended.end_s) for rid in ended.finishing if rid)
        for rank, tokens in enumerate(ended.taken):
            self.outstanding[rank] -= tokens
        self.waits = False
        self.due_s += self.shape.pause_s

    def _iterate(self) -> None:
        """Form a batch and hand it to the device, then wait for a pass, as SGLang's event loops do:
        for the previous pass with overlap scheduling, otherwise for this one."""
        now_s = self.due_s
        launched = self._launch(now_s)
        self.waits = bool(self.passes) and (self._launched or not self.shape.overlap)
        self._launched = launched and self.shape.overlap
        self._asleep = not launched and not self.waits
        if self.waits:
            self.due_s = max(now_s, self.passes[0].end_s)
        elif self._asleep:
            heads = [prompts[0].ready_s for prompts in self.prompts if prompts]
            self.due_s = min(heads, default=math.inf)

    def _launch(self, start_s: float) -> bool:
        """Launch a pass; return whether there was anything to compute."""
        finishing: list[str] = []
        taken, pairs = [0] * len(self.prompts), [0.0] * len(self.prompts)
        for rank, prompts in enumerate(self.prompts):
            if not prompts:
                continue
            chunk = Chunk(self.shape.chunk_tokens)
            ready = takewhile(lambda prompt: prompt.ready_s <= start_s, prompts)
            for prompt, part in chunk.fill(ready):
                prompt.advance(part)
                if not prompt.left_tokens:
                    prompts.popleft()
                    finishing.append(prompt.rid)
            taken[rank], pairs[rank] = chunk.tokens, chunk.pairs
            self.queued[rank] -= chunk.tokens
        if not any(taken):
            return False
        forward_s = self.shape.predict_s(taken, pairs)
        self.free_s = max(start_s, self.free_s) + forward_s
        self.passes.append(_ShadowPass(self.free_s, taken, finishing))
        return True


Place = tuple[str, int]
"""Prefill instance and DP rank."""


@dataclass(slots=True, frozen=True)
class ShadowRequest:
    """A request to be placed by a rule."""

    tokens: int
    """Uncached tokens."""
    now_s: float
    latency_s: float
    """Time on the way to the rank (L_net)."""


Rule = Callable[[dict[str, ShadowInstance], ShadowRequest], Place]


class ShadowRoundRobin:
    """Baseline ``round_robin``: workers in turn, and DP ranks of each worker in turn, as a gateway
    and SGLang do by default."""

    def __init__(self) -> None:
        self._turn = 0
        self._next: dict[str, int] = {}
        """Next rank by worker."""
        self._known: list[str] = []
        self._workers: list[tuple[str, list[Place]]] = []

    def __call__(self, instances: dict[str, ShadowInstance], asked: ShadowRequest) -> Place:
        if self._known != list(instances):
            self._know(instances)
        worker, ranks = self._workers[self._turn % len(self._workers)]
        self._turn += 1
        number = self._next.get(worker, 0) % len(ranks)
        self._next[worker] = number + 1
        return ranks[number]

    def _know(self, instances: dict[str, ShadowInstance]) -> None:
        workers: dict[str, list[Place]] = {}
        for name, instance in instances.items():
            ranks = workers.setdefault(instance.shape.worker or name, [])
            ranks += [(name, rank) for rank in range(instance.shape.dp_size)]
        self._known, self._workers = list(instances), list(workers.items())


def least_tokens(instances: dict[str, ShadowInstance], asked: ShadowRequest) -> Place:
    """Return the DP rank with the fewest unfinished prompt tokens, as a gateway would that counts
    tokens without delay."""
    name = min(instances, key=lambda name: min(instances[name].outstanding))
    outstanding = instances[name].outstanding
    return name, outstanding.index(min(outstanding))


def eta(instances: dict[str, ShadowInstance], asked: ShadowRequest) -> Place:
    """Return the DP rank with the earliest predicted finish, as the policy ``eta`` predicts it
    (``scheduling/policies/immediate.py``)."""
    best: tuple[float, int] | None = None
    chosen = ""
    for name, instance in instances.items():
        shape = instance.shape
        passes = instance.passes
        queued = sum(instance.queued)
        free_s = max(0.0, instance.free_s - asked.now_s) if passes else 0.0
        all_tokens = queued + asked.tokens
        pass_s = shape.formula.spread_s(all_tokens, shape.dp_size, shape.chunk_tokens)
        start_s = free_s + pass_s if passes and free_s < asked.latency_s else free_s
        total = min(instance.queued) + asked.tokens
        key = (start_s + ((total - 1) // shape.chunk_tokens + 1) * pass_s, total)
        if best is None or key < best:
            best, chosen = key, name
    queue = instances[chosen].queued
    return chosen, queue.index(min(queue))


class ShadowCluster:
    """Shadow of a cluster: place requests, then :meth:`advance`; times must not decrease."""

    def __init__(self) -> None:
        self.instances: dict[str, ShadowInstance] = {}
        self.requests = 0
        """Number of requests placed and not finished."""

    def follow(self, shapes: dict[str, Shape], now_s: float) -> None:
        """Set the running instances; requests of removed instances are dropped."""
        for name, known in list(self.instances.items()):
            shape = shapes.get(name)
            if shape is None or shape.dp_size != known.shape.dp_size:
                del self.instances[name]
                waiting = [prompt.rid for prompts in known.prompts for prompt in prompts]
                running = [rid for a_pass in known.passes for rid in a_pass.finishing]
                self.requests -= sum(rid != "" for rid in (*waiting, *running))
        for name, shape in shapes.items():
            if name in self.instances:
                self.instances[name].shape = shape
            else:
                self.instances[name] = ShadowInstance(shape, free_s=now_s)

    def preload(self, name: str, backlog_tokens: Sequence[int], free_s: float) -> None:
        """Set the backlog of an instance at the start of watching."""
        instance = self.instances[name]
        instance.free_s = free_s
        for rank, tokens in enumerate(backlog_tokens):
            if tokens > 0:
                instance.place(rank, _Prompt("", tokens, 0, free_s))

    def place(self, rid: str, where: Place, tokens: int, ready_s: float, cached: int = 0) -> None:
        """Place a request that can run from ``ready_s`` on; ``tokens`` excludes the ``cached``
        ones."""
        instance = self.instances.get(where[0])
        if instance is None or where[1] >= instance.shape.dp_size:
            return
        if self.requests >= MAX_REQUESTS:
            self.empty(ready_s)
            instance = self.instances[where[0]]
        instance.place(where[1], _Prompt(rid, tokens or 1, cached, ready_s))
        self.requests += 1

    def empty(self, now_s: float) -> None:
        """Drop all requests."""
        shapes = {name: instance.shape for name, instance in self.instances.items()}
        self.instances.clear()
        self.requests = 0
        self.follow(shapes, now_s)

    def advance(self, now_s: float) -> list[tuple[str, float]]:
        """Advance the passes to ``now_s``; return the finished requests and their times."""
        finished: list[tuple[str, float]] = []
        for instance in self.instances.values():
            if instance.due_s <= now_s:
                instance.advance(now_s, finished)
        self.requests -= len(finished)
        return finished
