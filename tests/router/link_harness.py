"""Front ends and schedulers in one process, with a network that loses messages on command."""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang_sbs.router.dispatch.dispatcher import Submitted
from sglang_sbs.router.dispatch.scheduler_driver import SchedulerLike
from sglang_sbs.router.options.config import BreakerConfig
from sglang_sbs.router.processes.front_end_sessions import Hub
from sglang_sbs.router.processes.leading.lead import Lead, Unopposed
from sglang_sbs.router.processes.leading.scheduler_choice import ChoiceTimes, SchedulerChoice
from sglang_sbs.router.processes.messages import (
    FromScheduler,
    ToScheduler,
    decode_from_scheduler,
    decode_to_scheduler,
    encode,
)
from sglang_sbs.router.processes.mirrored_registry import MirroredRegistry
from sglang_sbs.router.processes.scheduler_link import SchedulerLink
from sglang_sbs.router.processes.session_times import SessionTimes
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import WorkerInfo
from sglang_sbs.router.workers.worker import Worker, WorkerEvents
from sglang_sbs.scheduling import Command, Dispatch, Refuse, Scheduler, SchedulerConfig
from sglang_sbs.scheduling.events import (
    Event,
    InstanceRole,
    RequestArrived,
    RequestEnded,
)

IMMEDIATE = SchedulerConfig(policy="round_robin")
QUICK = SessionTimes(
    beat_s=0.01, cluster_s=0.05, lost_s=60.0, longest_lost_s=60.0, silent_s=60.0, call_s=60.0
)
"""Nobody is given up for a pause, however long it is on a busy machine. A line that is gone, as
after a crash, is noticed without."""
IMPATIENT = replace(QUICK, beat_s=0.05, lost_s=0.2, longest_lost_s=2.0, silent_s=0.6)
"""For tests of silence."""
HOLDING = SchedulerConfig(policy="sbs", trigger="paper", t_default_s=3600.0)
"""Sends one request per instance, then nothing for an hour."""


class SchedulerSide:
    """A scheduler process without its sockets: workers are up as soon as they are added."""

    def __init__(
        self,
        net: Net,
        config: SchedulerConfig,
        scheduler: SchedulerLike | None = None,
        lead: Lead | None = None,
        times: SessionTimes = QUICK,
    ) -> None:
        self.events: list[Event] = []
        self.registry = Registry(WorkerEvents(self._submit, silenced=self._silenced))
        self.scheduler = scheduler or Scheduler(config)
        unopposed = Unopposed()
        self.hub = Hub(self, net.to_front_end, self.scheduler, lead or Lead(unopposed), times=times)
        if lead is None:
            unopposed.begin(self.hub.lead, self.hub.follow)
        for number in range(2):
            self.add_worker(f"http://p{number}:1", "prefill", 9000)
        self.add_worker("http://d0:1", "decode", None)

    def _submit(self, event: Event) -> None:
        self.events.append(event)
        self.hub.pump.submit(event)
        self.hub.workers_changed()

    def _silenced(self, worker: Worker) -> None:
        self.hub.silenced(worker)

    def add_worker(self, url: str, role: InstanceRole, bootstrap_port: int | None) -> Worker:
        worker = self.registry.add(url, role, bootstrap_port)
        self.registry.described(
            worker, WorkerInfo(dp_size=2, chunk_tokens=1000, kv_capacity_tokens=1_000_000)
        )
        self.registry.set_healthy(worker, True)
        return worker

    def remove_worker(self, worker: Worker) -> None:
        self.registry.remove(worker)

    @property
    def books(self) -> tuple[int, int, int]:
        """Waiting, in flight, and legs counted at workers."""
        state = self.scheduler.snapshot(0.0)
        legs = sum(worker.active for worker in self.registry)
        return state.queue_requests, state.in_flight_requests, legs

    def close(self) -> None:
        self.hub.close()
        self.hub.pump.close()


class Net:
    """Delivers messages in order, in a later turn of the event loop, as bytes."""

    def __init__(self) -> None:
        self.side: SchedulerSide | None = None
        self.frozen = False
        """The scheduler process is stopped: what is sent to it waits."""
        self.cut = False
        """Connections are broken: what is sent is lost without an error."""
        self.full = False
        """There are no descriptors for another connection."""
        self.not_made = 0
        """Connections, for that reason."""
        self._lines: dict[bytes, FakeLine] = {}
        self._held: list[tuple[bytes, list[bytes]]] = []
        self._unsent: list[tuple[FakeLine, list[bytes]]] = []
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()

    def connect(self, receive: Callable[[FromScheduler], None]) -> FakeLine:
        if self.full:
            self.not_made += 1
            raise too_many_files()
        line = FakeLine(self, receive, b"%d" % next(self._numbers))
        self._lines[line.identity] = line
        return line

    def to_scheduler(self, line: FakeLine, message: ToScheduler) -> bool:
        if self.side is None or line.identity not in self._lines:
            return False
        frames = encode(message)
        if self.frozen:
            self._held.append((line.identity, frames))
        elif not self.cut:
            self._loop.call_soon(self._arrive, self.side, line.identity, frames)
        return True

    def _arrive(self, side: SchedulerSide, identity: bytes, frames: list[bytes]) -> None:
        if side is self.side:
            side.hub.receive(identity, decode_to_scheduler(frames))

    def to_front_end(self, identity: bytes, message: FromScheduler) -> bool:
        line = self._lines.get(identity)
        if line is None:
            return False
        frames = encode(message)
        if self.frozen:
            self._unsent.append((line, frames))
        elif not self.cut:
            self._loop.call_soon(self._reach, line, frames)
        return True

    @staticmethod
    def _reach(line: FakeLine, frames: list[bytes]) -> None:
        if not line.closed:
            line.receive(decode_from_scheduler(frames))

    def thaw(self) -> None:
        self.frozen = False
        unsent, self._unsent = self._unsent, []
        for line, frames in unsent:
            self._loop.call_soon(self._reach, line, frames)
        held, self._held = self._held, []
        for identity, frames in held:
            if self.side is not None:
                self._loop.call_soon(self._arrive, self.side, identity, frames)

    def mend(self) -> None:
        """Connections are there again; to the scheduler each is another peer, as with ZMQ."""
        if self.cut:
            self.cut = False
            for line in list(self._lines.values()):
                self.forget(line)
                line.identity = b"%d" % next(self._numbers)
                self._lines[line.identity] = line

    def forget(self, line: FakeLine) -> None:
        self._lines.pop(line.identity, None)


