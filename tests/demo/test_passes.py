"""Reading passes and placements back from an event log."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.demo.passes import ForwardPass, PassBuilder, pass_statistics, read_engines
from sglang_sbs.scheduling import Dispatch, ForwardEnded, SchedulerConfig, TimerFired
from sglang_sbs.scheduling.eventlog import EventLogWriter
from sglang_sbs.wire import EndForward

NAMES = {"http://p": "p0", "http://d": "d0"}


def report(instance: str, rank: int, kind: str, forward_id: int, **fields) -> ForwardEnded:
    return ForwardEnded(
        instance=instance,
        report=EndForward(
            instance_id=instance,
            boot_id="b",
            role="prefill" if instance == "http://p" else "decode",
            dp_rank=rank,
            dp_size=2,
            seq=forward_id * 10 + (kind == "forward"),
            kind=kind,
            forward_id=forward_id,
            chunk_tokens=100,
            **fields,
        ),
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    writer = EventLogWriter(path, SchedulerConfig())
    dispatch = Dispatch(
        rid="r",
        prefill="http://p",
        prefill_rank=1,
        decode="http://d",
        decode_rank=0,
        batch=1,
        held_s=0.5,
        reason="",
    )
    writer.write(0.0, TimerFired(), [dispatch])
    for rank, tokens in ((0, 60), (1, 100)):
        writer.write(1.0, report("http://p", rank, "launch", 1, extend_tokens=tokens), [])
    for rank in (0, 1):
        writer.write(1.6, report("http://p", rank, "forward", 1, forward_s=0.5, age_s=0.1), [])
    writer.write(1.7, report("http://d", 0, "forward", 9, forward_s=0.02), [])
    writer.close()
    return path


def test_a_pass_is_read_once_with_the_tokens_of_every_rank(log: Path):
    record = read_engines(log, NAMES)
    assert record.passes == [ForwardPass("p0", 1.0, 1.5, (60, 100))]
    assert record.endforward == {"p0/0": 1, "p0/1": 1, "d0/0": 1}


def test_event_log_names_the_ranks_of_each_request(log: Path):
    record = read_engines(log, NAMES)
    assert record.prefill_ranks == {"p0/1": 1}
    assert record.decode_ranks == {"d0/0": 1}
    assert record.pairs == {"r": ("p0/1", "d0/0")}


def test_without_a_barrier_every_rank_makes_passes_of_its_own():
    builder = PassBuilder()
    for rank in (0, 1):
        launch = report(
            "http://p", rank, "launch", 7, extend_tokens=60 + rank, barrier=False
        ).report
        assert builder.add("p0", launch, 1.0) is None
    ends = [
        builder.add(
            "p0", report("http://p", rank, "forward", 7, forward_s=0.5, barrier=False).report, end_s
        )
        for rank, end_s in ((0, 1.5), (1, 1.7))
    ]
    assert ends == [ForwardPass("p0/0", 1.0, 1.5, (60,)), ForwardPass("p0/1", 1.2, 1.7, (61,))]


def test_a_pause_without_requests_is_idle_time_but_no_bubble():
    passes = [
        ForwardPass("p0", 0.0, 1.0, (100, 100)),
        ForwardPass("p0", 1.1, 2.1, (100, 0)),
        ForwardPass("p0", 9.0, 10.0, (50, 50)),
    ]
    statistics = pass_statistics(passes, chunk_tokens=100)
    assert statistics.passes == 3
    assert statistics.gap_ms_p50 == pytest.approx(100)
    assert statistics.bubble_share == pytest.approx(0.01)
    assert statistics.idle_share == pytest.approx(0.7)
    assert statistics.chunk_utilization == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert statistics.active_ranks == pytest.approx((1 + 0.5 + 1) / 3)
    assert statistics.active_rank_count == pytest.approx((2 + 1 + 2) / 3)
    assert statistics.max_over_mean == pytest.approx((1 + 2 + 1) / 3)


def test_an_empty_window_has_no_figures():
    statistics = pass_statistics([], chunk_tokens=100)
    assert statistics.passes == 0
    assert math.isnan(statistics.bubble_share)


def test_passes_that_took_no_time_have_no_shares_of_it():
    """A hook reports such a pass if it had ended when it was launched."""
    statistics = pass_statistics([ForwardPass("p0", 1.0, 1.0, (100, 0))], chunk_tokens=100)
    assert statistics.passes == 1
    assert statistics.chunk_utilization == 0.5
    assert math.isnan(statistics.idle_share)
    assert math.isnan(statistics.bubble_share)
