"""Hostile and unlucky peers: garbage from engines, clients that stall, keys."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson
import pytest
from aiohttp import HttpVersion11
from harness.raw_engines import raw_server, read_request
from router_harness import cluster, options_for, sse_events, until

from sglang_sbs.router.client import answer_stream
from sglang_sbs.router.client.answer_stream import Downstream
from sglang_sbs.router.client.intake import Doorman
from sglang_sbs.router.options.config import ClientPace
from sglang_sbs.router.relay.aborts import Aborts
from sglang_sbs.router.server import RouterServer
from tools.stand_ins.mock_engine import Behaviour, MockEngine

GARBAGE = [b"data: {not json\n\n", b"data: [1]\n\n", b"\x00\xff", b'{"text": 5', b"[]"]


# Engines that answer nonsense -------------------------------------------------------------------


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "extra", [{"return_logprob": True}, {"rid": "mine"}], ids=["logprob", "rid"]
)
async def test_garbage_from_decode_that_must_be_edited_is_a_failure_not_a_hang(
    garbage: bytes, stream: bool, extra: dict[str, Any]
) -> None:
    async with cluster("--disable-retries") as c:
        c.decode[0].behaviour = Behaviour(garbage=garbage)
        async with c.post("/generate", {"text": "x", "stream": stream} | extra) as response:
            body = await response.read()
        if response.status == 200:
            assert stream
            events = sse_events(body)
            unreadable = garbage.startswith(b"data:")  # else it holds no event at all
            assert ("error" in events[-1]) == unreadable
        else:
            assert orjson.loads(body)["error"]["code"] == "decode_server_error"
        await c.settled()
        c.check_books()


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_from_prefill_is_a_failure(garbage: bytes) -> None:
    async with cluster("--disable-retries") as c:
        c.decode[0].gate.close()
        c.prefill[0].behaviour = Behaviour(garbage=garbage)
        status, body = await c.generate(text="x")
        assert (status, body["error"]["code"]) == (502, "prefill_server_error")
        await c.settled()
        c.check_books()


async def test_a_defect_after_the_first_byte_ends_the_stream_with_an_event(
    monkeypatch: Any,
) -> None:
    async with cluster() as c:

        async def broken(exchange: Any) -> Any:
            await exchange.downstream.open("text/event-stream")
            exchange.downstream.push(b"data: {}\n\n")
            raise ZeroDivisionError

        monkeypatch.setattr(c.server.relay, "_answer", broken)
        async with c.post("/generate", {"text": "x", "stream": True}) as response:
            events = sse_events(await response.read())
        assert events[0] == {}
        assert events[1]["error"]["code"] == "internal_error"


async def test_an_engine_that_never_answers_an_abort_keeps_no_connection() -> None:
    asked = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        asked.set()
        await reader.read()
        writer.close()

    async with cluster() as c, raw_server(serve) as (origin, _):
        before = c.server.pool.open_connections
        Aborts(c.server.pool, None, lambda: None, answer_s=0.05).send(origin, "r")
        await asked.wait()
        await until(lambda: c.server.pool.open_connections == before)


async def test_a_defect_while_watching_a_worker_is_not_the_end_of_watching_it(
    monkeypatch: Any, caplog: Any
) -> None:
    engine = MockEngine("decode")
    await engine.start()
    async with cluster() as c:
        described = c.server.registry.described
        defects = [KeyError("defect")]

        def broken(worker: Any, info: Any) -> None:
            if defects:
                raise defects.pop()
            described(worker, info)

        monkeypatch.setattr(c.server.registry, "described", broken)
        worker = await c.server.scheduler.add_worker(engine.url, "decode", None)
        await until(lambda: worker.usable)
        assert "failed; restarting" in caplog.text
    await engine.stop()


# Clients that stall -----------------------------------------------------------------------------


async def test_a_client_that_stops_reading_is_let_go_after_the_request_timeout() -> None:
    flags = ("--request-timeout-secs", "1", "--max-concurrent-requests", "1")
    async with cluster(*flags, relay={"pace": ClientPace(finish_s=0.05)}) as c:
        c.decode[0].behaviour = Behaviour(tokens=6000)
        reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port, limit=1024)
        body = orjson.dumps({"text": "x", "stream": True})
        writer.write(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        await reader.read(1)
        await until(lambda: c.server.in_flight.client_requests == 0)
        assert c.server.admission.running == 0
        c.check_books()
        writer.close()


class FakeSource:
    def __init__(self) -> None:
        self.paused = False

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


class FakeClient:
    """A client, and its transport, that reads only when the test lets it."""

    version = HttpVersion11

    def __init__(self) -> None:
        self.unread = 0
        self.transport = self

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def write(self, data: bytes) -> None:
        self.unread += len(data)


async def test_every_source_of_a_slow_client_is_paused_also_late_ones() -> None:
    client, sources = FakeClient(), {0: FakeSource()}
    stream = Downstream(client, sources)  # type: ignore[arg-type]
    stream._transport = client  # type: ignore[assignment]
    stream.push(bytes(answer_stream.HIGH_WATER_BYTES + 1))
    assert sources[0].paused
    sources[1] = FakeSource()
    stream.push(b"x")
    assert sources[1].paused
    client.unread = 0
    await until(lambda: not any(source.paused for source in sources.values()))


async def test_sources_are_paused_also_while_the_head_is_on_its_way() -> None:
    client, sources = FakeClient(), {0: FakeSource()}
    stream = Downstream(client, sources)  # type: ignore[arg-type]
    stream.push(bytes(answer_stream.HIGH_WATER_BYTES + 1))
    assert sources[0].paused
    stream._transport = client  # type: ignore[assignment]
    await until(lambda: not sources[0].paused)


async def test_a_body_that_does_not_come_is_a_408() -> None:
    async with cluster(relay={"pace": ClientPace(grace_s=0.05)}) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert (await reader.readline()).split()[1] == b"408"
        writer.close()
        await until(lambda: c.server.in_flight.client_requests == 0)


async def test_a_declared_length_over_the_limit_is_refused_without_reading() -> None:
    async with cluster("--max-payload-size", "1000") as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"413"
        writer.close()


async def test_connections_that_send_no_whole_head_are_closed() -> None:
    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            doorman.watch(transport)
            made.append(transport)

    made: list[asyncio.BaseTransport] = []
    doorman = Doorman(patience_s=0.05)
    server = await asyncio.get_running_loop().create_server(Protocol, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    silent, silent_writer = await asyncio.open_connection("127.0.0.1", port)
    await until(lambda: len(made) == 1)
    talking, talking_writer = await asyncio.open_connection("127.0.0.1", port)
    await until(lambda: len(made) == 2)
    doorman.on_received(made[1])
    silent_writer.write(b"POST /gen")
    with pytest.raises(ConnectionResetError):
        assert await silent.read() == b""
        raise ConnectionResetError
    assert not talking.at_eof()
    assert doorman._waiting == {}
    silent_writer.close()
    talking_writer.close()
    server.close()


async def test_a_client_that_takes_nothing_of_its_answer_is_waited_for_once() -> None:
    class Stuck(asyncio.Transport):
        aborted = False

        def is_closing(self) -> bool:
            return False

        def get_write_buffer_size(self) -> int:
            looks.append(self)
            return 1

        def abort(self) -> None:
            self.aborted = True

    looks: list[asyncio.Transport] = []
    doorman = Doorman(idle_s=0.02)
    transport = Stuck()
    doorman.rests(transport)
    await until(lambda: transport.aborted)
    assert len(looks) == 2
    assert doorman._waiting == {}


# The end ----------------------------------------------------------------------------------------


async def test_while_draining_every_answer_closes_its_connection_and_uploads_are_waited_for() -> (
    None
):
    prefill, decode = MockEngine("prefill"), MockEngine("decode")
    await prefill.start()
    await decode.start()
    server = RouterServer(options_for([prefill], [decode], "--policy", "round_robin"))
    await server.start()
    await until(lambda: server.registry.ready)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = orjson.dumps({"text": "x"})
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
    await until(lambda: server.in_flight.client_requests == 1)
    stop = asyncio.create_task(server.stop(grace_s=20))
    await until(lambda: server.in_flight.draining)
    writer.write(body)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in head.lower()
    assert orjson.loads(await reader.read())["text"] == "t1 t2 t3"
    await stop
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", server.port)
    writer.close()
    await prefill.stop()
    await decode.stop()


async def test_the_end_waits_for_a_client_that_reads_its_answer_slowly() -> None:
    async with cluster() as c:
        answer = b'{"text":"%b","meta_info":{}}' % (b"x" * (16 << 20))
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer)
        c.decode[0].raw_answers["/generate"] = head + answer
        reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
        body = orjson.dumps({"text": "x"})
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await reader.readuntil(b"\r\n\r\n")
        idle = asyncio.create_task(c.server.in_flight.wait_idle())  # as RouterServer.stop does
        await asyncio.sleep(0.5)
        assert not idle.done()
        assert await reader.readexactly(len(answer)) == answer
        await idle
        writer.close()


# Keys -------------------------------------------------------------------------------------------

ADMIN = [
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("GET", "/workers/x"),
    ("PUT", "/workers/x"),
    ("DELETE", "/workers/x"),
    ("POST", "/flush_cache"),
    ("GET", "/get_loads"),
    ("GET", "/v1/loads"),
    ("POST", "/abort_request"),
    ("GET", "/%77orkers"),
]


@pytest.mark.parametrize(("method", "path"), ADMIN)
@pytest.mark.parametrize("key", [None, "user", "boss2", "bos", ""])
async def test_admin_endpoints_want_the_admin_key(method: str, path: str, key: str | None) -> None:
    async with cluster("--admin-api-key", "boss", "--api-key", "user", wait=False) as c:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with c.client.request(method, c.url + path, json={}, headers=headers) as response:
            assert response.status == 401
        assert len(c.server.registry) == 2


async def test_a_key_of_odd_bytes_is_a_401_and_no_traceback(caplog: Any) -> None:
    async with cluster("--api-key", "user", wait=False) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
        writer.write(b"GET /workers HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"401"
        writer.close()
    assert not [r for r in caplog.records if r.exc_info]


async def test_keys_are_never_logged(caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    key = "k3y-of-the-user"
    headers = {"Authorization": f"Bearer {key}"}
    async with cluster("--api-key", key, "--admin-api-key", "k3y-of-the-boss") as c:
        response = await c.client.post(c.url + "/generate", json={"text": "x"}, headers=headers)
        assert response.status == 200
        await response.read()
    assert "k3y-of" not in caplog.text


async def test_server_info_does_not_hand_out_the_engines_keys() -> None:
    async with cluster() as c:
        c.prefill[0]._server_info = {
            "api_key": "hidden-1",
            "admin_api_key": "hidden-2",
            "ssl_keyfile_password": "hidden-3",
            "internal_states": [{"api_key": "hidden-4", "max_total_num_tokens": 7}],
        }
        async with c.get("/server_info") as response:
            text = await response.text()
        assert "hidden" not in text
        assert orjson.loads(text)["prefill"][0]["internal_states"][0]["max_total_num_tokens"] == 7
