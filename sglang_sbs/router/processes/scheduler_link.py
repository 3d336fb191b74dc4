"""A front end's connection to the scheduler process, and its fallback while disconnected.

The fallback is a :class:`Scheduler` with an immediate policy, given the last known workers and this
front end's own requests.

Theory of operation
-------------------
*Connected*: events of requests go to the scheduler,
decisions come back. *Alone*: they go to the fallback. While alone only :class:`Hello` is sent, so
nothing stale can arrive later.

The link goes from connected to alone when nothing was received for ``times.lost_s`` (the scheduler
sends :class:`Alive` every ``times.beat_s``), or when the scheduler does not know the session. The
fallback then places all waiting requests at once. The link goes from alone to connected with
:class:`Welcome`. Everything in flight is then submitted with its placement (:class:`Adopted`), so
that a restarted scheduler learns it and one that merely stalled corrects its state.

Each session has its own socket: nothing sent in the old one can reach the new one, in either
direction. A :class:`~.leading.scheduler_choice.SchedulerChoice` decides which scheduler to connect
to. Messages with an earlier term than the latest known one are dropped, and the session ends."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from typing import Any

import msgspec

from sglang_sbs import __version__
from sglang_sbs.console.plain_words import counted
from sglang_sbs.router.dispatch import scheduler_driver as driver
from sglang_sbs.router.dispatch.dispatcher import Dispatcher
from sglang_sbs.router.policy_in_force import PolicyInForce
from sglang_sbs.router.processes import messages
from sglang_sbs.router.processes.calls import Calls, no_scheduler
from sglang_sbs.router.processes.leading.scheduler_choice import LeadView, SchedulerChoice
from sglang_sbs.router.processes.leading.scouts import Line
from sglang_sbs.router.processes.messages import MAX_ADOPTED, OLDEST, VERSION
from sglang_sbs.router.processes.mirrored_registry import MirroredRegistry, states_of
from sglang_sbs.router.processes.session_times import SessionTimes
from sglang_sbs.scheduling.events import Event, RequestAdopted, RequestArrived
from sglang_sbs.scheduling.explained.stories import Story
from sglang_sbs.scheduling.explained.timelines import Timeline

logger = logging.getLogger(__name__)

_LAST_WORDS_MS = 200


@dataclass(eq=False)
class SchedulerLink(Dispatcher):
    """Dispatcher of a front end: sends requests to a scheduler in another process, or to the
    fallback while disconnected."""

    choice: SchedulerChoice
    """Selects the scheduler and connects to it."""
    registry: MirroredRegistry
    _: KW_ONLY
    name: str
    fallback: Callable[[], driver.SchedulerLike]
    """Creates the fallback, which schedules while the scheduler process is away."""
    counts: Callable[[driver.Decision], None]
    metrics_page: Callable[[], str]
    give_up_s: float
    policy: PolicyInForce = field(default_factory=lambda: PolicyInForce("sbs"))
    """Policy of the scheduler process, now or before it was lost."""
    abort: Callable[[str], int] = lambda rid: 0
    """Aborts clients' requests by their own id (empty: all) and returns their number."""
    find: Callable[[str], Story | None] = lambda name: None
    """Returns this front end's record of a recent request, by any of its ids; ``None``: unknown."""
    over: Callable[[Timeline], object] = lambda timeline: None
    """Called with the timeline of each request that ends while the fallback is in use."""
    alone_changed: Callable[[bool], None] = lambda alone: None
    """Called with True when the scheduler process is lost, with False when it is found."""
    dashboard_frame: Callable[[bytes, bool], None] = lambda payload, full: None
    """Called with the fields of each :class:`~.messages.DashboardFrame`."""
    times: SessionTimes = field(default_factory=SessionTimes)

    def __post_init__(self) -> None:
        super().__init__(self.give_up_s)
        self.times_alone = 0
        self.connected = False
        self._id = uuid.uuid4().hex
        self._refusal = ""
        self._calls: Calls[messages.Done] = Calls()
        self.fenced = 0
        """Number of messages dropped because of an earlier term: their scheduler was replaced."""
        self._snapshot: Any = None
        self._line: Line | None = None
        self._line_is_over = False
        """True if the connection must be replaced at the next heartbeat."""
        self._reported_alone = False
        self._failures: set[str] = set()
        """Errors of :meth:`_do_without` (their ``repr``) that have been logged already."""
        self._welcome = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._last_message_s = 0.0
        self._patience_s = self.times.lost_s
        self._found_s = 0.0
        self._loop = asyncio.get_running_loop()

    async def start(self, patience_s: float) -> bool:
        """Connect to the scheduler; return False if it was not found within ``patience_s`` seconds
        (attempts continue). Errors of this first connection are raised, later ones logged."""
        self._new_line()
        self._go_alone()
        self._ticker = asyncio.create_task(self._tick())
        try:
            async with asyncio.timeout(patience_s):
                await self._welcome.wait()
        except TimeoutError:
            logger.error(
                "no scheduler after %g s; refusing requests until one is available", patience_s
            )
            return False
        return True

    # Reports of the relay (Dispatcher) --------------------------------------------------------

    def _report(self, event: messages.OfRequests) -> None:
        if self.pump is not None:
            self.pump.submit(event)
        elif not self.send_message(event):
            # It was not accepted, but the next session submits it again.
            self._lose("it accepts no messages")

    def send_message(self, message: messages.ToScheduler) -> bool:
        """Send a message; return False if there is no scheduler or it accepts no message."""
        return self.connected and self._line is not None and self._line.send_message(message)

    async def ask(self, question: messages.Question) -> messages.Done:
        """Send a question to the scheduler, and return its answer. Raises: RouterError, 503, no
        scheduler, or no response in time; ValueError, the scheduler's reason for refusing."""
        done = await self._calls.ask(self.send_message, question, self.times.call_s)
        if done is None:
            raise no_scheduler()
        if done.error:
            raise ValueError(done.error)
        return done

    # Connected and alone ----------------------------------------------------------------------

    def _lose(self, why: str) -> None:
        if not self.connected:
            return
        text = "lost the scheduler (%s): placing requests at once, %d waiting"
        logger.warning(text, why, self.waiting)
        self._line_is_over = True
        self._go_alone()

    def _go_alone(self) -> None:
        """Switch to the fallback; every call in progress gets a 503. Never raises."""
        self.connected = self._reported_alone = False
        self.times_alone += 1
        self._welcome.clear()
        self._calls.give_up()
        self._do_without()

    def _do_without(self) -> None:
        """Create the fallback and a new connection, and report the loss, as far as not done yet.
        Never raises: a failed step (for example, no free descriptors) is repeated at the next
        heartbeat and does not delay the others."""
        steps = {
            self._place_alone: self.pump is None,
            self._new_line: self._line is None or self._line_is_over,
            self._report_alone: not self._reported_alone,
        }
        failed = False
        for step in [step for step, is_left in steps.items() if is_left]:
            try:
                step()
            except Exception as error:
                failed = True
                if repr(error) not in self._failures:
                    logger.exception("switching to the fallback: a step failed, retrying")
                self._failures.add(repr(error))
        if not failed:
            self._failures.clear()

    def _place_alone(self) -> None:
        """Create the fallback and submit to it all usable workers, the dispatched requests with
        their placement, and the waiting requests."""
        self.pump = pump = driver.SchedulerPump(
            self.fallback(), decided=self._on_decided, failed=self._fail, counts=self.counts
        )
        pump.timelines.ended = self.over
        try:
            known = chain[Event](self.registry.announcements(), self._placed())
            for event in chain[Event](known, self._undecided()):
                pump.submit(event)
        except BaseException:
            self._leave_pump()  # the next one gets everything again
            raise

    def _undecided(self) -> Iterator[RequestArrived]:
        """Yield the arrivals of requests without a decision. Each request is checked when its turn
        comes, because submitting one may decide others."""
        for request in list(self._requests.values()):
            if not request.decision.done():
                yield request.arrival

    def _placed(self) -> list[RequestAdopted]:
        """Return the dispatched requests in flight, for a scheduler that did not place them."""
        return [
            RequestAdopted(
                rid=rid,
                prompt_tokens=request.arrival.prompt_tokens,
                max_new_tokens=request.arrival.max_new_tokens,
                prefill=placed.prefill,
                prefill_rank=placed.prefill_rank,
                decode=placed.decode,
                decode_rank=placed.decode_rank,
                prefilled=request.prefilled,
            )
            for rid, request in self._requests.items()
            if (placed := request.dispatch) is not None
        ]

    def _leave_pump(self) -> None:
        pump, self.pump = self.pump, None
        if pump is not None:
            self._errors += pump.errors
            pump.close()

    def _report_alone(self) -> None:
        if self.pump is not None:  # listeners read it
            self.alone_changed(True)
            self._reported_alone = True

    def _welcomed(self, welcome: messages.Welcome) -> None:
        if self.connected:
            return
        try:
            self._join(welcome)
        except Exception:
            logger.exception("could not answer the scheduler's welcome")
            self._lose("it did not receive everything")
        if self.connected:
            self._welcome.set()
            self.alone_changed(False)

    def _join(self, welcome: messages.Welcome) -> None:
        """Switch from the fallback to the scheduler and submit all requests to it. If the scheduler
        is lost meanwhile, the fallback is back in use on return."""
        if not OLDEST <= welcome.version <= VERSION:
            logger.error("the scheduler uses version %d: run the same release", welcome.version)
            return
        if self.choice.boot_id == welcome.scheduler:
            self._patience_s = min(2 * self._patience_s, self.times.longest_lost_s)
        else:
            self._patience_s = self.times.lost_s
        found = self.choice.found(welcome)
        self._found_s = self._loop.time()
        self.connected = True
        self._failures.clear()
        self._leave_pump()
        self.registry.follow(welcome.workers)
        self.policy.follow(welcome.policy)
        placed = self._placed()
        for first in range(0, len(placed), MAX_ADOPTED):
            self.send_message(messages.Adopted(requests=placed[first : first + MAX_ADOPTED]))
        for arrival in self._undecided():
            self._report(arrival)
        if not self.connected:
            return
        logger.info(
            "connected to %s scheduler (%s, term %d); submitted %s in flight",
            *(found, self.choice.target, self.choice.term),
            counted(len(placed), "request"),
        )

    def _new_line(self) -> None:
        """Replace the connection by a new one. An error is raised, and leaves no connection."""
        # Close the old line first, because the new one needs its descriptors.
        before, self._line, self._line_is_over = self._line, None, False
        if before is not None:
            before.close()
        self._line = self.choice.connect(self._received)

    def _connect_anew(self, why: str) -> None:
        self._line_is_over = True
        self._lose(why)

    async def _tick(self) -> None:
        last_s = self._loop.time()
        while True:
            await asyncio.sleep(self.times.beat_s)
            now_s = self._loop.time()
            stalled, last_s = now_s - last_s > self.times.stalled_s, now_s
            try:
                self._beat(now_s, stalled=stalled)
            except Exception:
                logger.exception("heartbeat failed")
                self._connect_anew("the line to it failed")

    def _beat(self, now_s: float, *, stalled: bool) -> None:
        if self._line is not None:
            self._line.drain()
        if why := self.choice.look(served=self.connected):
            self._connect_anew(why)
        if not self.connected:
            self._do_without()
        if self._line is None:
            return
        if not self.connected:
            hello = messages.Hello(
                version=VERSION,
                front_end=self._id,
                name=self.name,
                scheduler=self.choice.boot_id,
                workers=states_of(self.registry),
                oldest=OLDEST,
                release=__version__,
                term=self.choice.term,
                last_term=self.choice.last_term,
                policy=self.policy.state,
            )
            self._line.send_message(hello)
        elif stalled:
            self._last_message_s = now_s
        elif now_s - self._last_message_s > self._patience_s:
            self._lose(f"silent for {now_s - self._last_message_s:.1f} s")
        elif not self._line.send_message(messages.Alive()):
            self._lose("it accepts no messages")
        elif now_s - self._found_s > self.times.forgiven_s:
            self._patience_s = self.times.lost_s

    def _received(self, message: messages.FromScheduler) -> None:
        self._last_message_s = self._loop.time()
        if not isinstance(message, messages.Unwelcome):
            if 0 < message.term < self.choice.term:
                self.fenced += 1
                self._lose(f"it was replaced: term {message.term}, not {self.choice.term}")
                return
            self.choice.term = max(self.choice.term, message.term)
        match message:
            case messages.Welcome():
                self._welcomed(message)
            case messages.Unwelcome() if message.standby:
                self._lose(f"it is a standby of {message.active or 'another one'}")
                self.choice.turned_away()
            case messages.Unwelcome():
                if message.reason and message.reason != self._refusal:
                    self._refusal = message.reason
                    logger.error("the scheduler refuses this front end: %s", message.reason)
                elif not message.reason:
                    self._lose("it does not know this front end: it was restarted")
            case messages.Done():
                self._calls.answered(message.call, message)
            case messages.AskMetrics():
                self.send_message(messages.MetricsPage(call=message.call, text=self.metrics_page()))
            case messages.Abort():
                self.send_message(
                    messages.Aborted(call=message.call, count=self.abort(message.rid))
                )
            case messages.FindStory():
                story = self.find(message.name)
                payload = b"" if story is None else msgspec.json.encode(story)
                self.send_message(messages.FoundStory(call=message.call, payload=payload))
            case _ if not self.connected:
                pass
            case messages.Decisions():
                for command in message.commands:
                    self._on_decided(command)
            case messages.Cluster():
                self.registry.follow(message.workers)
                self.policy.follow(message.policy)
                self.choice.on_cluster(message)
                if message.snapshot is not None:
                    self._snapshot = message.snapshot
            case messages.DashboardFrame():
                self.dashboard_frame(message.payload, message.full)
            case messages.Silenced():
                if worker := self.registry.get(message.worker):
                    self.registry.silenced(worker)

    # Views and end ----------------------------------------------------------------------------

    def snapshot(self) -> Any:
        """Return the last known state of the scheduler process, or the fallback's if in use."""
        return self._snapshot if self.pump is None else super().snapshot()

    def lead(self) -> LeadView:
        return self.choice.view(self.times_alone - 1, connected=self.connected)

    def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self.send_message(messages.Bye())
        self.connected = False
        super().close()
        if self._line is not None:
            self._line.close(linger_ms=_LAST_WORDS_MS)
            self._line = None
        self.choice.close()
