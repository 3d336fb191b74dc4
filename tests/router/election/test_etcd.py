"""The election by a key of etcd, on a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web
from campaigns import candidate, running
from harness.until import until

from benchmarks.chaos.etcd_process import Etcd, etcd_binary, running_etcd
from sglang_sbs.router.election import ElectionTimes
from sglang_sbs.router.election.candidate import Record
from sglang_sbs.router.election.election import OutdatedWrite, StoreError
from sglang_sbs.router.election.etcd import EtcdLock

pytestmark = pytest.mark.asyncio(loop_scope="module")
needs_etcd = pytest.mark.skipif(etcd_binary() is None, reason="there is no etcd here")
TIMES = ElectionTimes(lease_s=2, renew_s=1.2, retry_s=0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Etcd]:
    async with running_etcd(tmp_path_factory.mktemp("etcd")) as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module")
async def store(etcd: Etcd, request: pytest.FixtureRequest) -> AsyncIterator[EtcdLock]:
    lock = EtcdLock([etcd.url], request.node.name, 2, None)
    await lock.open()
    yield lock
    await lock.close()


def url(etcd: Etcd, key: str) -> str:
    return etcd.url.replace("http", "etcd") + f"/{key}"


@needs_etcd
async def test_who_comes_second_is_refused(etcd: Etcd, store: EtcdLock) -> None:
    other = EtcdLock([etcd.url], "test_who_comes_second_is_refused", 2, None)
    await other.open()
    nothing = await store.read()
    assert nothing == Record(version="0/0")
    mine = await store.take(nothing, "me#1", 1)
    assert mine == await store.renew(mine) == await other.read()
    assert (mine.holder, mine.term) == ("me#1", 1)
    with pytest.raises(OutdatedWrite):
        await other.take(nothing, "other#1", 1)
    # Its own lock, in a later term.
    again = await store.take(mine, "me#1", 2)
    with pytest.raises(OutdatedWrite):
        await store.renew(mine)
    assert await store.renew(again) == again
    await store.release(again)
    free = await other.read()
    assert (free.holder, free.term) == ("", 2)
    await other.take(free, "other#1", 3)
    with pytest.raises(OutdatedWrite):
        await store.renew(again)
    await other.close()


@needs_etcd
async def test_a_candidate_that_is_gone_is_removed_by_etcd(etcd: Etcd, store: EtcdLock) -> None:
    # Nobody keeps this one's lease alive: as after kill -9.
    await store.take(await store.read(), "tcp://10.0.0.9:7700#1", 1)
    recorded = candidate(url(etcd, "test_a_candidate_that_is_gone_is_removed_by_etcd"), 1, TIMES)
    async with running(recorded):
        await until(lambda: recorded.campaign.leader == "tcp://10.0.0.9:7700")
        assert recorded.terms == []
        await until(lambda: recorded.terms == [2])


@needs_etcd
async def test_the_other_leads_as_soon_as_the_first_ends(etcd: Etcd) -> None:
    first, second = (candidate(url(etcd, "ends"), number, TIMES) for number in (1, 2))
    async with running(second):
        await until(lambda: second.terms == [1])
        async with running(first):
            await until(lambda: first.campaign.leader == "tcp://10.0.0.2:7700")
            task = second.task
            assert task is not None
            task.cancel()
            await asyncio.wait([task])
            assert second.terms == [1, 0]
            await until(lambda: first.terms == [2])


@needs_etcd
async def test_a_key_that_somebody_deletes_is_taken_again_in_a_higher_term(etcd: Etcd) -> None:
    recorded = candidate(url(etcd, "deleted"), 1, TIMES)
    async with running(recorded):
        await until(lambda: recorded.terms == [1])
        await etcd.delete("deleted")
        await until(lambda: recorded.terms == [1, 0, 2])
        # All of it, as after a restore from nothing: this one remembers.
        await etcd.delete("deleted/term")
        await etcd.delete("deleted")
        await until(lambda: recorded.terms == [1, 0, 2, 0, 3])


@needs_etcd
async def test_an_etcd_that_stops_ends_the_lead(etcd: Etcd) -> None:
    recorded = candidate(url(etcd, "stops"), 1, TIMES)
    async with running(recorded):
        await until(lambda: recorded.terms == [1])
        etcd.stop()
        try:
            await until(lambda: recorded.terms == [1, 0])
            assert recorded.campaign.leader is None
            await until(lambda: bool(recorded.campaign.complaint))
        finally:
            etcd.go_on()
        await until(lambda: recorded.terms == [1, 0, 2])
        assert recorded.campaign.complaint == ""


@needs_etcd
async def test_a_member_that_is_away_is_passed_over(etcd: Etcd, unused_tcp_port: int) -> None:
    hosts = f"127.0.0.1:{unused_tcp_port},{etcd.url.removeprefix('http://')}"
    recorded = candidate(f"etcd://{hosts}/members", 1, TIMES)
    async with running(recorded):
        await until(lambda: recorded.terms == [1])


@needs_etcd
async def test_a_key_with_something_else_in_it_is_a_complaint(etcd: Etcd) -> None:
    other = EtcdLock([etcd.url], "taken", 2, None)
    await other.open()
    await other.take(await other.read(), "me#1", 1)
    # Where the lock called "taken" has its holder, another one would have its term.
    lock = EtcdLock([etcd.url], "x", 2, None)
    await lock.open()
    lock._term_key = other._lock_key
    with pytest.raises(StoreError, match="unexpected content in etcd"):
        await lock.read()
    await other.close()
    await lock.close()


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (200, "null", "not a response of etcd"),
        (200, "{}", "unexpected content in etcd"),
        (200, '{"responses": [{}, {}]}', "unexpected content in etcd"),
        (200, "<html>", "Expecting value"),
        (404, "no such page", "HTTP 404 b'no such page'"),
        (200, " " * 70_000, "the response is too long"),
    ],
)
async def test_what_is_no_etcd_is_a_complaint(status: int, text: str, message: str) -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    lock = EtcdLock([f"http://127.0.0.1:{runner.addresses[0][1]}"], "key", 2, None)
    await lock.open()
    try:
        with pytest.raises(StoreError, match=message):
            await lock.read()
    finally:
        await lock.close()
        await runner.cleanup()
