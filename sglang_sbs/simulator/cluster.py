"""The discrete-event cluster: arrivals, network, prefill instances and the real scheduler.

Owns simulated time. The scheduler it drives is the router's own object; everything the router would
do (deliver a dispatch, report EndForward, fire timers) happens here with a latency.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
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
    gang_jitter: float = 0.0
    """The same, shared by the requests of a batch, which leave back to back."""
    dispatch_serial_s: float = 0.0
    """Part of it that an instance spends on one request after the other."""
    launch_gap_s: float = 0.0
    """Engine work between the end of a pass and the launch of the next."""
    prepare_s: float = 0.0
    """Part of it after requests were taken in: what comes later has to wait. An idle instance
    spends it too, on top of the dispatch latency."""
    overlap: bool = False
    """One-batch lookahead of SGLang's overlap scheduling. False: a pass takes all that waits when
    the one before it ends."""
    page_size: int = 1
    """Tokens per KV page; a request is charged whole pages of the chunk."""
    handshake_s: float = 0.0
    """From a request's arrival at the rank, or from when decode has room, until it may run."""
    first_token_s: float = 0.0
    """From the end of the prefill to the first token at the router: KV transfer, admission."""
    pass_jitter: float = 0.0
    """Lognormal sigma of the forward time."""
    endforward_loss: float = 0.0
    """Share of EndForward messages that never arrive."""
    plugin: bool = True
    """Without it the scheduler hears HTTP answers only."""
    decode_s: float = 1.0
    """How long a request stays in decode."""
    decode_kv_capacity_tokens: int = 0
    """Per decode rank; 0: unbounded. A prompt that does not fit waits in the prefill's bootstrap
    queue, as decode reserves its KV before the prefill."""
    decode_max_running_requests: int = 0
    """Per decode rank; 0: unbounded."""
    max_new_tokens: int | None = None
    """What requests ask for; None: they do not say."""
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
        """Arrival until the first token (the end of the prefill plus ``first_token_s``)."""
        return self.prefilled_s - self.arrived_s


@dataclass(slots=True)
class _DecodeRank:
    """KV and slots of one decode DP rank; admits first come first served."""

    free_tokens: float
    free_slots: float
    waiting: deque[RequestRecord] = field(default_factory=deque)

    def admit(self) -> list[RequestRecord]:
        """Reserve for those at the head of the queue that fit now."""
        admitted = []
        while (
            self.waiting
            and self.free_slots >= 1
            and self.free_tokens >= self.waiting[0].prompt_tokens
        ):
            record = self.waiting.popleft()
            self.free_slots -= 1
            self.free_tokens -= record.prompt_tokens
            admitted.append(record)
        return admitted

    def release(self, record: RequestRecord) -> None:
        """The request is over."""
        self.free_slots += 1
        self.free_tokens += record.prompt_tokens


