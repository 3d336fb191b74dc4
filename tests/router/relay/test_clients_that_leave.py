"""Clients that leave, and aborts of theirs."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from router_harness import cluster, sse_events, until

from sglang_sbs.router.relay import aborts
from sglang_sbs.router.relay.aborts import Aborts
from sglang_sbs.scheduling.events import RequestEnded
from tools.stand_ins.mock_engine import Behaviour

ONE_TRY = ("--disable-retries",)


async def leave(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_byte_aborts_both_legs(stream: bool) -> None:
    async with cluster() as c:
        c.prefill[0].gate.close()
        c.decode[0].gate.close()
        async with aiohttp.ClientSession() as session:
            body = {"text": "x", "stream": stream}
            task = asyncio.create_task(_post(session, c.url + "/generate", body))
            await c.prefill[0].gate.arrived(1)
            await c.decode[0].gate.arrived(1)
            await leave(task)
        rid = c.prefill[0].requests[0].rid
        await c.prefill[0].aborted(rid)
        await c.decode[0].aborted(rid)
        await c.settled()
        assert c.scheduler.ended() == ["aborted"]
        c.check_books()


async def test_a_client_that_leaves_mid_stream_aborts_both_legs() -> None:
    async with cluster() as c:
        c.prefill[0].reply_gate.close()
        c.decode[0].token_gate.close()
        async with aiohttp.ClientSession() as session:
            response = await session.post(c.url + "/generate", json={"text": "x", "stream": True})
            await response.content.readuntil(b"\n\n")
            response.close()
        rid = c.decode[0].requests[0].rid
        await c.decode[0].aborted(rid)
        await c.prefill[0].aborted(rid)
        await c.settled()
        assert c.scheduler.ended() == ["aborted"]
        c.check_books()


async def test_when_many_clients_vanish_aborts_are_sent_over_few_connections() -> None:
    clients = 150
    async with cluster() as c:
        c.decode[0].gate.close()
        c.prefill[0].gate.close()
        connections = [
            await asyncio.open_connection("127.0.0.1", c.server.port) for _ in range(clients)
        ]
        body = b'{"text": "x"}'
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        for _, writer in connections:
            writer.write(head + body)
        await until(lambda: len(c.decode[0].requests) == len(c.prefill[0].requests) == clients)
        rids = {request.body["rid"] for request in c.decode[0].requests}
        c.decode[0].freeze()
        c.prefill[0].freeze()
        for _, writer in connections:
            writer.transport.abort()
        await until(lambda: c.server.in_flight.client_requests == 0)
        assert len(c.server.in_flight.aborts.tasks) == 2 * clients
        assert c.server.pool.open_connections <= 2 * aborts.AT_ONCE
        c.decode[0].thaw()
        c.prefill[0].thaw()
        await until(lambda: set(c.decode[0].aborts) == set(c.prefill[0].aborts) == rids)
        assert c.server.pool.open_connections <= 2 * aborts.AT_ONCE
        await c.server.in_flight.aborts.wait_idle()
        c.check_books()


async def test_an_abort_that_waited_too_long_is_dropped() -> None:
    async with cluster() as c:
        sender = Aborts(c.server.pool, None, lambda: None, at_once=1, stale_s=0.0)
        c.decode[0].freeze()
        for rid in ("first", "stale", "stale too"):
            sender.send(c.decode[0].url, rid)
        assert len(sender.tasks) == 3
        c.decode[0].thaw()
        await sender.wait_idle()
        assert c.decode[0].aborts == ["first"]


async def test_a_client_that_leaves_while_queued_is_dropped_and_no_engine_hears_of_it() -> None:
    async with cluster() as c:
        c.scheduler.hold = True
        async with aiohttp.ClientSession() as session:
            task = asyncio.create_task(_post(session, c.url + "/generate", {"text": "x"}))
            await until(lambda: c.scheduler.held)
            await leave(task)
        await c.settled()
        (ended,) = c.scheduler.of(RequestEnded)
        assert ended.outcome == "aborted"
        assert c.scheduler.held == {}
        assert c.prefill[0].requests == c.decode[0].requests == []
        c.check_books()


async def _post(
    session: aiohttp.ClientSession, url: str, body: Any, headers: dict[str, str] | None = None
) -> None:
    async with session.post(url, json=body, headers=headers) as response:
        await response.read()


async def test_abort_request_ends_a_request_by_the_clients_own_id() -> None:
    async with cluster() as c:
        c.decode[0].gate.close()
        task = asyncio.create_task(c.generate(text="x", rid="mine"))
        await c.decode[0].gate.arrived(1)
        async with c.post("/abort_request", {"rid": "mine"}) as response:
            assert await response.json() == {"aborted": 1}
        status, body = await task
        assert (status, body["error"]["code"]) == (499, "request_aborted")
        await c.decode[0].aborted(c.decode[0].requests[0].rid)
        await c.settled()
        assert c.scheduler.ended() == ["aborted"]
        c.check_books()


async def test_abort_request_all_ends_an_open_stream_with_an_error_event() -> None:
    async with cluster() as c:
        c.decode[0].token_gate.close()
        async with c.post("/generate", {"text": "x", "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            async with c.post("/abort_request", {"abort_all": True}) as answer:
                assert await answer.json() == {"aborted": 1}
            events = sse_events(await response.read())
        assert events[-1]["error"]["code"] == "request_aborted"


async def test_aborts_carry_the_admin_key() -> None:
    async with cluster("--api-key", "user", "--admin-api-key", "boss", *ONE_TRY) as c:
        c.prefill[0].behaviour = Behaviour(status=500)
        c.prefill[0].gate.close()
        c.decode[0].gate.close()
        headers = {"Authorization": "Bearer user"}
        task = asyncio.create_task(_post(c.client, c.url + "/generate", {"text": "x"}, headers))
        await c.decode[0].gate.arrived(1)
        c.prefill[0].gate.open()
        await task
        await c.decode[0].aborted(c.decode[0].requests[0].rid)
        assert c.decode[0].abort_headers[0]["authorization"] == "Bearer boss"
        assert c.decode[0].requests[0].headers["authorization"] == "Bearer user"


# Refusals and the front door --------------------------------------------------------------------
