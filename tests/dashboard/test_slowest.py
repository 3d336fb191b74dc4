"""The slowest requests of five minutes, and why they were."""

from __future__ import annotations

from harness.pages import local_feed
from router_harness import cluster, until

from sglang_sbs.dashboard.slowest import SHOWN, WINDOW_S, Slowest
from sglang_sbs.scheduling import Scheduler, SchedulerConfig
from sglang_sbs.scheduling.explained.decisions import Why
from sglang_sbs.scheduling.explained.timelines import Timeline
from sglang_sbs.scheduling.reasons import Waited, WaitReason

WAITS = [
    Waited(WaitReason.NOT_YET, 0.0),
    Waited(WaitReason.NO_DECODE_ROOM, 0.5),
    Waited(WaitReason.SHARE_FULL, 3.0),
]


def why(rid: str, now_s: float) -> Why | None:
    return Why(rid, 100, 0.0, WAITS, decided_s=3.2) if rid == "explained" else None


def added(slowest: Slowest, rid: str, now_s: float, **parts_s: float) -> None:
    slowest.add(now_s, Timeline(rid, 0.0, 100), sum(parts_s.values()), parts_s)


def test_the_slowest_come_first_and_leave_after_five_minutes() -> None:
    slowest = Slowest(why)
    for number in range(1000):
        added(slowest, str(number), 0.1 * number, hold=float(number % 500))
    found = slowest.summary(101.0)
    assert [request["ttft_s"] for request in found] == [499.0, 499.0, 498.0, 498.0] + [
        float(n) for n in (497, 497, 496, 496)
    ]
    assert len(found) == SHOWN
    assert {request["rid"] for request in slowest.summary(60.0 + WINDOW_S)} == {
        str(n) for n in range(992, 1000)
    }
    assert slowest.summary(101.0 + WINDOW_S) == []
    for number in range(100_000):
        added(slowest, "x", number * 1.0, hold=1.0)
    assert sum(len(slot) for _, slot in slowest._slots) <= 32 * SHOWN


def test_a_slow_request_shows_its_longest_part_and_longest_reason() -> None:
    slowest = Slowest(why)
    added(slowest, "explained", 1.0, hold=3.2, engine=1.0)
    added(slowest, "forgotten", 1.0, hold=2.2)
    added(slowest, "long", 1.0, hold=0.1, **{"pass": 1.5})
    added(slowest, "way", 1.0, hold=0.1, way=1.0)
    assert [request["why"] for request in slowest.summary(2.0)] == [
        "hold in the scheduler 3,200 ms: no decode DP rank had room for the request",
        "hold in the scheduler 2,200 ms",
        "forward pass 1,500 ms: it had 100 prompt tokens to compute",
        "way to the engine 1,000 ms: network, or a busy host of the router or the engine",
    ]


def test_the_reason_is_taken_while_it_is_remembered() -> None:
    known = {"explained"}
    slowest = Slowest(lambda rid, now_s: why(rid, now_s) if rid in known else None)
    added(slowest, "explained", 1.0, hold=3.2)
    slowest.summary(1.5)
    known.clear()
    assert "no decode DP rank" in slowest.summary(3.0)[0]["why"]


async def test_a_slow_request_is_shown_with_a_page_about_it() -> None:
    async with cluster(scheduler=Scheduler(SchedulerConfig(), remembers=100)) as running:
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 2}}
        async with running.post("/generate", body, headers={"x-request-id": "a\u202e"}) as answer:
            assert answer.status == 200
            await answer.read()
        recorder = local_feed(running).recorder
        assert recorder is not None
        await until(lambda: any(slot for _, slot in recorder._slowest._slots))
        (request,) = recorder._slowest.summary(recorder._slowest._slots[-1][1][0].ended_s)
        assert request["prefill"] == running.prefill[0].url
        assert request["ttft_s"] > 0
        headers = {"Accept": "text/plain"}
        async with running.get(f"/requests/{request['rid']}", headers=headers) as answer:
            assert answer.content_type == "text/plain"
            text = await answer.text()
        assert "Where the time to its first token went" in text
        assert "Why there:" in text
        assert "\u202e" not in text
