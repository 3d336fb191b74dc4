"""The cost of the engines that `scripts/compare-routers` brings up on CPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.compare_routers import command
from benchmarks.compare_routers.runs.engines import (
    H800_CHUNK_TOKENS,
    PASS_S,
    gate_environment,
    scaled_cost,
)
from benchmarks.compare_routers.workloads import WORKLOADS
from sglang_sbs.engine.config import GANG_GATE_MS
from sglang_sbs.simulator.cluster.cost import COSTS, CostError, PassCost, save_cost

CHUNK = H800_CHUNK_TOKENS


def test_the_scaled_cost_keeps_its_proportions() -> None:
    theirs = PassCost(fixed_s=0.1, mean_s=3e-5, max_s=5e-5)
    cost = scaled_cost(theirs, 2, CHUNK)
    whole_s = theirs.full_chunk_s(CHUNK)
    assert cost.prefill_s([1024, 1024]) == pytest.approx(PASS_S)
    assert cost.prefill_base_s / PASS_S == pytest.approx(theirs.fixed_s / whole_s)
    one_sided_s = theirs.pass_s([CHUNK, 0], [0.0, 0.0])
    assert cost.prefill_s([1024, 0]) / PASS_S == pytest.approx(one_sided_s / whole_s)


def test_longer_passes_are_the_same_cost_stretched() -> None:
    """Every ratio stays, decode beside prefill too: only the host weighs less."""
    usual, longer = (scaled_cost(COSTS["mixed"], 2, CHUNK, s) for s in (PASS_S, 3 * PASS_S))
    for name, value in asdict(usual).items():
        assert asdict(longer)[name] == pytest.approx(3 * value), name


def test_the_gang_gate_is_stretched_with_the_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GANG_GATE_MS, raising=False)
    gates = [
        gate_environment(scaled_cost(COSTS["mixed"], 2, CHUNK, times * PASS_S))
        for times in (1, 3, 100)
    ]
    assert gates == [{}, {GANG_GATE_MS: "120"}, {GANG_GATE_MS: "200"}]
    monkeypatch.setenv(GANG_GATE_MS, "5")
    assert gate_environment(scaled_cost(COSTS["mixed"], 2, CHUNK, 3 * PASS_S)) == {}


@pytest.mark.parametrize("dp_size", [1, 2, 8])
def test_attention_pairs_and_requests_are_paid_with_the_tokens(dp_size: int) -> None:
    """Their price is what one rank would pay if it computed the prompts of the paper workload
    alone."""
    theirs = PassCost(fixed_s=0.02, mean_s=1e-5, pair_s=2e-8, request_s=2e-3)
    lengths = [arrival.prompt_tokens for arrival in WORKLOADS["paper"](7, 5000, CHUNK)]
    share = CHUNK / sum(lengths)
    pairs, requests = share * sum(n**2 / 2 for n in lengths), share * len(lengths)
    rank_s = theirs.pair_s * pairs + theirs.request_s * requests
    balanced_s = theirs.fixed_s + theirs.mean_s * CHUNK + rank_s
    one_sided_s = theirs.fixed_s + theirs.mean_s * CHUNK / dp_size + rank_s
    cost = scaled_cost(theirs, dp_size, CHUNK)
    assert cost.prefill_s([1024] * dp_size) == pytest.approx(PASS_S)
    idle = [0] * (dp_size - 1)
    assert cost.prefill_s([1024, *idle]) / PASS_S == pytest.approx(
        one_sided_s / balanced_s, rel=0.01
    )


def test_a_cost_without_a_slope_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="needs mean_s, max_s"):
        scaled_cost(PassCost(fixed_s=0.1), 2, CHUNK)
    file = tmp_path / "cost.json"
    for cost, message in (
        (PassCost(fixed_s=0.1), "a cost with only fixed_s makes every pass equally long"),
        (PassCost(fixed_s=0.0, pair_s=1e-8), "set fixed_s, mean_s or max_s"),
    ):
        save_cost(cost, file)
        with pytest.raises(CostError, match=message):
            command.Plan(command.build_parser().parse_args(["--cost", str(file)]))
