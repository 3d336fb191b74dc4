"""EndForward wire v1: framing, forward compatibility, bad input."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.wire import (
    TOPIC,
    EndForward,
    MalformedMessage,
    decode_endforward,
    encode_endforward,
)
from sglang_sbs.wire.endforward import MAX_RIDS, Accepted, ImplausibleMessage, Started

MESSAGE = EndForward(
    instance_id="http://p0:30000",
    boot_id="boot",
    role="prefill",
    dp_rank=3,
    dp_size=8,
    seq=17,
    kind="forward",
    tokens_per_rank=[1, 2, 3, 4, 5, 6, 7, 8],
    waiting_tokens=10,
    bootstrapping_tokens=20,
    chunk_remainder_tokens=30,
    rids=["a" * 32],
)


def test_a_message_survives_the_wire():
    assert decode_endforward(encode_endforward(MESSAGE)) == MESSAGE


def test_requests_in_their_first_pass_survive_the_wire_and_their_fields_grow():
    started = [Started("a", queued_s=1.5, schedulable_s=2.5), Started("b")]
    launch = msgspec.structs.replace(MESSAGE, kind="launch", started=started)
    topic, seq, payload = encode_endforward(launch)
    assert decode_endforward([topic, seq, payload]).started == started
    fields = msgspec.msgpack.decode(payload)
    place = EndForward.__struct_fields__.index("started")
    fields[place] = [[*entry, "newer"] for entry in fields[place]]
    assert decode_endforward([topic, seq, msgspec.msgpack.encode(fields)]).started == started


def test_accepted_and_finished_requests_survive_the_wire_and_their_fields_grow():
    accepted = [Accepted("a", 1500, 9.5, 64, room=(1 << 63) - 1), Accepted("b")]
    sent = {"sent_s": 10.0, "accepted": accepted, "finished": ["a", "b"]}
    message = msgspec.structs.replace(MESSAGE, **sent)
    topic, seq, payload = encode_endforward(message)
    assert decode_endforward([topic, seq, payload]) == message
    fields = msgspec.msgpack.decode(payload)
    place = EndForward.__struct_fields__.index("accepted")
    fields[place] = [[*entry, "newer"] for entry in fields[place]]
    assert decode_endforward([topic, seq, msgspec.msgpack.encode(fields)]) == message


def test_a_reader_from_before_requests_had_lengths_goes_on_working():
    accepted = [Accepted("a", 1500, 9.5)]
    message = msgspec.structs.replace(MESSAGE, accepted=accepted, finished=["a"], sent_s=1.0)
    older = EndForward.__struct_fields__[: EndForward.__struct_fields__.index("sent_s")]
    made = msgspec.defstruct("Older", [(name, object) for name in older], array_like=True)
    read = msgspec.msgpack.decode(encode_endforward(message)[2], type=made)
    assert (read.seq, read.rids) == (17, MESSAGE.rids)


def test_r_queued_is_waiting_plus_bootstrapping_plus_the_chunk_remainder():
    assert MESSAGE.queued_tokens == 60


def test_a_message_stays_small():
    assert sum(len(frame) for frame in encode_endforward(MESSAGE)) < 300


def test_fields_appended_by_a_newer_engine_are_ignored():
    topic, seq, payload = encode_endforward(MESSAGE)
    newer = msgspec.msgpack.encode([*msgspec.msgpack.decode(payload), "something new", 42])
    assert decode_endforward([topic, seq, newer]) == MESSAGE


def test_fields_an_older_engine_does_not_send_have_defaults():
    topic, seq, payload = encode_endforward(MESSAGE)
    older = msgspec.msgpack.encode(msgspec.msgpack.decode(payload)[:7])
    decoded = decode_endforward([topic, seq, older])
    assert (decoded.dp_rank, decoded.kind, decoded.rids) == (3, "forward", [])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [TOPIC],
        [b"load", b"", b""],
        [TOPIC, b"", b"\xc1"],
        [TOPIC, b"", msgspec.msgpack.encode({"dp_rank": 1})],
        [TOPIC, b"", msgspec.msgpack.encode(["i", "b", "neither", 0, 1, 0, "forward"])],
        [TOPIC, b"", msgspec.msgpack.encode(["i", "b", "prefill", 2, 2, 0, "forward"])],
    ],
)
def test_malformed_messages_are_refused(frames):
    with pytest.raises(MalformedMessage):
        decode_endforward(frames)


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_random_bytes_never_raise_anything_else(frames):
    with pytest.raises(MalformedMessage):
        decode_endforward([TOPIC, *frames] if len(frames) != 2 else frames)


@pytest.mark.parametrize("words", ["$[999]", "$[0] <= 3", "$[" + "9" * 5000 + "]", "`$[1]" * 9])
@pytest.mark.parametrize("field", ["role", "kind"])
def test_the_senders_words_are_not_read_as_what_is_wrong(field, words):
    frames = encode_endforward(msgspec.structs.replace(MESSAGE, **{field: words}))
    with pytest.raises(MalformedMessage) as raised:
        decode_endforward(frames)
    assert not isinstance(raised.value, ImplausibleMessage)
    assert str(raised.value) == f"Invalid enum value '{words}' - at `{field}`"


def test_what_is_out_of_range_is_named():
    for change, place in (
        ({"extend_tokens": -1}, "extend_tokens"),
        ({"rids": ["r"] * 1025}, "rids"),
        ({"sent_s": 1e12}, "sent_s"),
        ({"accepted": [Accepted("r")] * (MAX_RIDS + 1)}, "accepted"),
        ({"accepted": [Accepted("r", prompt_tokens=1 << 41)]}, "accepted.*"),
        ({"accepted": [Accepted("r", arrived_s=-1.0)]}, "accepted.*"),
        ({"accepted": [Accepted("r", room=1 << 63)]}, "accepted.*"),
        ({"finished": ["r"] * (MAX_RIDS + 1)}, "finished"),
        ({"started": [Started("r", cached_tokens=-1)]}, "started.*"),
    ):
        frames = encode_endforward(msgspec.structs.replace(MESSAGE, **change))
        with pytest.raises(ImplausibleMessage, match=f"[<>]= .* - at `{place}`$"):
            decode_endforward(frames)
