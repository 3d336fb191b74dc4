"""The dashboard over HTTP: who may look, what it costs, and what becomes of slow watchers."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import router_harness
from aiohttp import web
from harness.pages import ScriptedFeed, local_feed, served, take
from router_harness import TIMEOUT_S, Cluster, options_for, until

from sglang_sbs.console.ask_router import NoAnswerError
from sglang_sbs.dashboard import pages
from sglang_sbs.dashboard.client import frames
from sglang_sbs.dashboard.feed import LocalFeed
from sglang_sbs.dashboard.pages import PENDING_FRAMES
from sglang_sbs.router.api.access import CONTROL_PLANE, OPEN_PATHS
from sglang_sbs.router.processes.scheduler_process import SchedulerProcess
from sglang_sbs.router.server import RouterServer
from sglang_sbs.scheduling import Scheduler
from tools.stand_ins.mock_engine import MockEngine, Rooms

KEYS = ("--control-plane-api-keys", "ops:Ops:admin:secret", "dev:Dev:user:weak")


def cluster(*flags: str) -> AbstractAsyncContextManager[Cluster]:
    return router_harness.cluster(*flags, scheduler=Scheduler())


# Who may look ---------------------------------------------------------------------------------


async def test_the_page_is_served_to_everybody_with_a_strict_policy() -> None:
    async with cluster("--admin-api-key", "secret", "--api-key", "user") as running:
        for path in pages.OPEN_PATHS:
            async with running.get(path) as answer:
                body = await answer.text()
                assert answer.status == 200, path
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert "http://" not in body.replace("http://127.0.0.1", ""), (
                    "nothing from elsewhere"
                )
                tag = answer.headers["ETag"]
            async with running.get(path, headers={"If-None-Match": tag}) as again:
                assert again.status == 304


def test_every_file_of_the_page_is_open_and_the_stream_is_not() -> None:
    assert pages.OPEN_PATHS <= OPEN_PATHS
    assert pages.EVENTS_PATH not in OPEN_PATHS
    assert pages.EVENTS_PATH.startswith(CONTROL_PLANE)
    static = Path(pages.__file__).parent / "static"
    served = {name for name, _ in pages._ASSETS.values()}
    assert {path.name for path in static.iterdir()} == served


@pytest.mark.parametrize(
    ("key", "status"), [(None, 401), ("wrong", 401), ("weak", 403), ("secret", 200)]
)
async def test_the_stream_wants_an_admin(key: str | None, status: int) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        cluster(*KEYS) as running,
        running.get("/dashboard/events", headers=headers) as answer,
    ):
        assert answer.status == status
    if status == 200:
        assert answer.headers["Content-Type"].startswith("text/event-stream")


async def test_without_an_admin_the_api_key_opens_it_and_no_key_is_taken_from_the_url() -> None:
    async with cluster("--api-key", "user") as running:
        for path in ("/dashboard/events", "/dashboard/events?key=user&api_key=user"):
            async with running.get(path) as answer:
                assert answer.status == 401
        assert (await take(running, 1, "user"))[0]["full"]


async def test_the_client_says_what_to_do_about_a_key() -> None:
    async with cluster(*KEYS) as running:
        with pytest.raises(NoAnswerError, match="--admin-api-key"):
            await take(running, 1)
        with pytest.raises(NoAnswerError, match="not accepted"):
            await take(running, 1, "weak")


# What it costs --------------------------------------------------------------------------------


async def test_a_history_comes_first_then_frames() -> None:
    async with cluster() as running:
        got = await take(running, 3)
    assert [frame["full"] for frame in got] == [True, False, False]
    assert [instance["instance"] for instance in got[0]["prefill"]] == [running.prefill[0].url]
    assert len(got[0]["decode"][0]["running"]) == 4


async def test_requests_show_up_as_decisions() -> None:
    async with cluster() as running:
        watching = asyncio.create_task(take(running, 8))
        await until(lambda: len(running.server.dashboard.watchers) == 1)
        status, _ = await running.generate(text="hello", sampling_params={"max_new_tokens": 2})
        assert status == 200
        seen = [gang for frame in await watching for gang in frame["gangs"]]
    assert len(seen) == 1
    assert seen[0]["requests"] == 1
    assert seen[0]["prefill"] == running.prefill[0].url


async def test_frames_are_made_only_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster() as running:
        feed = local_feed(running)
        feed.frame_s = 0.02
        recorder = feed.recorder
        assert recorder is not None, "the gain is estimated all the time"
        frames: list[float] = []
        ticks: list[float] = []
        frame, tick = recorder.frame, recorder.tick

        def counted_frame(now_s: float) -> Any:
            frames.append(now_s)
            return frame(now_s)

        def counted_tick(now_s: float) -> None:
            ticks.append(now_s)
            tick(now_s)

        monkeypatch.setattr(recorder, "frame", counted_frame)
        monkeypatch.setattr(recorder, "tick", counted_tick)
        await until(lambda: len(ticks) >= 3)
        assert not frames
        stop = feed.watch(lambda payload, full: None)
        await until(lambda: len(frames) >= 2)
        stop()
        made = len(frames)
        seen = len(ticks)
        await until(lambda: len(ticks) >= seen + 3)
        assert len(frames) == made
        assert feed.recorder is recorder


async def test_the_fallbacks_recorder_costs_nothing_when_nobody_looks() -> None:
    async with cluster() as running:
        pump = running.server.dispatcher.pump  # type: ignore[attr-defined]
        local_feed(running).close()
        feed = LocalFeed(pump, alone=True, frame_s=0.02, linger_s=0.05)
        assert feed.recorder is None
        assert pump.observer is None
        feed.watch(lambda payload, full: None)()
        await until(lambda: feed.recorder is None)
        assert pump.observer is None
        assert feed._ticker is None


async def test_all_watchers_get_the_same_bytes() -> None:
    async with cluster() as running:
        feed = local_feed(running)
        feed.frame_s = 0.02
        taken: list[list[bytes]] = [[], []]
        stops = [feed.watch(lambda payload, full, to=to: to.append(payload)) for to in taken]
        await until(lambda: all(len(to) >= 3 for to in taken))
        for stop in stops:
            stop()
        assert all(a is b for a, b in zip(taken[0][1:3], taken[1][1:3], strict=True))


async def test_a_defect_of_the_dashboard_is_not_the_schedulers() -> None:
    async with cluster() as running:
        feed = local_feed(running)
        feed.retry_s = 0.0
        feed.watch(lambda payload, full: None)
        broken = feed.recorder
        broken.ttft = None  # type: ignore[union-attr, assignment]
        status, _ = await running.generate(text="hello", sampling_params={"max_new_tokens": 2})
        assert status == 200
        await until(lambda: feed.recorder not in (None, broken))
        assert feed.recorder is not None
        assert feed.recorder.ttft is not None, "the gain is estimated again"
        assert running.server.dispatcher.scheduler_errors == 0


async def test_a_frame_that_cannot_be_written_ends_no_later_dashboard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster() as running:
        feed = local_feed(running)
        feed.frame_s = 0.02
        feed.watch(lambda payload, full: None)
        monkeypatch.setattr(feed.recorder, "frame", lambda now_s: {"request_id": "\udcff"})
        await until(lambda: feed.recorder is None)
        frames: list[bytes] = []
        feed.watch(lambda payload, full: frames.append(payload))
        await until(lambda: len(frames) >= 3)


# Slow and many watchers -----------------------------------------------------------------------


async def test_a_watcher_that_does_not_read_is_dropped() -> None:
    feed = ScriptedFeed()
    async with served(feed) as (dashboard, port):
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: len(dashboard.watchers) == 1)
            sent = 0
            async with asyncio.timeout(TIMEOUT_S):
                while feed.takes and sent < 1000:
                    feed.takes[0](b"x" * 1_000_000, False)
                    sent += 1
                    await asyncio.sleep(0)
            await until(lambda: len(dashboard.watchers) == 0)
    assert dashboard.dropped == 1
    assert sent < 100, "what waits for it is bounded"


async def test_a_burst_is_no_reason_to_drop_who_reads() -> None:
    feed = ScriptedFeed()
    async with (
        served(feed) as (dashboard, port),
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/dashboard/events") as answer,
    ):
        await until(lambda: bool(feed.takes))
        feed.takes[0](b"{}", True)
        for _ in range(PENDING_FRAMES - 1):
            feed.takes[0](b"{}", False)
        expected = b"event: history\ndata: {}\n\n" + b"event: frame\ndata: {}\n\n" * 9
        assert await answer.content.readexactly(len(expected)) == expected
        assert len(dashboard.watchers) == 1


async def test_too_many_watchers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_WATCHERS", 2)
    async with cluster() as running:
        first = await running.get("/dashboard/events")
        second = await running.get("/dashboard/events")
        async with running.get("/dashboard/events") as third:
            assert third.status == 503
            assert "too_many_dashboards" in await third.text()
        first.close()
        await until(lambda: len(running.server.dashboard.watchers) == 1)
        assert (await take(running, 1))[0]["full"]
        second.close()


async def test_the_client_with_most_dashboards_loses_one_to_another_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or one machine could lock out everybody."""
    monkeypatch.setattr(pages, "MAX_WATCHERS", 3)
    async with cluster() as running:
        greedy = [await running.get("/dashboard/events") for _ in range(3)]
        elsewhere = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with aiohttp.ClientSession(connector=elsewhere) as other:
            url = running.url + "/dashboard/events"
            first = await other.get(url)
            assert first.status == 200
            async with asyncio.timeout(TIMEOUT_S):
                with pytest.raises(aiohttp.ClientError):
                    await greedy[0].content.read()
            assert len(running.server.dashboard.watchers) == 3
            # Two of one, one of the other: nobody gives up a place for the sake of it.
            async with other.get(url) as second:
                assert second.status == 503
            first.close()
        for response in greedy:
            response.close()


