"""The HTTP client of the legs: framing however it is cut, reuse, replay, cancellation."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from harness.raw_engines import Collector, ask, chunked, raw_server, read_request
from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.router.engines import connection
from sglang_sbs.router.engines.connection import UpstreamError
from sglang_sbs.router.engines.connection_pool import Pool, fetch, request_head
from sglang_sbs.router.engines.response_framing import MalformedResponse, ResponseReader


async def test_a_small_answer_as_a_whole_or_why_there_is_none() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"nonsense\r\n\r\n"):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"GET /loads?a=1 HTTP/1.1\r\n")
            assert b"authorization: k\r\n" in head
            writer.write(answer)
        await reader.read()
        writer.close()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    headers = b"authorization: k\r\n"
    async with raw_server(serve) as (origin, pool):
        assert await fetch(pool, origin, "/loads?a=1", headers, 20.0) == (200, b"{}")
        with pytest.raises(UpstreamError):
            await fetch(pool, origin, "/loads?a=1", headers, 20.0)
        assert pool.open_connections == 0
    async with raw_server(silent) as (origin, pool):
        with pytest.raises(TimeoutError):
            await fetch(pool, origin, "/loads", headers, 0.01)
        assert pool.open_connections == 0


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@given(
    parts=st.lists(st.binary(max_size=40), max_size=8),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    extension=st.sampled_from([b"", b";a=b"]),
    trailer=st.sampled_from([b"", b"x: y\r\n", b"x: y\r\nz: 0\r\n"]),
)
def test_chunked_framing_comes_off_wherever_it_is_cut(
    parts: list[bytes], cuts: list[int], extension: bytes, trailer: bytes
) -> None:
    raw = CHUNKED + chunked(parts, extension, trailer)
    edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    reader = ResponseReader()
    for _ in range(2):  # a connection's second answer is read as its first
        reader.begin()
        out = b"".join(reader.feed(raw[a:b]) for a, b in itertools.pairwise(edges))
        assert out == b"".join(parts)
        assert reader.status and reader.keep_alive
        assert "content-type" not in reader.headers  # trailers are none
        assert reader.done
        assert not reader.surplus


@pytest.mark.parametrize("raw", [b"zz\r\n", b"-1\r\nx", b"3\r\nabcd\r\n", b"\r\nabc"])
def test_what_is_not_chunked_framing_is_an_error(raw: bytes) -> None:
    with pytest.raises(MalformedResponse):
        ResponseReader().feed(CHUNKED + raw)


@pytest.mark.parametrize("surplus", [b"H", b"nonsense", CHUNKED + b"1\r\nx\r\n0\r\n\r\n"])
@pytest.mark.parametrize("head", [CHUNKED, CHUNKED[:-2] + b"connection: close\r\n\r\n"])
@pytest.mark.parametrize("parts", [[], [b"abc"]])
def test_bytes_behind_the_end_make_the_connection_unusable(
    surplus: bytes, head: bytes, parts: list[bytes]
) -> None:
    reader = ResponseReader()
    assert reader.feed(head + chunked(parts) + surplus) == b"".join(parts)
    assert reader.done
    assert reader.surplus


@pytest.mark.parametrize(
    ("head", "body", "want"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"hello", b"hello"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
            chunked([b"he", b"llo"]),
            b"hello",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"hello", b"hello"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"", b""),
    ],
    ids=["length", "chunked", "until-eof", "no-content", "after-100"],
)
async def test_every_way_to_end_a_body(head: bytes, body: bytes, want: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for byte in head + body:  # as unkind as a network can be
            writer.write(bytes([byte]))
            await writer.drain()
        writer.close()

    async with raw_server(serve) as (origin, pool):
        answer = await ask(pool, origin)
        assert answer.error is None
        assert answer.body == want


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"", "reset"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe", "reset"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nab", "reset"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "protocol"),
    ],
)
async def test_broken_answers_fail(raw: bytes, kind: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(raw)
        await writer.drain()
        writer.close()

    async with raw_server(serve) as (origin, pool):
        answer = await ask(pool, origin)
        assert answer.error is not None
        assert answer.error.kind == kind
        assert pool.open_connections == 0


async def test_refused_connections_say_so() -> None:
    probe = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = probe.sockets[0].getsockname()[1]
    probe.close()
    await probe.wait_closed()
    pool = Pool(asyncio.get_running_loop())
    answer = await ask(pool, f"http://127.0.0.1:{port}")
    assert answer.error is not None
    assert answer.error.kind == "refused"


async def test_connections_are_reused_and_an_idle_one_the_engine_closed_is_replaced() -> None:
    seen: list[int] = []
    closing = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(set(seen))
        while True:
            try:
                await read_request(reader)
            except asyncio.IncompleteReadError:
                return
            if number == 0 and seen.count(0) == 2:
                writer.close()  # took the request, said nothing: as an idle close looks here
                closing.set()
                return
            seen.append(number)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()

    async with raw_server(serve) as (origin, pool):
        for _ in range(3):
            answer = await ask(pool, origin)
            assert answer.body == b"ok"
        assert closing.is_set()
        assert seen == [0, 0, 1]


async def test_connections_idle_for_too_long_are_not_reused() -> None:
    accepted = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        while True:
            try:
                await read_request(reader)
            except asyncio.IncompleteReadError:
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with raw_server(serve) as (origin, pool):
        await ask(pool, origin)
        pool.idle_limit_s = -1.0
        await ask(pool, origin)
        assert accepted == 2


async def test_a_cancelled_call_closes_its_connection_and_stays_silent() -> None:
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        arrived.set()
        assert await reader.read() == b""
        gone.set()

    async with raw_server(serve) as (origin, pool):
        collector = Collector()
        call = pool.call(origin, (request_head("POST", origin, "/", b"", 2), b"{}"), collector)
        assert not call.sent
        await arrived.wait()
        assert call.sent
        call.cancel()
        await asyncio.wait_for(gone.wait(), 10)
        assert not collector.over.is_set()
        assert pool.open_connections == 0


async def test_a_name_with_several_addresses_is_tried_until_one_answers(monkeypatch: Any) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    async with raw_server(serve) as (origin, pool):
        port = int(origin.rsplit(":", 1)[1])

        async def getaddrinfo(*_args: Any, **_kwargs: Any) -> Any:
            return [(2, 1, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]

        monkeypatch.setattr(pool.loop, "getaddrinfo", getaddrinfo)
        answer = await ask(pool, f"http://several.example:{port}")
        assert answer.body == b"ok"


class Slow(Collector):
    """Notes how much it gets at a time, and pauses the exchange now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.call: Any = None

    def body_received(self, data: bytes) -> None:
        super().body_received(data)
        self.sizes.append(len(data))
        if self.call is not None and len(self.sizes) % 7 == 0:
            self.call.set_paused(True)
            asyncio.get_running_loop().call_later(0.001, self.call.set_paused, False)


@pytest.mark.parametrize("end", ["length", "chunked", "close"])
@pytest.mark.parametrize("pauses", [False, True])
async def test_what_comes_at_once_is_taken_in_parts_between_which_others_get_turns(
    end: str, pauses: bool
) -> None:
    body = bytes(range(256)) * 12_000
    heads = {"length": b"Content-Length: %d\r\n" % len(body), "close": b""}
    head = b"HTTP/1.1 200 OK\r\n%b\r\n" % heads.get(end, b"Transfer-Encoding: chunked\r\n")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            chunked = end == "chunked"
            writer.write(head + (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body))
            await writer.drain()
            if end == "close":
                break
        writer.close()

    async with raw_server(serve) as (origin, pool):
        for _ in range(2 if end != "close" else 1):
            receiver = Slow()
            call = pool.call(origin, [request_head("GET", origin, "/", b"", 0)], receiver)
            receiver.call = call if pauses else None
            async with asyncio.timeout(20):
                await receiver.over.wait()
            assert receiver.error is None
            assert receiver.body == body
            assert max(receiver.sizes) <= connection._TAKEN_BYTES
