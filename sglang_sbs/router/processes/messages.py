"""Front end <-> scheduler process, wire v1.

What is said about requests are the scheduler's own events and commands (``scheduling.events``).

One message is two ZMQ frames: ``TOPIC`` and a tagged msgpack map. Compatibility rule: fields are
only ever appended, each with a default; unknown fields are ignored, unknown tags are malformed.
What cannot be said that way raises ``VERSION``; each side speaks ``OLDEST`` to ``VERSION``, so that
front ends and schedulers can be brought to another release one by one.
Nothing here is a difference to an earlier message except the events of requests, and those are
announced anew (:class:`Hello`, :class:`Adopted`) whenever one may have been lost.

Whatever a scheduler says bears its **term**. Terms only rise, and each has one scheduler: what is
said in an earlier term than the latest one heard of is by a scheduler that was replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from sglang_sbs.router.policy_in_force import PolicyState
from sglang_sbs.router.workers.breaker import BreakerState
from sglang_sbs.router.workers.worker import WorkerFacts
from sglang_sbs.scheduling import events
from sglang_sbs.scheduling.events import InstanceRole
from sglang_sbs.scheduling.explained.stories import Story
from sglang_sbs.scheduling.snapshot import Snapshot
from sglang_sbs.wire.endforward import MalformedMessage

TOPIC = b"sbsf1"
VERSION = 1
OLDEST = 1
MAX_MESSAGE_BYTES = 8 << 20
MAX_ADOPTED = 512
"""Requests in one :class:`Adopted`; more go into further ones."""


Term = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    pass


class _Said(_Message, frozen=True, kw_only=True):
    """By a scheduler."""

    term: Term = 0
    """0: of a release that knows no terms."""


class _Call(_Message, frozen=True, kw_only=True):
    """A question."""

    call: int = 0
    """Its number, given when it is asked, which the answer bears, too."""


class WorkerState(WorkerFacts, kw_only=True):
    """One engine instance as the scheduler process sees it."""

    info: Any = None
    """A :class:`WorkerInfo`, which is read when the worker is: what a later release says of one
    engine makes no whole message malformed."""
    breaker: BreakerState = "closed"
    active: int = 0
    """Legs in flight there, of all front ends."""
    report_age_s: float | None = None
    """Since its last EndForward."""
    reports: int = 0


# Front end to scheduler -----------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """A front end wants to be served; repeated until :class:`Welcome`."""

    version: int
    """The latest that it speaks."""
    front_end: str
    """The same for the life of the front end: a later session of it replaces the earlier one."""
    name: str
    """For people."""
    scheduler: str = ""
    """Boot id of the scheduler that ``workers`` is from; empty: never heard of one."""
    workers: list[WorkerState] = []
    oldest: int = 0
    """The earliest version that it speaks; 0: only ``version``."""
    release: str = ""
    """Of sglang-sbs, for people."""
    term: Term = 0
    """The highest it has heard of: a scheduler of an earlier one is deposed by it."""
    last_term: Term = 0
    """In which ``scheduler`` led."""
    policy: PolicyState | None = None
    """In force, as far as it knows: a scheduler that takes over goes on with it."""


class Look(_Message, frozen=True):
    """Asks a scheduler how it stands; answered by :class:`Standing`. Takes no session."""

    who: Annotated[str, msgspec.Meta(max_length=512)]
    """The front end, or the address of another scheduler."""
    term: Term = 0
    """As in :class:`Hello`."""
    served: bool = False
    """A front end that has a session in that term, with whomever."""


class Alive(_Said, frozen=True):
    """Heartbeat, both ways."""


class Adopted(_Message, frozen=True):
    """Requests this front end has in flight already; follows a :class:`Welcome`."""

    requests: Annotated[list[events.RequestAdopted], msgspec.Meta(max_length=MAX_ADOPTED)]


class LegFailed(_Message, frozen=True):
    """Passive health: a leg failed, and it was the worker's fault. The fields are those of
    :class:`~sglang_sbs.router.errors.LegFailure`."""

    worker: str
    leg: InstanceRole
    status: int
    code: str
    message: str
    transport: bool = False
    unreachable: bool = False
    left_room: bool = False
    """Nobody is blamed (status 0): the refusal may have left a bootstrap room at the worker."""


class AddWorker(_Call, frozen=True, kw_only=True):
    """``POST /workers``; answered by :class:`Done`."""

    url: str
    role: InstanceRole
    bootstrap_port: int | None = None


class RemoveWorker(_Call, frozen=True, kw_only=True):
    """``DELETE /workers/{id}``; answered by :class:`Done`."""

    worker_id: str


class UpdateWorker(_Call, frozen=True, kw_only=True):
    """``PUT /workers/{id}``: all three as they are now; answered by :class:`Done`."""

    worker_id: str
    priority: int
    cost: float
    labels: dict[str, str]


class DrainWorker(_Call, frozen=True, kw_only=True):
    """``POST /workers/{id}/drain`` or ``undrain``; answered by :class:`Done`."""

    worker_id: str
    draining: bool


class SwitchPolicy(_Call, frozen=True, kw_only=True):
    """``PUT /policy``; answered by :class:`Done`, after a :class:`Cluster`."""

    policy: str


class AskTrial(_Call, frozen=True, kw_only=True):
    """``/trial``; answered by :class:`Done` with a payload."""

    do: Annotated[str, msgspec.Meta(max_length=16)] = "show"
    """``begin``, ``end`` or ``show``."""
    body: Annotated[bytes, msgspec.Meta(max_length=65_536)] = b"{}"
    """JSON object of ``POST /trial``."""


class AbortElsewhere(_Call, frozen=True):
    """``POST /abort_request``: it may be another front end's; answered by :class:`Done`."""

    rid: str = ""
    """As its client gave it; empty: all."""


