"""The verdict on an engine's event stream depends on its bytes, not on how TCP cut them."""

from __future__ import annotations

import copy
import itertools
import re
import time
import tracemalloc
from collections.abc import Iterable
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_sbs.router.errors import EventTooLarge
from sglang_sbs.router.relay import event_reader
from sglang_sbs.router.relay.answer_kinds import ANSWER_KINDS
from sglang_sbs.router.relay.engine_json import opened
from sglang_sbs.router.relay.event_reader import EventReader, Payload, StreamKind
from sglang_sbs.router.relay.merged_answers import sse

TOKEN_STREAM = ANSWER_KINDS["chat"]
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "no", "code": 503}}\n\n'
ABORT = (
    b'data: {"text":"","meta_info":{"finish_reason":{"type":"abort","message":"gone",'
    b'"status_code":500}}}\n\n'
)
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
SAYS_DONE = b'data: {"choices":[{"index":0,"delta":{"content":"[DONE]"}}]}\n\n'
SAYS_ABORT = b'data: {"choices":[{"index":0,"delta":{"content":"abort"},"token":"abort"}]}\n\n'
PARTS = [
    *(CHUNK, DONE, ERROR, ABORT, SAYS_DONE, SAYS_ABORT, b"data: {", b"[DONE]", b'"abort"', b"\n"),
    *(
        b"\n\n",
        b"\r\n",
        b"\r",
        b": ping\n\n",
        b"event: x\n",
        b"id: 1\n",
        b"\xef\xbb\xbf",
        b"<html>",
    ),
    *(b"data:[DONE]\r\n\r\n", b'"type":"abort"', b"data: a\ndata: b\n\n", b"data:\n\n", b"data"),
]


def verdict(
    pieces: Iterable[bytes], kind: StreamKind = TOKEN_STREAM, *, whole: bool = False
) -> tuple[Any, ...]:
    """Everything that a reader says at the end, and what it passed on."""
    reader = EventReader(kind, "decode:1", whole=whole)
    passed: list[Payload] = []
    for piece in pieces:
        passed += reader.feed(piece)
    passed += reader.end()
    out: Any = [bytes(part).strip() for part in passed] if whole else b"".join(passed)
    failure = reader.failure and (reader.failure.status, reader.failure.message)
    facts = (reader.opened, reader.done, reader.failed, reader.events, reader.last)
    return (*facts, failure, type(reader.broken), str(reader.broken), out)


