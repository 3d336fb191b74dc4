"""The dashboard's view of the scheduler's events: passes, bubbles, shadows, alerts, frames."""

from __future__ import annotations

from typing import Any

import pytest
from harness.recorders import LoneRecorder

from sglang_sbs.dashboard.health.alerts import Recent, find_alerts
from sglang_sbs.dashboard.passes import PassHistory
from sglang_sbs.dashboard.shadow import ShadowRequest
from sglang_sbs.scheduling import (
    Command,
    Dispatch,
    Event,
    ForwardEnded,
    InstanceDown,
    InstanceUp,
    PrefillDone,
    Refuse,
    RequestArrived,
    RequestEnded,
    Scheduler,
    SchedulerConfig,
    TimerFired,
)
from sglang_sbs.scheduling.explained.timelines import Timeline, Timelines
from sglang_sbs.wire import EndForward

P0, D0 = "http://p0:1", "http://d0:1"


def report(**fields: Any) -> EndForward:
    values: dict[str, Any] = {
        **{"instance_id": "", "boot_id": "a", "role": "prefill", "dp_rank": 0, "dp_size": 2},
        **{"seq": 0, "kind": "forward"},
    }
    return EndForward(**values | fields)


# Passes ---------------------------------------------------------------------------------------


def test_all_ranks_tell_of_one_pass() -> None:
    history = PassHistory()
    for rank in (0, 1):
        message = report(
            dp_rank=rank, forward_id=1, forward_s=0.5, age_s=0.1, tokens_per_rank=[10, 20]
        )
        history.on_report(P0, 2, message, 10.0, 0.0)
    (only,) = history.take(10.0)
    assert (only.start_s, only.end_s, only.tokens) == (pytest.approx(9.4), 9.9, [10, 20])
    assert history.take(11.0) == []


def test_ranks_that_tell_only_of_themselves_are_put_together() -> None:
    history = PassHistory()
    history.on_report(P0, 2, report(forward_id=1, forward_s=0.5, extend_tokens=10), 10.0, 0.0)
    assert history.take(10.0) == []
    second = report(dp_rank=1, forward_id=1, forward_s=0.5, extend_tokens=20)
    history.on_report(P0, 2, second, 10.01, 0.0)
    (only,) = history.take(10.2)
    assert only.tokens == [10, 20]


@pytest.mark.parametrize("gathered", [None, [1, 2, 3, 4]])
def test_the_nodes_of_an_engine_have_boot_ids_of_their_own_and_passes_in_common(
    gathered: list[int] | None,
) -> None:
    history = PassHistory()
    for forward_id in (1, 2):
        for kind, at_s in (("launch", 0.0), ("forward", 0.4)):
            for rank in (0, 2, 1, 3):
                message = report(
                    boot_id=f"node {rank // 2}",
                    kind=kind,
                    dp_rank=rank,
                    dp_size=4,
                    forward_id=forward_id,
                    forward_s=0.4 if kind == "forward" else 0.0,
                    extend_tokens=rank + 1,
                    tokens_per_rank=gathered,
                )
                history.on_report(P0, 4, message, forward_id + at_s, 0.0)
    first, second = history.take(10.0)
    assert first.tokens == second.tokens == [1, 2, 3, 4]
    assert (first.gap_s, second.gap_s) == (0.0, pytest.approx(0.6))


def test_a_bubble_is_wasted_as_far_as_requests_waited() -> None:
    history = PassHistory()
    vector = {"tokens_per_rank": [5, 5], "forward_s": 1.0}
    history.on_report(P0, 2, report(forward_id=1, **vector), 10.0, waited_s=3.0)
    launch = report(kind="launch", forward_id=2, tokens_per_rank=[5, 5])
    history.on_report(P0, 2, launch, 12.0, waited_s=3.5)
    history.on_report(P0, 2, report(forward_id=2, **vector), 13.0, waited_s=4.0)
    first, second = history.take(13.0)
    assert (first.gap_s, first.waste_s) == (0.0, 0.0)
    assert (second.gap_s, second.waste_s) == (2.0, 0.5)


