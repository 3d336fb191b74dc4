"""The serving port as its clients see it: requests one after another, in pieces, early, unread."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from aiohttp import web
from router_harness import Cluster, cluster, sse_events, until

from sglang_sbs.router.client import answer_stream
from sglang_sbs.router.client.answer_stream import Downstream
from sglang_sbs.router.options.config import ClientPace
from tools.stand_ins.mock_engine import Behaviour


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


def connections(c: Cluster) -> int:
    return c.server._connections()


# Answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("origins", [(), ("--cors-allowed-origins", "http://a")], ids=["any", "a"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{"text": "x"}, {"nothing": 1}], ids=["good", "bad"])
async def test_an_answer_has_these_headers_and_is_counted(
    body: Any, stream: bool, origins: tuple[str, ...]
) -> None:
    async with cluster(*origins) as c, Talk(c) as talk:
        lines = ("Origin: http://a", "X-Request-Id: mine")
        status, headers, raw = await talk.ask(request(body | {"stream": stream}, *lines))
        good = "text" in body
        assert status == (200 if good else 400)
        framing = "transfer-encoding" if stream and good else "content-length"
        of_errors = set() if good else {"x-smg-error-code"}
        of_origins = {"access-control-allow-origin", "access-control-expose-headers"}
        if origins:
            of_origins |= {"access-control-allow-methods", "access-control-allow-headers", "vary"}
        common = {"content-type", "date", "x-request-id", framing}
        assert headers.keys() == common | of_errors | of_origins
        assert headers["x-request-id"] == "mine"
        if stream and good:
            assert [e["text"] for e in sse_events(raw)[:-1]] == ["t1", "t1 t2", "t1 t2 t3"]
        await until(lambda: c.server.in_flight.client_requests == 0)
        text = c.server.metrics.render().decode()
        assert 'smg_http_requests_total{method="POST",path="/generate"} 1.0' in text
        assert f'status_code="{status}"' in text


async def test_a_connection_serves_many_requests_and_every_kind() -> None:
    async with cluster() as c, Talk(c) as talk:
        for _ in range(3):
            status, headers, body = await talk.ask(request({"text": "x"}))
            assert (status, orjson.loads(body)["text"]) == (200, "t1 t2 t3")
            assert "connection" not in headers
        assert (await talk.ask(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 200
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
        c.check_books()


async def test_the_client_may_ask_for_the_connections_end() -> None:
    async with cluster() as c, Talk(c) as talk:
        status, headers, _ = await talk.ask(request({"text": "x"}, "Connection: close"))
        assert (status, headers["connection"]) == (200, "close")
        assert await talk.reader.read() == b""


async def test_a_key_is_wanted_here_too() -> None:
    async with cluster("--api-key", "k") as c, Talk(c) as talk, Talk(c) as other:
        assert (await talk.ask(request({"text": "x"})))[0] == 401
        assert (await other.ask(request({"text": "x"}, "Authorization: Bearer k")))[0] == 200


# Trouble ----------------------------------------------------------------------------------------


async def test_a_client_that_leaves_is_noticed_and_both_legs_are_aborted() -> None:
    async with cluster() as c:
        c.decode[0].gate.close()
        async with Talk(c) as talk:
            talk.writer.write(request({"text": "x"}))
            await until(lambda: len(c.decode[0].requests) == 1)
        await until(lambda: len(c.decode[0].aborts) >= 1)
        await c.settled()
        await until(lambda: connections(c) == 0)
        c.check_books()


async def test_a_body_that_stops_is_a_408_and_its_rest_no_request() -> None:
    async with cluster(relay={"pace": ClientPace(grace_s=0.05)}) as c, Talk(c) as talk:
        await until(lambda: connections(c) == 1)
        assert c.server._runner is not None and c.server._runner.server is not None
        c.server._runner.server.connections[0]._lingering_time = 0.05
        talk.writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        assert (await read_answer(talk.reader))[0] == 408
        talk.writer.write(request({"text": "smuggled"}))
        assert await talk.reader.read() == b""
        assert c.decode[0].requests == []


async def test_a_client_that_does_not_read_its_answers_gets_no_further_ones() -> None:
    async with cluster(relay={"pace": ClientPace(finish_s=0.2)}) as c, Talk(c) as talk:
        c.decode[0].behaviour = Behaviour(tokens=2_000_000)
        talk.writer.write(request({"text": "x"}) * 5)
        await until(lambda: c.decode[0].requests and connections(c) == 0)  # it was closed
        assert len(c.decode[0].requests) == 1
        await c.settled()


async def test_idle_connections_are_closed_after_a_while() -> None:
    async with cluster() as c, Talk(c) as talk:
        c.server.doorman._idle_s = 0.05
        assert (await talk.ask(request({"text": "x"})))[0] == 200
        assert await talk.reader.read() == b""


@pytest.mark.parametrize("pieces", [[], [b"data: 1\n\n"], [b"data: 1\n\n", b"data: 2\n\n"]])
async def test_a_stream_begins_and_ends_once_whatever_is_in_it(
    pieces: list[bytes], monkeypatch: Any
) -> None:
    async with cluster() as c, Talk(c) as talk:

        async def handle(asked: Any, *_: Any) -> Any:
            stream = Downstream(asked, {})
            for data in pieces[:1]:
                stream.push(data)  # before the head may go
            await stream.open("text/event-stream")
            await stream.open("text/event-stream")
            for data in pieces[1:]:
                stream.push(data)
            for _ in range(2):
                await stream.finish()
                stream.push(b"too late")
            return stream.response

        monkeypatch.setattr(c.server.relay, "handle", handle)
        for _ in range(2):  # the second one meets no stray byte of the first
            status, headers, body = await talk.ask(request({"text": "x"}))
            assert (status, headers["content-type"]) == (200, "text/event-stream")
            assert body == b"".join(pieces)


async def test_a_defect_behind_the_port_is_a_500(monkeypatch: Any, caplog: Any) -> None:
    async with cluster() as c, Talk(c) as talk:

        async def broken(*_: Any) -> Any:
            raise ZeroDivisionError

        monkeypatch.setattr(c.server.relay, "handle", broken)
        status, _, body = await talk.ask(request({"text": "x"}))
        assert (status, orjson.loads(body)["error"]["code"]) == (500, "internal_error")
        assert "ZeroDivisionError" in caplog.text


async def test_a_large_answer_is_written_piece_by_piece(monkeypatch: Any) -> None:
    """Its client may leave in the middle."""
    sizes: list[int] = []
    write = web.StreamResponse.write

    async def noting(self: web.StreamResponse, data: bytes) -> None:
        sizes.append(len(data))
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", noting)
    async with cluster() as c, Talk(c) as talk:
        c.decode[0].behaviour = Behaviour(tokens=400_000)
        status, headers, body = await talk.ask(request({"text": "x"}))
        assert (status, orjson.loads(body)["text"][-8:]) == (200, " t400000")
        assert len(body) == int(headers["content-length"]) == sum(sizes) > 2_000_000
        assert max(sizes) <= answer_stream.LARGE_PIECE_BYTES
        assert (await talk.ask(request({"text": "x"})))[0] == 200  # nothing was left over
        async with Talk(c) as leaves:
            leaves.writer.write(request({"text": "x"}))
            await leaves.reader.readexactly(100_000)
            leaves.writer.transport.abort()
        await until(lambda: connections(c) == 1)
        await c.settled()
