"""`scripts/chaos --ha`: what it refuses, what stands between its processes, how it counts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from benchmarks.chaos import command
from benchmarks.chaos.ha.clients import Balanced, BalancedLoad
from benchmarks.chaos.ha.cut import Cut
from benchmarks.chaos.ha.faults import BY_NAME
from benchmarks.chaos.ha.run import _result, run_fault
from benchmarks.chaos.ha.site import site_with, worker_flags
from benchmarks.chaos.open_load import Outcome
from benchmarks.demo.load import Arrival, Sample, Workload
from tools.stand_ins.mock_engine import MockEngine, Rooms


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--faults", "kill-scheduler,kill-all"], "'kill-all' is not one of kill-scheduler"),
        (["--seconds", "nan"], "--seconds must be greater than 0"),
        (["--qps", "0"], "--qps between 0 and 100"),
        (["--election", "raft"], "invalid choice: 'raft'"),
    ],
)
def test_says_what_is_wrong_before_anything_starts(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--ha", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# The network --------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[asyncio.Server]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server


async def test_nothing_passes_a_cut_and_nothing_ends_there(
    echo: asyncio.Server, unused_tcp_port: int
) -> None:
    way = Cut(("127.0.0.1", unused_tcp_port), echo.sockets[0].getsockname())
    await way.start()
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*way.listen)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        way.cut()
        writer.write(b"two")
        late, later = await asyncio.open_connection(*way.listen)
        later.write(b"new")
        later.write_eof()
        silent = [asyncio.create_task(stream.readexactly(3)) for stream in (reader, late)]
        done, _ = await asyncio.wait(silent, timeout=0.2)
        assert not done
        way.heal()
        assert await asyncio.gather(*silent) == [b"two", b"new"]
        assert await late.read() == b""
        writer.close()
        later.close()
    await way.close()


# Clients ------------------------------------------------------------------------------------------


class Answers:
    """A router: ``how`` it answers, and how often it was asked."""

    def __init__(self) -> None:
        self.how = "well"
        self.asked = 0
        self.url = ""

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/readiness", self._readiness)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.how == "hangs":
            await asyncio.sleep(3600)
        if self.how == "refuses":
            return web.Response(status=503, text='{"code": "no_decode"}')
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"meta_info": {"completion_tokens": 1}}\n\n')
        if self.how == "breaks" and request.transport is not None:
            request.transport.abort()
            return response
        last = b'data: {"meta_info": {"completion_tokens": 2, "finish_reason": {"type": "length"}}}'
        await response.write(last + b"\n\n")
        return response

    async def _readiness(self, _request: web.Request) -> web.Response:
        if self.how == "hangs":
            await asyncio.sleep(3600)
        return web.Response()


@pytest_asyncio.fixture
async def two() -> AsyncIterator[list[Answers]]:
    routers = [Answers(), Answers()]
    runners = [await router.start() for router in routers]
    yield routers
    for runner in runners:
        await runner.cleanup()


async def asked_of(routers: list[Answers], requests: int = 4) -> list[Balanced]:
    async with BalancedLoad([router.url for router in routers], timeout_s=20) as load:
        load.send([Arrival(0.0, [1, 2], 2)] * requests)
        while len(load.done) < requests:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
        return await load.all_answers()


async def test_a_router_that_breaks_off_is_not_asked_again_for_that_request(
    two: list[Answers],
) -> None:
    two[0].how = "breaks"
    done = await asked_of(two)
    assert all(request.answered for request in done)
    assert sum(request.tries > 1 for request in done) >= 2


async def test_a_silent_router_is_taken_out_and_the_other_asked(two: list[Answers]) -> None:
    two[0].how = "hangs"
    done = await asked_of(two)
    assert [router.asked for router in two] == [2, 4]
    assert [request.tries for request in sorted(done, key=lambda request: request.tries)] == [
        1,
        1,
        2,
        2,
    ]
    again = [request.outcome.sample.ttft_s for request in done if request.tries == 2]
    # As the client saw it: from the first try.
    assert all(ttft_s > 0.5 for ttft_s in again)


async def test_an_error_is_the_answer(two: list[Answers]) -> None:
    two[0].how = "refuses"
    done = await asked_of(two)
    assert [request.tries for request in done] == [1] * 4
    assert sorted(request.answered for request in done) == [False, False, True, True]


# The count ----------------------------------------------------------------------------------------


def answered(sent_s: float, ttft_s: float, error: str = "", tries: int = 1) -> Balanced:
    sample = Sample(0.0, 1, ttft_s=ttft_s, error=error)
    return Balanced(Outcome(sent_s, sent_s + 1.0, sample), tries)


def test_a_row_says_what_was_lost_and_the_longest_pause() -> None:
    fault = BY_NAME["kill-scheduler"]
    done = [answered(0.0, 0.3), answered(1.0, 0.5), answered(1.8, 2.4, tries=2), answered(3.0, 0.2)]
    row = _result(fault, done, 2.0, {}, ["scheduler 1"], 1.9)
    assert (row.requests, row.lost, row.repeated, row.takeover_s) == (4, 0, 1, 1.9)
    assert (row.longest_pause_s, row.longest_before_s) == (2.4, 0.5)
    assert row.passed
    slow = _result(fault, [*done, answered(3.0, 3.0)], 2.0, {}, [], None)
    assert not slow.passed and slow.lost == 0
    lost = _result(
        fault, [*done, answered(3.0, math.nan, "HTTP 503: no_decode")], 2.0, {}, [], None
    )
    assert (lost.lost, lost.longest_pause_s, lost.passed) == (1, math.inf, False)
    assert lost.errors == {"503 no_decode": 1} or len(lost.errors) == 1
    assert not _result(fault, done, 2.0, {"queued": 1}, [], None).passed


# All of it, but for the engines -------------------------------------------------------------------


async def test_nothing_is_lost_when_the_scheduler_that_schedules_is_killed(
    tmp_path: Path,
) -> None:
    rooms = Rooms()
    engines = [MockEngine("prefill", rooms=rooms), MockEngine("decode", rooms=rooms)]
    for engine in engines:
        engine.loads_of = lambda _port: []  # type: ignore[method-assign]
        await engine.start()
    prefill, decode = engines
    workload = Workload(qps=10, requests=1, max_prompt_tokens=50, max_new_tokens=3)
    try:
        async with site_with("lease", tmp_path) as site:
            # Long enough for a machine that is busy with other tests.
            patient = ["--sbs-election-lease-secs", "6", "--sbs-election-renew-secs", "5"]
            site.plan([*worker_flags([(prefill.url, 8998)], [decode.url]), *patient])
            async with site.places.running():
                (first,) = [
                    scheduler for scheduler in await site.places.standing() if scheduler.active
                ]
                row = await run_fault(
                    site.places,
                    BY_NAME["kill-scheduler"],
                    workload=workload,
                    quiet_s=1.0,
                    held_s=0.5,
                    tail_s=0.5,
                    patience_s=0.0,
                )
                (then,) = [
                    scheduler for scheduler in await site.places.standing() if scheduler.active
                ]
    finally:
        for engine in engines:
            await engine.stop()
    assert row.requests > 20
    assert (row.lost, row.errors, row.left_over) == (0, {}, {})
    assert then.term > first.term
