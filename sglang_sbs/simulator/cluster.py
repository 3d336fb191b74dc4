"""The discrete-event cluster: arrivals, network, prefill instances and the real scheduler.

Owns simulated time. The scheduler it drives is the router's own object; everything the router would
do (deliver a dispatch, report EndForward, fire timers, try a failed request again) happens here
with a latency. What cluster it is, the spec says (:mod:`.spec`).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from sglang_sbs.scheduling import (
    Dispatch,
    Event,
    ForwardEnded,
    InstanceDown,
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
from sglang_sbs.simulator.engine import SimulatedPrefill
from sglang_sbs.simulator.feedback import FeedbackChannel
from sglang_sbs.simulator.spec import ClusterSpec, InstanceSpec, TopologyChange, joins_late
from sglang_sbs.wire import EndForward

DECODE = "decode"
_MOST_WAKES = 1000
_MAX_ATTEMPTS = 5
_BACKOFF_S = 0.05
_BACKOFF_GROWTH = 1.5
"""The router's defaults (``--retry-max-retries`` and its neighbours)."""


@dataclass(slots=True)
class RequestRecord:
    """What became of one request; times in seconds, NaN: never."""

    rid: str
    prompt_tokens: int
    arrived_s: float
    told_tokens: int = 0
    """Its length as the scheduler was told."""
    dispatched_s: float = math.nan
    """Of the last attempt, as the next three."""
    prefilled_s: float = math.nan
    prefill: tuple[str, int] | None = None
    decode: tuple[str, int] | None = None
    refused: str | None = None
    attempts: int = 0
    excluded: tuple[str, ...] = ()
    """Instances it failed on."""
    reserved: bool = False
    """Decode holds KV for it."""
    ends: int = 0

    @property
    def ttft_s(self) -> float:
        """Arrival until the first token (the end of the prefill plus ``first_token_s``)."""
        return self.prefilled_s - self.arrived_s


class PassRecord(NamedTuple):
    """One forward pass."""

    instance: str
    start_s: float
    end_s: float
    tokens: int
    """Of all ranks."""
    heaviest_tokens: int
    """Of the rank with the most: the others wait for it."""


@dataclass(slots=True)
class _DecodeRank:
    """KV and slots of one decode DP rank; admits first come first served."""

    free_tokens: float
    free_slots: float
    output_tokens: int
    """Reserved for each request beside its prompt."""
    waiting: deque[tuple[str, RequestRecord]] = field(default_factory=deque)

    def admit(self) -> list[str]:
        """Reserve for those at the head of the queue that fit now."""
        admitted = []
        while (
            self.waiting
            and self.free_slots >= 1
            and self.free_tokens >= self.waiting[0][1].prompt_tokens + self.output_tokens
        ):
            rid, record = self.waiting.popleft()
            self.free_slots -= 1
            self.free_tokens -= record.prompt_tokens + self.output_tokens
            record.reserved = True
            admitted.append(rid)
        return admitted

    def release(self, rid: str, record: RequestRecord) -> None:
        """The attempt is over, whether it was admitted, waits, or is still on its way."""
        if record.reserved:
            record.reserved = False
            self.free_slots += 1
            self.free_tokens += record.prompt_tokens + self.output_tokens
        else:
            self.waiting = deque(entry for entry in self.waiting if entry[0] != rid)


