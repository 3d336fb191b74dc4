"""Is all well? One case per cause, from a snapshot; the line in ``GET /well`` and in top."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from harness.recorders import LoneRecorder
from harness.top_frames import drawn, frame_of
from router_harness import cluster

from sglang_sbs.dashboard.health import alerts, well
from sglang_sbs.dashboard.health.alerts import Recent, find_alerts
from sglang_sbs.dashboard.health.paces import Paces
from sglang_sbs.dashboard.health.well import Wellness, is_all_well
from sglang_sbs.scheduling import (
    Event,
    ForwardEnded,
    InstanceUp,
    PrefillDone,
    RequestArrived,
    Scheduler,
)
from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.events import RefuseCause
from sglang_sbs.scheduling.snapshot import (
    DecodeRankState,
    DecodeState,
    PrefillRankState,
    PrefillState,
    Snapshot,
)
from sglang_sbs.wire import EndForward

P0, D0 = "http://p0:1", "http://d0:1"
PREFILL = PrefillState(
    instance=P0,
    up=True,
    tier="endforward",
    ready=True,
    predicted_free_in_s=0.0,
    forward_fixed_s=0.1,
    prediction_error_s=0.02,
    gap_s=0.005,
    watchdog_fires=0,
    passes=100,
    ranks=[PrefillRankState(3072, 0, 0, 0, 0.2)] * 2,
    chunk_tokens=3072,
)
DECODE = DecodeState(D0, True, [DecodeRankState(5, 1000, 0, 0.2)] * 2, 100_000)
HEALTHY = Snapshot(
    policy="sbs",
    trigger="adaptive",
    queue_requests=3,
    queue_tokens=3000,
    in_flight_requests=20,
    oldest_wait_s=0.2,
    interval_s=0.4,
    mean_forward_s=0.4,
    latency_s=0.008,
    lead_s=0.02,
    throttled=False,
    batches=100,
    prefill=[PREFILL, msgspec.structs.replace(PREFILL, instance="http://p1:1")],
    decode=[DECODE],
)


def judged(recent: Recent | None = None, **changed: Any) -> Wellness:
    snapshot = msgspec.structs.replace(HEALTHY, **changed)
    found = find_alerts(snapshot, SchedulerConfig(max_queue_requests=100), recent or Recent())
    return is_all_well(snapshot, found)


def prefill(**changed: Any) -> list[PrefillState]:
    return [msgspec.structs.replace(PREFILL, **changed), HEALTHY.prefill[1]]


def test_green_says_what_runs_and_is_calm() -> None:
    assert judged() == Wellness("green", "2 prefill and 1 decode instances are up, busy", "")
    idle = judged(in_flight_requests=0, queue_requests=0)
    assert idle.cause.endswith("are up, idle")
    assert judged(in_flight_requests=21, queue_tokens=5, latency_s=0.009) == judged()


SILENT = [PrefillRankState(3072, 0, 0, 0, 20.0)] * 2
FULL = [msgspec.structs.replace(DECODE, ranks=[DecodeRankState(50, 95_000, 0, 0.2)] * 2)]
SLOW = Recent(ttft_requests=50, ttft_p95_s=5.5, ttft_p95_passes=12.0)


BUSY = [msgspec.structs.replace(DECODE, max_running=8, ranks=[DecodeRankState(8, 9, 0, 0.2)] * 2)]
CASES: list[tuple[str, str, str, str, dict[str, Any], Recent | None]] = [
    ("amber", "slow_way", "take 160 ms", "more CPU", {"latency_s": 0.16}, None),
    ("amber", "bubbles", "for 25% of", "L_net", {}, Recent(bubbles=0.25)),
    (
        *("amber", "cost_model", "50% of a pass wrong", "uses its GPUs"),
        *({"prefill": prefill(prediction_error_s=0.2)}, None),
    ),
    ("amber", "slow_ttft", "p95 5.5 s, 12 times", "sglang-sbs why", {}, SLOW),
    (
        *("amber", "slow_ttft", "p95 5.5 s", "add capacity", {}),
        Recent(ttft_requests=50, ttft_p95_s=5.5, ttft_p95_passes=12.0, load=0.95),
    ),
    (
        *("red", "slow_ttft", "p95 20.0 s", "sglang-sbs why", {}),
        Recent(ttft_requests=50, ttft_p95_s=20.0, ttft_p95_passes=50.0),
    ),
    ("amber", "decode_full", "decode is full: 95%", "add decode", {"decode": FULL}, None),
    ("amber", "not_holding", "holding is off", "more CPU", {"holding": False}, None),
    ("red", "stalled", "no pass takes", "restart", {"prefill": prefill(stalled=True)}, None),
    ("red", "watchdog", "fell silent", "engine's log", {}, Recent(watchdog_fires={P0: 1})),
    ("amber", "stale", "sent no EndForward", "hang", {"prefill": prefill(ranks=SILENT)}, None),
    (
        *("amber", "fallback", "no EndForward", "install the plugin"),
        *({"prefill": prefill(tier="load_poll")}, None),
    ),
    ("red", "no_prefill", "no prefill instance", "doctor", {"prefill": []}, None),
    ("red", "down", "instance is down", "log", {"prefill": prefill(up=False)}, None),
    (
        *("red", "down", "is down: nothing listens there", "log"),
        *({"prefill": prefill(up=False)}, Recent(problems=[(P0, "nothing listens there")])),
    ),
    (
        "amber",
        "drained",
        "is drained",
        "undrain",
        {"prefill": prefill(up=False, drained=True)},
        None,
    ),
    ("red", "throttled", "flow control", "add prefill", {"throttled": True}, None),
    ("amber", "queue", "90 requests of 100", "add prefill", {"queue_requests": 90}, None),
    ("amber", "refused", "3 requests refused", "capacity", {}, Recent(refusals={"full": 3})),
    ("amber", "problem", "an old SGLang", "", {}, Recent(problems=[(D0, "an old SGLang")])),
    ("red", "alone", "without the scheduler", "process runs", {}, Recent(alone=True)),
    ("red", "scheduler_errors", "a defect", "report it", {}, Recent(scheduler_errors=1)),
    (
        *("amber", "decode_full", "100% of its request slots", "add decode"),
        *({"decode": BUSY}, None),
    ),
    ("red", "no_decode", "no decode instance", "GET /workers", {"decode": []}, None),
    (
        *("amber", "slow_prefill", "passes take 2.5 times as long as usual", "throttled"),
        *({}, Recent(slower={P0: 2.5})),
    ),
    (
        *("amber", "failing", "6 of 100 attempts at requests failed", "router's log"),
        *({}, Recent(attempts=(100, 6, ""))),
    ),
    ("red", "failing", "most of them here", "drain", {}, Recent(attempts=(9, 7, D0))),
]


@pytest.mark.parametrize(("level", "kind", "cause", "todo", "changed", "recent"), CASES)
def test_each_cause_is_said_with_what_to_do(
    level: str, kind: str, cause: str, todo: str, changed: dict[str, Any], recent: Recent | None
) -> None:
    found = judged(recent, **changed)
    assert (found.level, found.kind) == (level, kind)
    assert cause in found.cause
    assert todo in found.todo
    assert found.todo


def test_every_alert_has_a_case_above_a_rank_and_a_line_in_the_page_about_them() -> None:
    kinds = {kind for _, kind, *_ in CASES}
    assert kinds == set(well._ORDER)
    assert len(well._ORDER) == len(kinds)
    source = inspect.getsource(alerts)
    made = set(re.findall(r'\(\s*(?:severe|"critical"|"warning"),\s*"(\w+)"', source))
    assert made | {"no_prefill", "no_decode"} == kinds
    table = (Path(__file__).parents[2] / "docs/dashboard.md").read_text()
    assert {kind for kind in kinds if f"`{kind}`" not in table} == set()


def test_every_cause_of_a_refusal_has_words_and_the_most_frequent_says_what_to_do() -> None:
    for cause in get_args(RefuseCause):
        found = judged(Recent(refusals={cause: 2}))
        assert not found.cause.endswith(f": {cause}"), "the word of the program"
        assert found.cause.startswith("2 requests refused in the last minute: ")
        assert found.todo not in ("", "add capacity, or send less")
    both = judged(Recent(refusals={"no_decode": 1, "deadline": 4}))
    assert (both.kind, both.more) == ("refused", 0)
    assert both.cause.endswith("--sbs-queue-timeout-secs (4), no decode instance was up (1)")
    assert "sglang-sbs why" in both.todo


def test_thresholds_hold_their_peace_just_below() -> None:
    healthy = Wellness("green", "2 prefill and 1 decode instances are up, busy", "")
    quiet = Recent(bubbles=0.09, ttft_requests=50, ttft_p95_s=9.0, ttft_p95_passes=5.9)
    assert judged(quiet, latency_s=0.099) == healthy
    assert judged(Recent(ttft_requests=5, ttft_p95_s=9.0, ttft_p95_passes=50.0)) == healthy
    assert judged(latency_s=0.02, mean_forward_s=0.05, prefill=prefill()) != healthy
    exact = [msgspec.structs.replace(PREFILL, prediction_error_s=0.0)] * 2
    assert judged(latency_s=0.02, mean_forward_s=0.05, prefill=exact) == healthy
    assert judged(prefill=prefill(prediction_error_s=0.2, passes=5)) == healthy
    unknown = [msgspec.structs.replace(DECODE, kv_capacity_tokens=0)]
    assert judged(decode=unknown) == healthy


def test_a_slow_instance_is_not_silent_during_its_own_passes() -> None:
    late = [PrefillRankState(3072, 0, 0, 0, 5.0)] * 2
    assert judged(prefill=prefill(ranks=late)).kind == "stale"
    assert judged(prefill=prefill(ranks=late, full_pass_s=3.0)).level == "green"


def test_slow_ttft_names_the_part_that_is_longest() -> None:
    slow = dataclasses.replace(SLOW, ttft_split_s={"hold": 1.0, "queue": 3.0, "pass": 0.4})
    assert judged(slow).cause.endswith("the prompts need, most of it queue of the engine")


def test_passes_are_compared_with_those_of_the_hour_before() -> None:
    paces = Paces()
    for now_s in range(100):
        assert paces.look({P0: 0.5, "http://p1:1": 3.0}, float(now_s)) == {}
    assert paces.look({P0: 1.5}, 100.0) == {P0: pytest.approx(3.0, rel=0.01)}
    noticed = [paces.look({P0: 1.5}, 100.0 + 10 * number) for number in range(2000)]
    assert noticed[60] and not noticed[-1], "what lasts for hours is usual"
    for now_s in range(300):
        paces.look({P0: 0.5}, 30_000.0 + now_s)
    assert paces.look({P0: 1.5}, 30_301.0), "what is faster is usual soon"


def test_the_gravest_and_the_cause_come_first() -> None:
    found = judged(SLOW, holding=False, latency_s=0.3, throttled=True)
    assert (found.level, found.kind, found.more) == ("red", "throttled", 3)
    found = judged(Recent(refusals={"x": 1}, bubbles=0.5), holding=False)
    assert (found.level, found.kind, found.more) == ("amber", "not_holding", 2)


async def test_get_well_answers_with_level_cause_alerts_and_gain() -> None:
    async with cluster("--admin-api-key", "open sesame", real=True) as running:
        async with running.get("/well") as answer:
            assert answer.status == 401
        key = {"Authorization": "Bearer open sesame"}
        async with running.get("/well", headers=key) as answer:
            assert answer.status == 200
            said = await answer.json()
        assert said["level"] in ("green", "amber", "red")
        assert (said["level"] == "green") == (said["alerts"] == [])
        assert said["gain"]["why"].startswith("not known yet")


def test_top_has_it_at_the_head() -> None:
    frame = frame_of(2, 1)
    frame["alerts"] = []
    frame["well"] = msgspec.to_builtins(judged())
    assert "all is well: 2 prefill" in drawn(frame, 120, 40)[1]
    assert "gain: not known yet" in drawn(frame, 120, 40)[2]
    frame["well"] = msgspec.to_builtins(judged(holding=False))
    frame["gain"]["baselines"] = {
        "eta": {"ratio": 0.86, "low": 0.8, "high": 0.92},
        "least_tokens": {"ratio": 0.7, "low": 0.6, "high": 0.8},
        "round_robin": {"ratio": 0.55, "low": 0.5, "high": 0.6},
    }
    frame["gain"]["trend"] = "steady"
    head = drawn(frame, 160, 40)
    assert head[1].startswith("▲ holding is off")
    assert "more CPU" in head[1]
    assert "0.86x of eta (0.80 to 0.92)" in head[2]
    assert "0.55x of round_robin (0.50 to 0.60)" in head[2]


# What the recorder adds to a snapshot ---------------------------------------------------------


@pytest.mark.parametrize("rests_until_s", [0.0, 1e9])
def test_slowness_is_measured_in_the_passes_that_a_prompt_needs(rests_until_s: float) -> None:
    scheduler = Scheduler(SchedulerConfig(policy="round_robin"))
    for name, role in ((P0, "prefill"), (D0, "decode")):
        scheduler.handle(InstanceUp(instance=name, role=role, dp_size=1, chunk_tokens=100), 0.0)
    recorder = LoneRecorder(scheduler, 0.0)
    recorder.ttft.rests_until_s = rests_until_s
    requests = {str(number): tokens for number, tokens in enumerate([50] * 30 + [1000] * 10)}
    events: list[tuple[float, Event]] = [
        *((1.0, RequestArrived(rid=rid, prompt_tokens=n)) for rid, n in requests.items()),
        *((1.0 + n / 50, PrefillDone(rid=rid)) for rid, n in requests.items()),
        *((25.0, PrefillDone(rid=rid)) for rid in requests),  # decode's answer
    ]
    for now_s, event in events:
        recorder.observe(event, scheduler.handle(event, now_s), now_s)
    assert recorder.ttft.slowness(30.0) == (40, 20.0, 2.0)
    assert recorder.ttft.slowness(90.0) == (0, 0.0, 0.0)


def test_bubbles_are_the_time_without_a_pass_while_requests_waited() -> None:
    scheduler = Scheduler(SchedulerConfig())
    for name, role in ((P0, "prefill"), (D0, "decode")):
        scheduler.handle(InstanceUp(instance=name, role=role, dp_size=1, chunk_tokens=100), 0.0)
    recorder = LoneRecorder(scheduler, 0.0)
    recorder.observe(RequestArrived(rid="a", prompt_tokens=9), [], 1.0)  # it waits for ever
    for number in range(1, 21):
        for kind, at_s in (("launch", 1.0 * number), ("forward", number + 0.5)):
            report = EndForward(
                **{"instance_id": "", "boot_id": "a", "role": "prefill", "dp_rank": 0},
                **{"dp_size": 1, "seq": 0, "kind": kind, "forward_id": number},
                **{"forward_s": 0.5, "tokens_per_rank": [50], "extend_tokens": 50},
            )
            recorder.observe(ForwardEnded(instance=P0, report=report), [], at_s)
    frame = recorder.frame(20.6)
    (alert,) = [alert for alert in frame["alerts"] if alert["kind"] == "bubbles"]
    assert "for 46% of" in alert["text"]
