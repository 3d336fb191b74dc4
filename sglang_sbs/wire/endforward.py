"""EndForward, wire v1: the report of one DP rank after each forward pass.

One message is three ZMQ frames: ``TOPIC``, the sequence number as unsigned 64-bit big-endian, and a
msgpack array (:class:`EndForward`, positional). Compatibility rule: fields are only ever appended,
each with a default; a decoder ignores trailing fields it does not know.

Every field is absolute or cumulative, so a lost, duplicated or late message heals with the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

TOPIC = b"sbs1"
FRAMES = 3
MAX_RIDS = 1024
MAX_DP_SIZE = 4096
"""Limit on the DP size in a message. It is larger than any engine's; a higher number is garbage."""
MAX_SPAN_S = 3600.0

Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Clock = Annotated[float, Meta(ge=0, le=1e11)]
Span = Annotated[float, Meta(ge=0, le=MAX_SPAN_S)]
Room = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Kind = Literal["launch", "forward", "idle", "heartbeat"]
Role = Literal["prefill", "decode", "null"]


class MalformedMessage(ValueError):
    """The frames are not an EndForward v1 message."""


class ImplausibleMessage(MalformedMessage):
    """The types are right, but the values are impossible for an engine."""


class Started(msgspec.Struct, array_like=True, frozen=True):
    """A request in its first pass. Times as in :class:`EndForward`; 0 if SGLang does not report
    them."""

    rid: str
    queued_s: float = 0.0
    """Time when the rank accepted the request; on prefill its handshake with decode began then."""
    schedulable_s: float = 0.0
    """Time from which a pass could take the request; on prefill its handshake was over."""
    cached_tokens: Count = 0
    """Prompt tokens that were in the prefix cache when this pass was formed."""


class Accepted(msgspec.Struct, array_like=True, frozen=True):
    """A request that a rank has accepted. Times as in :class:`EndForward`."""

    rid: str
    prompt_tokens: Count = 0
    arrived_s: Clock = 0.0
    """Time when the engine's HTTP server received the request, if SGLang passes it on. Otherwise
    the time when the scheduler accepted it, which happens between two passes."""
    max_new_tokens: Count = 0
    """Client's limit on output tokens; 0: unlimited, or unknown as on prefill."""
    room: Room = 0
    """Bootstrap room, the same on prefill and decode; 0 without one."""


class KvAddress(msgspec.Struct, array_like=True, frozen=True):
    """Address of a rank's KV events (SGLang, ``disaggregation/kv_events.py``)."""

    host: str
    """An IP address; empty: the source of this message."""
    port: int
    replay_port: int = 0
    """Port for requesting lost events again; 0: they cannot be requested."""


