"""A cluster of any size that exists only as events: drives a scheduler in real time, no sockets.

Owns engines that compute by the clock, and a load. Must not know the router: it is given where to
submit events. For looking at the dashboard with hundreds of DP ranks on a small machine.

    scheduler = WatchedScheduler(config)
    cluster = SyntheticCluster(scheduler, submit, prefill=24, prefill_dp=8, decode=2, decode_dp=32)
    cluster.begin()
    ...                                   # events come from the running event loop
    await cluster.end()
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from sglang_sbs.scheduling import (
    Command,
    Dispatch,
    Event,
    ForwardEnded,
    InstanceUp,
    PrefillDone,
    RequestArrived,
    RequestEnded,
    Scheduler,
)
from sglang_sbs.wire import EndForward

STEP_S = 0.02
_REPORT_S = 0.2
_MEAN_PROMPT_TOKENS = 1510.0
"""Of the log-normal lengths drawn below."""
_NETWORK_S = 0.02
_CATCH_UP_S = 0.05


class WatchedScheduler(Scheduler):
    """Tells what it decides to one listener more."""

    listener: Callable[[Dispatch], None] = staticmethod(lambda command: None)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """See :class:`~sglang_sbs.scheduling.Scheduler`."""
        commands = super().handle(event, now_s)
        for command in commands:
            if isinstance(command, Dispatch):
                self.listener(command)
        return commands


@dataclass(slots=True)
class _Job:
    rid: str
    left_tokens: int
    decode: tuple[str, int]
    ready_s: float


@dataclass(slots=True)
class _Engine:
    name: str
    role: Literal["prefill", "decode"]
    dp_size: int
    queues: list[deque[_Job]]
    running: list[dict[str, float]]
    fresh: list[list[str]]
    reported_s: float = 0.0
    forward_id: int = 0
    seq: int = 0
    pass_start_s: float = 0.0
    pass_end_s: float | None = None
    pass_tokens: list[int] = field(default_factory=list)
    finishing: list[_Job] = field(default_factory=list)


class SyntheticCluster:
    """Prefill passes of ``fixed_s`` plus ``per_token_s`` of the fullest rank; decode by time."""

    chunk_tokens = 4096
    prefill_max_requests = 0
    """As the engines' flag: of a rank in one pass; 0: no limit."""
    fixed_s = 0.2
    per_token_s = 1e-4
    decode_s = 4.0
    kv_capacity_tokens = 200_000

    def __init__(
        self,
        scheduler: WatchedScheduler,
        submit: Callable[[Event], None],
        *,
        prefill: int,
        prefill_dp: int,
        decode: int,
        decode_dp: int,
        load: float = 0.7,
        seed: int = 1,
    ) -> None:
        """``load`` is the share of full passes that arriving prompts would fill."""
        self.silent: set[str] = set()
        """Engines that say nothing any more."""
        self._submit = submit
        self._random = random.Random(seed)
        self._engines: dict[str, _Engine] = {}
        for number in range(prefill):
            self._add(f"http://prefill-{number}.cluster:30000", "prefill", prefill_dp)
        for number in range(decode):
            self._add(f"http://decode-{number}.cluster:30000", "decode", decode_dp)
        full_s = self.fixed_s + self.per_token_s * self.chunk_tokens
        self._tokens_per_s = load * prefill * prefill_dp * self.chunk_tokens / full_s
        self._next_s = 0.0
        self._sizes: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None
        scheduler.listener = self._dispatched

    def _add(self, name: str, role: Literal["prefill", "decode"], dp_size: int) -> None:
        self._engines[name] = _Engine(
            name,
            role,
            dp_size,
            queues=[deque() for _ in range(dp_size)],
            running=[{} for _ in range(dp_size)],
            fresh=[[] for _ in range(dp_size)],
        )

    @property
    def engines(self) -> list[str]:
        """Their names, prefill first."""
        return list(self._engines)

    def begin(self) -> None:
        """All instances come up, and requests begin to arrive."""
        for engine in self._engines.values():
            self._submit(
                InstanceUp(
                    instance=engine.name,
                    role=engine.role,
                    dp_size=engine.dp_size,
                    chunk_tokens=self.chunk_tokens if engine.role == "prefill" else 0,
                    kv_capacity_tokens=self.kv_capacity_tokens,
                    prefill_max_requests=(
                        self.prefill_max_requests if engine.role == "prefill" else 0
                    ),
                )
            )
        self._task = asyncio.create_task(self._run())

    async def end(self) -> None:
        """Stop; what is in flight stays so."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        self._next_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            # A process that is short of CPU sees fewer requests, not ever more of them.
            self._next_s = max(self._next_s, now_s - _CATCH_UP_S)
            while self._next_s <= now_s:
                tokens = min(16_000, int(self._random.lognormvariate(7.0, 0.8)) + 16)
                pace = self._tokens_per_s / _MEAN_PROMPT_TOKENS
                self._next_s += self._random.expovariate(pace)
                rid = f"{self._random.getrandbits(128):032x}"
                self._sizes[rid] = tokens
                self._submit(RequestArrived(rid=rid, prompt_tokens=tokens, max_new_tokens=256))
            for engine in self._engines.values():
                if engine.role == "prefill":
                    self._prefill(engine, now_s)
                else:
                    self._decode(engine, now_s)
            await asyncio.sleep(STEP_S)

    def _dispatched(self, command: Dispatch) -> None:
        engine = self._engines[command.prefill]
        where = (command.decode, command.decode_rank)
        ready_s = time.monotonic() + _NETWORK_S
        job = _Job(command.rid, self._sizes.pop(command.rid), where, ready_s)
        engine.queues[command.prefill_rank].append(job)
        engine.fresh[command.prefill_rank].append(command.rid)

    def _prefill(self, engine: _Engine, now_s: float) -> None:
        """Passes begin and end when they should, however late this is called."""
        while True:
            free_s = engine.reported_s
            if engine.pass_end_s is not None:
                if now_s < engine.pass_end_s:
                    return
                free_s = self._end_pass(engine, engine.pass_end_s, now_s)
            heads = [queue[0].ready_s for queue in engine.queues if queue]
            start_s = max(free_s, min(heads)) if heads else now_s + 1
            if start_s > now_s:
                break
            engine.finishing = []
            ranks = range(engine.dp_size)
            engine.pass_tokens = [self._take(engine, rank, start_s) for rank in ranks]
            engine.forward_id += 1
            engine.pass_start_s = start_s
            most = max(engine.pass_tokens)
            engine.pass_end_s = start_s + self.fixed_s + self.per_token_s * most
            self._report(engine, "launch", now_s, start_s)
        if now_s - engine.reported_s > 1.0:
            self._report(engine, "idle", now_s, now_s)

    def _end_pass(self, engine: _Engine, end_s: float, now_s: float) -> float:
        engine.pass_end_s = None
        self._report(engine, "forward", now_s, end_s)
        for job in engine.finishing:
            self._submit(PrefillDone(rid=job.rid))
            decode = self._engines[job.decode[0]]
            ends_s = end_s + self.decode_s * (0.5 + self._random.random())
            decode.running[job.decode[1]][job.rid] = ends_s
            decode.fresh[job.decode[1]].append(job.rid)
        return end_s

    def _take(self, engine: _Engine, rank: int, now_s: float) -> int:
        taken = 0
        places = self.prefill_max_requests or -1
        queue = engine.queues[rank]
        while queue and taken < self.chunk_tokens and places and queue[0].ready_s <= now_s:
            places -= 1
            job = queue[0]
            part = min(job.left_tokens, self.chunk_tokens - taken)
            taken += part
            job.left_tokens -= part
            if job.left_tokens:
                break
            queue.popleft()
            engine.finishing.append(job)
        return taken

    def _decode(self, engine: _Engine, now_s: float) -> None:
        if now_s - engine.reported_s < _REPORT_S:
            return
        for running in engine.running:
            for rid in [rid for rid, ends_s in running.items() if ends_s <= now_s]:
                del running[rid]
                self._submit(RequestEnded(rid=rid, outcome="completed", completion_tokens=200))
        self._report(engine, "heartbeat", now_s, now_s)

    def _report(
        self,
        engine: _Engine,
        kind: Literal["launch", "forward", "idle", "heartbeat"],
        now_s: float,
        at_s: float,
    ) -> None:
        """What happened at ``at_s``, of every rank."""
        engine.reported_s = at_s
        if engine.name in self.silent:
            return
        busy = kind in ("launch", "forward")
        engine.seq += 1
        for rank in range(engine.dp_size):
            fresh, engine.fresh[rank] = engine.fresh[rank], []
            running = engine.running[rank]
            self._submit(
                ForwardEnded(
                    instance=engine.name,
                    report=EndForward(
                        instance_id=engine.name,
                        boot_id="synthetic",
                        role=engine.role,
                        dp_rank=rank,
                        dp_size=engine.dp_size,
                        seq=engine.seq,
                        kind=kind,
                        forward_id=engine.forward_id,
                        forward_s=at_s - engine.pass_start_s if kind == "forward" else 0.0,
                        age_s=now_s - at_s,
                        extend_tokens=engine.pass_tokens[rank] if busy else 0,
                        tokens_per_rank=engine.pass_tokens if busy else None,
                        waiting_requests=(
                            len(engine.queues[rank]) if engine.role == "prefill" else 0
                        ),
                        waiting_tokens=sum(job.left_tokens for job in engine.queues[rank])
                        if engine.role == "prefill"
                        else 0,
                        running_requests=len(running),
                        kv_tokens=1_700 * len(running),
                        kv_capacity_tokens=self.kv_capacity_tokens,
                        chunk_tokens=self.chunk_tokens,
                        rids=fresh,
                    ),
                )
            )