def test_a_frame_tells_how_evenly_passes_are_spread_over_ranks() -> None:
    made = LoneRecorder(Scheduler(SchedulerConfig()), 0.0)
    assert made.frame(0.0)["balance"] is None
    for forward_id, tokens in ((1, [6, 2]), (2, [4, 0])):
        for rank in range(2):
            message = report(
                dp_rank=rank, forward_id=forward_id, forward_s=0.5, tokens_per_rank=tokens
            )
            made.observe(ForwardEnded(instance="http://p", report=message), (), float(forward_id))
    made.frame(3.0)
    assert made.frame(3.0)["balance"] == {"active_ranks": 1.5, "ranks": 2.0, "max_over_mean": 1.75}


def test_a_restarted_engine_begins_anew_and_idle_passes_are_none() -> None:
    history = PassHistory()
    vector = {"tokens_per_rank": [5, 5], "forward_s": 1.0}
    history.on_report(P0, 2, report(forward_id=9, **vector), 10.0, 0.0)
    history.on_report(P0, 2, report(boot_id="b", forward_id=1, **vector), 20.0, 0.0)
    idle = report(boot_id="b", forward_id=2, forward_s=0.1, tokens_per_rank=[0, 0])
    history.on_report(P0, 2, idle, 21.0, 0.0)
    assert [a_pass.gap_s for a_pass in history.take(30.0)] == [0.0, 0.0]


def test_a_launch_shows_what_runs_until_it_ends() -> None:
    history = PassHistory()
    launch = report(kind="launch", forward_id=1, tokens_per_rank=[7, 0], age_s=0.5)
    history.on_report(P0, 2, launch, 10.0, 0.0)
    assert history.running(P0) == [(9.5, [7, 0])]
    ended = report(forward_id=1, forward_s=1.0, tokens_per_rank=[7, 0])
    history.on_report(P0, 2, ended, 10.5, 0.0)
    assert history.running(P0) == []
    assert history.last_end_s(P0, 1) == 10.5


def test_without_a_barrier_every_rank_has_passes_and_bubbles_of_its_own() -> None:
    history = PassHistory()

    def hear(rank: int, kind: str, forward_id: int, now_s: float) -> None:
        message = report(
            **{"dp_rank": rank, "kind": kind, "forward_id": forward_id, "extend_tokens": 5 + rank},
            forward_s=1.0 if kind == "forward" else 0.0,
        )
        history.on_report(P0, 2, message, now_s, 0.0, barrier=False)

    hear(0, "forward", 900, 10.0)
    hear(1, "launch", 3, 10.1)
    hear(0, "launch", 901, 10.2)
    assert history.running(P0) == [(10.2, [5, None]), (10.1, [None, 6])]
    hear(1, "forward", 3, 11.1)
    hear(0, "forward", 901, 11.2)
    passes = history.take(11.2)
    assert [a_pass.tokens for a_pass in passes] == [[5, None], [None, 6], [5, None]]
    assert [a_pass.gap_s for a_pass in passes] == pytest.approx([0.0, 0.0, 0.2])
    assert (history.last_end_s(P0, 0), history.last_end_s(P0, 1)) == (11.2, 11.1)


def test_a_frame_tells_of_a_worker_without_a_barrier_as_one() -> None:
    scheduler = Scheduler(SchedulerConfig(policy="least_tokens"))
    up = InstanceUp(instance=P0, role="prefill", dp_size=2, chunk_tokens=1024, barrier=False)
    for event in (up, InstanceUp(instance=D0, role="decode", dp_size=1)):
        scheduler.handle(event, 0.0)
    recorder = LoneRecorder(scheduler, 1.0)
    events: list[Event] = [
        *(RequestArrived(rid=f"r{number}", prompt_tokens=50) for number in range(2)),
        *(
            ForwardEnded(
                instance=P0,
                report=report(dp_rank=rank, kind="launch", forward_id=40 * rank, extend_tokens=50),
            )
            for rank in range(2)
        ),
    ]
    for event in events:
        recorder.observe(event, scheduler.handle(event, 2.0), 2.0)
    frame = recorder.frame(2.1)
    (shown,) = frame["prefill"]
    assert (shown["instance"], shown["barrier"]) == (P0, False)
    assert shown["running"] == [[2.0, [50, None]], [2.0, [None, 50]]]
    assert shown["requests"] == [1, 1]
    for number in range(2):
        answered = PrefillDone(rid=f"r{number}")
        recorder.observe(answered, scheduler.handle(answered, 2.5), 2.5)
    figures = recorder.frame(3.0)["ttft"]["figures"]
    assert figures["modelled"]["p50"] > 0


