"""The discrete-event cluster: arrivals, network, prefill instances and the real scheduler.

Owns simulated time. The scheduler it drives is the router's own object; everything the router would
do (deliver a dispatch, report EndForward, fire timers) happens here with a latency.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from sglang_sbs.scheduling import (
    Dispatch,
    Event,
    ForwardEnded,
    InstanceUp,
    PrefillDone,
    Refuse,
    RequestArrived,
    RequestEnded,
    Scheduler,
    SchedulerConfig,
    TimerFired,
    WakeAt,
)
from sglang_sbs.simulator.cost import PassCost
from sglang_sbs.simulator.engine import SimulatedPrefill
from sglang_sbs.wire import EndForward

DECODE = "decode"


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated cluster; times in seconds."""

    cost: PassCost
    prefill_instances: int = 3
    dp_size: int = 8
    chunk_tokens: int = 3072
    decode_dp_size: int = 32
    dispatch_latency_s: float = 0.005
    """Router to the rank's socket: HTTP, tokenization, handshake."""
    dispatch_jitter: float = 0.0
    """Lognormal sigma of the dispatch latency, per request."""
    feedback_latency_s: float = 0.002
    """EndForward to the router."""
    launch_gap_s: float = 0.0
    """Pause between the end of a pass and the launch of the next."""
    pass_jitter: float = 0.0
    """Lognormal sigma of the forward time."""
    endforward_loss: float = 0.0
    """Share of EndForward messages that never arrive."""
    plugin: bool = True
    """Without it the scheduler hears HTTP answers only."""
    decode_s: float = 1.0
    """How long a request stays in decode."""
    seed: int = 0


@dataclass(slots=True)
class RequestRecord:
    """What became of one request; times in seconds, NaN: never."""

    rid: str
    prompt_tokens: int
    arrived_s: float
    dispatched_s: float = math.nan
    prefilled_s: float = math.nan
    prefill: tuple[str, int] | None = None
    decode: tuple[str, int] | None = None
    refused: str | None = None
    ends: int = 0

    @property
    def ttft_s(self) -> float:
        """Arrival until the prefill completed."""
        return self.prefilled_s - self.arrived_s


@dataclass(slots=True)
class Outcome:
    """A finished simulation."""

    requests: list[RequestRecord]
    passes: list[tuple[str, float, float, int]] = field(default_factory=list)
    """(instance, start_s, end_s, tokens) of every pass."""
    duration_s: float = 0.0


def simulate(
    arrivals: Sequence[tuple[float, int]],
    config: SchedulerConfig,
    spec: ClusterSpec,
    *,
    observe: Callable[[Scheduler, float], None] | None = None,
    drain_s: float = 600.0,
) -> Outcome:
    """Run arrivals ``(time_s, prompt_tokens)`` through the scheduler on the simulated cluster.

    Args:
        arrivals: in time order.
        config: of the scheduler under test.
        spec: the cluster.
        observe: called after every event, for invariants.
        drain_s: simulated time after the last arrival before it gives up on what is unfinished.
    """
    return _Simulation(arrivals, config, spec, observe, drain_s).run()