async def test_leaving_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sglang_sbs.access"):
        async with cluster() as running:
            await take(running, 2)
            await until(lambda: len(running.server.dashboard.watchers) == 0)
            await until(lambda: bool(caplog.records))
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert " 200 " in record.getMessage()


async def test_streams_end_with_the_router() -> None:
    async with cluster() as running:
        answer = await running.get("/dashboard/events")
        await running.server.stop(grace_s=0.0)
        async with asyncio.timeout(TIMEOUT_S):
            await answer.content.read()
        assert len(running.server.dashboard.watchers) == 0


@pytest.mark.parametrize("rest", [b'data: {"full": fal', b"data: ", b""])
async def test_an_event_that_a_proxy_cut_off_is_left_out(rest: bytes) -> None:
    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'event: history\ndata: {"full": true}\n\nevent: frame\n' + rest)
        return response

    application = web.Application()
    application.router.add_get(pages.EVENTS_PATH, events)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        got = [frame async for frame in frames(f"http://127.0.0.1:{port}", None)]
    finally:
        await runner.cleanup()
    assert got == [{"full": True}]


# Several processes ----------------------------------------------------------------------------


async def test_a_front_end_shows_the_scheduler_process_and_itself_without(tmp_path: Path) -> None:
    rooms = Rooms()
    prefill, decode = MockEngine("prefill", rooms=rooms), MockEngine("decode", rooms=rooms)
    for engine in (prefill, decode):
        await engine.start()
    endpoint = ("--sbs-scheduler", f"ipc://{tmp_path}/s")

    async def start_scheduler() -> SchedulerProcess:
        flags = ("--sbs-role", "scheduler", *endpoint, "--policy", "sbs")
        process = SchedulerProcess(options_for([prefill], [decode], *flags))
        await process.start()
        return process

    scheduler = await start_scheduler()
    front_end = RouterServer(options_for([prefill], [decode], "--sbs-role", "front-end", *endpoint))
    await front_end.start()
    shown: list[dict[str, Any]] = []

    async def follow() -> None:
        async for frame in frames(f"http://127.0.0.1:{front_end.port}", None):
            shown.append(frame)  # noqa: PERF401 - looked at meanwhile

    following = asyncio.create_task(follow())
    another: asyncio.Task[None] | None = None
    try:
        await until(lambda: len(shown) > 2)
        assert [frame["full"] for frame in shown[:3]] == [True, False, False]
        assert not shown[-1]["alone"]
        assert shown[-1]["policy"] == "sbs"
        await scheduler.stop()
        await until(lambda: shown[-1]["alone"])
        assert shown[-1]["policy"] == "least_tokens"
        assert "alone" in [alert["kind"] for alert in shown[-1]["alerts"]]
        first_alone = next(frame for frame in shown if frame["alone"])
        assert first_alone["full"], "another scheduler begins with a history"
        scheduler = await start_scheduler()
        await until(lambda: not shown[-1]["alone"])
        began = [number for number, frame in enumerate(shown) if frame["full"]]
        assert not shown[began[-1]]["alone"]
        another = asyncio.create_task(take_from(front_end, 2))
        assert [frame["full"] for frame in await another] == [True, False]
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await front_end.stop(grace_s=0.0)
        await scheduler.stop()
        for engine in (prefill, decode):
            await engine.stop()


async def take_from(server: RouterServer, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async for frame in frames(f"http://127.0.0.1:{server.port}", None):
        found.append(frame)
        if len(found) == count:
            break
    return found
