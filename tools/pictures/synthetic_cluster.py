"""A cluster of any size that exists only as events: drives a scheduler in real time, no sockets.

For looking at the dashboard with hundreds of DP ranks on a small machine.

    scheduler = WatchedScheduler(config)
    cluster = SyntheticCluster(scheduler, submit, prefill=24, prefill_dp=8, decode=2, decode_dp=32)
    cluster.begin()
    ...                                   # events come from the running event loop
    await cluster.end()
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from sglang_sbs.scheduling import (
    ClientSide,
    Command,
    Dispatch,
    Event,
    ForwardEnded,
    InstanceDown,
    InstanceUp,
    PrefillDone,
    RequestArrived,
    RequestEnded,
    Scheduler,
)
from sglang_sbs.simulator.cluster.cost import PassCost
from sglang_sbs.simulator.cluster.engine import DevicePass, SimulatedPrefill
from sglang_sbs.simulator.cluster.spec import ClusterSpec, InstanceSpec
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.endforward import Started

STEP_S = 0.02
_REPORT_S = 0.2
"""Between two reports of a decode engine."""
_IDLE_REPORT_S = 1.0
"""Between two reports of a prefill engine with nothing to do."""
_MEAN_PROMPT_TOKENS = 1510.0
_NETWORK_S = 0.02
_CATCH_UP_S = 0.05
_FIRST_STEP_S = 0.03
"""KV transfer and the first decode step."""


class WatchedScheduler(Scheduler):
    listener: Callable[[Dispatch], None] = staticmethod(lambda command: None)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """See :class:`~sglang_sbs.scheduling.Scheduler`."""
        commands = super().handle(event, now_s)
        for command in commands:
            if isinstance(command, Dispatch):
                self.listener(command)
        return commands


class _Coming(NamedTuple):
    ready_s: float
    rid: str
    rank: int
    tokens: int


@dataclass(slots=True)
class _Prefill:
    engine: SimulatedPrefill
    coming: deque[_Coming] = field(default_factory=deque)
    taken_s: dict[str, float] = field(default_factory=dict)
    """When a rank took in what no pass has begun on."""
    reported_s: float = 0.0
    pace: float = 1.0


@dataclass(slots=True)
class _Decode:
    name: str
    running: list[dict[str, tuple[float, ClientSide]]]
    """End of each request and what its client saw, by DP rank."""
    fresh: list[list[str]]
    reported_s: float = 0.0
    seq: int = 0


class SyntheticCluster:
    """Prefill engines are the simulator's, by the clock of this process; decode goes by time."""

    chunk_tokens = 4096
    cost = PassCost(fixed_s=0.2, max_s=1e-4)
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
        self.stuck: set[str] = set()
        """Decode engines that end no request any more."""
        self._submit = submit
        self._random = random.Random(seed)
        self._prefill = {
            name: self._simulated(name, prefill_dp, number)
            for number, name in enumerate(_names("prefill", prefill))
        }
        self._decode = {
            name: _Decode(name, [{} for _ in range(decode_dp)], [[] for _ in range(decode_dp)])
            for name in _names("decode", decode)
        }
        full_s = self.cost.full_chunk_s(self.chunk_tokens)
        self._tokens_per_s = load * prefill * prefill_dp * self.chunk_tokens / full_s
        self._next_s = 0.0
        self._asked: dict[str, tuple[int, float]] = {}
        """Prompt tokens and arrival of what has no first token yet."""
        self._placed: dict[str, tuple[str, str, int]] = {}
        """Prefill instance, decode instance and DP rank there of what is in prefill."""
        self._task: asyncio.Task[None] | None = None
        scheduler.listener = self._dispatched

    def _simulated(self, name: str, dp_size: int, seed: int, boot_id: str = "") -> _Prefill:
        engine_spec = InstanceSpec(dp_size=dp_size, chunk_tokens=self.chunk_tokens)
        spec, rng = ClusterSpec(cost=self.cost), random.Random(seed)
        return _Prefill(SimulatedPrefill(name, engine_spec, spec, rng=rng, boot_id=boot_id))

    def slow_down(self, name: str, factor: float) -> None:
        """Passes of a prefill engine take ``factor`` times as long from now on."""
        self._prefill[name].pace = factor

    def come_up(self, name: str) -> None:
        self.silent.discard(name)
        self._submit(
            InstanceUp(
                instance=name,
                role="prefill",
                dp_size=self._prefill[name].engine.shape.dp_size,
                chunk_tokens=self.chunk_tokens,
                kv_capacity_tokens=self.kv_capacity_tokens,
            )
        )

    def go_down(self, name: str) -> None:
        self._submit(InstanceDown(instance=name))
        for rid in [rid for rid, where in self._placed.items() if where[0] == name]:
            del self._placed[rid], self._asked[rid]
            self._submit(RequestEnded(rid=rid, outcome="failed"))
        engine = self._prefill.pop(name).engine
        boot_id = f"{name} from {time.monotonic()} on"
        self._prefill[name] = self._simulated(name, engine.shape.dp_size, 0, boot_id)
        self.silent.add(name)

    @property
    def engines(self) -> list[str]:
        """Their names, prefill first."""
        return [*self._prefill, *self._decode]

    def begin(self) -> None:
        for name in self._prefill:
            self.come_up(name)
        for name, decode in self._decode.items():
            self._submit(
                InstanceUp(
                    instance=name,
                    role="decode",
                    dp_size=len(decode.running),
                    kv_capacity_tokens=self.kv_capacity_tokens,
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
                self._asked[rid] = tokens, now_s
                self._submit(RequestArrived(rid=rid, prompt_tokens=tokens, max_new_tokens=256))
            for prefill in self._prefill.values():
                self._compute(prefill, now_s)
            for decode in self._decode.values():
                self._generate(decode, now_s)
            await asyncio.sleep(STEP_S)

    def _dispatched(self, command: Dispatch) -> None:
        self._placed[command.rid] = command.prefill, command.decode, command.decode_rank
        ready_s, tokens = time.monotonic() + _NETWORK_S, self._asked[command.rid][0]
        coming = _Coming(ready_s, command.rid, command.prefill_rank, tokens)
        self._prefill[command.prefill].coming.append(coming)

    def _compute(self, instance: _Prefill, now_s: float) -> None:
        """Passes begin and end when they should, however late this is called."""
        engine = instance.engine
        while True:
            at_s = instance.reported_s
            if engine.device:
                at_s = engine.device[0].end_s
                if now_s < at_s:
                    return
                ended, messages = engine.finish()
                self._say(instance, messages, now_s, at_s)
                for request in ended.completed:
                    self._prefilled(request.rid, at_s)
            if not any(rank.waiting for rank in engine.ranks):
                at_s = max(at_s, instance.coming[0].ready_s) if instance.coming else math.inf
            if at_s > now_s:
                break
            while instance.coming and instance.coming[0].ready_s <= at_s:
                ready_s, rid, rank, tokens = instance.coming.popleft()
                engine.deliver(rid, rank, tokens)
                instance.taken_s[rid] = ready_s
            launched, messages = engine.step(at_s)
            if launched is not None:
                launched.end_s += (instance.pace - 1.0) * (launched.end_s - launched.start_s)
            engine.waits_for(launched)
            self._say(instance, _with_started(instance, launched, messages), now_s, at_s)
        if now_s - instance.reported_s > _IDLE_REPORT_S:
            self._say(instance, engine.messages("idle"), now_s, now_s)

    def _say(
        self, engine: _Prefill, messages: Sequence[EndForward], now_s: float, at_s: float
    ) -> None:
        """Report the events of ``at_s``."""
        engine.reported_s = at_s
        if engine.engine.name in self.silent:
            return
        for message in messages:
            report = msgspec.structs.replace(message, age_s=now_s - at_s)
            self._submit(ForwardEnded(instance=engine.engine.name, report=report))

    def _prefilled(self, rid: str, now_s: float) -> None:
        self._submit(PrefillDone(rid=rid))
        _, name, rank = self._placed.pop(rid)
        decode = self._decode[name]
        ends_s = now_s + self.decode_s * (0.5 + self._random.random())
        _, arrived_s = self._asked.pop(rid)
        client = ClientSide(admission_s=0.001, first_byte_s=now_s + _FIRST_STEP_S - arrived_s)
        decode.running[rank][rid] = ends_s, client
        decode.fresh[rank].append(rid)

    def _generate(self, engine: _Decode, now_s: float) -> None:
        if now_s - engine.reported_s < _REPORT_S:
            return
        for running in engine.running:
            for rid in [rid for rid, (ends_s, _) in running.items() if ends_s <= now_s]:
                if engine.name in self.stuck:
                    continue
                ended = RequestEnded(
                    *(rid, "completed"), completion_tokens=200, client=running.pop(rid)[1]
                )
                self._submit(ended)
        engine.reported_s = now_s
        if engine.name in self.silent:
            return
        engine.seq += 1
        for rank, running in enumerate(engine.running):
            fresh, engine.fresh[rank] = engine.fresh[rank], []
            report = EndForward(
                instance_id=engine.name,
                boot_id=engine.name,
                role="decode",
                dp_rank=rank,
                dp_size=len(engine.running),
                seq=engine.seq,
                kind="heartbeat",
                running_requests=len(running),
                kv_tokens=1_700 * len(running),
                kv_capacity_tokens=self.kv_capacity_tokens,
                chunk_tokens=self.chunk_tokens,
                rids=fresh,
            )
            self._submit(ForwardEnded(instance=engine.name, report=report))


def _with_started(
    instance: _Prefill, launched: DevicePass | None, messages: Sequence[EndForward]
) -> list[EndForward]:
    """Each rank also reports the requests that its pass is the first one of."""
    if launched is None:
        return list(messages)
    begun = [request for rank in instance.engine.ranks for request in list(rank.waiting)[:1]]
    begun = [request for request in begun if request.left_tokens < request.prompt_tokens]
    started: dict[int, list[Started]] = {}
    for request in (*launched.completed, *begun):
        taken_s = instance.taken_s.pop(request.rid, None)
        if taken_s is not None:
            started.setdefault(request.rank, []).append(Started(request.rid, taken_s))
    return [
        msgspec.structs.replace(message, started=started.get(message.dp_rank, []))
        for message in messages
    ]


def _names(role: str, count: int) -> list[str]:
    return [f"http://{role}-{number}.cluster:30000" for number in range(count)]
