"""The same requests to ``sglang_router`` 0.3.2 and to this router, on the same kind of engines.

Needs the stock router installed; what is knowingly different is listed with the reason.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import pytest
from router_harness import TIMEOUT_S

from sglang_sbs.testing.mock_engine import Behaviour, MockEngine, Rooms

pytest.importorskip("sglang_router.sglang_router_rs")

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "x"}]}


@dataclass
class Probe:
    """One request, and how the engines behave for it."""

    name: str
    method: str
    path: str
    body: Any = None
    decode: Behaviour | None = None
    kill_decode: bool = False
    compare: Callable[[Any], Any] = lambda body: body
    """What of the body must be equal."""


def keys(body: Any) -> Any:
    return sorted(body) if isinstance(body, dict) else body


def error_of(body: Any) -> Any:
    """Type, code and message; the newer ``param`` is extra."""
    return {key: body["error"][key] for key in ("type", "code", "message")}


def code_of(body: Any) -> Any:
    return body["error"]["code"]


def without_id(body: Any) -> Any:
    if "meta_info" in body:
        return body | {"meta_info": body["meta_info"] | {"id": "*"}}
    return body | {"id": "*"}


def events(body: Any) -> Any:
    out = []
    for part in body.split("\n\n"):
        payload = part.removeprefix("data: ")
        out.append(without_id(orjson.loads(payload)) if payload.startswith("{") else payload)
    return out


def worker_fields(body: Any) -> Any:
    """Of the prefill worker: the stock fields with their values, without ids and addresses."""
    (worker,) = (w for w in body["workers"] if w["worker_type"] == "prefill")
    names = ("model_id", "priority", "cost", "worker_type", "is_healthy", "load")
    more = ("connection_mode", "bootstrap_port", "metadata", "disable_health_check")
    return body["total"], body["stats"], {name: worker[name] for name in names + more}


PROBES = [
    Probe("health", "GET", "/health"),
    Probe("liveness", "GET", "/liveness"),
    Probe("readiness", "GET", "/readiness"),
    Probe("models", "GET", "/v1/models", compare=lambda b: [m["id"] for m in b["data"]]),
    Probe("workers", "GET", "/workers", compare=worker_fields),
    Probe("no such worker", "GET", "/workers/00000000-0000-0000-0000-000000000000"),
    Probe("loads", "GET", "/get_loads", compare=lambda b: sorted(b["workers"][0])),
    Probe(
        "flush",
        "POST",
        "/flush_cache",
        compare=lambda b: {k: b[k] for k in ("status", "message", "workers_flushed")},
    ),
    Probe("no such route", "GET", "/nothing"),
    Probe("wrong method", "GET", "/generate"),
    Probe("embeddings", "POST", "/v1/embeddings", {"model": "m", "input": "x"}),
    Probe("generate", "POST", "/generate", {"text": "x"}, compare=without_id),
    Probe("stream", "POST", "/generate", {"text": "x", "stream": True}, compare=events),
    Probe("chat", "POST", "/v1/chat/completions", CHAT, compare=without_id),
    Probe("chat stream", "POST", "/v1/chat/completions", CHAT | {"stream": True}, compare=events),
    Probe(
        "completion",
        "POST",
        "/v1/completions",
        {"model": "mock", "prompt": "x"},
        compare=without_id,
    ),
    *(
        Probe(
            f"decode {status}",
            "POST",
            "/generate",
            {"text": "x"},
            decode=Behaviour(status=status, message="boom"),
            compare=error_of,
        )
        for status in (400, 404, 500, 503)
    ),
    Probe("decode gone", "POST", "/generate", {"text": "x"}, kill_decode=True, compare=code_of),
]

EXTRA_HEADERS = {"retry-after"}
"""Sent here only: with a 503, so that clients know when to come back."""
IGNORED_HEADERS = {"date", "server", "content-length", "vary", "x-request-id"}


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


async def answers_of(module: str, *flags: str) -> dict[str, Any]:
    """Run a router and collect its answers to all probes."""
    rooms = Rooms()
    prefill = MockEngine("prefill", dp_size=1, rooms=rooms)
    decode = MockEngine("decode", dp_size=1, rooms=rooms)
    await prefill.start()
    await decode.start()
    port, metrics_port = free_ports(2)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--pd-disaggregation"),
        *("--prefill", prefill.url, "9000", "--decode", decode.url),
        *("--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--worker-startup-check-interval", "1", "--disable-retries", "--log-level", "error"),
        *flags,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.timeout(60):
            await _until_ready(session, url)
            return {probe.name: await _ask(session, url, probe, decode) for probe in PROBES}
    finally:
        process.kill()
        await process.wait()
        await prefill.stop()
        await decode.stop()


async def _until_ready(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        try:
            async with session.get(url + "/readiness") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)


async def _ask(
    session: aiohttp.ClientSession, url: str, probe: Probe, decode: MockEngine
) -> tuple[int, dict[str, str], Any]:
    if probe.decode is not None:
        decode.behaviours.append(probe.decode)
    port = decode.port
    if probe.kill_decode:
        await decode.stop()
    async with session.request(probe.method, url + probe.path, json=probe.body) as response:
        raw = await response.read()
        headers = {
            name.lower(): value
            for name, value in response.headers.items()
            if name.lower() not in IGNORED_HEADERS
        }
        status = response.status
    if probe.kill_decode:
        await decode.start(port)
    try:
        body: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = raw.decode()
    return status, headers, probe.compare(body) if status != 404 or body else body


Collect = Callable[[], Awaitable[dict[str, Any]]]


async def test_answers_are_those_of_the_stock_router() -> None:
    stock, ours = await asyncio.gather(
        answers_of("sglang_router.launch_router"),
        answers_of("sglang_sbs.launch_router", "--sbs-endforward-bind", "none"),
    )
    for probe in PROBES:
        stock_status, stock_headers, stock_body = stock[probe.name]
        our_status, our_headers, our_body = ours[probe.name]
        assert our_status == stock_status, probe.name
        assert our_body == stock_body, probe.name
        missing = {
            name: value
            for name, value in stock_headers.items()
            if our_headers.get(name, "").partition(";")[0] != value.partition(";")[0]
        }
        # /v1/models is JSON, whatever the stock router labels it.
        if probe.name != "models":
            assert missing == {}, probe.name
        if stock_status != 404:
            assert set(our_headers) - set(stock_headers) <= EXTRA_HEADERS, probe.name
