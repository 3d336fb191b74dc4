"""KV events: both of SGLang's shapes, what is skipped, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_batches import decode_kv_batch

from sglang_sbs.router.signals.kv_messages import (
    END_OF_REPLAY,
    MAX_EVENT_BYTES,
    MOST_BLOCKS,
    MOST_EVENTS,
    Change,
    KvBatch,
    decode_in_parts,
    live_frames,
    replay_frames,
    replay_request,
)
from sglang_sbs.wire import MalformedMessage

pack = msgspec.msgpack.encode
TOKENS = list(range(32))


def stored(blocks: list[int], medium: str | None = "GPU", **fields: Any) -> dict[str, Any]:
    """Return a stored event in SGLang 0.5.23's form."""
    event = {
        "type": "BlockStored",
        "block_hashes": blocks,
        "parent_block_hash": None,
        "token_ids": TOKENS,
        "block_size": 16,
        "lora_id": None,
    }
    return event | ({} if medium is None else {"medium": medium}) | fields


def removed(blocks: list[int], medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": blocks, "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: Any, rank: int | None = 1) -> bytes:
    return pack([12.5, list(events), rank])


def test_maps_as_since_0_5_20() -> None:
    payload = batch(
        stored([5, -7], cache_salt="s", session_id="x"),
        stored([6]),
        removed([5]),
        CLEARED,
        stored([8], None),
    )
    assert decode_kv_batch(payload) == KvBatch(
        12.5,
        [
            Change("stored", "device", [5, -7, 6]),
            Change("removed", "device", [5]),
            Change("cleared"),
            Change("stored", "device", [8]),
        ],
        1,
    )


def test_arrays_as_up_to_0_5_18() -> None:
    payload = batch(
        ["BlockStored", [5, -7], None, TOKENS, 16, None, "GPU"],
        ["BlockStored", [9], 5, TOKENS, 16, None],  # before there were media
        ["BlockRemoved", [5], "GPU"],
        ["BlockRemoved", [6]],
        ["AllBlocksCleared"],
        rank=None,
    )
    assert decode_kv_batch(payload) == KvBatch(
        12.5,
        [
            Change("stored", "device", [5, -7, 9]),
            Change("removed", "device", [5, 6]),
            Change("cleared"),
        ],
        None,
    )


def test_the_same_events_mean_the_same_in_both_shapes() -> None:
    maps = batch(stored([1, 2]), removed([1], "CPU_PINNED"))
    arrays = batch(
        ["BlockStored", [1, 2], None, TOKENS, 16, None, "GPU"],
        ["BlockRemoved", [1], "CPU_PINNED"],
    )
    assert decode_kv_batch(maps) == decode_kv_batch(arrays)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("GPU", "device"), (None, "device"), ("CPU_PINNED", "host"), ("DISK", "host")],
)
def test_media_are_tiers(medium: str | None, tier: str) -> None:
    assert decode_kv_batch(batch(stored([1], medium))).changes == [Change("stored", tier, [1])]  # type: ignore[arg-type]


def test_what_is_not_known_here_is_skipped() -> None:
    later = {"type": "BlockPinned", "block_hashes": "anything"}
    for unknown in (stored([4], "EXTERNAL"), later, ["BlockPinned", 3]):
        changes = decode_kv_batch(batch(stored([1]), unknown, stored([2]))).changes
        assert changes == [Change("stored", "device", [1, 2])]


def test_later_fields_of_a_batch_are_skipped() -> None:
    assert decode_kv_batch(pack([1.0, [CLEARED], 0, "new"])).changes == [Change("cleared")]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        pack({}),
        pack([1.0]),
        pack(["now", [], 0]),
        pack([1.0, [3], 0]),
        pack([1.0, [[]], 0]),
        pack([1.0, [{}], 0]),
        batch({"type": "BlockStored"}),
        batch({"type": "BlockStored", "block_hashes": ["5"]}),
        batch({"type": "BlockRemoved", "block_hashes": [2**63]}),
        batch(["BlockRemoved", [1.5]]),
        batch(stored([1]))[:-9],
        b"\x93" + pack(1.0) + b"\x91" * 100_000,
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_kv_batch(payload)


