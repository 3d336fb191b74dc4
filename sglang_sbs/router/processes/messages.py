"""Messages between front end and scheduler process, wire v1.

Events and commands of requests are the scheduler's own (``scheduling.events``).

One message is two ZMQ frames: ``TOPIC`` and a tagged msgpack map. Compatibility rule: fields are
only ever appended, each with a default; unknown fields are ignored, unknown tags are malformed.
Other changes raise ``VERSION``. Each side supports ``OLDEST`` to ``VERSION``, so that front ends
and schedulers can be upgraded one by one. Messages hold absolute values, except for events of
requests, and those are submitted again (:class:`Hello`, :class:`Adopted`) whenever one may have
been lost.

Every message of a scheduler carries its **term**. Terms only rise, and each has one scheduler: a
message with an earlier term than the latest known one is from a scheduler that was replaced."""

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
"""Limit on requests in one :class:`Adopted`; further ones follow in more such messages."""


Term = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _WireMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    pass


class _Said(_WireMessage, frozen=True, kw_only=True):
    """Base of the messages that a scheduler sends."""

    term: Term = 0
    """Term of the sender; 0 from a release without terms."""


class _Call(_WireMessage, frozen=True, kw_only=True):
    """Base of the messages that the scheduler must answer; the answer repeats ``call``."""

    call: int = 0
    """Number given by the sender and repeated in the response."""


class WorkerState(WorkerFacts, kw_only=True):
    """One engine instance as the scheduler process sees it."""

    info: Any = None
    """A :class:`WorkerInfo`, decoded worker by worker: if one from a later release cannot be read,
    the other workers still can."""
    breaker: BreakerState = "closed"
    active: int = 0
    """Prefill and decode requests in flight from all front ends."""
    report_age_s: float | None = None
    """Seconds since the worker's last EndForward; ``None``: none was received."""
    reports: int = 0


# Front end to scheduler -----------------------------------------------------------------------


class Hello(_WireMessage, frozen=True):
    """Requests a session with a scheduler; repeated until :class:`Welcome`."""

    version: int
    """Latest version of these messages that the front end supports."""
    front_end: str
    """Id of the front end process: a later session replaces its earlier one."""
    name: str
    """Name of the front end for logs."""
    scheduler: str = ""
    """Boot id of the scheduler that ``workers`` is from; empty: none yet."""
    workers: list[WorkerState] = []
    oldest: int = 0
    """Earliest version that the front end supports; 0: only ``version``."""
    release: str = ""
    """Release of sglang-sbs, for logs."""
    term: Term = 0
    """Highest term the front end knows; a scheduler active in an earlier one becomes a standby."""
    last_term: Term = 0
    """Term in which ``scheduler`` was active."""
    policy: PolicyState | None = None
    """Policy in force as far as the front end knows; a new scheduler continues with it."""


class Look(_WireMessage, frozen=True):
    """Asks for a scheduler's state; answered by :class:`Standing`. It needs no session."""

    who: Annotated[str, msgspec.Meta(max_length=512)]
    """Sender: name of the front end, or address of another scheduler."""
    term: Term = 0
    """Highest term that the sender knows (:attr:`Hello.term`)."""
    served: bool = False
    """True if the sender is a front end that has a session, with any scheduler."""


class Alive(_Said, frozen=True):
    """Heartbeat in both directions."""


class Adopted(_WireMessage, frozen=True):
    """Dispatched requests that the front end has in flight, sent after a :class:`Welcome`."""

    requests: Annotated[list[events.RequestAdopted], msgspec.Meta(max_length=MAX_ADOPTED)]


class LegFailed(_WireMessage, frozen=True):
    """Reports that a prefill or decode request failed through the worker's fault. The fields are
    those of :class:`~sglang_sbs.router.errors.LegFailure`."""

    worker: str
    leg: InstanceRole
    status: int
    code: str
    message: str
    transport: bool = False
    unreachable: bool = False
    left_room: bool = False
    """True if nothing failed (status 0), but a refused request may have left a bootstrap room."""


class AddWorker(_Call, frozen=True, kw_only=True):
    """Forwards ``POST /workers``; answered by :class:`Done`."""

    url: str
    role: InstanceRole
    bootstrap_port: int | None = None


