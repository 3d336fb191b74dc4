"""The requests, comparisons and files of `scripts/compare-routers`; the real cluster is in
`test_compare_routers_cluster.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from compare_rows import HEADER, row
from msgspec.structs import replace
from rich.console import Console

from benchmarks.compare_routers import campaign
from benchmarks.compare_routers.contenders import BY_NAME, FIELD, chosen
from benchmarks.compare_routers.prompts import id_prompts
from benchmarks.compare_routers.results import ratios, report
from benchmarks.compare_routers.results.rows import Key, Row, RowFile
from benchmarks.compare_routers.results.tables import ratio_table
from benchmarks.compare_routers.results.verdict import sentences
from benchmarks.compare_routers.runs import endforward_check
from benchmarks.compare_routers.runs.cell import Setting
from benchmarks.router_processes import Contender

# ---- contenders


def test_every_contender_has_a_name_of_its_own_and_peers_are_not_sbs() -> None:
    assert len(BY_NAME) == len(FIELD)
    assert {c.name for c in FIELD if ratios.is_sbs(c.name)} == {"sbs", "sbs_paper", "sbs_no_gate"}
    assert {c.package for c in FIELD if ratios.is_peer(c.name)} == {
        "sglang_router",
        "smg",
        "dynamo",
    }
    assert {c.package for c in FIELD if ratios.is_immediate(c.name)} == {"sglang_sbs"}


def test_a_command_line_has_every_engine_with_its_bootstrap_port() -> None:
    argv = BY_NAME["sglang_router:random"].command(
        [("http://p0", 8998), ("http://p1", None)], ["http://d0"], 7000, 7001
    )
    words = " ".join(argv)
    assert "sglang_router.launch_router --pd-disaggregation" in words
    assert "--prefill http://p0 8998 --prefill http://p1 --decode http://d0" in words
    assert "--policy random" in words


# ---- ratios


def test_the_best_peer_is_the_one_we_look_worst_against() -> None:
    rows = [
        row("sbs", 50, p99=200),
        row("smg", 100, p99=150),
        row("mini_lb", 80, p99=400),
        row("sbs_paper", 60),
    ]
    cell = next(c for c in ratios.ratio_cells(rows) if c["policy"] == "sbs")
    assert (cell["workload"], cell["load"]) == ("paper", 0.8)
    assert (cell["peer"], cell["mean_ratio"]) == ("mini_lb", pytest.approx(50 / 80))
    assert (cell["p99_peer"], cell["p99_ratio"]) == ("smg", pytest.approx(200 / 150))


def test_a_peer_that_ran_with_one_of_the_seeds_is_not_compared_by_that_seeds_luck() -> None:
    rows = [
        *(row("sbs", mean, seed=seed) for seed, mean in ((1, 900), (2, 500))),
        *(row("mini_lb", 1000, seed=seed) for seed in (1, 2)),
        row("smg", 1000, seed=1),
    ]
    cell = ratios.ratio_cells(rows)[0]
    assert cell["mean_peer"] == "mini_lb"
    assert cell["mean_ratio"] == pytest.approx(0.7)


def test_our_own_immediate_policies_have_ratios_of_their_own() -> None:
    rows = [row("sbs", 50), row("eta", 60), row("smg", 100), row("mini_lb", 200)]
    (cell,) = ratios.ratio_cells(rows)
    assert (cell["peer"], cell["own_mean_peer"]) == ("smg", "eta")
    assert cell["mean_ratio"] == pytest.approx(0.5)
    assert cell["own_mean_ratio"] == pytest.approx(50 / 60)


def test_ratios_are_taken_seed_by_seed() -> None:
    rows = [
        row("sbs", 50, seed=1),
        row("sbs", 300, seed=2),
        row("smg", 100, seed=1),
        row("smg", 400, seed=2),
        row("mini_lb", 90, seed=3),
    ]
    (cell,) = ratios.ratio_cells(rows)
    assert cell["mean_ratio"] == pytest.approx((0.5 + 0.75) / 2)
    assert cell["mean_ratio_spread"] == pytest.approx([0.5, 0.75])
    assert cell["seeds"] == 2


def test_a_cell_with_a_run_on_a_slow_host_has_no_ratio_and_says_whose() -> None:
    rows = [row("sbs", 50), row("smg", 80, host_lag_ms=12.3), row("sbs", 50, load=0.4)]
    rows.append(row("smg", 80, load=0.4, host_lag_ms=12.1))
    cells = {cell["load"]: cell for cell in ratios.ratio_cells(rows)}
    assert cells[0.8]["disturbed"] == ["smg at paper 0.8 seed 1 (host lag 12 ms)"]
    assert cells[0.8]["mean_ratio"] is cells[0.8]["p99_ratio"] is None
    assert cells[0.4]["disturbed"] == [] and cells[0.4]["mean_ratio"] == pytest.approx(50 / 80)
    assert [row[-1] for row in ratio_table(rows).rows] == ["better", "disturbed"]
    again = [*rows, row("smg", 80)]
    assert [cell["mean_ratio"] for cell in ratios.ratio_cells(again)] == [pytest.approx(5 / 8)] * 2


def test_a_run_whose_router_stood_still_is_thrown_away_and_made_again() -> None:
    rows = [row("sbs", 50, stalled_s=0.31), row("smg", 80)]
    (cell,) = ratios.ratio_cells(rows)
    assert cell["mean_ratio"] is None
    assert rows[0].to_repeat
    assert sentences(rows) == [
        "No ratio in cells with a run that is thrown away: sbs at paper 0.8 seed 1 (the router's "
        "loop stood still for 0.31 s). A quieter machine or a longer --pass-s, then --resume."
    ]
    assert not replace(rows[0], most_host_lag_ms=0.0).disturbed, "--most-host-lag 0"


async def test_how_long_a_router_stood_still_is_read_from_its_metrics() -> None:
    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(
            text="# TYPE sbs_loop_stalled_seconds counter\nsbs_loop_stalled_seconds_total 1.5\n"
        )

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server:
        url = str(server.make_url("/metrics"))
        assert await endforward_check.stalled_s(url) == 1.5
    assert await endforward_check.stalled_s(url) == 0.0, "nobody answers"


def test_the_verdict_says_gains_losses_and_what_failed() -> None:
    rows = [row("sbs", 50), row("smg", 80), row("sbs", 60, seed=2), row("smg", 80, seed=2)]
    rows += [row("sbs", 90, load=0.4, p99=95), row("smg", 80, load=0.4, p99=100)]
    rows += [row("sbs", 80, load=0.2), row("smg", 80, load=0.2), row("eta", 80, load=0.2)]
    rows += [row("sbs", 50, load=0.9, failed=1), row("smg", 80, load=0.9)]
    assert sentences(rows) == [
        "sbs has a lower mean TTFT than the best other router: 0.69x (0.62 to 0.75 by seed) of smg "
        "at paper 0.8.",
        "sbs LOSES against the best other router: 1.12x of smg at paper 0.4.",
        "sbs gains nothing over the best other router: 1.00x of smg at paper 0.2.",
        "sbs gains nothing over our best immediate policy: 1.00x of eta at paper 0.2.",
        "No ratio, as runs failed: sbs at paper 0.9.",
        "SBS left 1 request unanswered.",
    ]
    assert sentences([row("smg", 80)])[0].startswith("No ratio: there is no run of SBS")


def test_the_report_begins_with_the_verdict_and_ends_with_how_it_was_measured(
    tmp_path: Path,
) -> None:
    rows = [row("sbs", 50), row("smg", 80)]
    report.write_report(HEADER, rows, tmp_path)
    text = (tmp_path / "report.md").read_text()
    order = ["sbs has a lower mean TTFT", "ratio", "How it was measured", "host lag"]
    places = [text.rfind(words) for words in order[1:]]
    assert -1 not in places and places == sorted(places)
    assert 0 < text.find(order[0]) < text.find(order[1])
    assert report.summary(HEADER, rows)["verdict"] == sentences(rows)


def test_a_peer_that_fails_requests_is_no_best_peer() -> None:
    rows = [row("sbs", 50), row("smg", 10, failed=40), row("mini_lb", 100)]
    (cell,) = ratios.ratio_cells(rows)
    assert cell["peer"] == "mini_lb"
    assert ratios.failed_requests(rows, ratios.is_peer) == 40
    assert ratios.failed_requests(rows, ratios.is_sbs) == 0


def test_peers_are_ranked_over_all_cells() -> None:
    rows = [
        row("smg", 100, load=0.4),
        row("smg", 300, load=0.8),
        row("mini_lb", 110, load=0.4),
        row("mini_lb", 200, load=0.8),
        row("least_tokens", 1, load=0.4),
    ]
    assert ratios.ranking(rows) == ["mini_lb", "smg"]


# ---- order of runs


def test_contenders_take_turns() -> None:
    field = chosen("sbs,smg,mini_lb")
    cells = [("paper", load) for load in (0.4, 0.8, 1.0)]
    keys = campaign.cell_keys(field, cells, seed=1)
    assert keys == campaign.cell_keys(field, cells, seed=1)
    turns = [[key.policy for key in keys[n : n + 3]] for n in (0, 3, 6)]
    assert all(sorted(turn) == ["mini_lb", "sbs", "smg"] for turn in turns)
    assert len(set(keys)) == 9


def test_only_sbs_the_best_peers_and_our_best_immediate_policy_go_on() -> None:
    scope = campaign.Scope(
        contenders=chosen("sbs,sbs_paper,smg,mini_lb,eta,least_tokens"),
        workloads=["paper"],
        loads=[0.8],
        seeds=3,
        first_seed=1,
        field_loads=[0.8],
        best_peers=1,
        requests=10,
    )
    rows = [row("smg", 100), row("mini_lb", 90), row("least_tokens", 95), row("sbs", 50)]
    rows += [row("mini_lb", 500, load=0.4), row("smg", 10, load=0.4), row("eta", 96)]
    names = [c.name for c in campaign.focus_of(scope, rows)]
    assert names == ["sbs", "sbs_paper", "least_tokens", "mini_lb"]


def small_campaign(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, rows: list[Row]
) -> tuple[campaign.Campaign, list[str], list[Key]]:
    """A campaign whose runs are made up; what was started, and what was run."""
    started: list[str] = []
    ran: list[Key] = []

    @asynccontextmanager
    async def start() -> AsyncIterator[object]:
        started.append("engines")
        yield object()

    async def run_cell(contender: Contender, key: Key, requests: int, *_: object) -> Row:
        if key.seed == 0:
            return row(contender.name, 1.0)
        ran.append(key)
        if contender.name == "mini_lb":
            return Row(key=key, requests=requests, error="it ended")
        mean_ms = {"sbs": 50.0, "smg": 100.0}.get(contender.name, 80.0) * 10 * key.load
        return replace(row(contender.name, mean_ms), key=key, qps=30 * key.load)

    monkeypatch.setattr(campaign, "run_cell", run_cell)
    scope = campaign.Scope(
        contenders=chosen("sbs,smg,mini_lb,sglang_router:round_robin"),
        workloads=["paper"],
        loads=[0.4, 1.0],
        seeds=2,
        first_seed=1,
        field_loads=[1.0],
        best_peers=1,
        requests=10,
    )
    setting = Setting(id_prompts(), None, 1.0, 0.1, 60.0, directory, "")
    file = RowFile(directory / "rows.jsonl")
    file.begin(HEADER)
    console = Console(quiet=True)
    made = campaign.Campaign(scope, setting, file, start, lambda *_: 1.0, console, rows)  # type: ignore[arg-type]
    return made, started, ran


async def test_a_campaign_runs_the_field_once_and_the_best_at_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, started, ran = small_campaign(tmp_path, monkeypatch, rows=[])
    await work.run()
    best = "sglang_router:round_robin"
    of = {name: [k for k in ran if k.policy == name] for name in ("sbs", "smg", "mini_lb", best)}
    assert len(of["smg"]) == len(of["mini_lb"]) == 1
    assert len(of["sbs"]) == len(of[best]) == 2 * 2
    assert started == ["engines"]
    assert len(work.file.read()[1]) == len(ran)
    assert all(row.begun > "2026" for row in work.rows)
    assert ratios.errors(work.rows) == {"mini_lb": "it ended"}

    again, started, ran = small_campaign(tmp_path, monkeypatch, rows=work.rows)
    await again.run()
    # What did not work is tried again: something may have been installed.
    assert [k.policy for k in ran] == ["mini_lb"]
    assert started == ["engines"]


async def test_disturbed_runs_are_made_again_but_not_those_that_failed_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, _started, _ran = small_campaign(tmp_path, monkeypatch, rows=[])
    work.scope = dataclasses.replace(work.scope, contenders=chosen("sbs,smg"))
    await work.run()
    slow = {Key("paper", 0.4, 1, "sbs"): 0, Key("paper", 1.0, 1, "smg"): 3}
    rows = [
        replace(row, host_lag_ms=99.0, answers=replace(row.answers, failed=slow[row.key]))
        if row.key in slow and row.answers
        else row
        for row in work.rows
    ]
    again, _started, ran = small_campaign(tmp_path, monkeypatch, rows=rows)
    again.scope = work.scope
    await again.run()
    assert ran == [Key("paper", 0.4, 1, "sbs")]
    cells = {cell["load"]: cell["disturbed"] for cell in ratios.ratio_cells(again.rows)}
    assert cells == {0.4: [], 1.0: ["smg at paper 1 seed 1 (host lag 99 ms)"]}


def breaking(monkeypatch: pytest.MonkeyPatch, breaks: Callable[[list[Key]], bool]) -> list[Key]:
    """The last run of those that were tried gives no figures where ``breaks`` says so; all that
    are tried from now on."""
    made_up = campaign.run_cell
    tried: list[Key] = []

    async def run_cell(contender: Contender, key: Key, requests: int, *words: object) -> Row:
        tried.append(key)
        if breaks(tried):
            return Row(key=key, requests=requests, error="it hung")
        return await made_up(contender, key, requests, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(campaign, "run_cell", run_cell)
    return tried


async def test_what_a_broken_contender_did_not_run_is_no_better_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be judged by the seeds before it broke."""
    work, _started, _ran = small_campaign(tmp_path, monkeypatch, rows=[])
    hangs = Key("paper", 1.0, 2, "sbs")
    ran = breaking(monkeypatch, lambda tried: tried[-1] == hangs)
    work.scope = dataclasses.replace(work.scope, loads=[1.0, 0.4], seeds=3)
    await work.run()
    cells = {cell["load"]: cell["failed"] for cell in ratios.ratio_cells(work.rows)}
    assert cells == {1.0: True, 0.4: True}
    assert (3, "sbs") not in {(key.seed, key.policy) for key in ran}
    assert ratios.errors(work.rows)["sbs"].endswith("seed 2: it hung")
    assert work.file.read()[1] == work.rows


# ---- files
