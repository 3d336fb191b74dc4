"""The scheduler's interface: events in, commands out.

Times are seconds of the driver's monotonic clock; every event reaches :meth:`Scheduler.handle` with
the driver's ``now_s``. All are tagged msgspec structs, so an event log contains the events
themselves."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sglang_sbs.scheduling.policy_registry import Policy
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.gangs import GangPart

MAX_BLOCKS = 65_536
MAX_SESSION_CHARS = 256
MAX_TENANT_CHARS = 64
MAX_COUNT = 1 << 40
"""Largest plausible number of tokens or ranks, enforced when decoding."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
MAX_REQUEST_ID_CHARS = 128
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e7)]
Rid = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
BlockName = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

InstanceId = str
"""The driver's name of an engine instance (the router uses its worker URL)."""
InstanceRole = Literal["prefill", "decode"]
Outcome = Literal["completed", "failed", "aborted"]
CacheTier = Literal["device", "host"]
"""Location of cached KV: ``host`` (host memory or disk) must be loaded first, which takes time."""
PrefixSource = Literal["events", "approximate", "off"]
"""How an instance's cached prefixes are known: from its KV events, assumed from the prompts sent
there, or not at all."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    pass


# Requests -------------------------------------------------------------------------------------


class RequestArrived(_Message, frozen=True):
    """A request arrived. ``rid`` is unique and never reused, even for retries."""

    rid: Rid
    prompt_tokens: Count
    """L(r): prompt length, with the cached part."""
    estimated: bool = False
    """``prompt_tokens`` is an estimate: do not refuse the request as too long because of it."""
    max_new_tokens: Count | None = None
    deadline_s: float | None = None
    """Time after which the request is refused instead of dispatched; None: the default timeout."""
    exclude: Annotated[tuple[InstanceId, ...], msgspec.Meta(max_length=4096)] = ()
    """Instances that a retry should avoid while there are others."""
    blocks: Annotated[list[BlockName], msgspec.Meta(max_length=MAX_BLOCKS)] = []
    """Names of the prompt's full KV blocks in order, as in KV events. Equal names mean that all
    tokens up to the end of the block are equal, in the same namespace (salt, LoRA). Empty: the
    prompt's prefix cannot be matched."""
    block_tokens: Count = 0
    """Tokens per block. Instances with an incompatible page size count as holding none of them."""
    session: Annotated[str, msgspec.Meta(max_length=MAX_SESSION_CHARS)] = ""
    """Session id, for policies that pin sessions to an instance."""
    priority: int = 0
    """Larger is more urgent."""
    ttft_slo_s: float | None = None
    """Client's limit on the time to first token; None: no limit."""
    tenant: Annotated[str, msgspec.Meta(max_length=MAX_TENANT_CHARS)] = ""
    """Tenant that the request is charged to; empty: the one shared by all requests without a
    tenant."""


class PrefillDone(_Message, frozen=True):
    """The prefill engine answered, or decode sent the first token: the prompt is computed. Sent at
    most once for each of the two; the second event of a request changes nothing."""

    rid: Rid
    prompt_tokens: Count | None = None
    """Number of prompt tokens counted by the engine; None: not reported."""
    cached_tokens: Count | None = None
    aborted: bool = False
    """Prefill aborted the request, so its answer does not show that a pass ended."""


class ClientSide(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The client's side of one attempt, as measured by the relay. Times are in seconds."""

    request_id: Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_ID_CHARS)] = ""
    """The client's ``x-request-id``, truncated."""
    admission_s: Seconds | None = None
    """Time from the client's request to the submission of its first attempt."""
    retries_s: Seconds = 0.0
    """Time from the submission of the first attempt to that of this one."""
    first_byte_s: Seconds | None = None
    """Time from this attempt's submission to decode's first byte; None: there was none."""


class RequestEnded(_Message, frozen=True):
    """The request is over on prefill and decode. Valid in any state; if queued, it is removed."""

    rid: Rid
    outcome: Outcome
    completion_tokens: Count | None = None
    client: ClientSide | None = None
    """Details known only to the relay; they change no decision."""


class RequestAdopted(_Message, frozen=True):
    """A request in flight that another scheduler dispatched; only its end is expected. Its
    instances need not be up yet."""

    rid: Rid
    prompt_tokens: Count
    prefill: InstanceId
    prefill_rank: Count
    decode: InstanceId
    decode_rank: Count
    max_new_tokens: Count | None = None
    prefilled: bool = False
    """Prefill has already answered, so only decode still works on the request."""


# Instances ------------------------------------------------------------------------------------


