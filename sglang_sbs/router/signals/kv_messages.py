"""Decodes SGLang's KV events: the blocks that a rank's cache gained and lost.

Covers published batches of ``disaggregation/kv_events.py``, in both formats SGLang has used, and
the frames of its replay protocol.

A batch is the frames ``topic``, sequence number (signed 64-bit big-endian) and the msgpack array
``[ts, [event, ...], attn_dp_rank]``. Since SGLang 0.5.20 an event is a map with the key ``type``,
up to 0.5.18 an array with the tag first; unknown types and media are skipped. Only block names are
decoded, not token ids, which make up most of a message."""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from sglang_sbs.scheduling.events import CacheTier
from sglang_sbs.wire.endforward import MalformedMessage

MAX_MESSAGE_BYTES = 16 << 20
"""Limit on one message. The blocks that one pass can store and evict take far less, token ids
included."""
MAX_EVENT_BLOCKS = 1 << 17
"""Limit on the blocks of one event; SGLang's have one block each."""
MAX_EVENT_BYTES = 4 << 20
MOST_EVENTS = 1 << 17
MOST_BLOCKS = 1 << 18
"""Limit on the blocks of one message, as ``MOST_EVENTS`` on its events. SGLang's events have one
block each and take a hundred bytes."""
_MOST_CHANGES = 10_000
"""Limit on the :class:`Change` items that a message decodes to; a pass of an engine makes a few."""
_PART_BYTES = 64 << 10
"""Bytes of a message decoded between two pauses, unless one event is larger."""
_EVENT_BYTES = 100
"""Least size that an event counts as towards ``_PART_BYTES``, as small ones take time as well."""
END_OF_REPLAY = -1
"""Sequence number of the message that ends a replay."""

_SEQ = struct.Struct(">q")
_TIERS: dict[str | None, CacheTier] = {
    **dict.fromkeys((None, "GPU"), "device"),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1", "CPU_TIER2", "DISK"), "host"),
}
"""Cache tier by SGLang's ``StorageMedium``, including older releases' values. ``EXTERNAL`` belongs
to no rank and is skipped."""

ChangeKind = Literal["stored", "removed", "cleared"]


@dataclass(slots=True)
class Change:
    """A change of a rank's cache. ``cleared`` has no blocks and applies to all tiers."""

    kind: ChangeKind
    tier: CacheTier = "device"
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class KvBatch:
    """Changes that one rank published together, in order."""

    ts_s: float
    """Time of publication, in seconds of the engine's wall clock."""
    changes: list[Change]
    dp_rank: int | None = None


_Block = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Blocks = Annotated[list[_Block], msgspec.Meta(max_length=MAX_EVENT_BLOCKS)]
_EVENTS = msgspec.Meta(max_length=MOST_EVENTS)
_Skipped = msgspec.Raw(b"\xc0")


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: _Blocks
    medium: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: _Blocks
    medium: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: _Blocks
    parent_block_hash: msgspec.Raw = _Skipped
    token_ids: msgspec.Raw = _Skipped
    block_size: msgspec.Raw = _Skipped
    lora_id: msgspec.Raw = _Skipped
    medium: str | None = None


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: _Blocks
    medium: str | None = None


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


_AnyEvent = _Stored | _Removed | _Cleared | _StoredArray | _RemovedArray | _ClearedArray


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: Annotated[list[msgspec.Raw], _EVENTS]
    attn_dp_rank: int | None = None


_batches = msgspec.msgpack.Decoder(_Batch)
_map_lists = msgspec.msgpack.Decoder(list[_Stored | _Removed | _Cleared])
_maps: msgspec.msgpack.Decoder[_AnyEvent] = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_arrays: msgspec.msgpack.Decoder[_AnyEvent] = msgspec.msgpack.Decoder(
    _StoredArray | _RemovedArray | _ClearedArray
)


def live_frames(frames: Sequence[bytes], topic: bytes) -> tuple[int, bytes]:
    """Return sequence number and payload of a published message. Raises: MalformedMessage, wrong
    topic or frames; not even the batch's number is known then."""
    return _numbered(frames, 3, topic, 0)


