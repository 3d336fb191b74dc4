"""``scripts/ablate``: constants are changed for a run, and only for it."""

from __future__ import annotations

import pytest

from benchmarks.ablation import CELLS, OFF, Cell, Variant, changed, main, run_variant
from sglang_sbs.scheduling.policies import tuning
from sglang_sbs.scheduling.policies.adaptive import long_prompts, pass_forecast

CELL = Cell("short", "paper-3k", 0.25, "mixed", 21.5, {"dp_size": 2})


def test_a_constant_is_changed_in_every_module_that_knows_it_and_comes_back() -> None:
    before = tuning.TUNING.nearest
    with changed({"nearest": 2}):
        assert [module.TUNING.nearest for module in (tuning, pass_forecast, long_prompts)] == [
            2,
            2,
            2,
        ]
    assert pass_forecast.TUNING.nearest == long_prompts.TUNING.nearest == before


def test_every_constant_is_one_of_the_code_and_matters_in_some_cell() -> None:
    for name, (off, cells) in OFF.items():
        with changed({name: off}):
            pass
        assert any(Variant(name, {}, cells).matters_in(cell) for cell in CELLS), name


def test_a_changed_constant_changes_the_run_and_nothing_else_does() -> None:
    as_it_is = run_variant(Variant("as it is", {}), CELL, 1)
    again = run_variant(Variant("again", {"again_weight": 1e9}), CELL, 1)
    other = run_variant(Variant("other", {"slack": 5.0}), CELL, 1)
    assert again["ttft_mean_s"] == as_it_is["ttft_mean_s"] != other["ttft_mean_s"]


@pytest.mark.parametrize(
    "words", [["--only", "no_such"], ["--set", "no_such=1"], ["--values", "third"]]
)
def test_what_is_no_constant_or_value_is_said(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert words[1].partition("=")[0] in capsys.readouterr().err