# Shadows --------------------------------------------------------------------------------------


ASKED = ShadowRequest(tokens=10, now_s=0.0, latency_s=0.0)


# Alerts ---------------------------------------------------------------------------------------


def scheduler_with(*events: tuple[Event, float], **config: Any) -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(**config))
    for name, role, at in ((P0, "prefill", 0.0), (D0, "decode", 0.0)):
        up = InstanceUp(instance=name, role=role, dp_size=2, chunk_tokens=100)
        scheduler.handle(up, at)
    for event, now_s in events:
        scheduler.handle(event, now_s)
    return scheduler


def kinds(scheduler: Scheduler, now_s: float, recent: Recent | None = None) -> list[str]:
    alerts = find_alerts(scheduler.snapshot(now_s), scheduler.config, recent or Recent())
    assert all(alert.text for alert in alerts)
    return [alert.kind for alert in alerts]


def idle_report(role: str, rank: int, seq: int = 0) -> ForwardEnded:
    name = P0 if role == "prefill" else D0
    said = report(role=role, dp_rank=rank, kind="idle", boot_id=role, seq=seq)
    return ForwardEnded(instance=name, report=said)


ALL_REPORTED = [(idle_report(role, rank), 1.0) for role in ("prefill", "decode") for rank in (0, 1)]


def test_a_healthy_cluster_has_no_alerts() -> None:
    assert kinds(scheduler_with(*ALL_REPORTED), 2.0) == []


def test_an_instance_that_becomes_slow_is_named() -> None:
    scheduler = Scheduler(SchedulerConfig())
    for name, role in ((P0, "prefill"), (D0, "decode")):
        scheduler.handle(InstanceUp(instance=name, role=role, dp_size=1, chunk_tokens=1000), 0.0)
    recorder, now_s = LoneRecorder(scheduler, 0.0), 1.0

    def passes(count: int, first: int, forward_s: float) -> set[str]:
        nonlocal now_s
        for number in range(first, first + count):
            about: dict[str, Any] = {"dp_size": 1, "forward_id": number, "tokens_per_rank": [900]}
            for kind in ("launch", "forward"):
                seq = 2 * number + (kind == "forward")
                times: dict[str, Any] = {"launch_s": now_s, "end_s": now_s, "forward_s": forward_s}
                said = report(**about, **times, kind=kind, seq=seq, extend_tokens=900)
                event = ForwardEnded(instance=P0, report=said)
                recorder.observe(event, scheduler.handle(event, now_s), now_s)
                now_s += forward_s if kind == "launch" else 0.01
            recorder.tick(now_s)
        return {alert["kind"] for alert in recorder.frame(now_s)["alerts"]}

    assert "slow_prefill" not in passes(60, 1, 0.5)
    assert "slow_prefill" in passes(30, 61, 2.0)
    assert "slow_prefill" not in passes(60, 91, 0.5)
    past = [alert for alert in recorder.history(now_s)["past"] if alert["kind"] == "slow_prefill"]
    assert past[0]["subject"] == P0


def test_attempts_that_fail_on_one_instance_name_it() -> None:
    recorder = LoneRecorder(scheduler_with(*ALL_REPORTED), 0.0)

    def over(count: int, outcome: str, prefill: str, decode: str, now_s: float) -> None:
        decision = Dispatch(
            **{"rid": "x", "prefill": prefill, "prefill_rank": 0, "decode": decode},
            **{"decode_rank": 0, "batch": 1, "reason": "", "held_s": 0.0},
        )
        for _ in range(count):
            timeline = Timeline("x", 0.0, 10, decision=decision, outcome=outcome)
            recorder.request_over(timeline, None, now_s)

    def failing(now_s: float) -> list[tuple[str, str]]:
        alerts = recorder.frame(now_s)["alerts"]
        return [
            (alert["severity"], alert["subject"]) for alert in alerts if alert["kind"] == "failing"
        ]

    over(60, "completed", P0, D0, 10.0)
    over(50, "aborted", P0, D0, 10.0)  # by clients
    over(2, "failed", P0, D0, 10.0)
    assert failing(11.0) == []
    over(4, "failed", "http://p1:1", D0, 11.0)
    assert failing(12.0) == [("warning", D0)]
    over(90, "failed", "http://p1:1", "http://d1:1", 12.0)
    assert failing(13.0) == [("critical", "")]
    assert failing(80.0) == []
    over(9, "failed", "http://p1:1", D0, 100.0)
    over(9, "failed", "http://p1:1", "http://d1:1", 100.0)
    assert failing(101.0) == [("critical", "http://p1:1")]