class InstanceUp(_Message, frozen=True):
    """An instance can be used, or its limits changed."""

    instance: InstanceId
    role: InstanceRole
    dp_size: int
    chunk_tokens: int = 0
    """C_chunk per DP rank (prefill); 0: unknown."""
    kv_capacity_tokens: int = 0
    """KV tokens per DP rank; 0: unknown, not enforced."""
    max_running_requests: int = 0
    """Limit on running requests per DP rank; 0: unknown, not enforced."""
    page_size: int = 1
    prefix_source: PrefixSource = "off"
    overlap: bool = False
    """The engine uses overlap scheduling: when a pass starts, it forms the next one from the
    requests that wait then. Later requests wait for the pass after it."""
    charged_page: int = 0
    """A request is charged whole pages of this many tokens of the chunk; 0: ``page_size``."""
    barrier: bool = True
    """All DP ranks of a prefill instance run each pass together. False: each rank runs its own
    passes (:mod:`.lone_ranks`)."""
    captured_tokens: tuple[int, ...] = ()
    """Token counts of captured prefill CUDA graphs, ascending: smaller passes are padded to one of
    them. Empty: passes are not padded."""
    allocates_late: bool = False
    """Decode allocates KV only when prefill is complete, so prefill does not wait for room there
    (SGLang's ``--disaggregation-decode-allocation-policy prefill_complete``)."""
    prefill_max_requests: int = 0
    """Limit on a DP rank's requests in a pass (SGLang's ``--prefill-max-requests``); 0: none."""
    shares_storage: bool = False
    """Its ranks write KV to storage that all instances with this flag read (SGLang's
    ``--hicache-storage-backend`` with write-through)."""


class InstanceDown(_Message, frozen=True):
    """No requests may be dispatched to the instance. Each request that it has still ends with its
    own :class:`RequestEnded`."""

    instance: InstanceId
    drained: bool = False
    """The instance works but takes no new requests, so the state known about it stays valid."""


class ForwardEnded(_Message, frozen=True):
    """An EndForward message, and the instance that sent it."""

    instance: InstanceId
    report: EndForward


class LoadPolled(_Message, frozen=True):
    """An instance's answer to a load poll (``/v1/loads``), the coarse fallback without (recent)
    EndForward. Lists have a value per DP rank; -1: no data."""

    instance: InstanceId
    queued_tokens: list[int]
    """Prompt tokens waiting or bootstrapping, per DP rank."""
    running_requests: list[int]
    kv_tokens: list[int]


class BlocksStored(_Message, frozen=True):
    """A DP rank reported that it has cached these blocks."""

    instance: InstanceId
    dp_rank: int
    blocks: list[int]
    tier: CacheTier = "device"


class BlocksRemoved(_Message, frozen=True):
    """A DP rank reported that it evicted these blocks."""

    instance: InstanceId
    dp_rank: int
    blocks: list[int]
    tier: CacheTier = "device"


class BlocksCleared(_Message, frozen=True):
    """A DP rank's cache is empty, or unknown because events were lost for good."""

    instance: InstanceId
    dp_rank: int


class PolicySwitched(_Message, frozen=True):
    """Another policy is in force. Queue, requests in flight and instance states stay unchanged."""

    policy: Policy


class TimerFired(_Message, frozen=True):
    """The time of an earlier :class:`WakeAt` has come (early or repeated ones are harmless)."""


Event = (
    RequestArrived
    | PrefillDone
    | RequestEnded
    | RequestAdopted
    | InstanceUp
    | InstanceDown
    | ForwardEnded
    | LoadPolled
    | BlocksStored
    | BlocksRemoved
    | BlocksCleared
    | PolicySwitched
    | TimerFired
)


# Commands -------------------------------------------------------------------------------------


class Dispatch(_Message, frozen=True):
    """Send a request's prefill and decode requests now, to these DP ranks."""

    rid: str
    prefill: InstanceId
    prefill_rank: int
    decode: InstanceId
    decode_rank: int
    batch: int
    """Number of the request's batch. The requests of a batch should be sent back to back."""
    held_s: float
    reason: str
    """Reason for the time and the place of the dispatch, in words."""
    cached_tokens: int = 0
    """L_hit: prompt tokens that the prefill rank is expected to have cached."""
    decode_cached_tokens: int = 0
    """Prompt tokens expected in the decode rank's cache, so that they need no transfer."""
    barrier: bool = True
    """All DP ranks of the prefill instance run each pass together."""
    joins: bool = False
    """The request joins a batch that is on its way to the same instance, for the same pass."""
    gang: GangPart | None = None
    """Describes the request's batch to the engine's batch gate. Added by the driver
    (:mod:`sglang_sbs.router.dispatch.gang_parts`)."""


RefuseCause = Literal[
    "queue_full", "deadline", "flow_control", "no_prefill", "no_decode", "too_long", "slo"
]


class Refuse(_Message, frozen=True):
    """Answer the client with an overload error; the request is over."""

    rid: str
    cause: RefuseCause
    retry_after_s: float
    message: str
    limit: InstanceRole | None = None
    """Role without capacity, if the cause is overload and the role is known."""


class WakeAt(_Message, frozen=True):
    """Send :class:`TimerFired` at this time; replaces any earlier one."""

    time_s: float


Command = Dispatch | Refuse | WakeAt
