"""The lower bound of the mean TTFT: below every schedule, and equal to one where that is easy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ttft_bound import (
    BOUND,
    Machines,
    bound_row,
    least_waits_s,
    main,
    mean_ttft_bound_s,
)
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.cluster.cost import COSTS
from sglang_sbs.simulator.experiments.sweep import Job, run_job

DP = 2
LATENCY_S = 0.005
TIMES = st.lists(st.floats(0, 2), min_size=1, max_size=7).map(sorted)


def runs_of(count: int) -> Iterator[list[range]]:
    """Every division of so many arrivals into runs of neighbours."""
    if count == 0:
        yield []
    for size in range(1, count + 1):
        for before in runs_of(count - size):
            yield [*before, range(count - size, count)]


@given(at_s=TIMES, pass_s=st.floats(0, 3))
@settings(max_examples=100, deadline=None)
def test_the_least_waits_are_those_of_the_best_division(at_s: list[float], pass_s: float):
    every = [
        sum(pass_s + sum(at_s[run[-1]] - at_s[i] for i in run) for run in runs)
        for runs in runs_of(len(at_s))
    ]
    assert least_waits_s(at_s, pass_s) == pytest.approx(min(every), abs=1e-9)


@pytest.mark.parametrize("cost", COSTS)
def test_of_a_single_request_it_is_what_a_pass_takes(cost: str):
    machines = Machines(COSTS[cost], 3, DP, LATENCY_S)
    bound_s = mean_ttft_bound_s([Arrival(1.0, 1000, 1)], machines)
    assert bound_s == pytest.approx(LATENCY_S + COSTS[cost].pass_s([1000, 0], [0, 0]))


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for others in partitions(rest):
        yield [[first], *others]
        for index, group in enumerate(others):
            yield [*others[:index], [first, *group], *others[index + 1 :]]


def least_mean_s(arrivals: Sequence[Arrival], machines: Machines) -> float:
    """By trying all orders of all batches on one instance, with tokens spread evenly."""
    cost = machines.cost
    best_s = float("inf")
    for groups in partitions(range(len(arrivals))):
        for order in permutations(groups):
            free_s = ttft_s = 0.0
            for group in order:
                tokens = [arrivals[i].prompt_tokens for i in group]
                slowest = max(sum(tokens) / DP, *tokens)
                start_s = max(free_s, max(arrivals[i].at_s for i in group) + machines.latency_s)
                free_s = start_s + cost.fixed_s + cost.mean_s * sum(tokens) / DP
                free_s += cost.max_s * slowest
                ttft_s += sum(free_s - arrivals[i].at_s for i in group)
            best_s = min(best_s, ttft_s / len(arrivals))
    return best_s


@given(
    at_s=st.lists(st.floats(0, 0.6), min_size=1, max_size=5).map(sorted),
    tokens=st.lists(st.integers(1, 3000), min_size=5, max_size=5),
    cost=st.sampled_from(sorted(COSTS)),
)
@settings(max_examples=60, deadline=None)
def test_no_schedule_is_below_it(at_s: list[float], tokens: list[int], cost: str):
    arrivals = [Arrival(at, size, 1) for at, size in zip(at_s, tokens, strict=False)]
    machines = Machines(COSTS[cost], 1, DP, LATENCY_S)
    assert mean_ttft_bound_s(arrivals, machines) <= least_mean_s(arrivals, machines) + 1e-9


@pytest.mark.parametrize("load", [0.3, 1.0])
def test_no_simulated_policy_is_below_it_and_the_default_not_far_above(load: float):
    jobs = {p: Job("paper-3k", p, load, 5, 26.0, "table") for p in (BOUND, "sbs", "eta")}
    bound_s = bound_row(jobs[BOUND])["ttft_mean_s"]
    for policy in ("sbs", "eta"):
        assert bound_s < run_job(jobs[policy])["ttft_mean_s"]
    assert run_job(jobs["sbs"])["ttft_mean_s"] < 2 * bound_s


def test_the_command(tmp_path, capsys):
    rows = tmp_path / "rows.json"
    words = f"paper-3k --loads 0.2 --duration 22 --policies eta --json {rows} --workers 1"
    assert main(words.split()) == 0
    bound, eta = json.loads(rows.read_text())
    assert (bound["policy"], eta["policy"]) == (BOUND, "eta")
    assert bound["completed"] == eta["completed"]
    assert "load 0.2" in capsys.readouterr().out


def test_the_warm_up_must_fit(capsys):
    with pytest.raises(SystemExit) as error:
        main(["paper-3k", "--duration", "20"])
    assert error.value.code == 2
    assert "--duration" in capsys.readouterr().err


def test_rows_that_cannot_be_written_are_refused_before_the_run(tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file" / "below.json", tmp_path):
        with pytest.raises(SystemExit) as ended:
            main(["paper-3k", "--json", str(path)])
        assert ended.value.code == 2
        captured = capsys.readouterr()
        assert f"--json {path}: cannot be written" in " ".join(captured.err.split())
        assert not captured.out
    assert (tmp_path / "file").read_text() == "kept"