@given(data=st.data())
def test_flipped_bytes_are_read_or_refused(data: Any) -> None:
    body = bytearray(batch(stored([1, 2]), ["BlockRemoved", [1], "GPU"], CLEARED))
    for position in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=4)):
        body[position] = data.draw(st.integers(0, 255))
    try:
        changes = decode_kv_batch(bytes(body)).changes
    except MalformedMessage:
        return
    assert len(changes) <= 3
    hashes = [block for change in changes for block in change.blocks]
    assert all(-(2**63) <= block < 2**63 for block in hashes)
    assert len(hashes) <= 3, "as many as were sent"


def test_frames_of_a_live_message() -> None:
    assert live_frames([b"kv", (7).to_bytes(8, "big"), b"x"], b"kv") == (7, b"x")
    for frames in (
        [],
        [b"kv", b"x"],
        [b"kv2", (7).to_bytes(8, "big"), b"x"],
        [b"kv", b"7", b"x"],
        [b"kv", (-1).to_bytes(8, "big", signed=True), b"x"],
    ):
        with pytest.raises(MalformedMessage, match=r"8 bytes|number -1"):
            live_frames(frames, b"kv")


def test_frames_of_a_replay() -> None:
    assert replay_request(258) == [b"", b"\0\0\0\0\0\0\x01\x02"]
    assert replay_frames([b"", b"kv", (7).to_bytes(8, "big"), b"x"]) == (7, b"x")
    end = (-1).to_bytes(8, "big", signed=True)
    assert replay_frames([b"", b"", end, b""]) == (END_OF_REPLAY, b"")
    for frames in ([], [b"", b"kv", b"x"], [b"kv", b"", end, b""], [b"", b"", b"-1", b""]):
        with pytest.raises(MalformedMessage):
            replay_frames(frames)


def test_clears_in_a_row_are_one() -> None:
    changes = decode_kv_batch(batch(stored([1]), CLEARED, CLEARED, CLEARED)).changes
    assert changes == [Change("stored", "device", [1]), Change("cleared")]


def test_a_large_message_is_decoded_in_parts() -> None:
    """Whichever way an engine could make one part of it large."""
    odd: list[Any] = [["X"]]
    wide = [stored([block]) for block in range(5_000)]
    payload = pack([1.0, wide, 0])
    parts, batch = 0, None
    decoding = decode_in_parts(payload)
    try:
        while True:
            next(decoding)
            parts += 1
    except StopIteration as over:
        batch = over.value
    assert parts >= len(payload) // (80 << 10)
    assert batch == KvBatch(1.0, [Change("stored", "device", list(range(5_000)))], 0)
    assert sum(1 for _ in decode_in_parts(pack([1.0, odd * 50_000]))) > 50


@pytest.mark.parametrize(
    "events",
    [[["X"]] * (MOST_EVENTS + 1), [stored([1] * 100_000)] * (MOST_BLOCKS // 100_000 + 1)],
    ids=["events", "blocks"],
)
def test_a_message_has_so_many_events_and_blocks_at_most(events: list[Any]) -> None:
    with pytest.raises(MalformedMessage):
        decode_kv_batch(pack([1.0, events]))
    assert decode_kv_batch(pack([1.0, events[:-1]]))


def test_an_event_has_a_size() -> None:
    """To look past its token ids takes time, too."""
    for size, read in ((MAX_EVENT_BYTES // 2, True), (MAX_EVENT_BYTES, False)):
        payload = pack([1.0, [stored([1], token_ids=[1] * size)]])
        if read:
            assert decode_kv_batch(payload).changes == [Change("stored", "device", [1])]
        else:
            with pytest.raises(MalformedMessage, match="over 4 MiB"):
                decode_kv_batch(payload)


def test_very_many_changes_in_one_message_are_no_message() -> None:
    """Each would be sent to the scheduler by itself."""
    events = [event for _ in range(5001) for event in (stored([1]), removed([1]))]
    with pytest.raises(MalformedMessage, match="changes"):
        decode_kv_batch(batch(*events))
