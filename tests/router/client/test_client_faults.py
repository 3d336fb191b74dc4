"""Clients' mistakes are a 4xx and one line of the log, never a 500 or a traceback."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
import pytest
from router_harness import Cluster, cluster, until

from sglang_sbs.router.telemetry import loop_watch

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
BASE = '"text": "x", "prompt": "x", "messages": [{"role": "user", "content": "x"}]'


def nested(key: str, depth: int, more: str = "") -> bytes:
    return f'{{{BASE}{more}, "{key}": {"[" * depth}1{"]" * depth}}}'.encode()


ODD_BODIES = [
    *(nested("stream_options", depth, ', "stream": true, "n": 2') for depth in (254, 255, 1020)),
    *(nested(key, 1020) for key in ("stream", "n", "rid", "priority", "model", "best_of")),
    b'{"prompt": [{"messages": 5}]}',
    b'{"prompt": [{"messages": [5]}]}',
    b'{"messages": 5}',
]


def complaints(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Tracebacks, and errors of any kind, but not the loop's stack, which a slow host causes."""
    records = [r for r in caplog.records if r.name.startswith("sglang_sbs")]
    records = [r for r in records if r.name != loop_watch.logger.name]
    return [r for r in records if r.exc_info or r.levelno >= logging.ERROR or "\n" in r.message]


async def check_served(c: Cluster) -> None:
    assert (await c.generate(text="still here"))[0] == 200
    await c.settled()
    c.check_books()


@pytest.mark.parametrize("path", PATHS)
async def test_deep_and_odd_bodies(path: str, caplog: Any) -> None:
    async with cluster() as c:
        for raw in ODD_BODIES:
            caplog.clear()
            async with c.client.post(c.url + path, data=raw) as response:
                assert response.status in (200, 400), raw[:100]
                failed = response.status == 400
                await response.read()
            # The line of a streamed answer may come after its last byte, and so to the next one.
            refused = [r for r in caplog.records if f"POST {path} 400 " in r.getMessage()]
            assert [r.levelno for r in refused] == [logging.WARNING] * failed
            assert complaints(caplog) == []
        await check_served(c)


@pytest.mark.parametrize("path", ["/generate", "/workers", "/abort_request"])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_body_that_is_not_of_its_encoding(path: str, coding: str, caplog: Any) -> None:
    async with cluster() as c:
        headers = {"Content-Encoding": coding}
        for body in (b'{"text": "x"}', b'{"text": "x"}' * 1000):
            async with c.client.post(c.url + path, data=body, headers=headers) as response:
                assert response.status in (400, 415)
                assert response.headers["X-SMG-Error-Code"]
        await check_served(c)
    assert complaints(caplog) == []


async def test_clients_that_expect_to_be_asked_and_leave(caplog: Any) -> None:
    async with cluster() as c:
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
        for _ in range(8):
            _, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
            writer.write(head + b"Content-Length: 13\r\n\r\n")
            writer.transport.abort()
        await until(lambda: c.server._connections() <= 1)
        await check_served(c)
    assert complaints(caplog) == []


async def test_what_aiohttp_answers_by_itself_has_no_empty_id() -> None:
    async with cluster() as c, aiohttp.ClientSession() as client:
        headers = {"Expect": "200-maybe"}
        async with client.post(c.url + "/generate", data=b"{}", headers=headers) as response:
            assert response.status == 417
            assert response.headers.get("x-request-id") != ""
