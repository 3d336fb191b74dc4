"""``GET /requests/{id}``, ``Server-Timing`` and the access log: one request, explained."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec
import pytest
from router_harness import Cluster, cluster, until

from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.config import parse_access_log
from sglang_sbs.router.relay import recent
from sglang_sbs.router.relay.recent import Minute, RecentRequests
from sglang_sbs.router.relay.time_split import server_timing
from sglang_sbs.scheduling import Scheduler, SchedulerConfig
from sglang_sbs.scheduling.explained.stories import Story
from sglang_sbs.scheduling.reasons import Opening, Term
from sglang_sbs.wire.endforward import Started
from tools.stand_ins.mock_engine import Behaviour

TIMING = {"x-sbs-server-timing": "1"}


async def story_of(c: Cluster, name: str, **more: Any) -> Story:
    async with c.get(f"/requests/{name}", **more) as response:
        assert response.status == 200, await response.text()
        return msgspec.json.decode(await response.read(), type=Story)


def real() -> Scheduler:
    return Scheduler(SchedulerConfig(), remembers=100)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_found_by_each_of_its_ids(stream: bool) -> None:
    async with cluster(prefill=2, scheduler=real()) as c:
        body = {"text": "hello", "rid": "of the client", "stream": stream}
        async with c.post("/generate", body, headers={"x-request-id": "abc"}) as response:
            await response.read()
        await c.settled()
        story = await story_of(c, "abc")
        (attempt,) = story.attempts
        rid = attempt.timeline.rid
        for name in ("of the client", rid):
            again = await story_of(c, name)
            assert again.request_id == "abc"
            assert again.attempts[0].timeline.rid == rid
        assert (story.kind, story.status) == ("generate", 200)
        assert [attempt.outcome for attempt in story.sent] == ["completed"]
        assert attempt.why is not None
        assert (attempt.why.opening, attempt.why.term) == (Opening.IDLE, Term.SOONEST)
        (chosen,) = [candidate for candidate in attempt.why.candidates if candidate.chosen]
        assert attempt.timeline.decision is not None
        assert chosen.instance == attempt.timeline.decision.prefill
        assert list(attempt.parts) == ["admission", "hold", "engine", "decode"]
        assert attempt.ttft_s == pytest.approx(sum(attempt.parts.values()))


async def test_the_id_in_the_body_of_an_answer_is_one_of_them() -> None:
    async with cluster(scheduler=real()) as c:
        status, answer = await c.generate(text="hello")
        assert status == 200
        story = await story_of(c, answer["meta_info"]["id"])
        assert len(story.attempts) == 1


async def test_what_the_engine_reports_splits_the_time_to_the_first_token() -> None:
    async with cluster(scheduler=real(), sbs_block=True) as c:
        (engine,) = c.prefill
        engine.connect_publisher(str(c.server.endforward_endpoint))
        engine.gate.close()
        asked = asyncio.create_task(c.generate(text="hello"))
        (record,) = await engine.received(1)
        rid = record.body["rid"]
        rank = record.body["routed_dp_rank"]
        timelines = c.server.dispatcher.pump.timelines
        started = [Started(rid, queued_s=99.9, schedulable_s=99.95)]

        def launched() -> bool:
            engine.publish(
                engine.report(
                    *(rank,),
                    kind="launch",
                    forward_id=5,
                    launch_s=100.0,
                    extend_tokens=10,
                    chunk_tokens=1024,
                    started=started,
                )
            )
            return timelines.get(rid).launched_s is not None

        await until(launched)

        def ended() -> bool:
            engine.publish(
                engine.report(
                    rank, kind="forward", forward_id=5, extend_tokens=10, chunk_tokens=1024
                )
            )
            return timelines.get(rid).computed_s is not None

        await until(ended)
        running = await story_of(c, rid)
        assert set(running.attempts[0].parts) == {"admission", "hold", "way", "queue", "pass"}
        engine.gate.open()
        assert (await asked)[0] == 200
        await c.settled()
        (attempt,) = (await story_of(c, rid)).attempts
        parts = ["admission", "hold", "way", "queue", "pass", "decode"]
        assert list(attempt.parts) == parts
        url = f"http://127.0.0.1:{c.server.prometheus_port}/metrics"
        async with c.client.get(url) as response:
            text = await response.text()
        for part in parts:
            assert f'sbs_ttft_part_seconds_count{{part="{part}"}} 1.0' in text, text[
                text.find("sbs_ttft") :
            ][:3000]


async def test_a_repeated_request_shows_what_failed_and_what_did_not() -> None:
    async with cluster(prefill=2, scheduler=real()) as c:
        for engine in c.prefill:
            engine.behaviours.append(Behaviour(status=503))
        async with c.post("/generate", {"text": "x"}, headers={"x-request-id": "r"}) as response:
            assert response.status == 200
            await response.read()
        await c.settled()
        story = await story_of(c, "r")
        assert [attempt.outcome for attempt in story.sent] == ["failed", "failed", "completed"]
        assert [bool(attempt.failure) for attempt in story.sent] == [True, True, False]
        assert "retries" not in story.attempts[0].parts
        assert story.attempts[2].parts["retries"] > 0


async def test_only_the_admin_key_shows_a_request() -> None:
    async with cluster("--admin-api-key", "boss", scheduler=real()) as c:
        async with c.post("/generate", {"text": "x"}, headers={"x-request-id": "r"}) as response:
            await response.read()
        async with c.get("/requests/r") as response:
            assert response.status == 401
        story = await story_of(c, "r", headers={"Authorization": "Bearer boss"})
        assert story.request_id == "r"


async def test_an_unknown_id_is_404() -> None:
    async with cluster() as c:
        for name in ("unknown", "x" * 600, "a%2Fb"):
            async with c.get(f"/requests/{name}") as response:
                assert response.status == 404
                assert response.headers["X-SMG-Error-Code"] == "request_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_split_is_a_header_of_the_answer_for_who_asks(stream: bool) -> None:
    async with cluster(scheduler=real()) as c:
        body = {"text": "hello", "stream": stream}
        async with c.post("/generate", body) as response:
            await response.read()
            assert "Server-Timing" not in response.headers
        async with c.post("/generate", body, headers=TIMING) as response:
            await response.read()
            parts = dict(
                part.split(";dur=") for part in response.headers["Server-Timing"].split(", ")
            )
        assert list(parts)[:2] == ["admission", "hold"]
        total_ms = sum(float(parts[name]) for name in parts if name != "ttft")
        assert float(parts["ttft"]) == pytest.approx(total_ms, abs=0.5)
        for request in (*c.prefill[0].requests, *c.decode[0].requests):
            assert "x-sbs-server-timing" not in request.headers


def test_the_header_has_milliseconds() -> None:
    assert server_timing({"hold": 0.41234, "engine": 1.0}) == (
        "hold;dur=412.3, engine;dur=1000.0, ttft;dur=1412.3"
    )
    assert server_timing({}) == ""


@pytest.mark.parametrize(
    ("which", "lines"), [("all", ["fine", "bad"]), ("errors", ["bad"]), ("slow:100s", ["bad"])]
)
async def test_the_access_log_has_the_lines_that_are_wanted(
    which: str, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sglang_sbs.access")
    async with cluster("--access-log", which, scheduler=real()) as c:
        async with c.post("/generate", {"text": "x"}, headers={"x-request-id": "r"}) as response:
            await response.read()
        async with c.post("/generate", {"text": 3}) as response:
            assert response.status == 400
        rid = (await story_of(c, "r")).attempts[0].timeline.rid
        found = [record.message for record in caplog.records if record.name == "sglang_sbs.access"]
        found = [line for line in found if "/generate" in line]
    assert ["fine" if " 200 " in line else "bad" for line in found] == lines
    if which == "all":
        assert f"rid {rid}; ttft " in found[0]
        assert "(admission " in found[0]


@pytest.mark.parametrize(
    ("text", "status", "waited_s", "has"),
    [
        ("slow:2s", 200, 2.0, True),
        ("slow:2s", 200, 1.9, False),
        ("slow:500ms", 200, 0.6, True),
        ("slow:2s", 500, 0.0, True),
        ("errors", 200, 100.0, False),
        ("errors", 404, 0.0, True),
        ("all", 200, 0.0, True),
    ],
)
def test_which_answers_have_a_line(text: str, status: int, waited_s: float, has: bool) -> None:
    assert parse_access_log(text).has(status, waited_s) == has


@pytest.mark.parametrize("text", ["none", "slow", "slow:", "slow:2", "slow:2m", "slow:-1s"])
def test_other_values_of_the_flag_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="slow:2s"):
        parse_access_log(text)


async def test_the_flag_names_itself() -> None:
    with pytest.raises(FlagError, match="--access-log"):
        async with cluster("--access-log", "sometimes"):
            pass


def test_only_so_many_requests_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MOST_KEPT", 10)
    kept = RecentRequests()
    for number in range(50):
        record = kept.begin(f"id {number}", "generate", time.monotonic(), 1, [f"rid {number}"])
        kept.on_submitted(record, f"own {number}", 0, 1.0)
    assert kept.find("id 39") is None
    assert kept.find("own 39") is None
    assert kept.find("rid 40") is kept.find("own 40")
    assert len(kept._by_id) == 30


def test_a_forgotten_request_that_goes_on_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting in a queue or trying again, a request may outlast thousands of newer ones."""
    monkeypatch.setattr(recent, "MOST_KEPT", 10)
    kept = RecentRequests()
    long = [kept.begin(f"long {number}", "chat", 0.0, 1, []) for number in range(5)]
    for number in range(20):
        kept.begin(f"id {number}", "chat", 0.0, 1, [])
    for number, record in enumerate(long):
        kept.on_submitted(record, f"rid {number}", 0, 1.0)
        kept.record_id(record, f"answer {number}")
    for number in range(20, 40):
        kept.begin(f"id {number}", "chat", 0.0, 1, [])
    assert len(kept._by_id) == 10
    assert [attempt.rid for attempt in long[0].sent] == ["rid 0"]  # the access log shows it


