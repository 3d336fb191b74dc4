"""What the scheduler is told and what it answers: events in, commands out.

The vocabulary between the policy and whoever drives it. Times are seconds of the driver's monotonic
clock; every event reaches :meth:`Scheduler.handle` with the driver's ``now_s``. All are tagged
msgspec structs, so an event log is the events themselves."""

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
"""Of tokens and ranks. What is larger than these nobody can mean; they hold for what is decoded."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
MAX_REQUEST_ID_CHARS = 128
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e7)]
Rid = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
BlockName = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

InstanceId = str
"""How the driver names an engine instance (the router: its worker URL)."""
InstanceRole = Literal["prefill", "decode"]
Outcome = Literal["completed", "failed", "aborted"]
CacheTier = Literal["device", "host"]
"""Where KV is kept: ``host`` (host memory or disk) must be loaded first, which costs something."""
PrefixSource = Literal["events", "approximate", "off"]
"""How it is known what an instance has cached: its KV events, or only what was sent there."""


RankChoice = Literal["free", "by_room", "engine"]
"""Which DP ranks of a decode instance go with a prefill rank: ``free`` all; ``by_room`` those with
the same remainder by the greatest common divisor of both DP sizes; ``engine`` it takes none from
outside, and only its reports tell (SGLang before 0.5.10, ``router/workers/rank_contract.py``)."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    pass


# Requests -------------------------------------------------------------------------------------


class RequestArrived(_Message, frozen=True):
    """A request waits for an assignment. ``rid`` is unique and never reused, also by retries."""

    rid: Rid
    prompt_tokens: Count
    """L(r)."""
    estimated: bool = False
    """Nobody has counted ``prompt_tokens``: no reason to refuse the request as too long."""
    max_new_tokens: Count | None = None
    deadline_s: float | None = None
    """Absolute time after which it is refused instead of dispatched."""
    exclude: Annotated[tuple[InstanceId, ...], msgspec.Meta(max_length=4096)] = ()
    """Instances a retry should avoid while there are others."""
    blocks: Annotated[list[BlockName], msgspec.Meta(max_length=MAX_BLOCKS)] = []
    """Names of its full KV pages from the first on, as KV events publish them: equal names mean
    equal tokens, and equal everything before them, in the same namespace (salt, LoRA). Empty: no
    prefix of it will be found."""
    block_tokens: Count = 0
    """Tokens per block; instances with another page size are taken to hold none of it."""
    session: Annotated[str, msgspec.Meta(max_length=MAX_SESSION_CHARS)] = ""
    """What the client calls its conversation, for policies that pin one to an instance."""
    priority: int = 0
    """Larger is more urgent."""
    ttft_slo_s: float | None = None
    """The client wants its first token within this time."""
    tenant: Annotated[str, msgspec.Meta(max_length=MAX_TENANT_CHARS)] = ""
    """Who shares the cluster with others by weight; empty: nobody in particular."""


class PrefillDone(_Message, frozen=True):
    """The prefill leg answered, or the first token came out of decode: L(r) left the prefill rank.
    Sent at most once per leg; a second one for the same request changes nothing."""

    rid: Rid
    prompt_tokens: Count | None = None
    """As the engine counted them."""
    cached_tokens: Count | None = None
    aborted: bool = False
    """The request was aborted on prefill, which says nothing about a pass."""