class AskStory(_Call, frozen=True):
    """``GET /requests/{id}``; answered by :class:`Done` with a payload."""

    name: Annotated[str, msgspec.Meta(max_length=512)] = ""
    rids: Annotated[list[str], msgspec.Meta(max_length=64)] = []
    """The attempts that this front end knows of it; empty: the request is not its own."""


class FoundStory(_Message, frozen=True):
    """Answers :class:`FindStory`: what this front end knows of it."""

    call: int
    payload: bytes = b""
    """JSON of a :class:`~sglang_sbs.scheduling.explained.stories.Story`; empty: nothing."""


Change = AddWorker | RemoveWorker | UpdateWorker | DrainWorker
"""Of the workers."""
Question = Change | SwitchPolicy | AskTrial | AbortElsewhere | AskStory


class Aborted(_Message, frozen=True):
    """Answers :class:`Abort`: so many requests of this front end."""

    call: int
    count: int


class MetricsPage(_Message, frozen=True):
    """This front end's metrics in the text format; answers :class:`AskMetrics`."""

    call: int
    text: str


class WatchDashboard(_Message, frozen=True):
    """Somebody looks at the dashboard here: wants a :class:`DashboardFrame` now and again. Neither
    of its fields: it goes on (nothing to do; earlier front ends say so every half second)."""

    history: bool = False
    """Begin (anew) with a frame that has everything: somebody began to look."""
    ended: bool = False
    """Nobody looks any more."""


class Bye(_Message, frozen=True):
    """The front end ends; nothing of it is in flight any more."""


_OfSessions = Hello | Look | Alive | Adopted | Bye
OfRequests = events.RequestArrived | events.PrefillDone | events.RequestEnded | events.BlocksCleared
_Others = Question | LegFailed | Aborted | MetricsPage | WatchDashboard | FoundStory
ToScheduler = _OfSessions | OfRequests | _Others


# Scheduler to front end -----------------------------------------------------------------------


class Welcome(_Said, frozen=True):
    """The session is open; events of requests may be sent from now on."""

    scheduler: str
    """Boot id: new for every start of the scheduler process."""
    workers: list[WorkerState]
    version: int = 1
    """Spoken from now on, by both."""
    release: str = ""
    policy: PolicyState | None = None
    """In force."""


class Standing(_Said, frozen=True):
    """Answers :class:`Look`. The term is the highest it has heard of, unless it is ``active``."""

    active: bool = False
    """It schedules, in that term."""
    ready: bool = False
    """It has looked at the workers."""


