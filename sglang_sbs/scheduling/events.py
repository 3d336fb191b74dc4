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
"""Source of an instance's cached prefixes: its KV events, or where prompts were sent."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    pass


# Requests -------------------------------------------------------------------------------------


class RequestArrived(_Message, frozen=True):
    """A request arrived. ``rid`` is unique and never reused, even for retries."""

    rid: Rid
    prompt_tokens: Count
    """L(r)."""
    estimated: bool = False
    """``prompt_tokens`` is an estimate, which must not be a reason to refuse the request as too
    long."""
    max_new_tokens: Count | None = None
    deadline_s: float | None = None
    """Absolute time after which it is refused instead of dispatched."""
    exclude: Annotated[tuple[InstanceId, ...], msgspec.Meta(max_length=4096)] = ()
    """Instances a retry should avoid while there are others."""
    blocks: Annotated[list[BlockName], msgspec.Meta(max_length=MAX_BLOCKS)] = []
    """Names of its full KV pages from the first on, as in KV events: equal names mean equal tokens,
    and equal preceding tokens, in the same namespace (salt, LoRA). Empty: its prefix cannot be
    matched."""
    block_tokens: Count = 0
    """Tokens per block; instances with another page size are assumed to have none of them."""
    session: Annotated[str, msgspec.Meta(max_length=MAX_SESSION_CHARS)] = ""
    """Session id, for policies that pin sessions to an instance."""
    priority: int = 0
    """Larger is more urgent."""
    ttft_slo_s: float | None = None
    """Client's limit on the time to its first token."""
    tenant: Annotated[str, msgspec.Meta(max_length=MAX_TENANT_CHARS)] = ""
    """Tenant that the request is charged to; empty: the one shared by all requests without a
    tenant."""


class PrefillDone(_Message, frozen=True):
    """Prefill responded, or decode sent the first token: L(r) left the prefill rank. Sent at most
    once for each of these; the second one for a request changes nothing."""

    rid: Rid
    prompt_tokens: Count | None = None
    """Number of prompt tokens counted by the engine."""
    cached_tokens: Count | None = None
    aborted: bool = False
    """The request was aborted on prefill, which does not show the end of a pass."""


class ClientSide(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The relay's times of one attempt, in seconds."""

    request_id: Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_ID_CHARS)] = ""
    """The client's ``x-request-id``, truncated."""
    admission_s: Seconds | None = None
    """Time from the client's request to the submission of its first attempt."""
    retries_s: Seconds = 0.0
    """Time from then to the submission of this attempt."""
    first_byte_s: Seconds | None = None
    """Time from its submission to decode's first byte; None if there was none."""


class RequestEnded(_Message, frozen=True):
    """The request ended in prefill and in decode, from any state; a queued one is dropped."""

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
    """Prefill has already responded: only decode still works on it."""


# Instances ------------------------------------------------------------------------------------


class InstanceUp(_Message, frozen=True):
    """An instance can be used, or its limits changed."""

    instance: InstanceId
    role: InstanceRole
    dp_size: int
    chunk_tokens: int = 0
    """C_chunk per DP rank (prefill); 0: unknown."""
    kv_capacity_tokens: int = 0
    """Per DP rank; 0: unknown, not enforced."""
    max_running_requests: int = 0
    """Per DP rank; 0: unknown, not enforced."""
    page_size: int = 1
    prefix_source: PrefixSource = "off"
    overlap: bool = False
    """One-batch lookahead (SGLang's overlap scheduling): requests left over from a pass are
    launched as the next pass when it starts, without requests that arrive while it runs."""
    charged_page: int = 0
    """Each request uses whole pages of this many tokens of the chunk; 0: ``page_size``."""
    barrier: bool = True
    """All DP ranks of a prefill instance run each pass together. False: each rank runs its own
    passes (:mod:`.lone_ranks`)."""
    captured_tokens: tuple[int, ...] = ()
    """Token counts of captured prefill CUDA graphs, ascending: smaller passes are padded to one of
    them. Empty: passes are not padded."""
    allocates_late: bool = False
    """Decode reserves room late, so prefill does not wait for it (SGLang's
    ``--disaggregation-decode-allocation-policy prefill_complete``)."""
    prefill_max_requests: int = 0
    """Most requests of a rank in one pass (SGLang's flag of that name); 0: no limit."""
    shares_storage: bool = False
    """Its ranks write KV to storage that all such instances read (SGLang's
    ``--hicache-storage-backend`` with write-through)."""


class InstanceDown(_Message, frozen=True):
    """The instance gets no new dispatches. ``RequestEnded`` ends its requests."""

    instance: InstanceId
    drained: bool = False
    """The instance works and only takes no new requests, so the state known about it stays
    valid."""


class ForwardEnded(_Message, frozen=True):
    """An EndForward message, bound to an instance."""

    instance: InstanceId
    report: EndForward


class LoadPolled(_Message, frozen=True):
    """A load poll of an instance without (fresh) EndForward, the coarse fallback. -1 for ranks
    without data."""

    instance: InstanceId
    queued_tokens: list[int]
    """Per DP rank: prompt tokens waiting or bootstrapping."""
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
    """Another policy is in force. Queue, requests in flight and instance states stay as they
    are."""

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
    """Send the prefill and the decode request now."""

    rid: str
    prefill: InstanceId
    prefill_rank: int
    decode: InstanceId
    decode_rank: int
    batch: int
    """Number of its batch; requests of one batch should be sent back to back."""
    held_s: float
    reason: str
    """Reason for time and place, in words."""
    cached_tokens: int = 0
    """L_hit used for placing: prompt tokens expected in the rank's cache."""
    decode_cached_tokens: int = 0
    """Prompt tokens that the decode rank is expected to have, so that they are not transferred."""
    barrier: bool = True
    """All DP ranks of that prefill instance run each pass together."""
    joins: bool = False
    """It follows a batch on its way to the same instance, for the same pass."""
    gang: GangPart | None = None
    """The part of its batch for the same rank, added by the driver
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
    """Role without capacity, if the cause is overload."""


class WakeAt(_Message, frozen=True):
    """Send :class:`TimerFired` at this time; replaces any earlier one."""

    time_s: float


Command = Dispatch | Refuse | WakeAt