class ClientSide(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What the relay saw of one attempt. Seconds."""

    request_id: Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_ID_CHARS)] = ""
    """The client's ``x-request-id``, cut to that length."""
    admission_s: Seconds | None = None
    """From the client's request until its first attempt was announced to the scheduler."""
    retries_s: Seconds = 0.0
    """From then until this attempt was announced."""
    first_byte_s: Seconds | None = None
    """From its announcement until decode's first byte; None: there was none."""


class RequestEnded(_Message, frozen=True):
    """The request is over on both legs, whatever state it was in (queued ones are dropped)."""

    rid: Rid
    outcome: Outcome
    completion_tokens: Count | None = None
    client: ClientSide | None = None
    """What only the relay knows of it; changes no decision."""


class RequestAdopted(_Message, frozen=True):
    """A request that another scheduler dispatched meanwhile: it is in flight, only its end is
    awaited. An instance need not be up yet."""

    rid: Rid
    prompt_tokens: Count
    prefill: InstanceId
    prefill_rank: Count
    decode: InstanceId
    decode_rank: Count
    max_new_tokens: Count | None = None
    prefilled: bool = False
    """Prefill has answered already: only decode still works on it."""


# Instances ------------------------------------------------------------------------------------


class InstanceUp(_Message, frozen=True):
    """An instance may be used from now on, or its limits changed."""

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
    rank_choice: RankChoice = "free"
    """Of a decode instance."""
    overlap: bool = False
    """One-batch lookahead (SGLang's overlap scheduling): what is left over of a pass is launched as
    the next one in the moment it starts, without what arrives while it runs."""
    charged_page: int = 0
    """Each request is charged whole pages of so many tokens of the chunk; 0: ``page_size``."""
    barrier: bool = True
    """All DP ranks of a prefill instance make each pass together. False: each rank makes passes of
    its own (:mod:`.lone_ranks`)."""
    captured_tokens: tuple[int, ...] = ()
    """Token counts that prefill CUDA graphs are captured for, ascending: smaller passes are padded
    to one of them. Empty: passes run as they are."""
    allocates_late: bool = False
    """Of a decode instance: prefill does not wait for room there (SGLang's
    ``--disaggregation-decode-allocation-policy prefill_complete``)."""
    prefill_max_requests: int = 0
    """Most requests of a rank in one pass (SGLang's flag of that name); 0: no limit."""
    shares_storage: bool = False
    """What its ranks compute is written to storage that all instances of which this is true read
    (SGLang's ``--hicache-storage-backend`` with write-through)."""


class InstanceDown(_Message, frozen=True):
    """No new dispatch to the instance. What runs there is ended by ``RequestEnded``."""

    instance: InstanceId
    drained: bool = False
    """It works, and only takes no new requests: what is known of it stays true."""


class ForwardEnded(_Message, frozen=True):
    """An EndForward message, bound to an instance."""

    instance: InstanceId
    report: EndForward


class LoadPolled(_Message, frozen=True):
    """A load poll of an instance without (fresh) EndForward: the coarse fallback signal. -1 for a
    rank of which the poll says nothing."""

    instance: InstanceId
    queued_tokens: list[int]
    """Per DP rank: prompt tokens waiting or bootstrapping."""
    running_requests: list[int]
    kv_tokens: list[int]


class BlocksStored(_Message, frozen=True):
    """A DP rank published that it holds these blocks now."""

    instance: InstanceId
    dp_rank: int
    blocks: list[int]
    tier: CacheTier = "device"


class BlocksRemoved(_Message, frozen=True):
    """A DP rank published that it evicted these blocks."""

    instance: InstanceId
    dp_rank: int
    blocks: list[int]
    tier: CacheTier = "device"


class BlocksCleared(_Message, frozen=True):
    """A DP rank holds nothing any more, or nothing is known of it: events were lost for good."""

    instance: InstanceId
    dp_rank: int


class PolicySwitched(_Message, frozen=True):
    """Another policy decides from now on. Queue, requests in flight and beliefs about instances
    stay as they are."""

    policy: Policy


class TimerFired(_Message, frozen=True):
    """The time of an earlier :class:`WakeAt` has come (early or spurious ones do no harm)."""


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
    """Send both legs of the request now."""

    rid: str
    prefill: InstanceId
    prefill_rank: int
    decode: InstanceId
    decode_rank: int
    batch: int
    """Number of the gang it leaves with; requests of one gang should be sent back to back."""
    held_s: float
    reason: str
    """Why now and why there, for people."""
    cached_tokens: int = 0
    """L_hit it was placed with: prompt tokens the rank is expected to find in its cache."""
    decode_cached_tokens: int = 0
    """Prompt tokens that the decode rank is expected to have, so that they are not transferred."""
    barrier: bool = True
    """All DP ranks of that prefill instance make each pass together."""
    joins: bool = False
    """It follows a batch that is on its way to the same instance, to be in the same pass."""
    gang: GangPart | None = None
    """The part of its gang that goes to the same rank; whoever carries the decision out fills it
    in (:mod:`sglang_sbs.router.assignment.gang_parts`)."""


RefuseCause = Literal[
    "queue_full", "deadline", "flow_control", "no_prefill", "no_decode", "too_long", "slo"
]


class Refuse(_Message, frozen=True):
    """Answer the client with an overload error; the request is over for the scheduler."""

    rid: str
    cause: RefuseCause
    retry_after_s: float
    message: str
    limit: InstanceRole | None = None
    """The role whose capacity was missing, where the cause is overload."""


class WakeAt(_Message, frozen=True):
    """Send :class:`TimerFired` at this time; replaces any earlier one."""

    time_s: float


Command = Dispatch | Refuse | WakeAt
