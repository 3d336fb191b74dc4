"""The discrete-event cluster: arrivals, network, prefill instances and the router's own scheduler.
The router's surroundings are simulated with latencies."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from sglang_sbs.scheduling import Scheduler, SchedulerConfig, events
from sglang_sbs.simulator.cluster import boot
from sglang_sbs.simulator.cluster.arrival import Arrival, ClosedLoop
from sglang_sbs.simulator.cluster.engine import SimulatedPrefill, SimulatedRequest
from sglang_sbs.simulator.cluster.kv_cache import Blocks, SharedStorage
from sglang_sbs.simulator.cluster.network import (
    DispatchNetwork,
    FeedbackChannel,
    pause_before_retry_s,
)
from sglang_sbs.simulator.cluster.outcome import Outcome, RequestRecord, SimulatedPass
from sglang_sbs.simulator.cluster.spec import ClusterSpec, TopologyChange, joins_late
from sglang_sbs.wire import EndForward

_MOST_WAKES = 1000


class Decides(Protocol):
    """Places requests: a :class:`Scheduler`, or a recording of one."""

    def handle(self, event: events.Event, now_s: float) -> list[events.Command]:
        """Apply an event and return commands (see :meth:`Scheduler.handle`)."""


def simulate(
    arrivals: Sequence[Arrival | tuple[float, int]] | ClosedLoop,
    config: SchedulerConfig,
    spec: ClusterSpec,
    *,
    observe: Callable[[Scheduler, float], None] | None = None,
    drain_s: float = 600.0,
) -> Outcome:
    """Run arrivals through the scheduler on the simulated cluster.

    ``arrivals``: requests in time order, as ``(time_s, prompt_tokens)`` if no prefixes are shared;
    or a closed loop, which sends each request after an answer. ``observe``: called after every
    event, for invariants. ``drain_s``: simulated time after the last arrival at which unfinished
    requests are given up. Raises: ValueError, a prompt is longer than any rank's KV."""
    loop = None if isinstance(arrivals, Sequence) else arrivals
    first = arrivals if isinstance(arrivals, Sequence) else arrivals.first
    longest = max((arrival[1] for arrival in first), default=0)
    if spec.block_tokens and longest > spec.kv_capacity_tokens:
        wanted = f"at least {longest}, the longest prompt"
        raise ValueError(f"kv_capacity_tokens must be {wanted}, not {spec.kv_capacity_tokens}")
    outcome = Outcome()
    simulation = Simulation(
        outcome, Scheduler(config), spec, observe=observe, drain_s=drain_s, loop=loop
    )
    simulation.start(first)
    simulation.end()
    return outcome


