"""The sentences that simulate and plan begin with."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

from sglang_sbs.simulator.experiments.plan import verdict
from sglang_sbs.simulator.experiments.verdict import of_capacity, of_loads
from sglang_sbs.simulator.options.common import clock, progress, run_with_progress
from sglang_sbs.simulator.parallel import Interrupted, Row
from sglang_sbs.trial.ratios import ratio_of_means, student_975


def row(policy: str, load: float, mean_s: float, **more: object) -> Row:
    rng = random.Random(load)  # the same arrivals for every policy
    parts = [(mean_s * rng.uniform(9, 11), 10) for _ in range(8)]
    return {
        **{"policy": policy, "load": load, "cost": "mixed", "chunk_tokens": 512, "seed": 1},
        **{"ttft_mean_s": mean_s, "ttft_p99_s": 2 * mean_s, "ttft_parts": parts},
        **{"completed": 80, "unfinished": 0, "rejected": 0, "dp_size": 8, "full_chunk_load": load},
        **more,
    }


def test_gain_no_gain_and_loss_are_each_said_with_the_hardest_rival():
    rows = [
        *(row("sbs", 0.2, 1.0), row("eta", 0.2, 1.0), row("round_robin", 0.2, 1.5)),
        *(row("sbs", 0.6, 0.8), row("eta", 0.6, 1.0), row("round_robin", 0.6, 2.0)),
        *(row("sbs", 0.8, 0.6), row("eta", 0.8, 1.1), row("round_robin", 0.8, 1.0)),
        *(row("sbs", 0.9, 1.2), row("eta", 0.9, 1.0), row("round_robin", 0.9, 2.0)),
    ]
    assert of_loads(rows) == [
        "sbs has 0.80x (0.80 to 0.80) the mean TTFT of eta at load 0.6 and 0.60x (0.60 to 0.60) "
        "that of round_robin at load 0.8. It gains nothing at load 0.2 (1.00x (1.00 to 1.00) of "
        "eta): the load is low (0.20 of what full chunks would compute): most requests find an "
        "idle instance. It loses at load 0.9 (1.20x (1.20 to 1.20) of eta). Its p99 TTFT is longer "
        "at load 0.9 (1.20x of eta)."
    ]


def test_who_does_not_serve_every_request_is_not_compared():
    rows = [row("sbs", 1.0, 1.0), row("eta", 1.0, 0.5, unfinished=3), row("random", 1.0, 2.0)]
    assert of_loads(rows)[0].startswith("sbs has 0.50x (0.50 to 0.50) the mean TTFT of random ")
    rows = [row("sbs", 1.0, 1.0, rejected=2), row("eta", 1.0, 0.5)]
    assert of_loads(rows) == ["At load 1 sbs refuses 2, so there is no ratio."]
    rows = [row("sbs", 1.0, 1.0), row("eta", 1.0, 0.5, unfinished=3)]
    assert "no other policy served every request there" in of_loads(rows)[0]


def test_a_paragraph_for_each_cost_and_chunk():
    rows = [row(p, 0.5, 1.0, cost=c) for p in ("sbs", "eta") for c in ("table", "mixed")]
    first, second = of_loads(rows)
    assert first.startswith("Cost table, chunk 512: sbs gains nothing at load 0.5")
    assert second.startswith("Cost mixed, chunk 512: ")


def test_seeds_that_differ_widen_the_interval_and_one_part_has_none():
    ours, theirs = [(8.0, 10), (12.0, 10), (10.0, 10)], [(10.0, 10), (11.0, 10), (13.0, 10)]
    found = ratio_of_means(ours, theirs)
    assert found.ratio == pytest.approx(30 / 34)
    assert found.low < 0.8 and found.high > 1.0
    assert ratio_of_means(ours[:1], theirs[:1]).words() == "0.80x"
    assert [student_975(n) for n in (1, 10, 11, 30)] == pytest.approx(
        [12.706, 2.228, 2.201, 2.042], abs=1e-3
    )


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    held = 0
    for trial in range(200):
        rng = random.Random(trial)
        busy = [rng.lognormvariate(0, 0.4) for _ in range(8)]
        ours = [(0.8 * value * rng.lognormvariate(0, 0.1), 10) for value in busy]
        found = ratio_of_means(ours, [(value, 10) for value in busy])
        held += found.low <= 0.8 * 2.718281828**0.005 <= found.high
    assert 0.9 * 200 <= held < 200


def capacity(policy: str, seed: int, qps: float) -> Row:
    head = {"cost": "mixed", "chunk_tokens": 512, "slo_ttft_s": 0.8, "prefill_instances": 2}
    return {**head, "policy": policy, "seed": seed, "max_qps": qps}


def test_the_capacity_is_compared_with_the_best_other_policy():
    rows = [
        capacity(p, s, q * s) for p, q in (("eta", 10), ("sbs", 12), ("random", 4)) for s in (1, 2)
    ]
    assert of_capacity(rows) == [
        "sbs serves 18 QPS within a mean TTFT of 0.8 s (chunk 512), 1.20x (1.20 to 1.20) the 15 "
        "QPS of eta, the best other."
    ]
    assert of_capacity([capacity("sbs", 1, 0.0), capacity("eta", 1, 3.0)]) == [
        "sbs meets a mean TTFT of 0.8 s at no load; eta, the best other policy, 3 QPS."
    ]


def test_a_plan_names_who_needs_fewer():
    cells = [
        {
            **{"policy": policy, "prefill_instances": count, "chunk_tokens": 512, "seeds": 1},
            **dict.fromkeys(("max_qps", "max_qps_least", "max_qps_most"), each * count),
        }
        for policy, each in (("eta", 10.0), ("sbs", 7.0))
        for count in (1, 2)
    ]
    assert verdict(cells, [("now", 10.0), ("x 2", 20.0)], 0.8) == [
        "At 10 QPS (now) sbs needs 2 prefill instances with chunk 512 for a mean TTFT of 0.8 s; "
        "eta 1.",
        "At 20 QPS (x 2) sbs needs more than 2 prefill instances for a mean TTFT of 0.8 s; eta 2.",
    ]


def test_progress_without_a_terminal_is_lines_and_not_too_many(capsys):
    with progress(Console(file=io.StringIO()), 400) as step:
        for _ in range(400):
            step("this")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 20
    assert lines[0].startswith("simulated this: 20 of 400, about 0 s left")
    assert lines[-1] == "simulated this: 400 of 400"


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_keeps_the_rows_of_the_runs_that_ended(workers: int):
    """An interrupt comes to the parent alone where runs are processes of their own; here a run
    raises it."""
    tasks = [(made, (number,)) for number in range(3)] + [(interrupt, ())]
    with pytest.raises(Interrupted) as raised:
        run_with_progress(tasks, Console(file=io.StringIO()), workers)
    rows = [row["number"] for row in raised.value.rows]
    assert rows == sorted(rows) and (workers > 1 or rows == [0, 1, 2])


def test_long_runs_print_what_to_expect(capsys):
    run_with_progress([(made, (1,))], Console(file=io.StringIO()), 1, 600.0)
    assert capsys.readouterr().err.startswith("1 run on one process: roughly 10 min\n")
    run_with_progress([(made, (1,))], Console(file=io.StringIO()), 1, 1.0)
    assert "roughly" not in capsys.readouterr().err
    assert [clock(s) for s in (4.4, 89, 91, 7200)] == ["4 s", "89 s", "2 min", "2.0 h"]


def made(number: int) -> Row:
    return {"number": number}


def interrupt() -> Row:
    raise KeyboardInterrupt
