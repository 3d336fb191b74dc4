"""The scheduler process's sessions with its front ends, and their requests.

The hub knows which front end a request belongs to, so that it can route decisions and end the
requests of a front end that dies.

Theory of operation
-------------------
A session begins with a :class:`Hello` answered by :class:`Welcome`. No :class:`Welcome` is sent
before the workers have been checked (``settled``): a scheduler that just started would refuse
requests that its front ends can still place themselves. A session ends with :class:`Bye`, with a
later session of the same front end, or after ``times.silent_s`` without a message. Its requests
then end as aborted, exactly once, like everything else in ``_owners``. A message of an unknown
session is answered with :class:`Unwelcome`.

Only the active scheduler has sessions. When its lead ends, all sessions end and the accounting is
empty until the next lead: front ends submit their requests in flight to the next active
scheduler. A standby receives all engine reports, so its view of the engines is current."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from sglang_sbs import __version__
from sglang_sbs.console.plain_words import counted
from sglang_sbs.dashboard.feed import Stop, Take
from sglang_sbs.router.dispatch import scheduler_driver as driver
from sglang_sbs.router.dispatch.decision_times import Spread
from sglang_sbs.router.errors import LegFailure
from sglang_sbs.router.policy_in_force import PolicyInForce
from sglang_sbs.router.processes import messages
from sglang_sbs.router.processes.calls import Calls
from sglang_sbs.router.processes.leading.lead import Lead
from sglang_sbs.router.processes.membership import Placed, SessionMembership
from sglang_sbs.router.processes.messages import VERSION, Hello, spoken
from sglang_sbs.router.processes.mirrored_registry import states_of
from sglang_sbs.router.processes.session_times import SessionTimes
from sglang_sbs.router.processes.summed_metrics import FrontEndPages
from sglang_sbs.router.trials import Trials
from sglang_sbs.router.workers.kubernetes_pods import Members
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling import events
from sglang_sbs.scheduling.events import Dispatch, Event, Refuse, RequestEnded
from sglang_sbs.scheduling.explained.stories import Story
from sglang_sbs.scheduling.policy_registry import spec_of
from sglang_sbs.scheduling.snapshot import Snapshot

logger = logging.getLogger(__name__)

_Answer = messages.MetricsPage | messages.Aborted | messages.FoundStory


@dataclass(slots=True, eq=False)
class _Session:
    identity: bytes
    front_end: str
    name: str
    last_message_s: float
    requests: dict[str, Placed] = field(default_factory=dict)
    outbox: list[Dispatch | Refuse] = field(default_factory=list)
    stop_frames: Stop = lambda: None
    """Stops the session's dashboard frames."""