class Simulation:
    """One cluster with its scheduler, from :meth:`start` to :meth:`end`. For several clusters with
    a common clock and outcome, alternate :meth:`go_on` and :meth:`come`."""

    def __init__(
        self,
        outcome: Outcome,
        scheduler: Decides,
        spec: ClusterSpec,
        *,
        observe: Callable[[Any, float], None] | None = None,
        drain_s: float = 600.0,
        loop: ClosedLoop | None = None,
    ) -> None:
        self._spec = spec
        self._network = DispatchNetwork(spec)
        self._lengths = random.Random(f"lengths {spec.seed}")
        self._estimates = spec.length_error > 0 or spec.length_factor != 1.0
        self._pauses = random.Random(f"pauses {spec.seed}")
        self._scheduler = scheduler
        self._observe = observe
        self._instances = dict(spec.prefill)
        self._boots = dict.fromkeys(self._instances, 0)
        self._engines: dict[str, list[SimulatedPrefill]] = {}
        """Running engines; without a barrier one per DP rank."""
        self._feedback = FeedbackChannel(spec)
        self._decode = boot.decode_ranks(spec)
        self._outcome = outcome
        self._computed: set[int] = set()
        """Names of the blocks that some rank of the cluster has computed."""
        self._attempts: dict[str, RequestRecord] = {}
        """Attempts in progress, by the request id known to the scheduler and the engines."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0
        self._now_s = 0.0
        self._wake_s: float | None = None
        self._woken_s = -math.inf
        self._wakes = 0
        """Number of wake-ups at the current simulated time: a correct scheduler's timers must
        end."""
        self._loop = loop
        self._storage: SharedStorage | None = None
        if spec.tiers.has_storage:
            self._outcome.history = loop.history if loop is not None else ()
            self._storage = SharedStorage(self._outcome.history)
            self._computed.update(self._outcome.history)
        self._drain_s = drain_s
        self._end_s = 0.0

    def start(self, arrivals: Sequence[Arrival | tuple[float, int]] = ()) -> None:
        self.come([a if isinstance(a, Arrival) else Arrival(*a, 0) for a in arrivals])
        for name in self._instances:
            if not joins_late([c for c in self._spec.changes if c.instance == name]):
                self._up(name)
        self._tell(boot.decode_up(self._spec))
        for change in self._spec.changes:
            self._at(change.at_s, self._change, change)

    def go_on(self, until_s: float) -> None:
        """Run all events until ``until_s``; events long after the last arrival are dropped."""
        while self._heap and self._heap[0][0] <= min(until_s, self._end_s):
            self._now_s, _, action, args = heapq.heappop(self._heap)
            action(*args)

    @property
    def in_flight(self) -> int:
        return len(self._attempts)

    def end(self) -> float:
        """Run the remaining events; returns the total simulated seconds."""
        self.go_on(math.inf)
        self._outcome.duration_s = max(self._outcome.duration_s, self._now_s)
        return self._now_s

    def _change(self, change: TopologyChange) -> None:
        if change.action == "up":
            self._up(change.instance)
        elif change.action == "drain":
            self._tell(events.InstanceDown(instance=change.instance))
        else:
            self._die(change.instance)

    def _up(self, name: str) -> None:
        instance, spec, before = self._instances[name], self._spec, self._boots[name]
        if name not in self._engines:
            if before and spec.publishes_blocks:
                # Its publisher restarts the numbering, which the subscriber interprets as an empty
                # cache.
                for rank in range(instance.dp_size):
                    self._tell(events.BlocksCleared(instance=name, dp_rank=rank))
            self._boots[name] += 1
            index = list(self._instances).index(name)
            engines = boot.boot_engines(
                name, instance, spec, index=index, boot=before, storage=self._storage
            )
            self._engines[name] = engines
        self._tell(boot.prefill_up(name, instance, spec))

    def _engine_of(self, name: str, rank: int) -> SimulatedPrefill | None:
        engines = self._engines.get(name)
        return None if engines is None else engines[rank % len(engines)]

    def _for(self, engine: SimulatedPrefill, action: Callable[..., None], *args: Any) -> None:
        """Perform an action at an engine unless it has died meanwhile."""
        if engine in self._engines.get(engine.name, ()):
            action(*args)

    def _die(self, name: str) -> None:
        """Kill an instance: its connections break, so its requests fail at once. Its loss is
        detected later."""
        del self._engines[name]
        there = {rid: r for rid, r in self._attempts.items() if r.prefill and r.prefill[0] == name}
        for rid in [rid for rid, r in there.items() if not r.prefilled_s <= self._now_s]:
            self._fail(rid)
        self._at(self._now_s + self._spec.detection_s, self._notice, name)

    def _notice(self, name: str) -> None:
        if name not in self._engines:
            self._tell(events.InstanceDown(instance=name))

    def _fail(self, rid: str) -> None:
        """Handle a failed attempt on a prefill instance: retry as the router does, or give up."""
        record = self._attempts.pop(rid)
        assert record.prefill is not None
        record.excluded = tuple(dict.fromkeys((*record.excluded, record.prefill[0])))
        record.prefilled_s = math.nan
        self._leave_decode(rid, record)
        self._tell(events.RequestEnded(rid=rid, outcome="failed"))
        if (pause_s := pause_before_retry_s(record.attempts)) is None:
            self._follow(record)
        else:
            self._outcome.retries += 1
            self._at(self._now_s + pause_s, self._attempt, record)

    def _leave_decode(self, rid: str, record: RequestRecord) -> None:
        assert record.decode is not None
        decode = self._decode[record.decode[1]]
        decode.release(rid, record)
        self._handshake(decode.admit())
        self._publish_decode(record.decode[1])

    def _at(self, time_s: float, action: Callable[..., None], *args: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (max(time_s, self._now_s), self._pushed, action, args))

    def _tell(self, event: events.Event) -> None:
        batches: dict[tuple[int, str], list[events.Dispatch]] = {}
        for command in self._scheduler.handle(event, self._now_s):
            match command:
                case events.Dispatch():
                    batches.setdefault((command.batch, command.prefill), []).append(command)
                case events.Refuse():
                    record = self._attempts.pop(command.rid)
                    record.refused = command.cause
                    self._follow(record)
                case events.WakeAt():
                    self._wake_s = command.time_s
                    self._at(command.time_s, self._wake)
        for batch in batches.values():
            self._send(batch)
        if self._observe is not None:
            self._observe(self._scheduler, self._now_s)

    def _wake(self) -> None:
        if self._wake_s is None or self._wake_s > self._now_s:
            return
        self._wakes = self._wakes + 1 if self._woken_s == self._now_s else 1
        self._woken_s = self._now_s
        if self._wakes > _MOST_WAKES:
            asked = f"the scheduler asks for the time it has, {self._now_s} s, again and again"
            raise RuntimeError(asked)
        self._wake_s = None
        self._tell(events.TimerFired())

    def come(self, arrivals: Sequence[Arrival], at: int = 0) -> None:
        """Schedule arrivals one after another, starting at index ``at``."""
        if at < len(arrivals):
            self._at(arrivals[at].at_s, self._arrive, arrivals, at)
            self._end_s = max(self._end_s, arrivals[-1].at_s + self._drain_s)

    def _follow(self, record: RequestRecord) -> None:
        record.ends += 1
        record.ended_s = self._now_s
        if self._loop is not None:
            for arrival in self._loop.after(self._outcome.arrivals[record.index], self._now_s):
                self.come([arrival])

    def _arrive(self, arrivals: Sequence[Arrival], at: int) -> None:
        self.come(arrivals, at + 1)
        index, tokens = len(self._outcome.arrivals), arrivals[at].prompt_tokens
        self._outcome.arrivals.append(arrivals[at])
        record = RequestRecord(f"r{index}", tokens, self._now_s, index, tokens)
        if self._estimates:
            error = self._spec.length_error
            factor = self._spec.length_factor * self._lengths.uniform(1 - error, 1 + error)
            record.submitted_tokens = max(1, round(tokens * factor))
        if 0 < self._spec.deflect_tokens < tokens:
            record.excluded = (list(self._instances)[-1],)
        self._outcome.requests.append(record)
        self._attempt(record)

    def _attempt(self, record: RequestRecord) -> None:
        rid = f"{record.rid}.{record.attempts}" if record.attempts else record.rid
        record.attempts += 1
        self._attempts[rid] = record
        blocks = self._blocks_of(record)
        arrival = self._outcome.arrivals[record.index]
        self._tell(
            events.RequestArrived(
                rid=rid,
                prompt_tokens=record.submitted_tokens,
                estimated=self._estimates,
                max_new_tokens=self._spec.max_new_tokens,
                exclude=record.excluded,
                blocks=list(blocks),
                block_tokens=self._spec.block_tokens if blocks else 0,
                session=arrival.session,
                priority=arrival.priority,
                ttft_slo_s=self._spec.ttft_slo_s,
                tenant=arrival.tenant,
            )
        )

    def _blocks_of(self, record: RequestRecord) -> Blocks:
        return self._outcome.arrivals[record.index].blocks if self._spec.block_tokens else ()

    def _send(self, batch: Sequence[events.Dispatch]) -> None:
        """Send the requests dispatched to one instance at the same time."""
        for command in batch:
            record = self._attempts[command.rid]
            record.dispatched_s = self._now_s
            record.prefill = (command.prefill, command.prefill_rank)
            record.decode = (command.decode, command.decode_rank)
            record.predicted_tokens = command.cached_tokens
        for command, at_s in zip(batch, self._network.arrive_s(batch, self._now_s), strict=True):
            self._at(at_s, self._deliver, command.rid)

    def _deliver(self, rid: str) -> None:
        if (record := self._attempts.get(rid)) is None:
            return  # it failed on the way
        assert record.prefill is not None and record.decode is not None
        engine = self._engine_of(*record.prefill)
        if engine is None:
            self._fail(rid)
            return
        decode = self._decode[record.decode[1]]
        blocks = self._blocks_of(record)
        decode.waiting.append(self._asking(rid, record))
        admitted = decode.admit()
        self._publish_decode(record.decode[1])
        at_once = record.reserved and not self._spec.handshake_s
        self._outcome.bootstrap_waits += not record.reserved
        rank, tokens = record.prefill[1], record.prompt_tokens
        engine.deliver(rid, rank, tokens, blocks, handshaken=at_once)
        if not at_once:
            self._handshake(admitted)
        self._step_if_asleep(engine)

    def _asking(self, rid: str, record: RequestRecord) -> boot.Asking:
        if not self._spec.decode_caches:
            return boot.Asking(rid, record, (), record.prompt_tokens + self._spec.output_tokens)
        arrival = self._outcome.arrivals[record.index]
        answer = arrival.answer_blocks if arrival.blocks else ()
        tokens = record.prompt_tokens + self._output_tokens(record)
        return boot.Asking(rid, record, (*arrival.blocks, *answer), tokens)

    def _handshake(self, admitted: list[str]) -> None:
        for rid in admitted:
            self._at(self._now_s + self._spec.handshake_s, self._handshaken, rid)

    def _handshaken(self, rid: str) -> None:
        if (record := self._attempts.get(rid)) is None:
            return  # it failed meanwhile
        assert record.prefill is not None
        engine = self._engine_of(*record.prefill)
        assert engine is not None
        engine.handshaken(rid, record.prefill[1])
        self._step_if_asleep(engine)

    def _step_if_asleep(self, engine: SimulatedPrefill) -> None:
        if engine.asleep:
            engine.asleep = False
            self._at(self._now_s, self._for, engine, self._step, engine)

    def _step(self, engine: SimulatedPrefill) -> None:
        prepare_s = self._spec.prepare_s
        while True:
            launch_s = self._now_s + prepare_s
            launched, messages = engine.step(launch_s)
            for request in engine.fetches:
                self._fetch(engine, request)
            engine.fetches.clear()
            for request, _ in launched.parts if launched is not None else ():
                there = self._attempts[request.rid].decode_cached_tokens
                request.sent_tokens = max(request.sent_tokens, there)
                engine.transfer(request, request.cached_tokens, launch_s)
            self._report(engine.name, messages, prepare_s if launched is not None else 0.0)
            self._outcome.queued_passes += launched is not None and len(engine.device) > 1
            waits_for = engine.waits_for(launched)
            if waits_for is not None:
                end_s = max(launch_s, waits_for.end_s)
                self._at(end_s, self._for, engine, self._finish, engine)
                return
            if launched is None:
                return
            if prepare_s:
                self._at(launch_s, self._for, engine, self._step, engine)
                return

    def _fetch(self, engine: SimulatedPrefill, request: SimulatedRequest) -> None:
        tokens = len(request.fetching) * self._spec.block_tokens
        at_s = self._now_s + tokens * self._spec.tiers.storage_load_s
        self._at(at_s, self._for, engine, self._go_on_with, engine, engine.fetched, request)

    def _go_on_with(
        self,
        engine: SimulatedPrefill,
        done: Callable[[SimulatedRequest], None],
        request: SimulatedRequest,
    ) -> None:
        """Complete an operation for a request by calling ``done``, after which other requests may
        be schedulable."""
        done(request)
        self._step_if_asleep(engine)

    def _finish(self, engine: SimulatedPrefill) -> None:
        ended, messages = engine.finish()
        record = SimulatedPass(engine.name, ended.start_s, ended.end_s, tuple(ended.tokens))
        self._outcome.passes.append(record)
        self._report(engine.name, messages)
        self._publish(engine)
        for request, tokens in ended.parts:
            there_s = engine.transfer(request, tokens, self._now_s)
            if tokens == request.prompt_tokens:
                self._complete(engine, request, there_s + self._spec.first_token_s)
        pause_s = max(0.0, self._spec.launch_gap_s - self._spec.prepare_s)
        if self._spec.rank_pause_s:
            mean_s = self._spec.rank_pause_s
            pause_s += max(self._pauses.expovariate(1 / mean_s) for _ in engine.ranks)
        self._at(self._now_s + pause_s, self._for, engine, self._step, engine)

    def _complete(
        self, engine: SimulatedPrefill, request: SimulatedRequest, first_s: float
    ) -> None:
        """Record that a prompt is computed; ``first_s``: time when its KV is at decode."""
        cached_tokens, record = None, self._attempts[request.rid]
        record.prefilled_s = first_s
        record.cached_tokens = request.cached_tokens
        record.loaded_tokens = request.loaded_tokens
        record.fetched_tokens = request.fetched_tokens
        if block_tokens := self._spec.block_tokens:
            cached_tokens = request.cached_tokens
            new = request.blocks[cached_tokens // block_tokens :]
            known = sum(block in self._computed for block in new)
            record.recomputed_tokens = known * block_tokens
            self._computed.update(new)
            if first_s > self._now_s:
                self._at(first_s, self._for, engine, self._go_on_with, engine, engine.sent, request)
            else:
                engine.sent(request)
        answer_s = first_s + self._spec.feedback_latency_s
        self._at(answer_s, self._prefilled, request.rid, cached_tokens)

    def _prefilled(self, rid: str, cached_tokens: int | None) -> None:
        if rid not in self._attempts:
            return  # its instance died before the KV transfer ended
        self._decode_has(rid, self._attempts[rid].prompt_tokens)
        self._tell(events.PrefillDone(rid=rid, cached_tokens=cached_tokens))
        output_tokens = self._output_tokens(self._attempts[rid])
        decode_s = self._spec.decode_s + self._spec.decode_token_s * output_tokens
        self._at(self._now_s + decode_s, self._end, rid)

    def _output_tokens(self, record: RequestRecord) -> int:
        if self._spec.decode_token_s:
            return self._outcome.arrivals[record.index].output_tokens
        return self._spec.output_tokens

    def _end(self, rid: str) -> None:
        tokens = self._output_tokens(self._attempts[rid])
        # The last token is sampled, but its KV is never computed.
        self._decode_has(rid, self._attempts[rid].prompt_tokens + tokens - 1)
        record = self._attempts.pop(rid)
        self._follow(record)
        self._leave_decode(rid, record)
        self._tell(events.RequestEnded(rid=rid, outcome="completed", completion_tokens=tokens))

    def _report(self, instance: str, messages: list[EndForward], delay_s: float = 0.0) -> None:
        for message in messages:
            sent_s = self._now_s + delay_s
            for at_s in self._feedback.arrivals_s(instance, message.dp_rank, sent_s):
                # A delay beyond the usual latency is not part of the age, because it is unknown to
                # the router.
                aged = msgspec.structs.replace(message, age_s=self._spec.feedback_latency_s)
                self._at(at_s, self._tell, events.ForwardEnded(instance=instance, report=aged))

    def _decode_has(self, rid: str, tokens: int) -> None:
        place = self._attempts[rid].decode
        assert place is not None
        self._decode[place[1]].has(rid, tokens)
        self._publish_decode(place[1])

    def _publish_decode(self, rank: int) -> None:
        received_s = self._now_s + self._spec.feedback_latency_s
        for event in self._decode[rank].cache.take_messages(boot.DECODE, rank):
            if self._spec.publishes_blocks and self._spec.decode_cache == "seen":
                self._at(received_s, self._tell, event)

    def _publish(self, engine: SimulatedPrefill) -> None:
        """Publish KV events, once per pass and without loss, because they can be requested
        again."""
        received_s = self._now_s + self._spec.feedback_latency_s
        # Take the events in any case, otherwise they would pile up.
        for event in engine.take_block_events():
            if self._spec.publishes_blocks:
                self._at(received_s, self._for, engine, self._tell, event)
