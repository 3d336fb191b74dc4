"""The closed-loop decode experiment."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import msgspec
import pytest

from benchmarks.decode import command
from benchmarks.decode.runs import DECODE_POLICIES, DecodeJob, run_decode
from benchmarks.decode.simulation import DecodeSimulation, DecodeSpec
from sglang_sbs.scheduling import SchedulerConfig

ROW_FIELDS = {
    *("scenario", "policy", "cost", "load", "qps", "seed", "ttft_mean_s", "ttft_p50_s"),
    *("ttft_p99_s", "chunk_utilization", "bubble_share", "completed", "rejected"),
    *("kv_sigma_low", "kv_sigma_high", "kv_peak", "tokens_per_s"),
}

SPEC = DecodeSpec(ranks=8, concurrency=200, steps=1600, warm_up_steps=800, seed=3)


def outcome(policy: str, spec: DecodeSpec = SPEC):
    chosen = DECODE_POLICIES[policy]
    config = SchedulerConfig(**chosen.settings, max_queue_requests=10_000)
    return DecodeSimulation(spec, config).run(chosen.skew, chosen.foresight_steps)


def test_a_row_has_the_contracts_fields():
    row = run_decode(DecodeJob("sbs_potential", 1, steps=60, warm_up_steps=20))
    assert row.keys() >= ROW_FIELDS
    assert row["kv_sigma_low"] < row["kv_sigma_high"] < row["kv_peak"]
    assert row["tokens_per_s"] > 0
    # As many requests on each of fewer ranks.
    few = run_decode(DecodeJob("sbs_potential", 1, steps=60, warm_up_steps=20, ranks=4))
    assert few["tokens_per_s"] < row["tokens_per_s"] / 2
    assert few["batch_max"] > row["batch_max"] / 2


def test_nobody_is_lost_between_the_passes():
    """Closed loop: those in decode plus those that wait for a pass are always all."""
    simulation = DecodeSimulation(SPEC, SchedulerConfig(policy="sbs", max_queue_requests=10_000))
    simulation.run()
    decoding = sum(rank.running for rank in simulation._ranks)
    assert decoding + len(simulation._lengths) == SPEC.concurrency
    assert decoding == len(simulation._live)


@pytest.mark.parametrize("policy", ["sbs_potential", "sbs_iqr", "least_requests"])
def test_choosing_by_state_is_faster_than_in_turn(policy):
    assert outcome(policy).row()["tokens_per_s"] > outcome("round_robin").row()["tokens_per_s"]


def test_the_potential_narrows_the_kv_band():
    narrow = outcome("sbs_potential").row()["kv_cv"]
    assert narrow < 0.7 * outcome("round_robin").row()["kv_cv"]
    assert narrow < 0.9 * outcome("sbs_iqr").row()["kv_cv"]


@pytest.mark.parametrize(("large_ends_at", "chosen"), [(1, 0), (5000, 1)])
def test_foresight_does_not_count_what_is_about_to_end(large_ends_at: int, chosen: int):
    spec = msgspec.structs.replace(SPEC, ranks=2)
    simulation = DecodeSimulation(spec, SchedulerConfig(policy="round_robin"))
    simulation._foresight_steps = 100
    for index, (kv_tokens, end_step) in enumerate([(50_000, large_ends_at), (10_000, 5000)]):
        simulation._ranks[index].running = 1
        simulation._ranks[index].kv_tokens = kv_tokens
        simulation._live[str(index)] = (index, kv_tokens, 0)
        simulation._finish.append((end_step, str(index)))
    assert simulation._foreseen_rank("new", 1000) == chosen


def test_a_rule_with_foresight_is_faster_than_in_turn():
    assert (
        outcome("clairvoyant").row()["tokens_per_s"] > outcome("round_robin").row()["tokens_per_s"]
    )


def test_the_books_the_scheduler_keeps_are_the_ranks(monkeypatch):
    """At every report, what the scheduler believes of a rank is what runs there or is to join."""
    simulation = DecodeSimulation(SPEC, SchedulerConfig(policy="sbs", max_queue_requests=10_000))
    report = simulation._report

    def checked():
        report()
        (decode,) = simulation._scheduler.decode.values()
        coming = [0] * SPEC.ranks
        for placed in simulation._placed:
            coming[placed.decode_rank] += 1
        for rank, load, more in zip(simulation._ranks, decode.loads(), coming, strict=True):
            assert load.running == rank.running + more

    monkeypatch.setattr(simulation, "_report", checked)
    simulation.run()


def test_persistent_weights_are_the_worst():
    assert outcome("skewed").row()["tokens_per_s"] < outcome("round_robin").row()["tokens_per_s"]


def test_equal_requests_in_turn_keep_every_rank_alike():
    spec = msgspec.structs.replace(SPEC, input_cv=1e-3, output_cv=1e-3, concurrency=160)
    done = outcome("round_robin", spec)
    assert statistics.fmean(done.running_max) == pytest.approx(20, abs=6)
    assert not math.isnan(done.row()["kv_cv"])


def test_a_policy_that_holds_places_requests_as_gangs():
    sizes: dict[int, int] = {}
    simulation = DecodeSimulation(SPEC, SchedulerConfig(policy="sbs", max_queue_requests=10_000))
    join = simulation._join

    def record(command, spread_ages):
        if not spread_ages:
            sizes[command.batch] = sizes.get(command.batch, 0) + 1
        join(command, spread_ages)

    simulation._join = record
    simulation.run()
    assert max(sizes.values()) > 1


def rows_of(flags: str, path: Path) -> list[dict]:
    words = f"--decode-ranks 2 --workers 1 --json {path} {flags}"
    assert command.main(words.split()) == 0
    return json.loads(path.read_text())


def test_k_of_algorithm_3_changes_decode(tmp_path: Path) -> None:
    page, capacity = tmp_path / "page.html", []
    for k in ("0", "9"):
        flags = f"--policies sbs_iqr --sbs-iqr-k {k} --plot {page}"
        (row,) = rows_of(flags, tmp_path / f"{k}.json")
        assert row["scenario"] == "paper-decode" and row["ttft_mean_s"] is None
        capacity.append(row["tokens_per_s"])
    assert capacity[0] != capacity[1]
    assert "data:image/png;base64," in page.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--policies eta", "--policies: 'eta' is not one of sbs_potential"),
        ("--decode-ranks 0", "--decode-ranks: '0': write a positive integer"),
        ("--plot x.pdf", "--plot x.pdf: the name must end in .png, .svg, .html"),
    ],
)
def test_bad_flags_are_named(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(flags.split())
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