class Unwelcome(_Said, frozen=True):
    """No session: say :class:`Hello` (again), or give up when ``reason`` says so."""

    reason: str = ""
    standby: bool = False
    """It does not schedule: say Hello elsewhere."""
    active: str = ""
    """The address of who does, as far as a standby knows."""


class Cluster(_Said, frozen=True):
    """All workers; sent on every change and once a second."""

    workers: list[WorkerState]
    snapshot: Snapshot | None = None
    lead_s: float = 0.0
    """For so long this scheduler has scheduled."""
    address: str = ""
    """Where it says that it can be reached."""
    policy: PolicyState | None = None
    """In force."""


class Silenced(_Said, frozen=True):
    """The worker answers nothing any more, or restarted: what it was doing is lost."""

    worker: str


class Decisions(_Said, frozen=True):
    """Requests of one gang stay together and in order."""

    commands: list[events.Dispatch | events.Refuse]


class Abort(_Said, frozen=True):
    """End requests of clients (see :class:`AbortElsewhere`); answered by :class:`Aborted`."""

    call: int = 0
    rid: str = ""


class Done(_Said, frozen=True):
    """Answers what a front end asked for."""

    call: int
    worker_id: str = ""
    count: int = 0
    error: str = ""
    payload: bytes = b""
    """JSON: for :class:`AskStory` a :class:`~sglang_sbs.scheduling.explained.stories.Story`, for
    :class:`AskTrial` a :class:`~sglang_sbs.trial.report.Report`."""


class AskMetrics(_Said, frozen=True):
    """Wants a :class:`MetricsPage`."""

    call: int = 0


class FindStory(_Said, frozen=True):
    """Wants a :class:`FoundStory`: another front end was asked for a request."""

    call: int = 0
    name: str = ""


class DashboardFrame(_Said, frozen=True):
    """See :class:`WatchDashboard`."""

    payload: bytes
    """JSON, as clients get it."""
    full: bool = False
    """A history: whoever follows already has it."""


_Asked = Abort | AskMetrics | FindStory
_News = Cluster | Silenced | Decisions | DashboardFrame
FromScheduler = Welcome | Standing | Unwelcome | Alive | Done | _Asked | _News


_encoder = msgspec.msgpack.Encoder()
_to_scheduler = msgspec.msgpack.Decoder(ToScheduler)
_story = msgspec.json.Decoder(Story)
_from_scheduler = msgspec.msgpack.Decoder(FromScheduler)


def encode(message: ToScheduler | FromScheduler) -> list[bytes]:
    """The two frames of one message."""
    return [TOPIC, _encoder.encode(message)]


def decode_to_scheduler(frames: Sequence[bytes]) -> ToScheduler:
    """Parse what a front end sent. Raises: MalformedMessage, wrong topic, frame count or types, or
    numbers no front end can mean."""
    message: ToScheduler = _decode(_to_scheduler, frames)
    if isinstance(message, events.RequestArrived) and message.deadline_s is not None:
        raise MalformedMessage("deadline_s is a time of the sender's clock")
    return message


def decode_from_scheduler(frames: Sequence[bytes]) -> FromScheduler:
    """Parse what the scheduler sent. Raises: MalformedMessage."""
    message: FromScheduler = _decode(_from_scheduler, frames)
    return message


def read_story(payload: bytes) -> Story | None:
    """None: there is none, or it is of a release that writes it differently."""
    try:
        return _story.decode(payload) if payload else None
    except (msgspec.DecodeError, RecursionError):
        return None


def spoken(hello: Hello) -> int | None:
    """The version to speak with this front end; ``None``: there is none that both do."""
    latest = min(hello.version, VERSION)
    return latest if latest >= max(hello.oldest or hello.version, OLDEST) else None


def _decode(decoder: msgspec.msgpack.Decoder[Any], frames: Sequence[bytes]) -> Any:
    if len(frames) != 2 or frames[0] != TOPIC:
        raise MalformedMessage(f"expected 2 frames starting with {TOPIC!r}")
    if len(frames[1]) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"{len(frames[1])} bytes")
    try:
        return decoder.decode(frames[1])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error
