"""Where the time goes: the split of typical and slow requests, and that real requests are in it."""

from __future__ import annotations

import pytest
from harness.pages import local_feed
from router_harness import cluster, until

from sglang_sbs.dashboard.split import WINDOW_S, TimeSplit


def add(split: TimeSplit, now_s: float, parts_s: dict[str, float]) -> None:
    split.add(now_s, sum(parts_s.values()), parts_s)


def test_typical_and_slow_requests_have_splits_that_add_up() -> None:
    split = TimeSplit()
    assert split.summary(0.0) == {"requests": 0, "window_s": WINDOW_S}
    for number in range(1, 101):
        slow = number > 98
        add(split, 1.0, {"hold": 5.0 if slow else 0.01 * number, "pass": 1.0})
    found = split.summary(2.0)
    assert found["requests"] == 100
    assert found["p50"]["parts_s"] == {"hold": pytest.approx(0.505), "pass": 1.0}
    assert found["p99"]["parts_s"] == {"hold": 5.0, "pass": 1.0}
    for name in ("p50", "p99"):
        assert sum(found[name]["parts_s"].values()) == pytest.approx(found[name]["ttft_s"])
    assert split.summary(400.0)["requests"] == 0


def test_parts_that_only_some_requests_have_are_averaged_over_all() -> None:
    split = TimeSplit()
    add(split, 1.0, {"hold": 1.0, "retries": 4.0})
    assert split.summary(1.0)["p99"]["parts_s"] == {"hold": 1.0, "retries": 4.0}
    for _ in range(3):
        add(split, 3.0, {"hold": 5.0})
    assert split.summary(3.0)["p50"]["ttft_s"] == 5.0


def test_memory_is_bounded() -> None:
    split = TimeSplit()
    for _ in range(5_000):
        add(split, 1.0, {"hold": 1.0})
    assert split.summary(1.0)["requests"] == 2_000


async def test_a_request_that_was_answered_is_in_the_split() -> None:
    async with cluster(real=True) as running:
        status, _ = await running.generate(text="hello", sampling_params={"max_new_tokens": 2})
        assert status == 200
        recorder = local_feed(running).recorder
        assert recorder is not None
        await until(lambda: len(recorder.split._samples) == 1)
        found = recorder.split.summary(recorder.split._samples[0][0])
        assert found["p50"]["ttft_s"] > 0
        assert set(found["p50"]["parts_s"]) >= {"admission", "hold"}