@dataclass(slots=True)
class Outcome:
    """A finished simulation."""

    requests: list[RequestRecord]
    passes: list[tuple[str, float, float, int]] = field(default_factory=list)
    """(instance, start_s, end_s, tokens) of every pass."""
    queued_passes: int = 0
    """Passes that were handed to the device while another ran (overlap)."""
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
                page_size=spec.page_size,
                overlap=spec.overlap,
            )
            for index, name in enumerate(f"p{i}" for i in range(spec.prefill_instances))
        }
        self._front_free_s = dict.fromkeys(self._engines, 0.0)
        self._decode = [
            _DecodeRank(
                spec.decode_kv_capacity_tokens or math.inf,
                spec.decode_max_running_requests or math.inf,
            )
            for _ in range(spec.decode_dp_size)
        ]
        self._gang = (-1, 1.0)
        """Number of the batch and its latency factor."""
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
                    page_size=self._spec.page_size,
                )
            )
        self._tell(
            InstanceUp(
                instance=DECODE,
                role="decode",
                dp_size=self._spec.decode_dp_size,
                kv_capacity_tokens=self._spec.decode_kv_capacity_tokens,
                max_running_requests=self._spec.decode_max_running_requests,
            )
        )
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
        self._tell(
            RequestArrived(
                rid=record.rid, prompt_tokens=tokens, max_new_tokens=self._spec.max_new_tokens
            )
        )

    def _send(self, command: Dispatch) -> None:
        record = self._records[command.rid]
        record.dispatched_s = self._now_s
        record.prefill = (command.prefill, command.prefill_rank)
        record.decode = (command.decode, command.decode_rank)
        latency_s = self._spec.dispatch_latency_s
        if self._spec.gang_jitter:
            if command.batch != self._gang[0]:
                self._gang = command.batch, math.exp(self._rng.gauss(0.0, self._spec.gang_jitter))
            latency_s *= self._gang[1]
        if self._spec.dispatch_jitter:
            latency_s *= math.exp(self._rng.gauss(0.0, self._spec.dispatch_jitter))
        reach_s = self._now_s + latency_s
        if self._spec.dispatch_serial_s:
            free_s = max(self._now_s, self._front_free_s[command.prefill])
            self._front_free_s[command.prefill] = free_s + self._spec.dispatch_serial_s
            reach_s += free_s + self._spec.dispatch_serial_s - self._now_s
        self._at(reach_s, lambda: self._deliver(record))

    def _deliver(self, record: RequestRecord) -> None:
        """Both legs have reached their ranks."""
        assert record.prefill is not None and record.decode is not None
        name, rank = record.prefill
        engine = self._engines[name]
        decode = self._decode[record.decode[1]]
        decode.waiting.append(record)
        admitted = decode.admit()
        at_once = admitted == [record] and not self._spec.handshake_s
        engine.deliver(record.rid, rank, record.prompt_tokens, handshaken=at_once)
        if not at_once:
            self._handshake(admitted)
        self._step_if_asleep(engine)

    def _handshake(self, admitted: list[RequestRecord]) -> None:
        for record in admitted:
            self._at(
                self._now_s + self._spec.handshake_s,
                lambda r=record: self._handshaken(r),  # type: ignore[misc]
            )

    def _handshaken(self, record: RequestRecord) -> None:
        assert record.prefill is not None
        engine = self._engines[record.prefill[0]]
        engine.handshaken(record.rid, record.prefill[1])
        self._step_if_asleep(engine)

    def _step_if_asleep(self, engine: SimulatedPrefill) -> None:
        if engine.asleep:
            engine.asleep = False
            self._at(self._now_s, lambda: self._step(engine))

    def _step(self, engine: SimulatedPrefill) -> None:
        """One iteration of the engine's event loop."""
        prepare_s = self._spec.prepare_s
        while True:
            launch_s = self._now_s + prepare_s
            launched, messages = engine.step(launch_s)
            self._report(engine.name, messages, prepare_s if launched is not None else 0.0)
            self._outcome.queued_passes += launched is not None and len(engine.device) > 1
            waits_for = engine.waits_for(launched)
            if waits_for is not None:
                self._at(max(launch_s, waits_for.end_s), lambda: self._finish(engine))
                return
            if launched is None:
                return
            if prepare_s:
                self._at(launch_s, lambda: self._step(engine))
                return

    def _finish(self, engine: SimulatedPrefill) -> None:
        ended, messages = engine.finish(self._now_s)
        self._outcome.passes.append((engine.name, ended.start_s, ended.end_s, sum(ended.tokens)))
        self._report(engine.name, messages)
        first_s = self._now_s + self._spec.first_token_s
        for rid in ended.completed:
            self._records[rid].prefilled_s = first_s
            self._at(first_s + self._spec.feedback_latency_s, lambda r=rid: self._prefilled(r))  # type: ignore[misc]
        pause_s = max(0.0, self._spec.launch_gap_s - self._spec.prepare_s)
        self._at(self._now_s + pause_s, lambda: self._step(engine))

    def _prefilled(self, rid: str) -> None:
        self._tell(PrefillDone(rid=rid))
        self._at(self._now_s + self._spec.decode_s, lambda: self._end(rid))

    def _end(self, rid: str) -> None:
        record = self._records[rid]
        record.ends += 1
        assert record.decode is not None
        decode = self._decode[record.decode[1]]
        decode.release(record)
        self._handshake(decode.admit())
        self._tell(RequestEnded(rid=rid, outcome="completed"))

    def _report(self, instance: str, messages: list[EndForward], delay_s: float = 0.0) -> None:
        if not self._spec.plugin:
            return
        for message in messages:
            if self._spec.endforward_loss and self._rng.random() < self._spec.endforward_loss:
                continue
            aged = msgspec.structs.replace(message, age_s=self._spec.feedback_latency_s)
            event = ForwardEnded(instance=instance, report=aged)
            self._at(
                self._now_s + delay_s + self._spec.feedback_latency_s,
                lambda e=event: self._tell(e),  # type: ignore[misc]
            )
