"""Calibration: known costs are found again, from every source, through noise and outliers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.calibrate.command import main, virtual_gpu_cost
from sglang_sbs.evaluate.fitting.calibration import fit_cost
from sglang_sbs.evaluate.fitting.recording import RecordedPass
from sglang_sbs.scheduling import ForwardEnded, RequestArrived, SchedulerConfig
from sglang_sbs.scheduling.eventlog import EventLogWriter
from sglang_sbs.simulator.cluster.cost import PassCost, load_cost
from sglang_sbs.wire import EndForward
from tools.cpu_engine.virtual_gpu import VirtualGpuCost

COST = PassCost(fixed_s=0.09, mean_s=3e-5, max_s=5e-5, pair_s=2e-9, request_s=1e-3)
DP = 4


def made(tokens: list[int], contexts: list[int], requests: list[int], forward_s: float):
    pairs = [n * c + n * n / 2 / r for n, c, r in zip(tokens, contexts, requests, strict=True)]
    return RecordedPass(
        "p0", tokens, 0.0, 0, end_s=1.0, forward_s=forward_s, pairs=pairs, requests=requests
    )


def passes(
    count: int, noise: float = 0.0, outliers: float = 0.0, seed: int = 1, cost: PassCost = COST
) -> list[RecordedPass]:
    """``noise``: lognormal sigma; ``outliers``: share of passes that take three to eight times."""
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        tokens = [rng.randint(0, 3072) for _ in range(DP)]
        sample = made(
            tokens,
            [rng.choice((0, 0, 4000, 12_000)) for _ in tokens],
            [rng.randint(1, 12) for _ in tokens],
            1.0,
        )
        forward_s = cost.pass_s(sample.tokens, sample.pairs, sample.requests)
        forward_s *= rng.lognormvariate(0.0, noise)
        if rng.random() < outliers:
            forward_s *= rng.uniform(3, 8)
        sample.forward_s = forward_s
        out.append(sample)
    return out


def test_exact_passes_give_the_exact_cost_and_no_error():
    cost, errors = fit_cost(passes(200))
    for name in PassCost.__struct_fields__:
        assert getattr(cost, name) == pytest.approx(getattr(COST, name), rel=1e-6), name
    assert errors.r2 == pytest.approx(1.0)
    assert errors.outliers == 0
    assert errors.held_out_p95_share < 1e-6


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_through_noise_and_outliers_the_truth_is_within_the_errors(seed, outliers):
    cost, errors = fit_cost(passes(600, noise=0.03, outliers=outliers, seed=seed))
    for name in PassCost.__struct_fields__:
        found, truth = getattr(cost, name), getattr(COST, name)
        error = errors.standard_errors[name]
        assert error is not None, name
        assert abs(found - truth) < 5 * error, name
        assert error < 0.5 * truth, name
    unseen = passes(200, seed=99)
    off = [abs(cost.pass_s(p.tokens, p.pairs, p.requests) / p.forward_s - 1) for p in unseen]
    assert sum(off) / len(off) < 0.01
    assert errors.held_out_median_share == pytest.approx(0.02, abs=0.01)
    if outliers:
        assert 0.05 < errors.outliers / errors.passes < 0.2


def test_terms_that_are_not_there_are_not_invented():
    truth = PassCost(fixed_s=0.1, max_s=8e-5)
    cost, errors = fit_cost(passes(300, noise=0.02, cost=truth))
    assert (cost.mean_s, cost.pair_s, cost.request_s) == (0.0, 0.0, 0.0)
    assert errors.standard_errors["mean_s"] is None
    assert cost.max_s == pytest.approx(truth.max_s, rel=0.03)


def test_the_virtual_gpu_takes_as_long_in_the_mean():
    known = passes(100)
    virtual = virtual_gpu_cost(COST, known)
    theirs = sum(virtual.prefill_s(p.tokens) for p in known)
    assert theirs == pytest.approx(sum(p.forward_s for p in known), rel=0.05)


# From messages ----------------------------------------------------------------------------------


def messages(
    count: int, noise: float = 0.0, cost: PassCost = COST
) -> list[tuple[EndForward, list[tuple[str, int]]]]:
    """Two ranks, one prompt each per pass; with each message the requests it accepts."""
    rng, noises = random.Random(5), random.Random(6)
    out = []
    seq, accepted, tokens_so_far = [0, 0], [0, 0], [0, 0]
    clock_s = 100.0
    for number in range(1, count + 1):
        tokens = [rng.randint(1, 3000), rng.randint(1, 3000)]
        forward_s = cost.pass_s(tokens, [n * n / 2 for n in tokens], [1, 1])
        forward_s *= noises.lognormvariate(0.0, noise)
        for kind in ("launch", "forward"):
            for rank in (0, 1):
                rids = [(f"{number}-{rank}", tokens[rank])] if kind == "launch" else []
                accepted[rank] += len(rids)
                tokens_so_far[rank] += sum(n for _, n in rids)
                report = EndForward(
                    instance_id="http://p0:1",
                    boot_id="boot",
                    role="prefill",
                    dp_rank=rank,
                    dp_size=2,
                    seq=seq[rank],
                    kind=kind,
                    forward_id=number,
                    mode="extend",
                    launch_s=clock_s,
                    end_s=clock_s + forward_s if kind == "forward" else 0.0,
                    forward_s=forward_s if kind == "forward" else 0.0,
                    extend_tokens=tokens[rank],
                    batch_size=1,
                    accepted_requests=accepted[rank],
                    accepted_tokens=tokens_so_far[rank],
                    rids=[rid for rid, _ in rids],
                )
                seq[rank] += 1
                out.append((report, rids))
        clock_s += forward_s + 0.01
    return out


def logged(path: Path, count: int, **how) -> str:
    """The event log of a router that saw these passes."""
    writer = EventLogWriter(path, SchedulerConfig())
    for report, rids in messages(count, **how):
        for rid, tokens in rids:
            writer.write(report.launch_s, RequestArrived(rid=rid, prompt_tokens=tokens), [])
        writer.write(report.launch_s, ForwardEnded(instance="p0", report=report), [])
    writer.close()
    return str(path)


def test_an_event_log_gives_the_cost(tmp_path: Path):
    log, out = logged(tmp_path / "run.events", 120), tmp_path / "c.json"
    assert main([log, "--out", str(out), "--note", "made up"]) == 0
    found = load_cost(out)
    tokens = [2000, 500]
    pairs = [n * n / 2 for n in tokens]
    expected_s = COST.pass_s(tokens, pairs, [1, 1])
    assert found.pass_s(tokens, pairs, [1, 1]) == pytest.approx(expected_s, rel=0.01)
    content = json.loads(out.read_text())
    assert content["provenance"]["note"] == "made up"
    assert content["provenance"]["dp_size"] == 2
    assert VirtualGpuCost.from_json(out.read_text()).prefill_base_s == pytest.approx(
        content["cost"]["fixed_s"]
    )


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"noise": 1.5}, "passes that a fit has not seen are predicted"),
        ({"cost": PassCost(fixed_s=0.2)}, "tokens cost nothing: mean_s and max_s are 0"),
    ],
)
def test_a_poor_fit_is_written_only_if_forced(how, reason, tmp_path: Path, capsys):
    log, out = logged(tmp_path / "run.events", 60, **how), tmp_path / "cost.json"
    assert main([log, "--out", str(out)]) == 1
    said = words(capsys.readouterr().out)
    assert f"a poor fit: {reason}" in said
    assert "engines with the machine for themselves" in said
    assert "not written: " in said
    assert not out.exists()
    assert main([log, "--out", str(out), "--force"]) == 0
    assert f"a poor fit: {reason}" in words(capsys.readouterr().out)
    forced = json.loads(out.read_text())["provenance"]["forced"]
    assert any(text.startswith(reason) for text in forced)


def test_too_few_passes_are_refused_with_their_number(tmp_path: Path, capsys):
    log, out = logged(tmp_path / "run.events", 29), tmp_path / "cost.json"
    assert main([log, "--out", str(out), "--force"]) == 2
    said = words(capsys.readouterr().out)
    assert "29 prefill passes with launch and end: it takes 30 or more" in said
    assert "longer or more LOG files" in said
    assert not out.exists()
    assert main([logged(tmp_path / "run.events", 30), "--out", str(out)]) == 0


def test_without_a_log_the_usage_is_printed(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "LOG" in capsys.readouterr().err
