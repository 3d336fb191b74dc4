"""The HTTP client against hostile bytes: whatever arrives, each call ends once, without a raise."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Sequence

import pytest
from harness.raw_engines import Collector, ask, chunked, raw_server, read_request
from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.router.engines.connection import Connection, UpstreamError
from sglang_sbs.router.engines.connection_pool import IDLE_LIMIT_S, Call, Pool, request_head
from sglang_sbs.router.engines.response_framing import MalformedResponse, ResponseReader

ORIGIN = "http://10.0.0.1:1"


class FakeTransport:
    """The part of a transport that a connection uses."""

    def __init__(self) -> None:
        self.closing = False
        self.reading = True
        self.unsent = 0

    def writelines(self, pieces: Sequence[bytes]) -> None: ...
    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Once(Collector):
    """Counts the ends it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = 0

    def head_received(self, status: int, headers: dict[str, str]) -> None:
        assert self.ends == 0
        super().head_received(status, headers)

    def body_received(self, data: bytes) -> None:
        assert self.ends == 0
        super().body_received(data)

    def message_complete(self) -> None:
        self.ends += 1

    def failed(self, error: UpstreamError) -> None:
        self.ends += 1
        self.error = error


def exchange(receiver: Collector) -> tuple[Pool, Connection, FakeTransport, Call]:
    """A call whose request was just written to a connection that cannot be replaced."""
    pool = Pool(None)  # type: ignore[arg-type]
    connection, transport = Connection(pool, ORIGIN), FakeTransport()
    connection.transport = transport  # type: ignore[assignment]
    call = Call(pool, ORIGIN, (b"GET",), receiver)
    call._replayable = False
    call._send(connection)
    return pool, connection, transport, call


def feed(raw: bytes, cuts: list[int], *, reset: bool = False) -> tuple[Once, Pool]:
    receiver = Once()
    pool, connection, transport, _ = exchange(receiver)
    edges = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        if not transport.closing:
            connection.data_received(raw[start:end])
    connection.connection_lost(ConnectionResetError() if reset else None)
    return receiver, pool


HEAD = b"HTTP/1.1 200 OK\r\nserver: x\r\n"
VALID = {
    "length": HEAD + b"content-length: 11\r\n\r\nhello world",
    "chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked([b"hello ", b"world"]),
    "trailers": HEAD
    + b"transfer-encoding: chunked\r\n\r\n"
    + chunked([b"hello ", b"world"], b";a=b", b"x: y\r\nz: 0\r\n"),
    "after-103": b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    + HEAD
    + b"content-length: 11\r\n\r\nhello world",
    "until-eof": b"HTTP/1.0 200 OK\r\n\r\nhello world",
}


@pytest.mark.parametrize("raw", VALID.values(), ids=VALID.keys())
def test_a_valid_answer_is_the_same_wherever_it_is_cut(raw: bytes) -> None:
    for cut in range(len(raw) + 1):
        receiver, pool = feed(raw, [cut])
        assert (receiver.error, receiver.body, receiver.ends) == (None, b"hello world", 1)
        assert pool.open_connections == 0
    assert feed(raw, list(range(len(raw))))[0].body == b"hello world"


@pytest.mark.parametrize("raw", VALID.values(), ids=VALID.keys())
def test_a_truncated_answer_is_a_failure_unless_its_end_is_the_connections(raw: bytes) -> None:
    for length in range(len(raw)):
        receiver, _ = feed(raw[:length], [])
        assert receiver.ends == 1
        assert receiver.error is not None or (raw == VALID["until-eof"] and receiver.status == 200)
        receiver, _ = feed(raw[:length], [], reset=True)
        assert receiver.error is not None


