"""HTTPS towards clients and towards engines."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import aiohttp
from router_harness import TIMEOUT_S, sse_events, until

from sglang_sbs.router.flags import parse_flags
from sglang_sbs.router.server import RouterServer
from sglang_sbs.testing.mock_engine import MockEngine, Rooms


async def test_both_sides_over_tls(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(cert, key)
    serving.load_verify_locations(cert)  # engines want to know who calls, too
    serving.verify_mode = ssl.CERT_REQUIRED
    rooms = Rooms()
    prefill, decode = MockEngine("prefill", rooms=rooms), MockEngine("decode", rooms=rooms)
    for engine in (prefill, decode):
        await engine.start(tls=serving)
        assert engine.url.startswith("https://")
    options = parse_flags(
        [
            *("--prefill", prefill.url, "9000", "--decode", decode.url),
            *("--host", "127.0.0.1", "--port", "0", "--sbs-endforward-bind", "none"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", "0"),
            *("--policy", "round_robin", "--ca-cert-paths", str(cert)),
            *("--client-cert-path", str(cert), "--client-key-path", str(key)),
            *("--tls-cert-path", str(cert), "--tls-key-path", str(key)),
        ]
    )
    server = RouterServer(options)
    await server.start()
    trusting = ssl.create_default_context(cafile=str(cert))
    connector = aiohttp.TCPConnector(ssl=trusting)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        await until(lambda: server.registry.ready)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:

            async def ask(stream: bool) -> bytes:
                url = f"https://127.0.0.1:{server.port}/generate"
                async with client.post(url, json={"text": "x", "stream": stream}) as response:
                    assert response.status == 200
                    return await response.read()

            plain, streamed = await asyncio.gather(ask(False), ask(True))
            assert b"t1 t2 t3" in plain
            assert sse_events(streamed)[-1] == "[DONE]"
            # What goes on to aiohttp does so with its TLS.
            async with client.get(f"https://127.0.0.1:{server.port}/health") as response:
                assert response.status == 200
            assert b"t1 t2 t3" in await ask(False)
            assert server.doorman._silent == {}
        assert prefill.requests[0].body["bootstrap_host"] == "127.0.0.1"
    finally:
        await server.stop(grace_s=0.0)
        await prefill.stop()
        await decode.stop()