class _Simulation:
    def __init__(
        self,
        arrivals: Sequence[tuple[float, int]],
        config: SchedulerConfig,
        spec: ClusterSpec,
        observe: Callable[[Scheduler, float], None] | None,
        drain_s: float,
    ) -> None:
        self._spec = spec
        self._rng = random.Random(spec.seed)
        self._scheduler = Scheduler(config)
        self._observe = observe
        self._engines = {
            name: SimulatedPrefill(
                name,
                dp_size=spec.dp_size,
                chunk_tokens=spec.chunk_tokens,
                cost=spec.cost,
                jitter=spec.pass_jitter,
                rng=random.Random(spec.seed * 1000 + index),
            )
            for index, name in enumerate(f"p{i}" for i in range(spec.prefill_instances))
        }
        self._outcome = Outcome([])
        self._records: dict[str, RequestRecord] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._pushed = 0
        self._now_s = 0.0
        self._wake_s: float | None = None
        self._arrivals = arrivals
        self._end_s = (arrivals[-1][0] if arrivals else 0.0) + drain_s

    def run(self) -> Outcome:
        for name in self._engines:
            self._tell(
                InstanceUp(
                    instance=name,
                    role="prefill",
                    dp_size=self._spec.dp_size,
                    chunk_tokens=self._spec.chunk_tokens,
                )
            )
        self._tell(InstanceUp(instance=DECODE, role="decode", dp_size=self._spec.decode_dp_size))
        if self._arrivals:
            self._at(self._arrivals[0][0], lambda: self._arrive(0))
        while self._heap:
            time_s, _, action = heapq.heappop(self._heap)
            if time_s > self._end_s:
                break
            self._now_s = time_s
            action()
        self._outcome.duration_s = self._now_s
        return self._outcome

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (max(time_s, self._now_s), self._pushed, action))

    def _tell(self, event: Event) -> None:
        for command in self._scheduler.handle(event, self._now_s):
            match command:
                case Dispatch():
                    self._send(command)
                case Refuse():
                    record = self._records[command.rid]
                    record.refused = command.cause
                    record.ends += 1
                case WakeAt():
                    self._wake_s = command.time_s
                    self._at(command.time_s, self._wake)
        if self._observe is not None:
            self._observe(self._scheduler, self._now_s)

    def _wake(self) -> None:
        if self._wake_s is not None and self._wake_s <= self._now_s:
            self._wake_s = None
            self._tell(TimerFired())

    def _arrive(self, index: int) -> None:
        if index + 1 < len(self._arrivals):
            self._at(self._arrivals[index + 1][0], lambda: self._arrive(index + 1))
        tokens = self._arrivals[index][1]
        record = RequestRecord(f"r{index}", tokens, self._now_s)
        self._records[record.rid] = record
        self._outcome.requests.append(record)
        self._tell(RequestArrived(rid=record.rid, prompt_tokens=tokens))

    def _send(self, command: Dispatch) -> None:
        record = self._records[command.rid]
        record.dispatched_s = self._now_s
        record.prefill = (command.prefill, command.prefill_rank)
        record.decode = (command.decode, command.decode_rank)
        latency_s = self._spec.dispatch_latency_s
        if self._spec.dispatch_jitter:
            latency_s *= math.exp(self._rng.gauss(0.0, self._spec.dispatch_jitter))
        engine = self._engines[command.prefill]

        def deliver() -> None:
            engine.deliver(record.rid, command.prefill_rank, record.prompt_tokens)
            self._launch_soon(engine, self._now_s)

        self._at(self._now_s + latency_s, deliver)

    def _launch_soon(self, engine: SimulatedPrefill, time_s: float) -> None:
        if engine.running is None and engine.launch_at_s is None and engine.has_work:
            engine.launch_at_s = time_s
            self._at(time_s, lambda: self._launch(engine))

    def _launch(self, engine: SimulatedPrefill) -> None:
        self._report(engine.name, engine.launch(self._now_s))
        assert engine.running is not None
        self._at(engine.running.end_s, lambda: self._finish(engine))

    def _finish(self, engine: SimulatedPrefill) -> None:
        ended, messages = engine.finish(self._now_s)
        self._outcome.passes.append((engine.name, ended.start_s, ended.end_s, sum(ended.tokens)))
        self._report(engine.name, messages)
        for rid in ended.completed:
            self._records[rid].prefilled_s = self._now_s
            self._at(self._now_s + self._spec.feedback_latency_s, lambda r=rid: self._prefilled(r))  # type: ignore[misc]
        if engine.has_work:
            self._launch_soon(engine, self._now_s + self._spec.launch_gap_s)
        else:
            self._report(engine.name, engine.idle_messages(self._now_s))

    def _prefilled(self, rid: str) -> None:
        self._tell(PrefillDone(rid=rid))
        self._at(self._now_s + self._spec.decode_s, lambda: self._end(rid))

    def _end(self, rid: str) -> None:
        self._records[rid].ends += 1
        self._tell(RequestEnded(rid=rid, outcome="completed"))

    def _report(self, instance: str, messages: list[EndForward]) -> None:
        if not self._spec.plugin:
            return
        for message in messages:
            if self._spec.endforward_loss and self._rng.random() < self._spec.endforward_loss:
                continue
            aged = msgspec.structs.replace(message, age_s=self._spec.feedback_latency_s)
            event = ForwardEnded(instance=instance, report=aged)
            self._at(
                self._now_s + self._spec.feedback_latency_s,
                lambda e=event: self._tell(e),  # type: ignore[misc]
            )