class RemoveWorker(_Call, frozen=True, kw_only=True):
    """Forwards ``DELETE /workers/{id}``; answered by :class:`Done`."""

    worker_id: str


class UpdateWorker(_Call, frozen=True, kw_only=True):
    """Forwards ``PUT /workers/{id}``, completed with the current value of each field that the
    client left out; answered by :class:`Done`."""

    worker_id: str
    priority: int
    cost: float
    labels: dict[str, str]


class DrainWorker(_Call, frozen=True, kw_only=True):
    """Forwards ``POST /workers/{id}/drain`` or ``undrain``; answered by :class:`Done`."""

    worker_id: str
    draining: bool


class SwitchPolicy(_Call, frozen=True, kw_only=True):
    """Forwards ``PUT /policy``; answered by :class:`Cluster` (new policy), then :class:`Done`."""

    policy: str


class AskTrial(_Call, frozen=True, kw_only=True):
    """Forwards ``GET``, ``POST`` or ``DELETE /trial``; answered by :class:`Done` (``payload``)."""

    do: Annotated[str, msgspec.Meta(max_length=16)] = "show"
    """``begin``, ``end`` or ``show``."""
    body: Annotated[bytes, msgspec.Meta(max_length=65_536)] = b"{}"
    """JSON object of ``POST /trial``."""


class AbortElsewhere(_Call, frozen=True):
    """Forwards ``POST /abort_request`` to all other front ends; answered by :class:`Done` with
    the ``count`` of requests aborted."""

    rid: str = ""
    """Id of the request as the client gave it; empty: all requests."""


class AskStory(_Call, frozen=True):
    """Forwards ``GET /requests/{id}``; answered by :class:`Done` with a ``payload``."""

    name: Annotated[str, msgspec.Meta(max_length=512)] = ""
    rids: Annotated[list[str], msgspec.Meta(max_length=64)] = []
    """Ids of the request's attempts; empty: another front end may have received the request."""


class FoundStory(_WireMessage, frozen=True):
    """Answers :class:`FindStory` with the front end's record of a request."""

    call: int
    payload: bytes = b""
    """A :class:`~sglang_sbs.scheduling.explained.stories.Story` as JSON; empty if unknown."""


Change = AddWorker | RemoveWorker | UpdateWorker | DrainWorker
"""Messages that change the set of workers or one of them."""
Question = Change | SwitchPolicy | AskTrial | AbortElsewhere | AskStory


class Aborted(_WireMessage, frozen=True):
    """Answers :class:`Abort` with the number of requests aborted."""

    call: int
    count: int


class MetricsPage(_WireMessage, frozen=True):
    """Answers :class:`AskMetrics` with the front end's metrics in Prometheus text format."""

    call: int
    text: str


class WatchDashboard(_WireMessage, frozen=True):
    """Starts (``history``) or ends (``ended``) the sending of :class:`DashboardFrame`. With neither
    set it has no effect (earlier front ends send that every half second)."""

    history: bool = False
    """Start, or start over, with a complete frame for a new watcher."""
    ended: bool = False
    """Stop, because the last watcher left."""


class Bye(_WireMessage, frozen=True):
    """Ends the session: the front end shuts down and has nothing in flight."""


_OfSessions = Hello | Look | Alive | Adopted | Bye
OfRequests = events.RequestArrived | events.PrefillDone | events.RequestEnded | events.BlocksCleared
_Others = Question | LegFailed | Aborted | MetricsPage | WatchDashboard | FoundStory
ToScheduler = _OfSessions | OfRequests | _Others


# Scheduler to front end -----------------------------------------------------------------------


class Welcome(_Said, frozen=True):
    """Answers :class:`Hello`: the session is open, and the front end may send requests' events."""

    scheduler: str
    """Boot id, new at every start of the scheduler process."""
    workers: list[WorkerState]
    version: int = 1
    """Version of these messages that both sides use from now on."""
    release: str = ""
    policy: PolicyState | None = None
    """Policy in force."""