class Hub:
    """Passes messages between the scheduler and the sessions of front ends, and ends the requests
    of lost sessions. Use only from one event loop."""

    def __init__(
        self,
        members: Members,
        send: Callable[[bytes, messages.FromScheduler], bool],
        scheduler: driver.SchedulerLike,
        lead: Lead,
        *,
        policy: PolicyInForce | None = None,
        counts: Callable[[driver.Decision], None] | None = None,
        times: SessionTimes | None = None,
    ) -> None:
        self.boot_id = uuid.uuid4().hex
        self.pump = driver.SchedulerPump(scheduler, self.on_decided, self.failed, counts)
        self.policy = policy or PolicyInForce("sbs")
        self.policy.listeners.append(
            lambda policy: self.pump.submit(events.PolicySwitched(policy=policy))
        )
        self.frames: Callable[[Take], Stop] = lambda take: lambda: None
        """Starts to send dashboard frames to a callback; returns a function that stops it."""
        self._times = times or SessionTimes()
        self.foreign = 0
        """Number of messages about requests of another session; a defect in a front end."""
        self.lag = Spread()
        """Histogram of how late the event loop ran each heartbeat, in seconds."""
        self._registry = members.registry
        self._send = send
        self._sessions: dict[bytes, _Session] = {}
        self._owners: dict[str, _Session] = {}
        self._pages = FrontEndPages(members.registry.get)
        self._asked: Calls[_Answer] = Calls()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flushing = False
        self._loop = asyncio.get_running_loop()
        self._ticked_s = self._loop.time()
        self._published_s = 0.0
        self.stands = (
            True  # standing for election; until then this scheduler also reports not ready
        )
        self.membership = SessionMembership(members, self._ticked_s)
        self._lead = lead
        self.trials = Trials(
            self.policy,
            self.pump,
            leads=lambda: lead.active,
            term=lambda: lead.term,
            switched=self._publish_now,
        )
        self._ticker = asyncio.create_task(self._tick())

    # The lead ---------------------------------------------------------------------------------

    def lead(self, term: int) -> None:
        self._lead.begin(term, self._loop.time())
        logger.info("this process is now the active scheduler: term %d", term)

    def follow(self) -> None:
        """Become a standby: end all sessions and drop their requests, which front ends submit to
        the next active scheduler."""
        logger.warning("this process is no longer active; it is a standby")
        self.trials.close()
        sessions, self._sessions = self._sessions.values(), {}
        for session in sessions:
            self.send_message(session.identity, self._lead.turned_away())
        self._abort(*sessions)
        self._pages.clear()  # the next active scheduler requests them

    # From outside -----------------------------------------------------------------------------

    @property
    def front_ends(self) -> int:
        return len(self._sessions)

    @property
    def requests(self) -> int:
        """Number of requests that front ends have submitted and that have not ended."""
        return len(self._owners)

    @property
    def settled(self) -> bool:
        return self.membership.settled(self._loop.time())

    def workers_changed(self) -> None:
        """Send all workers to the front ends at the next turn of the event loop."""
        self._published_s = 0.0
        self._flush_soon()

    def find_owner(self, rid: str, role: str) -> str | None:
        """Return the URL of the engine that has the prefill or decode request (``role``) of
        ``rid``, if any. EndForward of an unknown boot id that names ``rid`` is from that engine."""
        session = self._owners.get(rid)
        placed = session.requests[rid] if session is not None else Placed()
        return (placed.prefill if role == "prefill" else placed.decode) or None

    async def metrics_pages(self) -> list[str]:
        """Return the metrics page of every front end (its last known one if it does not respond in
        time), and those with the counters of former front ends."""
        asked = (self._ask(session, messages.AskMetrics()) for session in self._sessions.values())
        for session, answer in await asyncio.gather(*asked):
            is_here = self._sessions.get(session.identity) is session
            if isinstance(answer, messages.MetricsPage) and is_here:
                self._pages.put(session.front_end, answer.text)
        return self._pages.pages()

    async def _ask(
        self, session: _Session, question: messages.AskMetrics | messages.Abort | messages.FindStory
    ) -> tuple[_Session, _Answer | None]:
        """Ask one front end; return its session and the answer, ``None`` if none came in time."""
        send = partial(self.send_message, session.identity)
        answer = await self._asked.ask(send, question, self._times.answer_s)
        if answer is None:
            logger.warning("front end %s does not respond", session.name)
        return session, answer

    def close(self) -> None:
        self.trials.close()
        for task in (self._ticker, *self._tasks):
            task.cancel()

    # Messages ---------------------------------------------------------------------------------

    def receive(self, identity: bytes, message: messages.ToScheduler) -> None:
        session = self._sessions.get(identity)
        if isinstance(message, messages.Look):
            self.send_message(
                identity, self._lead.looked(message, ready=self.settled and self.stands)
            )
        elif isinstance(message, Hello):
            self._hello(identity, message)
        elif session is None:
            unknown = messages.Unwelcome() if self._lead.active else self._lead.turned_away()
            self.send_message(identity, unknown)
        else:
            self._on_message(session, message)

    def _on_message(self, session: _Session, message: messages.ToScheduler) -> None:
        identity = session.identity
        session.last_message_s = self._loop.time()
        match message:
            case events.RequestArrived():
                self._enter(session, message.rid, Placed(), message)
            case events.PrefillDone():
                self._prefill_done(session, message)
            case RequestEnded():
                self._on_ended(session, message)
            case messages.Adopted():
                for request in message.requests:
                    self._adopt(session, request)
            case messages.LegFailed(left_room=True):
                self._registry.room_left(message.worker)
            case messages.LegFailed():
                failure = msgspec.structs.asdict(message)
                del failure["left_room"]
                self._registry.leg_failed(LegFailure(**failure))
            case message if isinstance(message, messages.Change):
                self.send_message(identity, self._change(message))
            case messages.SwitchPolicy():
                self.send_message(identity, self._switch(session, message))
            case messages.AskTrial():
                self.send_message(identity, self._ask_trial(message))
            case messages.AbortElsewhere():
                self._in_background(self._abort_elsewhere(session, message))
            case messages.AskStory():
                self._in_background(self._send_story(session, message))
            case messages.MetricsPage() | messages.Aborted() | messages.FoundStory():
                self._asked.answered(message.call, message)
            case events.BlocksCleared():
                self.pump.submit(message)
            case messages.WatchDashboard() if message.history or message.ended:
                self._send_frames(session, wanted=message.history)
            case messages.Bye():
                self._end_session(session, "it shut down")

    def _send_frames(self, session: _Session, *, wanted: bool) -> None:
        def take(payload: bytes, full: bool) -> None:
            self.send_message(session.identity, messages.DashboardFrame(payload=payload, full=full))

        session.stop_frames()
        session.stop_frames = self.frames(take) if wanted else lambda: None

    def _hello(self, identity: bytes, hello: Hello) -> None:
        version = spoken(hello)
        if version is None:
            spoken_here = f"it uses version {hello.version}, this scheduler {VERSION}"
            reason = f"{spoken_here}: run the same sglang-sbs on both"
            self.send_message(identity, messages.Unwelcome(reason=reason))
            return
        self._lead.deposed_by(hello, self.boot_id)
        if not self._lead.active:
            self.send_message(identity, self._lead.turned_away())
            return
        now_s = self._loop.time()
        if self.policy.inherit(hello.policy, self._lead.term):
            self.trials.inherited()
        if hello.scheduler not in ("", self.boot_id):
            self.membership.inherit(hello, now_s)
        if identity not in self._sessions and self.settled:
            session = _Session(identity, hello.front_end, hello.name, now_s)
            before, self._sessions[identity] = list(self._sessions.values()), session
            self._pages.joined(session.front_end)
            for earlier in before:
                if earlier.front_end == session.front_end:
                    self._end_session(earlier, "started over")
            welcome = messages.Welcome(
                scheduler=self.boot_id,
                workers=states_of(self._registry),
                version=version,
                release=__version__,
                policy=self.policy.state,
            )
            self.send_message(identity, welcome)
            logger.info("front end %s connected; %d now", session.name, self.front_ends)

    async def _abort_elsewhere(self, session: _Session, message: messages.AbortElsewhere) -> None:
        question = messages.Abort(rid=message.rid)
        others = (other for other in self._sessions.values() if other is not session)
        answers = await asyncio.gather(*(self._ask(other, question) for other in others))
        count = sum(answer.count for _, answer in answers if isinstance(answer, messages.Aborted))
        self.send_message(session.identity, messages.Done(call=message.call, count=count))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_story(self, session: _Session, message: messages.AskStory) -> None:
        """Answer :class:`~.messages.AskStory` with the scheduler's record of a request. If the
        asking front end does not know the request, ask all others and include their record."""
        story = Story(attempts=self.pump.attempts(message.rids or [message.name]))
        if not message.rids:
            question = messages.FindStory(name=message.name)
            others = (other for other in self._sessions.values() if other is not session)
            for _, answer in await asyncio.gather(
                *(self._ask(other, question) for other in others)
            ):
                if isinstance(answer, messages.FoundStory):
                    found = messages.read_story(answer.payload)
                    if found is not None:
                        found.attempts = self.pump.attempts([attempt.rid for attempt in found.sent])
                        story = found
        known = bool(story.attempts or story.sent)
        payload = msgspec.json.encode(story) if known else b""
        self.send_message(session.identity, messages.Done(call=message.call, payload=payload))

    def _change(self, message: messages.Change) -> messages.Done:
        try:
            worker = self.membership.change(message, self._lead.term)
        except ValueError as error:
            return messages.Done(call=message.call, error=str(error))
        self._publish_now()
        return messages.Done(call=message.call, worker_id=worker.id)

    def _switch(self, session: _Session, message: messages.SwitchPolicy) -> messages.Done:
        if spec_of(message.policy) is None:
            return messages.Done(call=message.call, error=f"unknown policy {message.policy}")
        self.policy.switch(message.policy, session.name, self._lead.term)
        self._publish_now()
        return messages.Done(call=message.call)

    def _ask_trial(self, message: messages.AskTrial) -> messages.Done:
        try:
            shown = self.trials.ask(message.do, msgspec.json.decode(message.body, type=dict))
        except ValueError as error:
            return messages.Done(call=message.call, error=str(error))
        return messages.Done(call=message.call, payload=msgspec.json.encode(shown))

    def _publish_now(self) -> None:
        """Send the changed workers or policy to all front ends. The answer to the client's change
        is sent afterwards, so that the client's next query already shows the change."""
        self._published_s = 0.0
        self._flush()

    # Requests ---------------------------------------------------------------------------------

    def _enter(self, session: _Session, rid: str, placed: Placed, event: Event) -> None:
        if rid in self._owners:
            self.foreign += 1
            return
        self._owners[rid] = session
        session.requests[rid] = placed
        self.pump.submit(event)

    def _adopt(self, session: _Session, request: events.RequestAdopted) -> None:
        placed = Placed(request.prefill, request.decode, not request.prefilled)
        if request.rid not in self._owners:
            self.membership.count(placed, 1)
        self._enter(session, request.rid, placed, request)

    def _prefill_done(self, session: _Session, event: events.PrefillDone) -> None:
        placed = session.requests.get(event.rid)
        if placed is None:
            self.foreign += 1
            return
        self.membership.prefill_over(placed)
        self.pump.submit(event)

    def _on_ended(self, session: _Session, event: RequestEnded) -> None:
        placed = session.requests.pop(event.rid, None)
        if placed is None:
            return  # refused at the same moment
        del self._owners[event.rid]
        self.membership.count(placed, -1)
        if event.outcome == "completed":
            self._registry.leg_succeeded(placed.prefill)
            self._registry.leg_succeeded(placed.decode)
        self.pump.submit(event)

    def on_decided(self, command: Dispatch | Refuse) -> None:
        session = self._owners.get(command.rid)
        if session is None:
            return  # it ended meanwhile, which was reported
        if isinstance(command, Dispatch):
            self.membership.on_dispatched(session.requests[command.rid], command)
        else:
            del self._owners[command.rid], session.requests[command.rid]
        session.outbox.append(command)
        self._flush_soon()

    def failed(self, rid: str) -> None:
        """Refuse a request whose arrival raised an exception in the scheduler."""
        why = "the scheduler failed on this request; its log has the cause"
        self.on_decided(Refuse(rid=rid, cause="flow_control", retry_after_s=1.0, message=why))
        self.pump.submit(RequestEnded(rid=rid, outcome="failed"))

    # Sending ----------------------------------------------------------------------------------

    def silenced(self, worker: Worker) -> None:
        self._flush()
        self._send_to_all(messages.Silenced(worker=worker.url))

    def send_message(self, identity: bytes, message: messages.FromScheduler) -> bool:
        """Send a message with the current term; return False if the session's socket is gone."""
        return self._send(identity, msgspec.structs.replace(message, term=self._lead.term))

    def _send_to_all(self, message: messages.FromScheduler) -> None:
        for session in list(self._sessions.values()):
            if not self.send_message(session.identity, message):
                self._end_session(session, "its connection is gone")

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _cluster(self, snapshot: Snapshot | None = None) -> messages.Cluster:
        return messages.Cluster(
            workers=states_of(self._registry),
            snapshot=snapshot,
            lead_s=self._loop.time() - self._lead.since_s,
            address=self._lead.address,
            policy=self.policy.state,
        )

    def _flush(self) -> None:
        """Send pending worker changes and decisions to all front ends. Workers go first, because a
        decision may name a new one. A standby sends nothing."""
        self._flushing = False
        if not self._lead.active:
            return  # a standby sends nothing
        if self._published_s == 0.0:
            self._published_s = self._loop.time()
            self._send_to_all(self._cluster())
        for session in list(self._sessions.values()):
            if session.outbox:
                commands, session.outbox = session.outbox, []
                if not self.send_message(session.identity, messages.Decisions(commands=commands)):
                    self._end_session(session, "its connection is gone")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._times.beat_s)
            try:
                self._beat(self._loop.time())
            except Exception:
                logger.exception("heartbeat failed")

    def _beat(self, now_s: float) -> None:
        if not self._lead.active:  # asking may end the lead
            self._ticked_s = now_s
            return
        self.lag.add(max(0.0, now_s - self._ticked_s - self._times.beat_s))
        late_s = max(0.0, now_s - self._ticked_s - 2 * self._times.beat_s)
        self._ticked_s = now_s
        for session in list(self._sessions.values()):
            # Time in which this process was stopped does not count as silence of its front ends.
            session.last_message_s += late_s
            if now_s - session.last_message_s > self._times.silent_s:
                self._end_session(session, f"silent for {now_s - session.last_message_s:.1f} s")
        if now_s - self._published_s >= self._times.cluster_s:
            self._published_s = now_s
            self._send_to_all(self._cluster(self.pump.snapshot()))
        self._send_to_all(messages.Alive())

    def _end_session(self, session: _Session, why: str) -> None:
        del self._sessions[session.identity]
        if any(other.front_end == session.front_end for other in self._sessions.values()):
            logger.info("front end %s %s: it submits its requests again", session.name, why)
        else:
            level = logging.WARNING if session.requests else logging.INFO
            had = counted(len(session.requests), "request")
            logger.log(level, "front end %s is gone (%s) with %s", session.name, why, had)
            self._pages.left(session.front_end)
        self._abort(session)

    def _abort(self, *sessions: _Session) -> None:
        """End all requests of the sessions as aborted. Waiting requests end first, because ending a
        running one would dispatch one of them."""
        owned = [request for session in sessions for request in session.requests.items()]
        for session in sessions:
            session.stop_frames()
            session.requests, session.outbox = {}, []
        for rid, _ in owned:
            del self._owners[rid]
        for rid, placed in sorted(owned, key=lambda request: bool(request[1].prefill)):
            self.membership.count(placed, -1)
            self.pump.submit(RequestEnded(rid=rid, outcome="aborted"))