def too_many_files() -> OSError:
    return OSError(errno.EMFILE, "Too many open files")


class FakeLine:
    malformed = 0
    closed = False

    def __init__(self, net: Net, receive: Callable[[FromScheduler], None], identity: bytes) -> None:
        self.identity = identity
        self._net = net
        self._receive = receive

    def receive(self, message: FromScheduler) -> None:
        self._receive(message)

    def send_message(self, message: ToScheduler) -> bool:
        return self._net.to_scheduler(self, message)

    def drain(self) -> None: ...

    def close(self, linger_ms: int = 0) -> None:
        self.closed = True
        self._net.forget(self)


class Counts:
    """Counts what was dispatched."""

    def __init__(self) -> None:
        self.dispatches = 0

    def __call__(self, command: Dispatch | Refuse) -> None:
        self.dispatches += isinstance(command, Dispatch)


def submitted(rid: str, prompt_tokens: int = 10, **fields: Any) -> Submitted:
    return Submitted(arrival=RequestArrived(rid=rid, prompt_tokens=prompt_tokens, **fields))


class FrontEnd:
    def __init__(
        self,
        nets: Net | dict[str, Net],
        name: str = "front end",
        times: SessionTimes = QUICK,
        choice_times: ChoiceTimes = ChoiceTimes(),  # noqa: B008 - it is frozen
    ) -> None:
        """``nets``: the network to each scheduler, by its address."""
        by_address = nets if isinstance(nets, dict) else {"here": nets}
        self.alone = Counts()
        self.aborted: list[str] = []
        self.silenced: list[str] = []
        self.alone_changes: list[bool] = []
        """Each time it lost the scheduler or found it."""
        self.registry = MirroredRegistry(
            WorkerEvents(self._found_out, silenced=lambda worker: self.silenced.append(worker.url)),
            BreakerConfig(),
        )
        self.link = SchedulerLink(
            SchedulerChoice(
                list(by_address),
                lambda address, receive: by_address[address].connect(receive),
                name,
                choice_times,
            ),
            self.registry,
            name=name,
            fallback=lambda: Scheduler(SchedulerConfig(policy="least_tokens")),
            counts=self.alone,
            metrics_page=lambda: f"# {name}\n",
            give_up_s=30.0,
            alone_changed=self.alone_changes.append,
            times=times,
        )
        self.registry.report, self.link.abort = self.link.send_message, self._abort

    def _found_out(self, event: Event) -> None:
        self.link.submit(event)

    def _abort(self, rid: str) -> int:
        self.aborted.append(rid)
        return 2

    def ask(self, rid: str, tokens: int = 10) -> asyncio.Task[Dispatch]:
        return asyncio.create_task(self._asked(rid, tokens))

    async def _asked(self, rid: str, tokens: int) -> Dispatch:
        """Send a request like the relay."""
        try:
            return await self.link.dispatch(submitted(rid, tokens))
        except BaseException:
            self.link.on_ended(rid, "aborted")
            raise


class World:
    def __init__(self) -> None:
        self.net = Net()
        self.front_ends: list[FrontEnd] = []
        self.times = QUICK
        """Times of objects that are made from now on."""

    async def boot(
        self, config: SchedulerConfig = IMMEDIATE, scheduler: SchedulerLike | None = None
    ) -> SchedulerSide:
        self.net.side = side = SchedulerSide(self.net, config, scheduler, times=self.times)
        return side

    def crash(self) -> None:
        side, self.net.side = self.net.side, None
        if side is not None:
            side.close()

    async def front_end(self) -> FrontEnd:
        front_end = FrontEnd(self.net, f"front end {len(self.front_ends)}", self.times)
        self.front_ends.append(front_end)
        assert await front_end.link.start(5.0)
        return front_end


class OneAtATime:
    """Dispatches the next request when one ends."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.ended: list[str] = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
        if isinstance(event, RequestArrived):
            self.waiting.append(event.rid)
        if not isinstance(event, RequestEnded):
            return []
        self.ended.append(event.rid)
        if event.rid in self.waiting:
            self.waiting.remove(event.rid)
        return [
            Dispatch(
                rid=rid,
                prefill="http://p0:1",
                prefill_rank=0,
                decode="http://d0:1",
                decode_rank=0,
                batch=1,
                held_s=0.0,
                reason="",
            )
            for rid in self.waiting[:1]
        ]

    def snapshot(self, now_s: float) -> None:
        return None