class Standing(_Said, frozen=True):
    """Answers :class:`Look`. ``term``: the own term if ``active``, otherwise the highest known."""

    active: bool = False
    """The scheduler is active, in ``term``."""
    ready: bool = False
    """The scheduler has checked its workers and can become active."""


class Unwelcome(_Said, frozen=True):
    """Refuses the session: send :class:`Hello` again, or stop if there is a ``reason``."""

    reason: str = ""
    standby: bool = False
    """The scheduler is not active: send :class:`Hello` to another."""
    active: str = ""
    """Address of the active scheduler, if the standby knows it; otherwise empty."""


class Cluster(_Said, frozen=True):
    """State of all workers and the policy; sent on every change and once a second."""

    workers: list[WorkerState]
    snapshot: Snapshot | None = None
    lead_s: float = 0.0
    """Seconds since this scheduler became active."""
    address: str = ""
    """Address at which front ends reach this scheduler."""
    policy: PolicyState | None = None
    """Policy in force."""


class Silenced(_Said, frozen=True):
    """Reports that a worker no longer responds or has restarted: its requests are lost."""

    worker: str


class Decisions(_Said, frozen=True):
    """Decisions for the front end's requests; those of one batch stay together and in order."""

    commands: list[events.Dispatch | events.Refuse]


class Abort(_Said, frozen=True):
    """Asks a front end to abort clients' requests, for an :class:`AbortElsewhere` of another;
    answered by :class:`Aborted`."""

    call: int = 0
    rid: str = ""


class Done(_Said, frozen=True):
    """Answers a front end's message with the same ``call``. ``error``: why it was refused."""

    call: int
    worker_id: str = ""
    count: int = 0
    error: str = ""
    payload: bytes = b""
    """JSON: for :class:`AskStory` a :class:`~sglang_sbs.scheduling.explained.stories.Story`, for
    :class:`AskTrial` a :class:`~sglang_sbs.trial.report.TrialReport`."""


class AskMetrics(_Said, frozen=True):
    """Asks a front end for its :class:`MetricsPage`."""

    call: int = 0


class FindStory(_Said, frozen=True):
    """Asks a front end for its record of a request that another front end was asked about
    (:class:`AskStory`); answered by :class:`FoundStory`."""

    call: int = 0
    name: str = ""


class DashboardFrame(_Said, frozen=True):
    """One update of the dashboard, sent after :class:`WatchDashboard`."""

    payload: bytes
    """JSON as sent to the dashboard's clients."""
    full: bool = False
    """True for a complete frame, which only new watchers need."""


_Asked = Abort | AskMetrics | FindStory
_News = Cluster | Silenced | Decisions | DashboardFrame
FromScheduler = Welcome | Standing | Unwelcome | Alive | Done | _Asked | _News


_encoder = msgspec.msgpack.Encoder()
_to_scheduler = msgspec.msgpack.Decoder(ToScheduler)
_story = msgspec.json.Decoder(Story)
_from_scheduler = msgspec.msgpack.Decoder(FromScheduler)


def encode(message: ToScheduler | FromScheduler) -> list[bytes]:
    """Encode one message as its two frames."""
    return [TOPIC, _encoder.encode(message)]


def decode_to_scheduler(frames: Sequence[bytes]) -> ToScheduler:
    """Decode a message of a front end. Raises: MalformedMessage, wrong topic, frame count or types,
    or implausible numbers."""
    message: ToScheduler = _decode(_to_scheduler, frames)
    if isinstance(message, events.RequestArrived) and message.deadline_s is not None:
        raise MalformedMessage("deadline_s is a time of the sender's clock")
    return message


def decode_from_scheduler(frames: Sequence[bytes]) -> FromScheduler:
    """Decode a message of the scheduler. Raises: MalformedMessage, wrong topic, frame count or
    types."""
    message: FromScheduler = _decode(_from_scheduler, frames)
    return message


def read_story(payload: bytes) -> Story | None:
    """Decode the JSON of a :class:`Story`; ``None`` if it is empty or another release's format."""
    try:
        return _story.decode(payload) if payload else None
    except (msgspec.DecodeError, RecursionError):
        return None


def spoken(hello: Hello) -> int | None:
    """Return the latest message version that both sides support; ``None`` if there is none."""
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
