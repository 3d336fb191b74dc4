"""Failures in `scripts/compare-routers`: SBS gains nothing by them, and nothing hides them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
from compare_rows import HEADER, row
from msgspec.structs import replace

from benchmarks.compare_routers import command
from benchmarks.compare_routers.contenders import BY_NAME
from benchmarks.compare_routers.prompts import id_prompts
from benchmarks.compare_routers.results import ratios, report, tables
from benchmarks.compare_routers.results.rows import NOT_RUN, Key, Row, RowFile
from benchmarks.compare_routers.runs import cell
from benchmarks.compare_routers.runs.engines import Engines
from benchmarks.demo.load import Arrival, Sample
from benchmarks.demo.runs import RouterPorts
from benchmarks.router_processes import Contender


def broken(policy: str, *, load: float = 0.8, seed: int = 1, warm_up_failed: int = 0) -> Row:
    return Row(
        key=Key("paper", load, seed, policy),
        requests=100,
        warm_up_failed=warm_up_failed,
        error="it ended at its start",
    )


# ---- ratios


@pytest.mark.parametrize(
    "ours",
    [
        [row("sbs", 10, failed=40)],
        [row("sbs", 10, failed=1)],
        [row("sbs", math.nan, failed=100)],
        [broken("sbs")],
        [row("sbs", 10, seed=2), broken("sbs")],
    ],
)
def test_sbs_gains_no_ratio_by_failing(ours: list[Row]) -> None:
    rows = [*ours, row("smg", 100), row("eta", 90)]
    (found,) = ratios.ratio_cells(rows)
    assert (found["workload"], found["load"], found["policy"]) == ("paper", 0.8, "sbs")
    assert found["failed"] is True
    assert found["mean_ratio"] is found["p99_ratio"] is found["own_mean_ratio"] is None
    table = tables.ratio_table(rows)
    assert table.rows[0][-1] == "failed"


def test_what_was_not_tried_after_a_failure_does_not_hide_why() -> None:
    rows = [broken("sbs"), replace(broken("sbs", load=1.0), error=NOT_RUN), row("smg", 100)]
    assert ratios.errors(rows) == {"sbs": "it ended at its start"}
    assert [cell["failed"] for cell in ratios.ratio_cells(rows)] == [True, True]


def test_a_contender_that_fails_is_marked(tmp_path: Path) -> None:
    rows = [row("sbs", 50), row("smg", 10, failed=2), row("mini_lb", 100), row("smg", 90, load=0.4)]
    report.write_report(HEADER, rows, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text.count("| smg (fails) |") == text.count("(fails)") == 1


# ---- what is reported


def test_a_run_that_succeeded_later_is_no_failure() -> None:
    rows = [broken("smg", warm_up_failed=24), row("smg", 100)]
    assert ratios.errors(rows) == {}
    assert ratios.failed_requests(rows, ratios.is_peer) == 0
    rows.append(broken("smg", load=1.0))
    assert ratios.errors(rows) == {"smg": "paper 1 seed 1: it ended at its start"}


@pytest.mark.parametrize(
    ("rows", "code", "says"),
    [
        ([row("sbs", 50), row("smg", 100)], 0, ""),
        ([broken("sbs"), row("smg", 100)], 1, "sbs was not measured: it ended at its start"),
        ([row("sbs", 50), broken("sbs", load=1.0)], 1, "paper 1 seed 1: it ended"),
        ([row("sbs", 50), row("smg", 100), broken("mini_lb")], 0, ""),
    ],
)
def test_the_exit_code_says_whether_sbs_was_measured(
    rows: list[Row],
    code: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = RowFile(tmp_path / "rows.jsonl")
    file.begin(HEADER)
    for a_row in rows:
        file.add(a_row)
    assert command.main(["--report-only", "--report", str(tmp_path)]) == code
    out = " ".join(capsys.readouterr().out.split())
    assert says in out
    assert ("not measured" in out) == bool(says)


def test_failures_are_in_the_json(tmp_path: Path) -> None:
    rows = [row("sbs", math.nan, failed=100), row("smg", 100)]
    report.write_json(HEADER, rows, tmp_path / "out.json")
    found = orjson.loads((tmp_path / "out.json").read_bytes())
    assert [(cell["failed"], cell["mean_ratio"]) for cell in found["cells"]] == [(True, None)]
    assert found["failed_requests"] == 100


# ---- a run


class Attempts:
    """Runs of a contender with the answers that its attempts give, and what they were sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failed: int) -> None:
        self._failed = list(failed)
        self.warm_ups: list[list[Arrival]] = []

        @asynccontextmanager
        async def running(*_: object) -> AsyncIterator[tuple[str, object]]:
            yield "http://router", SimpleNamespace(cpu_s=lambda: 0.0)

        async def no_check(*_: object) -> None:
            pass

        monkeypatch.setattr(cell, "_running", running)
        monkeypatch.setattr(cell, "_check_reports", no_check)
        monkeypatch.setattr(cell, "run_load", self._answered)

    async def _answered(self, _url: str, sent: list[Arrival], **_: object) -> list[Sample]:
        if len(sent) != cell.WARM_UP_REQUESTS:
            await asyncio.sleep(0)  # as any real client, so that what watches it has begun
            return [Sample(0.0, 10, ttft_s=0.1, e2e_s=0.2, output_tokens=8)]
        self.warm_ups.append(sent)
        failed = self._failed.pop(0) if self._failed else 0
        return [Sample(0.0, 10, error="no" if n < failed else "") for n in range(len(sent))]

    async def run(self, tmp_path: Path, load: float = 0.8, policy: str = "mini_lb") -> Row:
        listener = SimpleNamespace(bind="", take=list)
        ports = RouterPorts(1, 2, 3)
        engines = Engines([("http://p0", 8998)], [], {}, 2, 1024, 1e4, ports, listener)  # type: ignore[arg-type]
        setting = cell.Setting(id_prompts(), None, 1.0, 0.1, 60.0, tmp_path, "", settle_s=0.0)
        key = Key("paper", load, 1, policy)
        installed = Contender(policy, "sglang_sbs", BY_NAME[policy].flags)
        return await cell.run_cell(installed, key, 5, engines, setting)


async def test_a_run_that_fails_before_its_load_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = Attempts(monkeypatch, 24, 2)
    found = await attempts.run(tmp_path)
    assert found.answers is not None
    assert found.warm_up_failed == 26
    # The prefix caches know the first attempt's prompts.
    first, second = attempts.warm_ups
    assert first[0].input_ids[:20] != second[0].input_ids[:20]


async def test_a_second_failure_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await Attempts(monkeypatch, 24, 24).run(tmp_path)
    assert found.answers is None
    assert found.error.startswith("24 of 24 requests failed at half load")
    assert found.warm_up_failed == 48


async def test_no_two_runs_are_warmed_up_with_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = Attempts(monkeypatch)
    for load in (0.4, 0.8):
        await attempts.run(tmp_path, load)
    first, other = attempts.warm_ups
    assert [a.at_s for a in first] == [a.at_s for a in other]
    assert not [1 for a, b in zip(first, other, strict=True) if a.input_ids[:8] == b.input_ids[:8]]