@dataclass(slots=True)
class Outcome:
    """A finished simulation."""

    requests: list[RequestRecord]
    passes: list[PassRecord] = field(default_factory=list)
    """In the order of their ends."""
    queued_passes: int = 0
    """Passes that were handed to the device while another ran (overlap)."""
    bootstrap_waits: int = 0
    """Dispatches that reached their ranks before decode had room for them."""
    retries: int = 0
    """Attempts after the first, of all requests."""
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
        self._lengths = random.Random(f"lengths {spec.seed}")
        self._scheduler = Scheduler(config)
        self._observe = observe
        self._instances = dict(spec.prefill)
        self._boots = dict.fromkeys(self._instances, 0)
        self._engines: dict[str, SimulatedPrefill] = {}
        """Those that are alive."""
        self._front_free_s = dict.fromkeys(self._instances, 0.0)
        self._feedback = FeedbackChannel(spec)
        self._decode = [
            _DecodeRank(
                spec.decode_kv_capacity_tokens or math.inf,
                spec.decode_max_running_requests or math.inf,
                spec.output_tokens,
            )
            for _ in range(spec.decode_dp_size)
        ]
        self._gang = (-1, 1.0)
        """Number of the batch and its latency factor."""
        self._outcome = Outcome([])
        self._attempts: dict[str, RequestRecord] = {}
        """Attempts under way, by the request id that the scheduler and the engines know."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._pushed = 0
        self._now_s = 0.0
        self._wake_s: float | None = None
        self._woken_s = -math.inf
        self._wakes = 0
        """At that very time: the timers of a sound scheduler come to an end."""
        self._arrivals = arrivals
        self._end_s = (arrivals[-1][0] if arrivals else 0.0) + drain_s

    def run(self) -> Outcome:
        for name in self._instances:
            if not joins_late([c for c in self._spec.changes if c.instance == name]):
                self._up(name)
        self._tell(
            InstanceUp(
                instance=DECODE,
                role="decode",
                dp_size=self._spec.decode_dp_size,
                kv_capacity_tokens=self._spec.decode_kv_capacity_tokens,
                max_running_requests=self._spec.decode_max_running_requests,
            )
        )
        for change in self._spec.changes:
            self._at(change.at_s, lambda c=change: self._change(c))  # type: ignore[misc]
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

    # Topology -----------------------------------------------------------------------------

    def _change(self, change: TopologyChange) -> None:
        match change.action:
            case "up":
                self._up(change.instance)
            case "drain":
                self._tell(InstanceDown(instance=change.instance))
            case "down":
                self._die(change.instance)

    def _up(self, name: str) -> None:
        one, spec = self._instances[name], self._spec
        if name not in self._engines:
            self._engines[name] = self._boot(name, one)
        self._tell(
            InstanceUp(
                instance=name,
                role="prefill",
                dp_size=one.dp_size,
                chunk_tokens=one.chunk_tokens,
                page_size=spec.page_size,
            )
        )

    def _boot(self, name: str, one: InstanceSpec) -> SimulatedPrefill:
        spec, boot = self._spec, self._boots[name]
        self._boots[name] += 1
        index = list(self._instances).index(name)
        return SimulatedPrefill(
            name,
            dp_size=one.dp_size,
            chunk_tokens=one.chunk_tokens,
            cost=spec.cost if one.speed == 1 else spec.cost.at_speed(one.speed),
            jitter=spec.pass_jitter,
            rng=random.Random(spec.seed * 1000 + index + 1_000_000_007 * boot),
            page_size=spec.page_size,
            overlap=spec.overlap,
            boot_id=f"{name}-{boot}",
        )

    def _die(self, name: str) -> None:
        """Every connection to the instance breaks, so its requests fail at once; that it is gone
        is noticed later."""
        del self._engines[name]
        lost = [
            rid
            for rid, record in self._attempts.items()
            if record.prefill is not None
            and record.prefill[0] == name
            and not record.prefilled_s <= self._now_s
        ]
        for rid in lost:
            self._fail(rid)
        self._at(self._now_s + self._spec.detection_s, lambda: self._notice(name))

    def _notice(self, name: str) -> None:
        if name not in self._engines:
            self._tell(InstanceDown(instance=name))

    def _fail(self, rid: str) -> None:
        """An attempt broke on its prefill instance: again, as the router does, or give up."""
        record = self._attempts.pop(rid)
        assert record.prefill is not None and record.decode is not None
        record.excluded = tuple(dict.fromkeys((*record.excluded, record.prefill[0])))
        record.prefilled_s = math.nan
        decode = self._decode[record.decode[1]]
        decode.release(rid, record)
        self._handshake(decode.admit())
        self._tell(RequestEnded(rid=rid, outcome="failed"))
        if record.attempts >= _MAX_ATTEMPTS:
            record.ends += 1
            return
        pause_s = _BACKOFF_S * _BACKOFF_GROWTH ** (record.attempts - 1)
        self._outcome.retries += 1
        self._at(self._now_s + pause_s, lambda: self._attempt(record))

    # Requests -----------------------------------------------------------------------------

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (max(time_s, self._now_s), self._pushed, action))

    def _tell(self, event: Event) -> None:
        for command in self._scheduler.handle(event, self._now_s):
            match command:
                case Dispatch():
                    self._send(command)
                case Refuse():
                    record = self._attempts.pop(command.rid)
                    record.refused = command.cause
                    record.ends += 1
                case WakeAt():
                    self._wake_s = command.time_s
                    self._at(command.time_s, self._wake)
        if self._observe is not None:
            self._observe(self._scheduler, self._now_s)

    def _wake(self) -> None:
        if self._wake_s is None or self._wake_s > self._now_s:
            return
        self._wakes = self._wakes + 1 if self._woken_s == self._now_s else 1
        self._woken_s = self._now_s
        if self._wakes > _MOST_WAKES:
            raise RuntimeError(
                f"the scheduler asks for the time it has, {self._now_s} s, again and again"
            )
        self._wake_s = None
        self._tell(TimerFired())

    def _arrive(self, index: int) -> None:
        if index + 1 < len(self._arrivals):
            self._at(self._arrivals[index + 1][0], lambda: self._arrive(index + 1))
        tokens = self._arrivals[index][1]
        record = RequestRecord(f"r{index}", tokens, self._now_s, tokens)
        if error := self._spec.length_error:
            record.told_tokens = max(1, round(tokens * self._lengths.uniform(1 - error, 1 + error)))
        self._outcome.requests.append(record)
        self._attempt(record)

    def _attempt(self, record: RequestRecord) -> None:
        rid = f"{record.rid}.{record.attempts}" if record.attempts else record.rid
        record.attempts += 1
        self._attempts[rid] = record
        self._tell(
            RequestArrived(
                rid=rid,
                prompt_tokens=record.told_tokens,
                max_new_tokens=self._spec.max_new_tokens,
                exclude=record.excluded,
            )
        )

    def _send(self, command: Dispatch) -> None:
        record = self._attempts[command.rid]
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
        self._at(reach_s, lambda: self._deliver(command.rid))

    def _deliver(self, rid: str) -> None:
        """Both legs have reached their ranks."""
        record = self._attempts.get(rid)
        if record is None:
            return  # it failed on the way
        assert record.prefill is not None and record.decode is not None
        name, rank = record.prefill
        engine = self._engines.get(name)
        if engine is None:
            self._fail(rid)
            return
        decode = self._decode[record.decode[1]]
        decode.waiting.append((rid, record))
        admitted = decode.admit()
        at_once = record.reserved and not self._spec.handshake_s
        self._outcome.bootstrap_waits += not record.reserved
        engine.deliver(rid, rank, record.prompt_tokens, handshaken=at_once)
        if not at_once:
            self._handshake(admitted)
        self._step_if_asleep(engine)

    def _handshake(self, admitted: list[str]) -> None:
        for rid in admitted:
            self._at(
                self._now_s + self._spec.handshake_s,
                lambda r=rid: self._handshaken(r),  # type: ignore[misc]
            )

    def _handshaken(self, rid: str) -> None:
        record = self._attempts.get(rid)
        if record is None:
            return  # it failed meanwhile
        assert record.prefill is not None
        engine = self._engines[record.prefill[0]]
        engine.handshaken(rid, record.prefill[1])
        self._step_if_asleep(engine)

    def _step_if_asleep(self, engine: SimulatedPrefill) -> None:
        if engine.asleep:
            engine.asleep = False
            self._at(self._now_s, lambda: self._step(engine))

    def _step(self, engine: SimulatedPrefill) -> None:
        """One iteration of the engine's event loop."""
        if self._engines.get(engine.name) is not engine:
            return  # dead
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
        if self._engines.get(engine.name) is not engine:
            return  # dead
        ended, messages = engine.finish(self._now_s)
        self._outcome.passes.append(
            PassRecord(
                engine.name, ended.start_s, ended.end_s, sum(ended.tokens), max(ended.tokens)
            )
        )
        self._report(engine.name, messages)
        first_s = self._now_s + self._spec.first_token_s
        for rid in ended.completed:
            self._attempts[rid].prefilled_s = first_s
            self._at(first_s + self._spec.feedback_latency_s, lambda r=rid: self._prefilled(r))  # type: ignore[misc]
        pause_s = max(0.0, self._spec.launch_gap_s - self._spec.prepare_s)
        self._at(self._now_s + pause_s, lambda: self._step(engine))

    def _prefilled(self, rid: str) -> None:
        if rid not in self._attempts:
            return  # its instance died before the KV was over
        self._tell(PrefillDone(rid=rid))
        self._at(self._now_s + self._spec.decode_s, lambda: self._end(rid))

    def _end(self, rid: str) -> None:
        record = self._attempts.pop(rid)
        record.ends += 1
        assert record.decode is not None
        decode = self._decode[record.decode[1]]
        decode.release(rid, record)
        self._handshake(decode.admit())
        self._tell(
            RequestEnded(rid=rid, outcome="completed", completion_tokens=self._spec.output_tokens)
        )

    def _report(self, instance: str, messages: list[EndForward], delay_s: float = 0.0) -> None:
        for message in messages:
            sent_s = self._now_s + delay_s
            for at_s in self._feedback.arrivals_s(instance, message.dp_rank, sent_s):
                # A delay beyond the usual latency is not part of the age: nobody can see it.
                aged = msgspec.structs.replace(message, age_s=self._spec.feedback_latency_s)
                event = ForwardEnded(instance=instance, report=aged)
                self._at(at_s, lambda e=event: self._tell(e))  # type: ignore[misc]