def cut(raw: bytes, cuts: Iterable[int]) -> list[bytes]:
    edges = sorted({0, len(raw), *(at % (len(raw) + 1) for at in cuts)})
    return [raw[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("whole", [False, True], ids=["as it comes", "whole events"])
@given(st.lists(st.sampled_from(PARTS), max_size=8), st.lists(st.integers(0, 500), max_size=12))
@example([ERROR, DONE], [1])
@example([b"\xef\xbb\xbf", CHUNK, DONE], [2])
def test_the_verdict_is_the_same_wherever_the_stream_is_cut(
    whole: bool, parts: list[bytes], cuts: list[int]
) -> None:
    raw = b"".join(parts)
    once = verdict([raw], whole=whole)
    assert verdict(cut(raw, cuts), whole=whole) == once
    assert verdict((raw[at : at + 1] for at in range(len(raw))), whole=whole) == once


@pytest.mark.parametrize("whole", [False, True], ids=["as it comes", "whole events"])
@given(
    st.lists(
        st.sampled_from([*PARTS, b"x" * 30, b"x" * 47, b'{"error": "' + b"y" * 60]), max_size=12
    ),
    st.lists(st.integers(0, 900), max_size=12),
)
def test_nor_does_it_depend_on_cuts_where_events_are_long(
    whole: bool, parts: list[bytes], cuts: list[int]
) -> None:
    raw = b"".join(parts)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(event_reader, "LONG_BYTES", 64)
        patched.setattr(event_reader, "_HEAD_BYTES", 16)
        patched.setattr(event_reader, "_TAIL_BYTES", 24)
        patched.setattr(event_reader, "MAX_EVENT_BYTES", 150)
        once = verdict([raw], whole=whole)
        assert verdict(cut(raw, cuts), whole=whole) == once
        assert verdict((raw[at : at + 1] for at in range(len(raw))), whole=whole) == once


@pytest.mark.parametrize("raw", [ERROR + DONE, ABORT + DONE, ERROR.strip()])
def test_a_first_event_that_is_an_error_never_opens_a_stream(raw: bytes) -> None:
    for at in range(len(raw)):
        reader = EventReader(TOKEN_STREAM, "decode:1")
        passed = [*reader.feed(raw[:at]), *reader.feed(raw[at:]), *reader.end()]
        assert (reader.opened, passed) == (False, []), at
        assert reader.failure is not None
        assert reader.failure.message in ("no", "gone"), at


def test_an_end_mark_inside_content_is_none() -> None:
    opened, done, *_ = verdict([CHUNK, SAYS_DONE])
    assert (opened, done) == (True, False)
    assert verdict([CHUNK, b"data: x [DONE]\n\n"])[1] is False
    for end in (
        DONE,
        b"data:[DONE]\n\n",
        b"data: [DONE]",
        b"data: [DONE]\r\n\r\n",
        b"id: 1\n" + DONE,
    ):
        assert verdict([CHUNK, end])[1] is True, end


def test_what_is_no_event_stream_does_not_open() -> None:
    for raw in (
        b"<html>",
        b"<html>\n\n",
        b'{"text": "x"}',
        b"\0" * 100_000,
        b"\xef\xbb\xbf<p>\n\n",
    ):
        opened, *_, why, passed = verdict([raw])
        assert (opened, why, passed) == (False, "its response is not an event stream", b""), raw


def test_a_byte_order_mark_and_comments_come_before_the_first_event() -> None:
    raw = b"\xef\xbb\xbf: hello\r\n\r\nid: 7\r\n" + CHUNK + DONE
    opened, done, _, events, *_, passed = verdict([raw])
    assert (opened, done, events, passed) == (True, True, 1, raw)
    assert verdict([b": hello\n\n"])[0] is False


def test_an_abort_is_seen_in_the_middle_of_a_long_event() -> None:
    long = b"0.1," * 100_000
    for mark in (b'"type":"abort"', b'"finish_reason": "abort"'):
        raw = b'data: {"text":"","meta_info":{%b,"l":[%b1],"m":[%b1]}}\n\n' % (mark, long, long)
        for size in (len(raw), 16 << 10, 7001):
            reader = EventReader(TOKEN_STREAM, "decode:1")
            for piece in (CHUNK, *(raw[at : at + size] for at in range(0, len(raw), size)), DONE):
                assert b"".join(reader.feed(piece)) == piece
            assert reader.failed and reader.done
    assert not verdict([CHUNK, b'data: {"text":"%babort"}\n\n' % long])[2]


def response_event(name: str, **fields: Any) -> bytes:
    data = orjson.dumps({"type": name} | fields)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


CREATED = response_event("response.created", response={"instructions": "i" * 100_000})
DELTA = response_event("response.output_text.delta", delta="a")
COMPLETED = response_event(
    "response.completed",
    response={
        "output": ['"output_tokens":9 ' * 10_000],
        "status": "completed",
        "usage": {"output_tokens": 17},
        "metadata": {"output_tokens": 3, "x": "y" * 100_000},
    },
)


def failed_event(usage: Any, message: str, fill: int = 0) -> bytes:
    error = {"code": "server_error", "message": message}
    response = {"status": "failed", "usage": usage, "error": error, "instructions": "i" * fill}
    return response_event("response.failed", response=response)


@pytest.mark.parametrize("size", [7, 4096, 1 << 20])
def test_a_response_is_held_back_until_its_first_output(size: int) -> None:
    """The events before it repeat the request, however long that is."""
    reader = EventReader(ANSWER_KINDS["responses"], "decode:1", most_held=1 << 20)

    def feed(data: bytes) -> bytes:
        pieces = (data[at : at + size] for at in range(0, len(data), size))
        return b"".join(bytes(part) for piece in pieces for part in reader.feed(piece))

    assert feed(CREATED) + feed(response_event("response.in_progress")) == b""
    assert not reader.opened
    assert feed(DELTA).startswith(b"event: response.created")
    assert feed(COMPLETED) == COMPLETED
    assert (reader.done, reader.failed) == (True, False)
    assert ANSWER_KINDS["responses"].output_tokens(reader.last) == 17


def test_what_is_held_back_has_a_bound() -> None:
    reader = EventReader(ANSWER_KINDS["responses"], "decode:1")
    assert not reader.feed(CREATED)
    assert isinstance(reader.broken, EventTooLarge)


@pytest.mark.parametrize(
    ("event", "status", "message"),
    [
        (failed_event({}, "KV transfer failed"), 500, "KV transfer failed"),
        (failed_event(None, "top_p must be in (0, 1]"), 400, "top_p must be in (0, 1]"),
        (failed_event(None, "no room", 100_000), 400, "no room"),
        (failed_event(None, "503: no engine"), 503, "no engine"),
        (failed_event(None, "200: what?"), 400, "200: what?"),
        (response_event("error", message="m"), 500, "request aborted by decode worker"),
        (b"event: response.failed\ndata: {\n\n", 500, "request aborted by decode worker"),
        (b'data: {"type": "response.failed"}\n\n', 500, "request aborted by decode worker"),
    ],
)
def test_a_response_that_fails_before_its_first_output(
    event: bytes, status: int, message: str
) -> None:
    kind = ANSWER_KINDS["responses"]
    reader = EventReader(kind, "decode:1", most_held=1 << 20)
    assert not [*reader.feed(CREATED), *reader.feed(event)]
    assert not reader.opened
    assert reader.failure is not None
    assert (reader.failure.status, reader.failure.message) == (status, message)
    later = EventReader(kind, "decode:1")
    assert later.feed(DELTA)
    assert b"".join(later.feed(event)) == event
    assert (later.failed, later.done, later.failure) == (True, True, None)


class CountedMark:
    """Counts the searches for the mark of a kind."""

    def __init__(self, mark: re.Pattern[bytes]) -> None:
        self._mark = mark
        self.searches = 0

    def search(self, *where: Any) -> re.Match[bytes] | None:
        self.searches += 1
        return self._mark.search(*where)


@pytest.mark.parametrize("opened", [False, True], ids=["preamble", "content"])
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_what_almost_matches_costs_one_search_per_piece(api: Any, opened: bool) -> None:
    """Clients can fill tools with it, and engines repeat those."""
    kind = copy.copy(ANSWER_KINDS[api])
    mark = CountedMark(kind.mark)
    kind.mark = mark  # type: ignore[assignment]
    reader = EventReader(kind, "decode:1", most_held=None if api == "chat" else 16 << 20)
    name = "response.created" if api == "responses" else "message_start"
    event = b'event: %b\ndata: {"l":[%b1]}\n\n' % (name.encode(), (kind.needle + b",") * 50_000)
    if opened:
        reader.feed(DELTA)
    for at in range(0, len(event), 16 << 10):
        reader.feed(event[at : at + (16 << 10)])
    assert reader.events == 1 + opened
    assert mark.searches <= len(event) / (16 << 10) + 3
    if not opened and api != "chat":
        assert not mark.searches


def test_a_long_failure_is_not_copied_or_parsed() -> None:
    """A client decides how long the tools are that the engine repeats with the error."""
    tools = b'"tools":["error","\\"error\\":{\\"code\\":",%b1],' % (b'"x",' * (1 << 20))
    event = failed_event(None, 'no "room" for \u20ac').replace(b'"error"', tools + b'"error"')
    reader = EventReader(ANSWER_KINDS["responses"], "decode:1", most_held=16 << 20)
    reader.feed(event[:-2])
    reader.feed(event[-2:-1])  # its buffer has room for more from now on
    tracemalloc.start()
    try:
        reader.feed(event[-1:])
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reader.failure is not None
    assert (reader.failure.status, reader.failure.message) == (400, 'no "room" for \u20ac')
    assert taken < 1 << 20


def test_a_client_cannot_write_the_error_of_a_long_failure() -> None:
    forged = b'"tools":[{"error":{"code":"x","message":"503: forged"}},"%b"],' % (b"x" * 100_000)
    event = failed_event(None, "no room").replace(b'"error"', forged + b'"error"', 1)
    for size in (len(event), 16 << 10, 4099):
        reader = EventReader(ANSWER_KINDS["responses"], "decode:1", most_held=1 << 20)
        for at in range(0, len(event), size):
            reader.feed(event[at : at + size])
        assert reader.failure is not None
        assert (reader.failure.status, reader.failure.message) == (400, "Bad Request")


def test_a_preamble_is_kept_once() -> None:
    """It waits for prefill in full, and is not kept in the incomplete event as well."""
    reader = EventReader(ANSWER_KINDS["responses"], "decode:1", most_held=16 << 20)
    event = response_event("response.created", response={"instructions": "i" * (8 << 20)})
    tracemalloc.start()
    try:
        for at in range(0, len(event) - 1, 16 << 10):
            reader.feed(event[at : min(at + (16 << 10), len(event) - 1)])
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert reader.unopened_bytes == len(event) - 1
    assert taken < len(event) * 1.2
    assert b"".join(reader.feed(event[-1:] + DELTA)) == event + DELTA
    assert reader.unopened_bytes == 0


def test_a_parked_stream_is_watched_and_not_kept() -> None:
    reader = EventReader(ANSWER_KINDS["responses"], "decode:1", most_held=1 << 20)
    assert not reader.watch(CREATED[:1000])
    assert not reader.watch(CREATED[1000:])
    assert reader.watch(DELTA)
    assert not b"".join(reader.feed(b""))


def test_a_reader_keeps_little_of_an_endless_event() -> None:
    reader = EventReader(TOKEN_STREAM, "decode:1")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        reader.feed(CHUNK + b"data: ")
        piece = b"x" * (16 << 10)
        for _ in range(1000):
            reader.feed(piece)
        assert tracemalloc.get_traced_memory()[1] - before < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("whole", [False, True], ids=["as it comes", "whole events"])
def test_a_long_event_in_pieces_takes_no_longer_than_its_length(whole: bool) -> None:
    """Joined anew with every piece, this one would take minutes."""
    reader = EventReader(TOKEN_STREAM, "decode:1", whole=whole)
    data = b"data: " + bytes(15 << 20) + b"\n\n"
    started_s = time.process_time()
    passed = 0
    for start in range(0, len(data), 512):
        passed += sum(map(len, reader.feed(data[start : start + 512])))
        if time.process_time() - started_s > 20:
            pytest.fail("more than a hundred times as long as it should take")
    assert passed >= 15 << 20
    assert reader.events == 1


BODIES = st.binary(max_size=40).filter(lambda body: body.strip() != b"[DONE]")


@given(st.lists(BODIES, max_size=8), st.integers(1, 30))
def test_long_events_say_what_short_ones_would(bodies: list[bytes], piece: int) -> None:
    raw = CHUNK + b"".join(b"\ndata: %b\n\n" % re.sub(rb"[\r\n]", b"", body) for body in bodies)
    wanted = verdict([raw], whole=True)[-1]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(event_reader, "LONG_BYTES", 10)
        pieces = (raw[at : at + piece] for at in range(0, len(raw), piece))
        assert verdict(pieces, whole=True)[-1] == wanted


def test_a_long_event_is_not_copied() -> None:
    """A copy of sixteen megabytes would hold up others for some milliseconds."""
    pushed: list[bytes | memoryview] = []
    reader = EventReader(TOKEN_STREAM, "decode:1", whole=True)
    text = b"x" * (8 << 20)
    tracemalloc.start()
    try:
        reader.feed(b'data: {"choices":[{"delta":{"content":"%b"}}],"a":1}\n' % text)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for data in reader.feed(b"\n"):
            pushed += sse(opened(data))
        taken = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert taken < len(text) // 4
    assert orjson.loads(b"".join(pushed).removeprefix(b"data: "))["a"] == 1


def test_too_long_an_event_breaks_a_stream_that_is_edited(monkeypatch: Any) -> None:
    monkeypatch.setattr(event_reader, "MAX_EVENT_BYTES", 100_000)
    reader = EventReader(TOKEN_STREAM, "decode:1", whole=True)
    assert reader.feed(CHUNK + b"data: " + b"x" * 90_000)
    assert reader.broken is None
    assert not reader.feed(b"x" * 20_000)
    assert isinstance(reader.broken, EventTooLarge)
    assert not reader.feed(CHUNK)