def test_instances_are_in_the_order_of_the_command_line() -> None:
    scheduler = Scheduler(SchedulerConfig())
    names = [f"http://p{number}:1" for number in (2, 0, 3, 1)]  # as they came up
    for name in names:
        scheduler.handle(InstanceUp(instance=name, role="prefill", dp_size=1), 0.0)
    order = [f"http://p{number}:1" for number in range(3)]
    frame = LoneRecorder(scheduler, 0.0, order=lambda: order).frame(1.0)
    assert [instance["instance"] for instance in frame["prefill"]] == [*order, "http://p3:1"]


def test_ranks_that_fall_silent() -> None:
    scheduler = scheduler_with(*ALL_REPORTED, (idle_report("prefill", 0, seq=1), 9.0))
    alerts = find_alerts(scheduler.snapshot(9.5), scheduler.config, Recent())
    assert [(alert.kind, alert.subject) for alert in alerts] == [("stale", P0), ("stale", D0)]
    assert alerts[0].text.startswith("1 of 2 DP ranks")
    assert alerts[1].text.startswith("2 of 2 DP ranks")


def test_instances_that_are_down() -> None:
    down = scheduler_with(*ALL_REPORTED, (InstanceDown(instance=D0), 1.0))
    assert kinds(down, 1.0) == ["no_decode"]


def test_a_queue_near_its_limit_and_flow_control() -> None:
    arrivals = [(RequestArrived(rid=str(i), prompt_tokens=400), 1.0) for i in range(40)]
    scheduler = scheduler_with(*ALL_REPORTED, *arrivals, max_queue_requests=40)
    waiting = scheduler.snapshot(1.0).queue_requests
    limit = SchedulerConfig(max_queue_requests=int(waiting / 0.8))
    assert [a.kind for a in find_alerts(scheduler.snapshot(1.0), limit, Recent())] == ["queue"]


def test_what_the_last_minute_tells() -> None:
    recent = Recent(
        refusals={"queue_full": 3},
        watchdog_fires={P0: 2},
        problems=[(D0, "an SGLang before 0.5.10")],
        scheduler_errors=1,
        alone=True,
    )
    found = kinds(scheduler_with(*ALL_REPORTED), 2.0, recent)
    assert sorted(found) == ["alone", "problem", "refused", "scheduler_errors", "watchdog"]
    assert found[:3] == ["alone", "watchdog", "scheduler_errors"], "critical ones first"


def test_a_fallback_tier_is_shown_only_where_feedback_matters() -> None:
    silence = (RequestArrived(rid="a", prompt_tokens=10), 2.0)
    answer = (PrefillDone(rid="a"), 2.5)
    events = (silence, (TimerFired(), 2.3), answer)
    assert "fallback" in kinds(scheduler_with(*events), 3.0)
    assert "fallback" not in kinds(scheduler_with(*events, policy="round_robin"), 3.0)


# Frames ---------------------------------------------------------------------------------------


class Watched:
    """A scheduler with a recorder, as the pump has them."""

    def __init__(self, now_s: float = 1.0, **config: Any) -> None:
        self.scheduler = scheduler_with(*ALL_REPORTED, **config)
        self.recorder = LoneRecorder(self.scheduler, now_s)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands = self.scheduler.handle(event, now_s)
        self.recorder.observe(event, commands, now_s)
        return commands


