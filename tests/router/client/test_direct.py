"""The serving port's own HTTP: the same answers as through aiohttp, and nothing doubtful read."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpRequestParser
from hypothesis import given
from hypothesis import strategies as st
from router_harness import Cluster, cluster, sse_events, until

from sglang_sbs.router.client import intake, serving_port
from sglang_sbs.router.client.answer_stream import Downstream
from sglang_sbs.router.client.serving_port import parse_plain_head
from tools.stand_ins.mock_engine import Behaviour

PATHS = {"POST /generate HTTP/1.1": "/generate"}


def request(body: Any, *lines: str, target: str = "/generate") -> bytes:
    raw = orjson.dumps(body)
    head = [f"POST {target} HTTP/1.1", "Host: x", f"Content-Length: {len(raw)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + raw


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One response with a length or in chunks; its body without framing."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    return int(head[0].split()[1]), headers, body


class Talk:
    """A connection to the router."""

    def __init__(self, cluster_: Cluster) -> None:
        self._port = cluster_.server.port

    async def __aenter__(self) -> Talk:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        self.writer.write(data)
        return await read_answer(self.reader)


def directly(c: Cluster) -> int:
    assert c.server._direct is not None
    return len(c.server._direct.connections)


# What is taken ----------------------------------------------------------------------------------

LINES = st.sampled_from(
    [
        *("Host: x", "host:y", "Content-Length: 5", "Content-Length: +5", "Content-Length: 5, 5"),
        *("content-length: 0005", "Transfer-Encoding: chunked", "Connection: close", "X: \tv \t"),
        *("Connection: Keep-Alive", "Connection: upgrade", "Upgrade: h2c", "Expect: 100-continue"),
        *(" folded", "X : v", "X", "", ":v", "X: a\rb", "X: a\nb", "X: \0", "X: ä", "X: a:b"),
        *("Content-Encoding: gzip", "Authorization: Bearer k", "X-Request-Id: i", "\tX: v"),
    ]
) | st.text(max_size=12)


@given(
    first=st.sampled_from([*PATHS, "GET /generate HTTP/1.1", "POST /generate HTTP/1.0", "POST x"]),
    lines=st.lists(LINES, max_size=6),
)
def test_a_head_that_is_taken_means_the_same_to_aiohttp(first: str, lines: list[str]) -> None:
    data = "\r\n".join([first, "Host: x", "Content-Length: 7", *lines]).encode()
    data = data.split(b"\r\n\r\n", 1)[0]
    head = parse_plain_head(data, PATHS)
    if head is None:
        return
    loop = asyncio.new_event_loop()
    try:
        parser = HttpRequestParser(BaseProtocol(loop), loop, 2**16)
        (message, _), *more = parser.feed_data(data + b"\r\n\r\n")[0]
    finally:
        loop.close()
    assert not more
    assert (message.method, message.path) == ("POST", head.path)
    assert {name.lower(): value for name, value in message.headers.items()} == head.fields
    assert int(message.headers["Content-Length"]) == head.content_length
    assert message.should_close == head.close
    assert not (message.chunked or message.upgrade or message.compression)


@pytest.mark.parametrize(
    "line",
    [
        *("Transfer-Encoding: chunked", "Expect: 100-continue", "Upgrade: h2c", "Host: y"),
        *("Content-Encoding: gzip", "X: ä", "Connection: upgrade", "X : v", " folded"),
    ],
)
def test_what_is_out_of_the_ordinary_is_left_to_aiohttp(line: str) -> None:
    plain = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5"
    assert parse_plain_head(plain, PATHS) is not None
    assert parse_plain_head(plain + b"\r\n" + line.encode(), PATHS) is None


# The same answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("origins", [(), ("--cors-allowed-origins", "http://a")], ids=["any", "a"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{"text": "x"}, {"nothing": 1}], ids=["good", "bad"])
async def test_both_ways_answer_alike(body: Any, stream: bool, origins: tuple[str, ...]) -> None:
    async with cluster(*origins) as c, Talk(c) as talk, Talk(c) as through_aiohttp:
        lines = ("Origin: http://a", "X-Request-Id: mine")
        mine = await talk.ask(request(body | {"stream": stream}, *lines))
        assert directly(c) >= 1
        query = request(body | {"stream": stream}, *lines, target="/generate?a=1")
        theirs = await through_aiohttp.ask(query)
        assert directly(c) == 1  # the other one was handed over
        status, headers, raw = mine
        assert status == theirs[0] == (200 if "text" in body else 400)
        assert headers.keys() == theirs[1].keys()
        varying = {"date", "content-length"}
        assert {k: v for k, v in headers.items() if k not in varying} == {
            k: v for k, v in theirs[1].items() if k not in varying
        }
        assert headers["x-request-id"] == "mine"
        if stream and status == 200:
            assert [e["text"] for e in sse_events(raw)[:-1]] == [
                e["text"] for e in sse_events(theirs[2])[:-1]
            ]
        text = c.server.metrics.render().decode()
        assert 'smg_http_requests_total{method="POST",path="/generate"} 2.0' in text
        await until(lambda: c.server.in_flight.client_requests == 0)
        assert f'status_code="{status}"' in c.server.metrics.render().decode()


async def test_a_connection_serves_many_requests_and_every_kind() -> None:
    async with cluster() as c, Talk(c) as talk:
        for _ in range(3):
            status, headers, body = await talk.ask(request({"text": "x"}))
            assert (status, orjson.loads(body)["text"]) == (200, "t1 t2 t3")
            assert "connection" not in headers
        assert directly(c) == 1
        assert (await talk.ask(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 200
        assert directly(c) == 0
        assert (await talk.ask(request({"text": "x"})))[0] == 200


async def test_a_request_may_come_in_any_pieces_and_the_next_one_early() -> None:
    async with cluster() as c, Talk(c) as talk:
        data = request({"text": "x" * 50}, "X-A: b")
        cut = data.index(b"\r\n\r\n") + 4
        for piece in (data[:cut], data[cut : cut + 10], data[cut + 10 :] + request({"text": "y"})):
            talk.writer.write(piece)
            await talk.writer.drain()
            await asyncio.sleep(0.01)
        for _ in range(2):
            assert (await read_answer(talk.reader))[0] == 200
        assert [r.body["text"] for r in c.decode[0].requests] == ["x" * 50, "y"]
        assert directly(c) == 1
        c.check_books()


async def test_a_head_in_pieces_goes_to_aiohttp_and_is_served() -> None:
    async with cluster() as c, Talk(c) as talk:
        data = request({"text": "x"})
        talk.writer.write(data[:30])
        await until(lambda: directly(c) == 0)
        assert (await talk.ask(data[30:]))[0] == 200


async def test_the_client_may_ask_for_the_connections_end() -> None:
    async with cluster() as c, Talk(c) as talk:
        status, headers, _ = await talk.ask(request({"text": "x"}, "Connection: close"))
        assert (status, headers["connection"]) == (200, "close")
        assert await talk.reader.read() == b""
        assert directly(c) == 0


async def test_a_key_is_wanted_here_too() -> None:
    async with cluster("--api-key", "k") as c, Talk(c) as talk, Talk(c) as other:
        assert (await talk.ask(request({"text": "x"})))[0] == 401
        assert (await other.ask(request({"text": "x"}, "Authorization: Bearer k")))[0] == 200
        assert directly(c) == 1


# Trouble ----------------------------------------------------------------------------------------


async def test_a_client_that_leaves_is_noticed_and_both_legs_are_aborted() -> None:
    async with cluster() as c:
        c.decode[0].gate.close()
        async with Talk(c) as talk:
            talk.writer.write(request({"text": "x"}))
            await until(lambda: len(c.decode[0].requests) == 1)
        await until(lambda: len(c.decode[0].aborts) >= 1)
        await c.settled()
        assert directly(c) == 0
        c.check_books()


async def test_a_body_that_stops_is_a_408_and_its_rest_no_request(monkeypatch: Any) -> None:
    monkeypatch.setattr(intake, "GRACE_S", 0.05)
    monkeypatch.setattr(serving_port, "_LINGER_S", 0.05)
    async with cluster() as c, Talk(c) as talk:
        talk.writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        status, headers, _ = await read_answer(talk.reader)
        assert (status, headers["connection"]) == (408, "close")
        talk.writer.write(request({"text": "smuggled"}))
        assert await talk.reader.read() == b""
        assert c.decode[0].requests == []


async def test_a_client_that_does_not_read_its_answers_gets_no_further_ones(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(serving_port, "FINISH_S", 0.2)
    async with cluster() as c, Talk(c) as talk:
        c.decode[0].behaviour = Behaviour(tokens=2_000_000)
        talk.writer.write(request({"text": "x"}) * 5)
        await until(lambda: directly(c) == 0)  # it was closed
        assert len(c.decode[0].requests) == 1
        await c.settled()


async def test_idle_connections_are_closed_after_a_while() -> None:
    async with cluster() as c, Talk(c) as talk:
        c.server.doorman._idle._patience_s = 0.05
        assert (await talk.ask(request({"text": "x"})))[0] == 200
        assert await talk.reader.read() == b""


@pytest.mark.parametrize("pieces", [[], [b"data: 1\n\n"], [b"data: 1\n\n", b"data: 2\n\n"]])
async def test_a_stream_begins_and_ends_once_whatever_is_in_it(
    pieces: list[bytes], monkeypatch: Any
) -> None:
    async with cluster() as c, Talk(c) as talk:

        async def handle(client: Any, *_: Any) -> None:
            stream = Downstream(client, {})
            for data in pieces[:1]:
                stream.push(data)  # before the head may go
            await stream.open("text/event-stream")
            await stream.open("text/event-stream")
            for data in pieces[1:]:
                stream.push(data)
            for _ in range(2):
                await stream.finish()
                stream.push(b"too late")

        monkeypatch.setattr(c.server.relay, "handle", handle)
        for _ in range(2):  # the second one meets no stray byte of the first
            status, headers, body = await talk.ask(request({"text": "x"}))
            assert (status, headers["content-type"]) == (200, "text/event-stream")
            assert body == b"".join(pieces)
        assert directly(c) == 1


async def test_a_defect_behind_the_port_is_a_500(monkeypatch: Any, caplog: Any) -> None:
    async with cluster() as c, Talk(c) as talk:

        async def broken(*_: Any) -> Any:
            raise ZeroDivisionError

        monkeypatch.setattr(c.server.relay, "handle", broken)
        status, _, body = await talk.ask(request({"text": "x"}))
        assert (status, orjson.loads(body)["error"]["code"]) == (500, "internal_error")
        assert "ZeroDivisionError" in caplog.text


async def test_a_large_answer_is_written_piece_by_piece() -> None:
    """Its client may leave in the middle."""
    sizes: list[int] = []
    async with cluster() as c, Talk(c) as talk, Talk(c) as leaves:
        c.decode[0].behaviour = Behaviour(tokens=400_000)
        assert (await talk.ask(request({"text": "x"})))[0] == 200
        assert c.server._direct is not None
        idle = list(c.server.doorman._idle.since_s)
        connection = next(o for o in c.server._direct.connections if o.transport in idle)

        class Watched:
            def __init__(self, transport: Any) -> None:
                self._transport = transport

            def write(self, data: bytes) -> None:
                sizes.append(len(data))
                self._transport.write(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._transport, name)

        connection.transport = Watched(connection.transport)
        status, _, body = await talk.ask(request({"text": "x"}))
        assert (status, orjson.loads(body)["text"][-8:]) == (200, " t400000")
        assert len(body) > 2_000_000 and max(sizes) <= serving_port._LARGE_PIECE_BYTES
        leaves.writer.write(request({"text": "x"}))
        await leaves.reader.readexactly(100_000)
        leaves.writer.transport.abort()
        await until(lambda: directly(c) == 1)
        await c.settled()