def replay_frames(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return sequence number and payload of a replay's message; the last has ``END_OF_REPLAY`` and
    no payload. Raises: MalformedMessage, wrong frames."""
    return _numbered(frames, 4, b"", END_OF_REPLAY)


def _numbered(frames: Sequence[bytes], count: int, first: bytes, least: int) -> tuple[int, bytes]:
    if len(frames) != count or frames[0] != first or len(frames[-2]) != _SEQ.size:
        wanted = f"{count} frames, {first[:64]!r} first, {_SEQ.size} bytes in the last but one"
        raise MalformedMessage(f"expected {wanted}")
    seq: int = _SEQ.unpack(frames[-2])[0]
    if seq < least:
        raise MalformedMessage(f"sequence number {seq}")
    return seq, frames[-1]


def replay_request(start_seq: int) -> list[bytes]:
    """Return the frames that request (on a DEALER socket) a replay of every batch from
    ``start_seq`` on that the publisher still has."""
    return [b"", _SEQ.pack(start_seq)]


def decode_in_parts(payload: bytes) -> Generator[None, None, KvBatch]:
    """Decode one batch in steps, so that others can run in between; neighbouring changes of the
    same kind and tier are joined. Raises: MalformedMessage, it is not a batch, or an event of a
    known type is invalid."""
    changes: list[Change] = []
    blocks = 0
    try:
        batch = _batches.decode(payload)
        yield
        for part in _parts(batch.events):
            for event in _decode_events(part):
                blocks += _add(changes, event)
                if len(changes) > _MOST_CHANGES or blocks > MOST_BLOCKS:
                    raise MalformedMessage(f"over {_MOST_CHANGES} changes or {MOST_BLOCKS} blocks")
            yield
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error
    return KvBatch(batch.ts, changes, batch.attn_dp_rank)


def _parts(raws: list[msgspec.Raw]) -> Iterator[list[msgspec.Raw]]:
    part: list[msgspec.Raw] = []
    size = 0
    for raw in raws:
        part.append(raw)
        event_bytes = memoryview(raw).nbytes
        if event_bytes > MAX_EVENT_BYTES:
            raise MalformedMessage(f"an event over {MAX_EVENT_BYTES >> 20} MiB")
        size += max(_EVENT_BYTES, event_bytes)
        if size >= _PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _add(changes: list[Change], event: _AnyEvent) -> int:
    """Append an event, or join it to the previous change; return its number of blocks."""
    if isinstance(event, _Cleared | _ClearedArray):
        if not changes or changes[-1].kind != "cleared":
            changes.append(Change("cleared"))
        return 0
    tier = _TIERS.get(event.medium)
    if tier is None:
        return 0
    kind: ChangeKind = "stored" if isinstance(event, _Stored | _StoredArray) else "removed"
    if changes and changes[-1].kind == kind and changes[-1].tier == tier:
        changes[-1].blocks += event.block_hashes
    else:
        changes.append(Change(kind, tier, event.block_hashes))
    return len(event.block_hashes)


def _decode_events(raws: list[msgspec.Raw]) -> Sequence[_AnyEvent]:
    """Decode events, skip unknown types; in one call if all are maps (SGLang since 0.5.20)."""
    with suppress(msgspec.ValidationError):
        return _map_lists.decode(b"\xdc%b%b" % (len(raws).to_bytes(2, "big"), b"".join(raws)))
    return [event for raw in raws if (event := _decode_event(raw)) is not None]


def _decode_event(raw: msgspec.Raw) -> _AnyEvent | None:
    """Decode an event of either format; ``None`` for unknown types."""
    data = bytes(raw)
    is_map = 0x80 <= data[0] <= 0x8F or data[0] in (0xDE, 0xDF)
    try:
        return _maps.decode(data) if is_map else _arrays.decode(data)
    except msgspec.ValidationError as error:
        if str(error).startswith("Invalid value"):  # unknown tag
            return None
        raise
