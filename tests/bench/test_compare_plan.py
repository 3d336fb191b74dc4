"""The command line of `scripts/compare-routers`, and its refusals before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from compare_rows import HEADER, row
from rich.console import Console

from benchmarks.compare_routers import command
from benchmarks.compare_routers.plan import Plan
from benchmarks.compare_routers.results import ratios
from benchmarks.compare_routers.results.rows import RowFile

REAL = ["--real", "--prefill", "http://p0:30000", "8998", "--prefill", "http://p1:30000"]
REAL += ["--decode", "http://d0:30000", "--slo-ttft", "0.8", "--prompts", "ids"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "papers"], "--workload: 'papers' is not one of paper"),
        (["--contenders", "sbs,nginx"], "--contenders: 'nginx' is not one of"),
        (["--contenders", "smg,mini_lb"], "needs sbs or sbs_paper, and a peer"),
        (["--loads", "0.4;0.8"], "write e.g. 0.4,0.8,1.0"),
        (["--loads", "0"], "--loads must be shares of capacity"),
        (["--seeds", "0"], "--seeds: '0': write a positive integer"),
        (["--first-seed", "0"], "--first-seed: '0': write a positive integer"),
        (["--quick", "--seeds", "3"], "--quick sets --seeds itself"),
        (["--quick", "--loads", "0.4,0.8,1.0"], "--quick sets --loads itself"),
        (["--topology", "3P"], "write e.g. 3P1D"),
        (["--cost", "h900"], "'h900' is not one of h800, table"),
        (["--real"], "--real needs --prefill URL PORT"),
        (["--decode", "http://d0"], "add --real"),
        (["--tokenizer-path", "x"], "add --real"),
        (["--resume"], "cannot read"),
        (["--report-only"], "cannot read"),
        (["--json", "/dev/null/out.json"], "--json: /dev/null is not a folder"),
        (["--report", "/dev/null"], "--report: /dev/null is not a folder"),
        ([*REAL, "--capacity", "-5"], "--capacity: '-5': write a positive number"),
        ([*REAL, "--capacity", "0"], "--capacity: '0': write a positive number"),
        (["--pass-s", "0"], "--pass-s: '0': write a positive number"),
        ([*REAL, "--capacity", "5", "--pass-s", "1.5"], "leave it out with --real"),
    ],
)
def test_says_what_is_wrong_before_anything_starts(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--report", str(tmp_path), *words])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_given_engines_need_no_cluster(tmp_path: Path) -> None:
    parser = command.build_parser()
    plan = Plan(parser.parse_args([*REAL, "--capacity", "150000", "--report", str(tmp_path)]))
    assert plan.capacity_tokens_per_s == 150000
    assert plan.model is None


def test_longer_passes_stretch_the_limits_and_thin_the_arrivals() -> None:
    """So that a load, and a request within its limits, mean what they did."""
    usual, longer = (
        Plan(command.build_parser().parse_args(words)) for words in ([], ["--pass-s", "1.22"])
    )
    assert longer.settings()["slo_ttft_s"] == pytest.approx(2 * usual.settings()["slo_ttft_s"])
    assert longer.settings()["slo_tpot_s"] == pytest.approx(2 * usual.settings()["slo_tpot_s"])
    assert longer.settings()["timeout_s"] == 2 * usual.settings()["timeout_s"]
    assert longer.capacity_tokens_per_s == pytest.approx(usual.capacity_tokens_per_s / 2)
    said = Plan(command.build_parser().parse_args(["--pass-s", "1.22", "--slo-tpot", "0.3"]))
    assert said.settings()["slo_tpot_s"] == 0.3


def test_resume_refuses_rows_of_another_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = command.build_parser()
    file = RowFile(tmp_path / "rows.jsonl")
    words = ["--report", str(tmp_path), "--requests", "10"]
    Plan(parser.parse_args(words)).begin(file, Console(quiet=True))
    file.add(row("sbs", 50))
    _header, rows = Plan(parser.parse_args([*words, "--resume"])).begin(file, Console(quiet=True))
    assert [r.key.policy for r in rows] == ["sbs"]
    with pytest.raises(SystemExit):
        command.main(["--report", str(tmp_path), "--requests", "11", "--resume"])
    assert "was measured with requests 10, not 11" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--timeout", "61"], "timeout s 60.0, not 61.0"),
        (["--pass-s", "1.5"], "pass s 0.61, not 1.5"),
        (["--cost", "COST"], "cost sha256 "),
    ],
)
def test_resume_refuses_what_changes_a_figure(words: list[str], name: str, tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    words = ["--report", str(tmp_path), *(str(cost) if w == "COST" else w for w in words)]
    cost.write_text('{"fixed_s": 0.1, "max_s": 1e-5}')
    changed = {"--timeout", "61", "--pass-s", "1.5"}
    before = [word for word in words if word not in changed]
    parse = command.build_parser().parse_args
    file = RowFile(tmp_path / "rows.jsonl")
    Plan(parse(before)).begin(file, Console(quiet=True))
    Plan(parse([*before, "--resume"])).begin(file, Console(quiet=True))
    cost.write_text('{"fixed_s": 0.1, "max_s": 2e-5}')
    with pytest.raises(ValueError, match=name):
        Plan(parse([*words, "--resume"])).begin(file, Console(quiet=True))


def test_resume_refuses_other_engines_and_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.compare_routers import plan

    words = [*REAL, "--capacity", "150000", "--report", str(tmp_path)]
    file = RowFile(tmp_path / "rows.jsonl")
    parse = command.build_parser().parse_args
    monkeypatch.setattr(plan, "revision", lambda: "1234")
    Plan(parse(words)).begin(file, Console(quiet=True))
    words.append("--resume")
    Plan(parse(words)).begin(file, Console(quiet=True))
    with monkeypatch.context() as patch:
        patch.setattr(plan, "machine", lambda: {"smg": "9.9"})
        with pytest.raises(ValueError, match=r"with smg '.+', not '9\.9'"):
            Plan(parse(words)).begin(file, Console(quiet=True))
    with pytest.raises(ValueError, match="decode http://d0:30000, http://d1:30000"):
        Plan(parse([*words, "--decode", "http://d1:30000"])).begin(file, Console(quiet=True))
    for other in ("5678", ""):
        monkeypatch.setattr(plan, "revision", lambda of_code=other: of_code)
        with pytest.raises(ValueError, match="revision '1234', not"):
            Plan(parse(words)).begin(file, Console(quiet=True))


def test_quick_is_one_seed_of_paper_at_two_loads_against_two_peers() -> None:
    plan = Plan(command.build_parser().parse_args(["--quick"]))
    assert plan.scope.seeds == 1
    assert len(plan.scope.loads) == 2
    assert plan.scope.workloads == ["paper"]
    assert len([c for c in plan.scope.contenders if ratios.is_peer(c.name)]) == 2
    file = RowFile(Path("unused"))
    work = plan.campaign(file, [], Console())
    assert work.expected_total_s() < 10 * 60


def test_rows_of_an_earlier_run_are_moved_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = RowFile(tmp_path / "rows.jsonl")
    assert file.begin(HEADER) is None
    file.add(row("sbs", 50))
    plan = Plan(command.build_parser().parse_args(["--report", str(tmp_path)]))
    plan.begin(file, Console(width=500))
    assert "moved to" in capsys.readouterr().out
    assert file.begin(HEADER) == tmp_path / "rows.2.jsonl"
    assert [r.key.policy for r in RowFile(tmp_path / "rows.1.jsonl").read()[1]] == ["sbs"]
    assert file.read() == (HEADER, [])


@pytest.mark.parametrize(
    "words",
    [
        [*REAL[:-2], "--capacity", "5", "--tokenizer-path", "/dev/null"],
    ],
)
def test_what_cannot_run_leaves_the_rows_of_an_earlier_run_alone(
    words: list[str], tmp_path: Path
) -> None:
    file = RowFile(tmp_path / "rows.jsonl")
    file.begin(HEADER)
    file.add(row("sbs", 50))
    before = file.path.read_bytes()
    with pytest.raises(SystemExit):
        command.main(["--report", str(tmp_path), *words])
    assert file.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