@given(
    raw=st.sampled_from(list(VALID.values())),
    edits=st.lists(
        st.tuples(
            st.integers(0, 200), st.sampled_from(["set", "insert", "delete"]), st.binary(max_size=4)
        ),
        min_size=1,
        max_size=4,
    ),
    cuts=st.lists(st.integers(0, 300), max_size=6),
)
def test_mutated_answers_end_exactly_once(
    raw: bytes, edits: list[tuple[int, str, bytes]], cuts: list[int]
) -> None:
    data = bytearray(raw)
    for position, how, new in edits:
        at = position % (len(data) + 1)
        if how == "delete":
            del data[at : at + 1 + len(new)]
        elif how == "insert":
            data[at:at] = new
        else:
            data[at : at + len(new)] = new
    receiver, _ = feed(bytes(data), cuts)
    assert receiver.ends == 1


@given(raw=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=6))
def test_garbage_ends_exactly_once(raw: bytes, cuts: list[int]) -> None:
    receiver, _ = feed(raw, cuts)
    assert receiver.ends == 1
    assert receiver.error is not None


@pytest.mark.parametrize(
    "lines",
    [
        b"content-length: -5",
        b"content-length: +5",
        b"content-length: 5_0",
        b"content-length: 5, 6",
        b"content-length: 5, 5",
        b"content-length: 5\r\ncontent-length: 5",
        b"content-length: 5\r\ncontent-length: 6",
        b"content-length: 5\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked\r\ncontent-length: 5",
        b"transfer-encoding: chunked, chunked",
        b"content-length : 5",
        b"transfer-encoding: gzip, chunked",
        b"transfer-encoding: xchunked",
        b"content-encoding: gzip\r\ncontent-length: 5",
        b"no colon",
        b" folded: 1",
        b"x: a\nb",
        b"x: a\rb",
    ],
)
def test_ambiguous_heads_are_malformed(lines: bytes) -> None:
    with pytest.raises(MalformedResponse):
        ResponseReader().feed(b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n\r\nhello")


@pytest.mark.parametrize(
    "line",
    [
        b"HTTP/2 200",
        b"HTTP/2.0 200 OK",
        b"HTTP/1.1 099 x",
        b"HTTP/1.1 600 x",
        b"HTTP/1.1 199 x",
        b"HTTP/1.1 -99 x",
        b"HTTP/1.1 20",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 101 Up",
        b"",
    ],
)
def test_bad_status_lines_are_malformed(line: bytes) -> None:
    with pytest.raises(MalformedResponse):
        ResponseReader().feed(line + b"\r\ncontent-length: 0\r\n\r\n")


@pytest.mark.parametrize("size", [b"0x5", b"+5", b"5_0", b" 5", b"5 5", b"", b"f" * 20])
def test_odd_chunk_sizes_are_malformed(size: bytes) -> None:
    raw = HEAD + b"transfer-encoding: chunked\r\n\r\n" + size + b"\r\nhello\r\n0\r\n\r\n"
    receiver, _ = feed(raw, [])
    assert receiver.error is not None
    assert receiver.error.kind == "protocol"


def test_a_head_without_end_is_given_up() -> None:
    cuts = list(range(10_000, 120_000, 10_000))
    receiver, _ = feed(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000, cuts)
    assert receiver.error is not None
    assert "64 KiB" in str(receiver.error)


def test_several_connection_options_are_understood() -> None:
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: x, Close\r\n\r\n")
    assert reader.status
    assert not reader.keep_alive


@pytest.mark.parametrize(
    ("begun", "endless"), [(b"0\r\n", b"x: y\r\n"), (b"0", b";x=y")], ids=["trailers", "extension"]
)
def test_what_is_no_body_is_bounded(begun: bytes, endless: bytes) -> None:
    reader = ResponseReader()
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    assert reader.feed(head + b"5\r\nhello\r\n" + begun) == b"hello"
    with pytest.raises(MalformedResponse, match="64 KiB"):
        for _ in range(20):
            reader.feed(endless * 1000)


def test_a_receiver_that_raises_fails_its_call_in_either_callback() -> None:
    class AtBody(Once):
        def body_received(self, data: bytes) -> None:
            raise TypeError("no such thing")

    class AtEnd(Once):
        def message_complete(self) -> None:
            raise KeyError("no such thing")

    for receiver in (AtBody(), AtEnd()):
        _, connection, _, _ = exchange(receiver)
        connection.data_received(VALID["length"])
        connection.connection_lost(None)
        assert receiver.ends == 1
        assert receiver.error is not None
        assert receiver.error.kind == "protocol"


def test_a_connection_that_was_paused_is_read_again_by_its_next_user() -> None:
    class Slow(Once):
        def body_received(self, data: bytes) -> None:
            call.set_paused(True)

    pool, connection, transport, call = exchange(Slow())
    connection.data_received(VALID["length"])
    assert pool.take_idle(ORIGIN) is connection
    assert transport.reading
    call.set_paused(False)  # the slow client catches up later: nobody's business any more
    assert transport.reading


def test_a_pause_holds_for_a_call_that_has_no_connection_yet() -> None:
    pool = Pool(None)  # type: ignore[arg-type]
    connection, transport = Connection(pool, ORIGIN), FakeTransport()
    connection.transport = transport  # type: ignore[assignment]
    call = Call(pool, ORIGIN, (b"GET",), Once())
    call.set_paused(True)
    call._send(connection)
    assert not transport.reading
    call.set_paused(False)
    assert transport.reading


def test_an_early_answer_leaves_no_half_sent_request_on_a_reused_connection() -> None:
    pool, connection, transport, _ = exchange(Once())
    transport.unsent = 1000
    connection.data_received(VALID["length"])
    assert transport.closing
    assert pool.take_idle(ORIGIN) is None


async def test_a_request_the_engine_may_have_worked_on_is_not_sent_again() -> None:
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                requests.append(await read_request(reader))
            except asyncio.IncompleteReadError:
                return
            if len(requests) == 2:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" if interim else b"")
                await writer.drain()
                writer.close()
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    for interim in (True, False):
        requests.clear()
        async with raw_server(serve) as (origin, pool):
            if not interim:
                pool.replay_within_s = 0.0
            await ask(pool, origin)
            answer = await ask(pool, origin)
            assert answer.error is not None
            assert answer.error.kind == "reset"
            assert len(requests) == 2


def test_engines_are_asked_not_to_compress() -> None:
    assert b"\r\naccept-encoding: identity\r\n" in request_head("POST", ORIGIN, "/", b"", 2)


async def test_an_impossible_host_name_is_a_failure_not_a_hang() -> None:
    pool = Pool(asyncio.get_running_loop())
    answer = await ask(pool, "http://a..b:80")
    assert answer.error is not None
    assert answer.error.kind == "connect"


def test_idle_connections_that_an_engine_leaves_open_are_closed_here() -> None:
    pool, connection, transport, _ = exchange(Once())
    connection.data_received(VALID["length"])
    connection.idle_since -= IDLE_LIMIT_S + 1
    newer, other = Connection(pool, ORIGIN), FakeTransport()
    newer.transport = other  # type: ignore[assignment]
    pool.keep(newer)
    assert (transport.closing, other.closing) == (True, False)
    assert pool.take_idle(ORIGIN) is newer


@pytest.mark.parametrize("lost", [False, True])
def test_a_connection_that_is_over_leaves_nothing_to_the_collector(lost: bool) -> None:
    """Its reader and its parser hold each other, and the router's collector seldom runs."""

    def readers() -> int:
        return sum(isinstance(found, ResponseReader) for found in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = readers()
        pool, connection, transport, call = exchange(Once())
        connection.data_received(VALID["length"][:40])
        assert readers() == before + 1
        if lost:
            connection.connection_lost(None)
        else:
            connection.close()
        del pool, connection, transport, call
        assert readers() == before
    finally:
        gc.enable()
