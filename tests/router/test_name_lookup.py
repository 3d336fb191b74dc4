"""A name server that does not answer delays only those that wait for that name."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web

from sglang_sbs.router.name_lookup import FRESH_S, NameLookup, RouterLoop, is_address

HANGS = "hangs"


class Dns:
    """``gate``: names that begin with ``hangs`` wait for it."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked: list[str] = []
        self.away = False
        self.address = "10.0.0.1"

    def __call__(self, host: Any, port: Any, *rest: Any) -> list[Any]:
        self.asked.append(host)
        if str(host).startswith(HANGS):
            self.gate.wait(60)
        if self.away:
            raise socket.gaierror(socket.EAI_AGAIN, "away")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.address, port))]


def wanted(host: str) -> tuple[Any, ...]:
    return host, 80, 0, socket.SOCK_STREAM, 0, 0


async def test_a_name_that_hangs_delays_no_other_one() -> None:
    dns = Dns()
    names = NameLookup(dns, limit_s=0.05)
    hanging = [asyncio.create_task(names.getaddrinfo(*wanted(f"{HANGS}{n}"))) for n in range(32)]
    assert (await names.getaddrinfo(*wanted("well")))[0][4] == ("10.0.0.1", 80)
    for task in hanging:
        with pytest.raises(socket.gaierror, match="did not respond"):
            await task
    dns.gate.set()


async def test_a_name_takes_one_thread_however_often_it_is_asked_for() -> None:
    dns = Dns()
    names = NameLookup(dns, limit_s=0.01)
    for _ in range(20):
        with pytest.raises(socket.gaierror):
            await names.getaddrinfo(*wanted(HANGS))
    assert dns.asked == [HANGS]
    dns.gate.set()


async def test_lookups_are_bounded() -> None:
    dns = Dns()
    names = NameLookup(dns, limit_s=0.01, most_lookups=2)
    for number in range(2):
        with pytest.raises(socket.gaierror, match="did not respond"):
            await names.getaddrinfo(*wanted(f"{HANGS}{number}"))
    with pytest.raises(socket.gaierror, match="2 host names"):
        await names.getaddrinfo(*wanted("well"))
    assert len(dns.asked) == 2
    dns.gate.set()


async def test_while_dns_is_away_the_last_addresses_hold() -> None:
    dns = Dns()
    names = NameLookup(dns, limit_s=0.05)
    first = await names.getaddrinfo(*wanted("well"))
    dns.away = True
    assert await names.getaddrinfo(*wanted("well")) == first
    with pytest.raises(socket.gaierror, match="away"):
        await names.getaddrinfo(*wanted("other"))


async def test_fresh_addresses_are_answered_while_the_name_is_looked_up_again() -> None:
    """The limit is longer than the test may take: nobody waits for a lookup that hangs."""
    dns, now_s = Dns(), 0.0
    names = NameLookup(dns, limit_s=3600, clock=lambda: now_s)
    dns.gate.set()
    first = await names.getaddrinfo(*wanted(HANGS))
    dns.gate.clear()
    now_s = FRESH_S - 1
    for _ in range(3):
        assert await names.getaddrinfo(*wanted(HANGS)) == first
    assert dns.asked == [HANGS] * 2, "looked up again, once at a time"
    now_s = FRESH_S
    waiting = asyncio.create_task(names.getaddrinfo(*wanted(HANGS)))
    await asyncio.sleep(0)
    assert not waiting.done(), "too old to be believed unasked"
    now_s += 3600
    assert await names.getaddrinfo(*wanted(HANGS)) == first, "the lookup is as old as its limit"
    dns.address = "10.0.0.2"
    dns.gate.set()
    assert (await waiting)[0][4] == ("10.0.0.2", 80)
    assert (await names.getaddrinfo(*wanted(HANGS)))[0][4] == ("10.0.0.2", 80)


def test_addresses_are_distinguished_from_names() -> None:
    assert all(map(is_address, ("10.0.0.1", "::1", "fe80::1%eth0")))
    assert not any(map(is_address, ("host", "", "1.2.3", None, b"10.0.0.1")))


class NoLookups(RouterLoop):
    async def getaddrinfo(self, host: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_address(host):
            raise AssertionError(f"{host} was looked up")
        return await super().getaddrinfo(host, *args, **kwargs)


async def serve_and_ask() -> int:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text="well")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/") as response:
                status = response.status
            with pytest.raises(aiohttp.ClientConnectorError):
                # Nothing listens at port 1.
                await session.get("http://127.0.0.1:1/")
    finally:
        await runner.cleanup()
    return status


def test_aiohttp_reaches_an_address_without_libuvs_threads(monkeypatch: Any) -> None:
    async def no_pool(*_: Any, **__: Any) -> Any:
        raise AssertionError("uvloop's own lookup")

    monkeypatch.setattr(uvloop.Loop, "sock_connect", no_pool)
    with asyncio.Runner(loop_factory=NoLookups) as runner:
        assert runner.run(serve_and_ask()) == 200