def test_long_ids_are_found_and_take_little_memory() -> None:
    kept = RecentRequests()
    ids = [f"{number} " + "é" * 1022 for number in range(32)]
    record = kept.begin("r" * 32_000, "generate", 0.0, 32, ids)
    kept.record_id(record, "a" * 1024)
    for name in ("r" * 32_000, ids[31], "a" * 1024):
        assert kept.find(name) is record
    assert sum(map(len, kept._by_id)) < 5_000
    assert sum(map(len, (record.request_id, *record.ids))) < 5_000
    for number in range(recent.MOST_KEPT):
        kept.begin(f"id {number}", "chat", 0.0, 1, [])
    assert len(kept._by_id) == recent.MOST_KEPT


def test_an_id_that_is_used_again_is_the_latest_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MOST_KEPT", 2)
    kept = RecentRequests()
    for _ in range(2):
        last = kept.begin("same", "generate", 0.0, 1, [])
    assert kept.find("same") is last
    kept.begin("other", "generate", 0.0, 1, [])  # the first "same" is forgotten
    assert kept.find("same") is last


def test_the_line_of_a_minute_has_the_figures_and_begins_anew() -> None:
    minute = Minute()
    assert minute.take() == ""
    minute.requests = 3
    minute.ttft_s += [0.1, 0.2, 12.0]
    minute.held_s += [0.05, 0.06]
    minute.refused["queue_full"] += 2
    assert minute.take() == (
        "last minute: 3 requests; TTFT p50 200 ms, p99 12.0 s; held p50 60 ms, p95 60 ms; "
        "refused or failed: 2 queue_full"
    )
    minute.requests = 1
    assert minute.take() == "last minute: 1 request; none refused"
    minute.requests = 1
    gain = "gain: mean TTFT 0.55x of round_robin (0.50 to 0.60)"
    assert minute.take(gain) == f"last minute: 1 request; none refused; {gain}"


async def test_the_minute_counts_what_clients_got() -> None:
    async with cluster(scheduler=real()) as c:
        assert (await c.generate(text="x"))[0] == 200
        async with c.post("/generate", {"text": 3}) as response:
            await response.read()
        await c.settled()
        line = c.server.in_flight.recent.minute.take()
    assert line.startswith("last minute: 2 requests; TTFT p50 ")
    assert "; held p50 " in line
    assert "refused or failed: 1 " in line