def test_a_frame_has_what_is_new_and_a_history_everything() -> None:
    watched = Watched()
    watched.handle(RequestArrived(rid="a", prompt_tokens=60), 2.0)
    launch = report(boot_id="prefill", seq=1, kind="launch", forward_id=1, tokens_per_rank=[60, 0])
    watched.handle(ForwardEnded(instance=P0, report=launch), 2.1)
    ended = report(boot_id="prefill", seq=2, forward_id=1, forward_s=0.4, tokens_per_rank=[60, 0])
    watched.handle(ForwardEnded(instance=P0, report=ended), 2.5)
    watched.handle(PrefillDone(rid="a"), 2.6)
    frame = watched.recorder.frame(2.7)
    assert frame["full"] is False
    (gang,) = frame["gangs"]
    assert (gang["requests"], gang["tokens"], gang["prefill"], gang["rids"]) == (1, 60, P0, ["a"])
    assert gang["reason"]
    (a_pass,) = frame["passes"]
    assert a_pass[0] == P0
    assert a_pass[5] == [60, 0]
    assert frame["hold"]["requests"] == 1
    assert frame["prefill"][0]["chunk"] == 100
    assert frame["decode"][0]["kv_capacity"] == 0, "unknown"
    again = watched.recorder.frame(2.9)
    assert again["gangs"] == again["passes"] == []
    history = watched.recorder.history(3.0)
    assert history["full"] is True
    assert (history["gangs"], history["passes"]) == ([gang], [a_pass])
    assert [requests for _, requests in history["queue_trail"]] == [0, 0]


def test_what_waits_is_shown_by_class_and_tenants() -> None:
    watched = Watched()
    for i in range(30):
        more = {"priority": (i % 3) - 1, "tenant": "ab"[i % 2]}
        watched.handle(RequestArrived(rid=f"r{i}", prompt_tokens=90, **more), 2.0)
    queue = watched.recorder.frame(2.5)["queue"]
    assert sum(queue["classes"].values()) == queue["requests"] > 6
    assert min(queue["classes"].values()) > 0
    assert queue["tenants"] == 2


def test_refusals_and_waiting_requests_are_shown() -> None:
    watched = Watched(max_queue_requests=5)
    refused = 0
    for i in range(30):
        commands = watched.handle(RequestArrived(rid=f"r{i}", prompt_tokens=90), 2.0)
        refused += sum(isinstance(command, Refuse) for command in commands)
    assert refused
    frame = watched.recorder.frame(2.5)
    assert frame["rates"]["refused_in_60_s"] == {"queue_full": refused}
    waiting = frame["queue"]["oldest"]
    assert len(waiting) == frame["queue"]["requests"] == 5
    assert all(waits == 0.5 and tokens == 90 for _, tokens, waits in waiting)
    for rid, _, _ in waiting:
        watched.handle(RequestEnded(rid=rid, outcome="aborted"), 3.0)
    assert watched.recorder.frame(3.0)["queue"]["oldest"] == []
    assert watched.recorder.frame(100.0)["rates"]["refused_in_60_s"] == {}


def test_memory_is_bounded_whatever_comes() -> None:
    watched = Watched(policy="round_robin", max_queue_requests=10**6)
    for i in range(25_000):
        watched.recorder.observe(RequestArrived(rid=str(i), prompt_tokens=9), [], 2.0)
        dispatch = Dispatch(
            **{"rid": str(i), "prefill": P0, "prefill_rank": 0, "decode": D0, "decode_rank": 0},
            **{"batch": i, "held_s": 0.0, "reason": "x"},
        )
        watched.recorder.observe(RequestArrived(rid=f"w{i}", prompt_tokens=9), [dispatch], 2.0)
    frame = watched.recorder.frame(2.1)
    assert len(frame["gangs"]) == 40
    sizes = [
        len(value)
        for part in (watched.recorder, watched.recorder.ttft)
        for value in vars(part).values()
        if hasattr(value, "__len__") and not isinstance(value, Timelines)
    ]
    assert max(sizes) <= 20_000 + 25_000  # the undecided of the comparison leave with time
    watched.recorder.frame(60.0)
    undecided = watched.recorder.ttft._undecided
    assert len(undecided) == 0


def test_the_clock_of_waiting_runs_only_while_something_waits() -> None:
    watched = Watched()
    recorder = watched.recorder
    recorder.observe(RequestArrived(rid="a", prompt_tokens=9), [], 2.0)
    recorder.observe(RequestArrived(rid="b", prompt_tokens=9), [], 3.0)
    recorder.observe(RequestEnded(rid="a", outcome="aborted"), [], 4.0)
    recorder.observe(RequestEnded(rid="b", outcome="aborted"), [], 5.0)
    recorder.frame(9.0)
    assert recorder._waited_s == 3.0
