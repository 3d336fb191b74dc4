"""Alerts of the last hour: from when to when, bounded, and still shown when the trouble is over."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from harness.pages import local_feed
from harness.recorders import LoneRecorder
from router_harness import cluster, until

from sglang_sbs.dashboard.health.alerts import Alert
from sglang_sbs.dashboard.health.past import AGAIN_S, KEPT_S, MOST_KEPT, AlertHistory
from sglang_sbs.dashboard.recorder import DashboardRecorder
from sglang_sbs.scheduling import InstanceDown, InstanceUp, Scheduler, SchedulerConfig

SLOW = Alert("warning", "slow_ttft", "", "TTFT is slow: p95 3 s", "add capacity")
DOWN = Alert("critical", "down", "http://p0:1", "this prefill instance is down", "see its log")


def test_an_alert_that_is_over_is_shown_with_its_times() -> None:
    history = AlertHistory()
    history.update(10.0, [SLOW])
    history.update(11.0, [SLOW, DOWN])
    assert history.over() == []
    assert history.since_s(SLOW, 11.0) == 10.0
    history.update(12.0, [DOWN])
    history.update(13.0, [])
    down, slow = history.over()
    assert (down["kind"], down["began_s"], down["ended_s"]) == ("down", 11.0, 12.0)
    assert (slow["text"], slow["began_s"], slow["ended_s"]) == (SLOW.text, 10.0, 11.0)
    history.update(11.0 + KEPT_S + 0.5, [])
    assert [alert["kind"] for alert in history.over()] == ["down"]


def test_a_flicker_is_one_alert() -> None:
    history = AlertHistory()
    for now_s in range(20):
        history.update(float(now_s), [SLOW] if now_s % 2 == 0 else [])
    (alert,) = history.over()
    assert (alert["began_s"], alert["ended_s"], alert["times"]) == (0.0, 18.0, 10)
    history.update(18.0 + AGAIN_S + 1, [SLOW])
    history.update(18.0 + AGAIN_S + 2, [])
    assert [alert["times"] for alert in history.over()] == [1, 10]


def test_the_gravest_time_gives_the_text() -> None:
    history = AlertHistory()
    grave = Alert("critical", "slow_ttft", "", "TTFT is slow: p95 30 s", "add capacity")
    for now_s, alerts in enumerate(([SLOW], [grave], [SLOW], [])):
        history.update(float(now_s), alerts)
    (alert,) = history.over()
    assert (alert["severity"], alert["text"], alert["ended_s"]) == ("critical", grave.text, 2.0)


def test_memory_is_bounded_and_what_goes_on_is_kept() -> None:
    history = AlertHistory()
    history.update(0.0, [DOWN])
    for number in range(3 * MOST_KEPT):
        problem = Alert("warning", "problem", "http://p0:1", f"problem {number}")
        history.update(1.0 + number, [DOWN, problem])
    assert len(history.over()) == MOST_KEPT - 2
    assert history.since_s(DOWN, 9e9) == 0.0
    everything = [Alert("critical", "down", f"http://p{number}:1", "") for number in range(900)]
    history.update(2000.0, everything)
    history.update(2001.0, everything)
    assert len(history.over()) + MOST_KEPT <= 2 * MOST_KEPT


def frames_of(recorder: DashboardRecorder, times_s: list[float]) -> list[dict[str, Any]]:
    return [recorder.frame(now_s) for now_s in times_s]


def test_frames_tell_of_the_past_when_it_changes_and_histories_always() -> None:
    scheduler = Scheduler(SchedulerConfig())
    recorder = LoneRecorder(scheduler, 0.0)
    for name, role in (("http://p0:1", "prefill"), ("http://d0:1", "decode")):
        scheduler.handle(InstanceUp(instance=name, role=role, dp_size=1, chunk_tokens=100), 0.0)
    scheduler.handle(InstanceDown(instance="http://d0:1"), 1.0)
    down = recorder.frame(2.0)
    (alert,) = down["alerts"]
    assert (alert["kind"], alert["since_s"]) == ("no_decode", 2.0)
    assert recorder.frame(4.0)["alerts"][0]["since_s"] == 2.0
    scheduler.handle(InstanceUp(instance="http://d0:1", role="decode", dp_size=1), 5.0)
    over, later = recorder.frame(6.0), recorder.frame(7.0)
    assert [alert["kind"] for alert in over["past"]] == ["no_decode"]
    assert "past" not in down
    assert "past" not in later
    (past,) = recorder.history(8.0)["past"]
    assert (past["began_s"], past["ended_s"]) == (2.0, 4.0)


def test_alerts_are_recorded_while_no_dashboard_is_open() -> None:
    recorder = LoneRecorder(Scheduler(SchedulerConfig()), 0.0)
    recorder.tick(1.0)
    assert {alert["since_s"] for alert in recorder.frame(5.0)["alerts"]} == {1.0}


def test_failed_events_are_forgotten_and_remembered_as_past() -> None:
    failed = [0]
    recorder = LoneRecorder(Scheduler(SchedulerConfig()), 0.0, errors=lambda: failed[0])
    recorder.tick(1.0)
    failed[0] = 3
    kinds = [
        [alert["kind"] for alert in frame["alerts"]] for frame in frames_of(recorder, [2.0, 70.0])
    ]
    assert ["scheduler_errors" in kind for kind in kinds] == [True, False]
    assert "failed on 3 events" in recorder.history(71.0)["past"][0]["text"]


async def test_get_well_has_dates() -> None:
    async with cluster(real=True, prefill=2) as running:
        engine = running.prefill[1]
        recorder = local_feed(running).recorder
        assert recorder is not None

        async def well() -> dict[str, Any]:
            async with running.get("/well") as answer:
                found: dict[str, Any] = await answer.json()
                return found

        worker = running.server.registry.get(engine.url)
        assert worker is not None
        running.server.registry.drain(worker, True)
        await until(lambda: any(alert.alert.kind == "drained" for alert in recorder._past._kept))
        alerts = {alert["kind"]: alert for alert in (await well())["alerts"]}
        assert datetime.fromisoformat(alerts["drained"]["since"]).tzinfo is not None
        running.server.registry.drain(worker, False)
        await until(lambda: any(alert["kind"] == "drained" for alert in recorder._past.over()))
        past = {alert["kind"]: alert for alert in (await well())["past"]}
        assert past["drained"]["subject"] == engine.url
        assert past["drained"]["from"] <= past["drained"]["to"]
        assert "is drained" in past["drained"]["text"]