class EndForward(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """State of one DP rank at the end of a forward pass (or while idle).

    Times are seconds of the engine's monotonic clock, which differs per host: a receiver may
    subtract two of them, and place the pass end at ``its own now - age_s``.
    """

    instance_id: Annotated[str, Meta(max_length=512)]
    """Worker URL if configured on the engine. If it is empty, the receiver finds the worker by
    ``rids``."""
    boot_id: Annotated[str, Meta(min_length=1, max_length=128)]
    """New for every start of the engine; a change means everything in flight there is gone."""
    role: Role
    dp_rank: int
    dp_size: Annotated[int, Meta(le=MAX_DP_SIZE)]
    seq: Count
    """Counts this rank's messages from 0 within one ``boot_id``."""
    kind: Kind
    """``forward``: a pass ended. ``launch``: a prefill pass with tokens on some rank was handed to
    the device (``launch_s`` is set and ``age_s`` counts from it; ``end_s`` and ``forward_s`` are 0;
    the pass itself is not part of ``inflight_*``). ``idle``: the rank just became idle.
    ``heartbeat``: liveness only; the state fields are current, the pass fields repeat the last
    pass."""

    forward_id: Count = 0
    """SGLang's ``batch.forward_iter``; counts passes on every rank alike if there is a barrier."""
    mode: str = "idle"
    """SGLang's ForwardMode name in lower case (``extend``, ``decode``, ``idle``, ...)."""
    launch_s: Clock = 0.0
    end_s: Clock = 0.0
    age_s: Annotated[float, Meta(ge=-1, le=1e11)] = 0.0
    """Send time minus ``end_s``, or minus ``launch_s`` for a launch. It grows while a rank is
    idle."""
    forward_s: Span = 0.0
    """T_fwd: ``end - max(launch, previous end)``, the time the device was busy with this pass."""
    extend_tokens: Count = 0
    cached_tokens: Count = 0
    batch_size: Count = 0
    tokens_per_rank: Annotated[list[Count], Meta(max_length=MAX_DP_SIZE)] | None = None
    """Tokens of every DP rank in this pass, if the engine gathers them."""

    inflight_passes: Count = 0
    """Passes already launched behind this one (overlap); the first started at ``end_s``."""
    inflight_tokens: Count = 0
    inflight_requests: Count = 0

    waiting_requests: Count = 0
    waiting_tokens: Count = 0
    """Uncached prompt tokens of requests that are schedulable and not yet launched."""
    bootstrapping_requests: Count = 0
    bootstrapping_tokens: Count = 0
    """Prefill: prompt tokens of requests still in the handshake with decode."""
    chunk_remainder_tokens: Count = 0
    """Tokens of the chunked request that no launched pass contains yet."""
    kv_transfer_requests: Count = 0
    """Prefill: requests whose KV is being sent. Decode: preallocated or in transfer."""

    running_requests: Count = 0
    """B_i of the paper: number of running requests."""
    kv_tokens: Count = 0
    """K_i of the paper: KV cache tokens in use, without evictable prefix cache."""
    kv_capacity_tokens: Count = 0

    chunk_tokens: Count = 0
    """C_chunk per rank: ``--chunked-prefill-size`` after SGLang divided it by the DP size."""
    max_running_requests: Count = 0
    """Limit on running requests of this rank."""

    accepted_requests: Count = 0
    accepted_tokens: Count = 0
    computed_tokens: Count = 0
    """Extend tokens of all passes ended so far."""
    aborted_requests: Count = 0

    rids: Annotated[list[str], Meta(max_length=MAX_RIDS)] = []
    """Request ids this rank has accepted since its previous message."""
    hook_errors: int = 0
    sglang_version: str = ""
    hook_us: int = 0
    """Engine time in microseconds spent on building and sending this rank's previous message."""
    started: Annotated[list[Started], Meta(max_length=MAX_RIDS)] = []
    """``launch``: the requests whose first tokens are in this pass."""
    barrier: bool = True
    """All DP ranks run each pass together. False: this rank runs and counts its own passes."""
    kv_address: KvAddress | None = None
    """Set by a rank on another node than the engine's first, whose host ``/server_info`` does not
    name."""
    gang_gate: str = ""
    """Fault of a batch gate that was on: one of the values ``GATE_…``, or empty."""
    dist_init_addr: Annotated[str, Meta(max_length=256)] = ""
    """``--dist-init-addr`` of an engine on several nodes, each of which has its own ``boot_id``;
    empty on one node."""
    sent_s: Clock = 0.0
    """Time when the message was built; 0: the plugin does not report it."""
    accepted: Annotated[list[Accepted], Meta(max_length=MAX_RIDS)] = []
    """Details of the requests in ``rids``."""
    finished: Annotated[list[str], Meta(max_length=MAX_RIDS)] = []
    """``forward``: ids of the requests whose last prompt tokens were in this pass."""

    @property
    def queued_tokens(self) -> int:
        """R_queued of the paper: tokens that the rank has accepted and that are in no launched
        pass."""
        return self.waiting_tokens + self.bootstrapping_tokens + self.chunk_remainder_tokens

    @property
    def idle(self) -> bool:
        """True: nothing is launched, waiting or bootstrapping. KV transfers may still run."""
        return (
            self.inflight_passes == 0
            and self.waiting_requests == 0
            and self.bootstrapping_requests == 0
            and self.chunk_remainder_tokens == 0
            and (self.role == "prefill" or self.running_requests == 0)
        )


GATE_ALONE = "alone"
"""The rank waits only for its own part of a batch, because it receives nothing about the
others'."""
GATE_ERRORS = "errors"
"""The rank turned its gate off after errors."""
GATE_UNSUPPORTED = "unsupported"
"""There is no gate: the engine is on several hosts, with SGLang before 0.5.22."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EndForward)


def encode_endforward(message: EndForward) -> list[bytes]:
    """Return the three frames of one message."""
    return [TOPIC, message.seq.to_bytes(8, "big"), _encoder.encode(message)]


def decode_endforward(frames: Sequence[bytes]) -> EndForward:
    """Decode one message. Raises: MalformedMessage, wrong topic, frame count or types, or an
    impossible rank; ImplausibleMessage, a field is out of range."""
    if len(frames) != FRAMES or frames[0] != TOPIC:
        raise MalformedMessage(f"expected {FRAMES} frames starting with {TOPIC!r}")
    try:
        message = _decoder.decode(frames[2])
    except msgspec.DecodeError as error:
        raise _named(str(error)) from error
    if not 0 <= message.dp_rank < message.dp_size:
        raise MalformedMessage(f"dp_rank {message.dp_rank} outside [0, {message.dp_size})")
    if message.age_s > MAX_SPAN_S and message.kind in ("launch", "forward"):
        raise ImplausibleMessage(f"a {message.kind} that is {message.age_s:g} s old")
    return message


def _named(error: str) -> MalformedMessage:
    """Replace the field's number by its name. The place is last, because the text before it may be
    the sender's own."""
    problem, at, place = error.rpartition(" - at `$[")
    number, _, rest = place.partition("]")
    if at and number.isdecimal() and int(number) < len(EndForward.__struct_fields__):
        error = f"{problem} - at `{EndForward.__struct_fields__[int(number)]}{rest}"
    out_of_range = problem.startswith("Expected ") and (">= " in problem or "<= " in problem)
    return (ImplausibleMessage if out_of_range else MalformedMessage)(error)
