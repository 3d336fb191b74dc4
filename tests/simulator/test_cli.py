"""``sglang-sbs simulate``: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from simulator_fixtures import (
    CACHE_FIELDS,
    ROW_FIELDS,
    lengths,
    write_azure,
    write_mooncake,
    write_turns,
)

from sglang_sbs.router.options.table import GROUPS
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.simulator import cli
from sglang_sbs.simulator.cli import build_parser, main
from sglang_sbs.simulator.cluster.cost import PassCost, save_cost
from sglang_sbs.simulator.experiments import trials
from sglang_sbs.simulator.experiments.tables import load_tables

SMALL = ["--prefill", "1", "--dp", "2", "--duration", "24", "--workers", "1"]


def test_loads_are_printed_and_written(tmp_path, capsys):
    rows = tmp_path / "deep" / "rows.json"
    flags = f"--policies sbs,eta --loads 0.1,0.2 --seeds 2 --cost table,mixed --json {rows}"
    assert main(["paper-3k", *SMALL, *flags.split()]) == 0
    written = json.loads(rows.read_text())
    assert len(written) == 2 * 2 * 2 * 2
    assert all(row.keys() >= ROW_FIELDS for row in written)
    assert "load 0.2" in capsys.readouterr().out


def test_the_router_s_limits_refuse_in_a_simulation_too(capsys: pytest.CaptureFixture[str]) -> None:
    overload = ["paper-3k", *SMALL, "--policies", "sbs", "--loads", "3"]
    assert main(overload) == 0
    assert "refused" not in capsys.readouterr().out
    for limit in ("--sbs-max-queue-requests 5", "--sbs-max-queue-tokens 4000", "--sbs-n-limit 1"):
        assert main([*overload, *limit.split()]) == 0
        assert "refused)" in capsys.readouterr().out, limit


def simulate_rows(flags: str, path: Path) -> list[dict]:
    """The rows that the command as installed writes, read by a parser that knows no NaN."""
    argv = [sys.executable, "-m", "sglang_sbs.cli", "simulate", *flags.split(), "--json", str(path)]
    subprocess.run([*argv, "--workers", "1"], check=True, capture_output=True, timeout=60)

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        ("paper-3k --policies sbs --loads 0.2 --prefill 1 --dp 2 --duration 24", set()),
        (
            "paper-3k --policies eta --max-qps --slo-ttft 0.4 --prefill 1 --dp 1 --duration 24",
            {"slo_ttft_s", "max_qps"},
        ),
        (
            "plan --scenario paper-3k --policies eta --slo-ttft 0.4 --prefill 1 --dp 1 "
            "--duration 24",
            {"slo_ttft_s", "max_qps"},
        ),
    ],
)
def test_rows_have_the_promised_fields_and_types(flags, more, tmp_path):
    (row,) = simulate_rows(flags, tmp_path / "rows.json")
    assert row.keys() >= ROW_FIELDS | more
    for name in ("scenario", "policy", "cost"):
        assert isinstance(row[name], str)
    for name in ("seed", "completed", "rejected"):
        assert isinstance(row[name], int)
    for name in {"load", "qps"} | more:
        assert isinstance(row[name], int | float), name
    prefill = {"ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "chunk_utilization", "bubble_share"}
    for name in prefill:
        assert isinstance(row[name], float)


def test_a_trace_with_blocks_has_hit_rates(tmp_path, capsys):
    trace = write_turns(tmp_path / "t.jsonl", conversations=20, turns=6, gap_s=10.0)
    policies = "sbs,sbs_basic,cache_aware,session,least_tokens"
    rows = tmp_path / "rows.json"
    flags = f"--policies {policies} --load-counts uncached --loads 0.2 --kv-tokens 50000"
    assert main([f"trace:{trace}", *SMALL, *flags.split(), "--json", str(rows)]) == 0
    written = json.loads(rows.read_text())
    assert [row["policy"] for row in written] == policies.split(",")
    for row in written:
        assert row.keys() >= ROW_FIELDS | CACHE_FIELDS
        for name in CACHE_FIELDS - {"hit_rate"}:
            assert isinstance(row[name], int), name
        assert 0 < row["hit_rate"] < 1
    assert "hit rate" in capsys.readouterr().out
    flags = "--policies sbs --loads 0.2"
    for without in (["paper-3k"], [f"trace:{trace}", "--kv-tokens", "0"]):
        assert main([*without, *SMALL, *flags.split()]) == 0
        assert "hit rate" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sessions --kv-tokens 1000", "--kv-tokens 1000: the longest prompt has 65536"),
        ("paper-3k --load-counts uncached", "paper-3k: nothing is cached there"),
        ("sessions --prefix-source guess", "argument --prefix-source: invalid choice: 'guess'"),
    ],
)
def test_caches_that_cannot_be_are_named_with_their_flag(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_what_has_no_value_is_null(tmp_path):
    flags = "paper-3k --policies sbs --loads 0.00001 --duration 21"
    (row,) = simulate_rows(flags, tmp_path / "rows.json")
    assert row["completed"] == 0
    for name in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "chunk_utilization", "bubble_share"):
        assert row[name] is None


def test_a_cost_file_is_a_cost_called_by_its_stem(tmp_path, capsys):
    save_cost(PassCost(fixed_s=0.01, max_s=1e-5), tmp_path / "fast.json")
    rows = tmp_path / "rows.json"
    flags = f"--policies sbs --loads 0.2 --cost table,{tmp_path / 'fast.json'} --json {rows}"
    assert main(["paper-3k", *SMALL, *flags.split()]) == 0
    table, fast = json.loads(rows.read_text())
    assert (table["cost"], fast["cost"]) == ("table", "fast")
    assert fast["ttft_mean_s"] < 0.3 * table["ttft_mean_s"]
    assert "cost fast" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["paper-3k"], ["plan", "--scenario", "paper-3k"]])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.json", "{", "is not valid JSON"),
        ("c.json", '{"fixed": 1}', "unknown field 'fixed'; known: fixed_s"),
        ("c.json", None, "No such file"),
        ("mixed.json", '{"fixed_s": 1}', "rows would call two costs 'mixed'; rename"),
        ("c.txt", '{"fixed_s": 1}', "is not one of table, mixed, barrier, FILE.json"),
    ],
)
def test_a_bad_cost_file_is_named_with_its_flag(command, name, content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / name).write_text(content)
    more = ["--slo-ttft", "1"] if command[0] == "plan" else []
    with pytest.raises(SystemExit) as ended:
        main([*command, *more, "--cost", str(tmp_path / name)])
    assert ended.value.code == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "--cost: " in err and name in err and message in err


def test_knobs_reach_the_cluster(tmp_path):
    rows = tmp_path / "rows.json"
    base = "paper-3k --policies eta --loads 0.3 --duration 26 --workers 1"

    def ttft_s(flags: str) -> float:
        assert main([*base.split(), *flags.split(), "--json", str(rows)]) == 0
        (row,) = json.loads(rows.read_text())
        assert row["unfinished"] == row["rejected"] == 0
        return row["ttft_mean_s"]

    plain_s = ttft_s("")
    for flags in (
        "--jitter 0.3",
        "--first-pass-s 5",
        "--gap-ms 20",
        "--latency-ms 30",
        "--burstiness 3",
        "--length-error 0.3",
        "--endforward-loss 0.9",
        "--endforward-delay-ms 100",
        "--decode-kv-tokens 4000",
        "--decode-running 1",
        "--instance count=3,speed=0.5",
        "--no-barrier",
        "--at 21:down:p1",
    ):
        assert ttft_s(flags) != pytest.approx(plain_s, rel=1e-6), flags
    assert ttft_s("--instance count=2 --instance dp=8,chunk=3072,speed=1") == plain_s
    # Looking ahead matters only where something waits when a pass starts.
    assert ttft_s("--dp 2 --loads 0.25") != ttft_s("--dp 2 --loads 0.25 --no-overlap")
    assert ttft_s("--decode-kv-tokens 4000 --decode-seconds 2") > plain_s


@pytest.mark.parametrize(("name", "write"), [("t.jsonl", write_mooncake), ("t.csv", write_azure)])
def test_a_trace_file_is_a_scenario(tmp_path, name, write):
    trace = write(tmp_path / name, lengths(300))
    rows = tmp_path / "rows.json"
    flags = ["--policies", "sbs", "--loads", "0.3", "--json", str(rows)]
    assert main([f"trace:{trace}", *SMALL, *flags]) == 0
    (row,) = json.loads(rows.read_text())
    assert row["scenario"] == f"trace:{trace}"
    assert row["completed"] > 0 == row["rejected"]


def test_both_helps_say_how_long_a_hold_may_really_be():
    simulated = " ".join(build_parser().format_help().split())
    of_router = [option for options in GROUPS.values() for option in options]
    (router,) = [option.help for option in of_router if option.flag == "sbs-max-hold-ms"]
    assert TUNING.most_hold_passes == 5
    for words in (simulated.rpartition("--sbs-max-hold-ms ")[2][:300], router):
        assert "five mean forward times if that is longer" in words


@pytest.mark.parametrize("more", [["--loads", "0.1,0.2"], ["--max-qps", "--slo-ttft", "0.4"]])
def test_a_plot_is_a_picture_or_a_self_contained_page(tmp_path, more):
    for name in ("p.png", "p.html"):
        path = tmp_path / name
        flags = ["--policies", "eta", *more, "--plot", str(path)]
        assert main(["paper-3k", *SMALL, *flags]) == 0
        content = path.read_bytes()
        if name.endswith(".png"):
            assert content.startswith(b"\x89PNG")
        else:
            assert b"data:image/png;base64," in content and b"<table>" in content
            assert b"http" not in content and b"src=" in content


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "name a scenario"),
        (["paper-4k"], "no scenario 'paper-4k'"),
        (["paper-3k", "--policies", "fifo"], "--policies: 'fifo' is not one of sbs"),
        (["paper-3k", "--max-qps", "--loads", "0.5"], "--loads: --max-qps searches for the load"),
        (["paper-3k", "--slo-ttft", "0.8"], "--slo-ttft: only --max-qps searches"),
        (["paper-3k", "--cost", "free"], "--cost: 'free' is not one of table"),
        (["paper-3k", "--loads", "0.5,much"], "write positive numbers"),
        (["paper-3k", "--chunks", "0"], "write positive integers"),
        (["paper-3k", "--duration", "5"], "longer than the warm-up"),
        (["paper-3k", "--plot", "x.pdf"], "must end in .png, .svg, .html"),
        (["trace:/absent.jsonl"], "no such file"),
        (["paper-3k", "--short-pool", "3"], "--short-pool 3: leave one of 3 to long prompts"),
        (["paper-3k", "--pools", "2"], "--pools 2: 3 instances cannot be divided so"),
        (["paper-3k", "--pools", "3", "--short-pool", "1"], "leave --short-pool, --deflect"),
        (["agentic", "--pools", "3"], "agentic is a closed loop"),
        (["paper-3k", "--short-pool", "1", "--deflect-tokens", "9"], "leave --deflect-tokens and"),
        (["paper-3k", "--at", "5:down:p7"], "--at 5:down:p7: no such instance; there are p0"),
        (["paper-3k", "--at", "5:kill:p1"], "write SECOND:ACTION:INSTANCE with up, drain, down"),
        (["paper-3k", "--at", "soon:down:p1"], "'soon': write a number, 0 or greater"),
        (["paper-3k", "--at", "5:down:p1,6:drain:p1"], "--at 6:drain:p1: after down comes up"),
        (["paper-3k", "--instance", "ranks=4"], "'ranks=4': write count=, dp=, chunk=, speed="),
        (["paper-3k", "--instance", "speed=0"], "'speed=0': write a positive number, as in speed"),
        (
            ["paper-3k", "--instance", "speed=1,dp=0"],
            "'dp=0': write a positive integer, as in dp=4",
        ),
        (["paper-3k", "--instance", "count=x"], "'count=x': write a positive integer, as in count"),
        (["paper-3k", "--seeds", "0"], "--seeds: '0': write a positive integer, as in 3"),
        (["paper-3k", "--seeds", "1,2"], "--seeds: '1,2': write a positive integer, as in 3"),
        (["paper-3k", "--slo-ttft", "0"], "--slo-ttft: '0': write a positive number, as in 0.8"),
        (["paper-3k", "--instance", "dp=4", "--prefill", "2"], "--instance lists the instances"),
        (["paper-3k", "--length-error", "1"], "write a share below 1"),
        (["paper-3k", "--endforward-loss", "1.5"], "write a share between 0 and 1"),
        (["paper-3k", "--decode-kv-tokens", "-1"], "0 for unbounded"),
        (["paper-3k", "--policies", "sbs,eta,sbs"], "--policies: sbs is named twice"),
        (["paper-3k", "--loads", "0.5,0.50"], "write positive numbers, each once"),
        (["paper-3k", "--chunks", "512,512"], "write positive integers, each once"),
    ],
)
def test_bad_flags_are_named(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


WITHOUT_EFFECT = (
    ("paper-3k --intake-until 5", "--intake-until: without --intake-ms it has no effect"),
    ("paper-3k --pool-balance random", "--pool-balance: without --pools"),
    ("paper-3k --decode-seconds 5", "--decode-seconds: without --decode-kv-tokens or -running"),
    ("paper-3k --sbs-tenant-weights a=2", "--sbs-tenant-weights: without --tenants"),
    ("paper-3k --sbs-refuse-missed-slo", "--sbs-refuse-missed-slo: without --ttft-slo-ms"),
    ("paper-3k --sbs-priority-step-ms 9", "--sbs-priority-step-ms: without --priority-share or"),
    *(
        (f"paper-3k --policies eta,random {flag} 9", f"{flag}: no effect under eta, random: it is")
        for flag in (
            *("--sbs-n-limit", "--sbs-queue-timeout-secs", "--sbs-max-queue-requests"),
            *("--sbs-max-queue-tokens", "--sbs-max-hold-ms", "--sbs-iqr-k"),
        )
    ),
    (
        "paper-3k --policies session --sbs-t-default-ms 9",
        "it is for a policy that reads",
    ),
    ("sessions --policies eta --prefix-source off", "--prefix-source: no effect under eta: it is"),
    ("paper-3k --prefix-source off", "--prefix-source: no effect, as there are no prefix caches"),
    ("sessions --kv-tokens 0 --prefix-source off", "--prefix-source: no effect, as there are no"),
    ("paper-3k --kv-tokens 9999", "--kv-tokens: no effect, as there are no prefix caches"),
    ("paper-3k --host-kv-tokens 9", "--host-kv-tokens: no effect, as there are no prefix caches"),
    ("paper-3k --decode-cache seen", "--decode-cache: no effect, as there are no prefix caches"),
    ("paper-3k --storage", "--storage: no effect, as there are no prefix caches"),
    ("paper-3k --instance chunk=512 --chunks 9", "--chunks: no effect, as every --instance has"),
    ("paper-3k --instance dp=2 --dp 4", "--dp: no effect, as every --instance has its own"),
    ("paper-3k --at 80:down:p1", "--at 80:down:p1: no effect, as --duration ends at 80 s"),
    ("plan --scenario paper-3k --slo-ttft 1 --intake-until 5", "--intake-until: without --intake"),
    ("plan --scenario paper-3k --slo-ttft 1 --kv-tokens 9", "--kv-tokens: no effect, as there"),
    ("plan --scenario paper-3k --slo-ttft 1 --decode-seconds 5", "--decode-seconds: without"),
    (
        "plan --scenario sessions --slo-ttft 1 --policies eta --prefix-source off",
        "--prefix-source: no effect under eta",
    ),
)


@pytest.mark.parametrize(("words", "message"), WITHOUT_EFFECT)
def test_a_flag_without_effect_is_refused(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "words",
    [
        "paper-3k --policies sbs,eta --sbs-max-hold-ms 9 --sbs-n-limit 9",
        "paper-3k --policies sbs_paper,random --sbs-iqr-k 1 --decode-running 9 --decode-seconds 2",
        "paper-3k --kv-tokens 0",
        "sessions --policies sbs,eta --prefix-source off --kv-tokens 200000 --host-kv-tokens 9",
        "paper-3k --instance chunk=512 --instance dp=2 --chunks 9 --dp 4 --at 79:down:p1",
    ],
)
def test_a_flag_with_effect_on_some_of_what_is_simulated_is_not(words, monkeypatch):
    class Simulated(Exception):
        pass

    def stop(*_):
        raise Simulated

    monkeypatch.setattr(cli, "run_with_progress", stop)
    with pytest.raises(Simulated):
        main(words.split())


def test_a_window_without_arrivals_is_called_that(capsys):
    flags = "--policies eta --loads 0.00001 --duration 21 --workers 1"
    assert main(["paper-3k", *flags.split()]) == 0
    out = capsys.readouterr().out
    assert "no arrivals after warm-up" in out
    assert "nan" not in out and "nothing completed" not in out


def test_without_a_whole_pass_there_is_no_chunk_use_to_show():
    row = {
        "cost": "mixed",
        "chunk_tokens": 512,
        "scenario": "paper-3k",
        "load": 1.0,
        "policy": "eta",
        "unfinished": 0,
        "rejected": 0,
        "completed": 1,
        "ttft_mean_s": 0.5,
        "ttft_p99_s": 0.5,
        "chunk_utilization": math.nan,
    }
    cells = [
        table.rows[0][1]
        for change in ({}, {"chunk_utilization": 0.25}, {"completed": 0, "ttft_mean_s": math.nan})
        for rejected in (0, 1)
        for table in load_tables([{**row, **change, "rejected": rejected}])
    ]
    assert cells == [
        "0.500/0.50",
        "0.500/0.50 (50% refused)",
        "0.500/0.50 25%",
        "0.500/0.50 25% (50% refused)",
        "no arrivals after warm-up",
        "nothing completed",
    ]


def interrupted_after(monkeypatch, module, runs):
    """Ctrl-C in the run after so many."""
    made = []

    def call_of(real):
        def call(*args):
            if len(made) == runs:
                raise KeyboardInterrupt
            made.append(real(*args))
            return made[-1]

        return call

    for name in ("run_job", "max_load"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, call_of(getattr(module, name)))
    return made


def test_an_interrupt_gives_what_there_is(monkeypatch, tmp_path, capsys):
    interrupted_after(monkeypatch, cli.sweep, 3)
    rows, page = tmp_path / "rows.json", tmp_path / "page.html"
    flags = f"--policies sbs,eta --loads 0.2,0.4 --json {rows} --plot {page}"
    assert main(["paper-3k", *SMALL, *flags.split()]) == 130
    assert len(json.loads(rows.read_text())) == 3 and page.exists()
    out, err = capsys.readouterr()
    assert out.startswith("sbs ") and "at load 0.2" in out.splitlines()[0]
    assert "interrupted after 3 of 4 runs; the results so far follow" in err


def test_an_interrupted_plan_says_nothing_of_what_it_did_not_simulate(monkeypatch, capsys):
    interrupted_after(monkeypatch, cli.plan, 3)
    flags = "--slo-ttft 0.5 --prefill 1..3 --dp 1 --policies sbs,eta --duration 21 --workers 1"
    assert main(["plan", "--scenario", "paper-3k", *flags.split()]) == 130
    out, err = capsys.readouterr()
    assert "At 171 QPS (now) sbs needs more than 2 prefill instances" in out
    assert "; eta more than 1." in out
    assert "interrupted after 3 of 6 runs; the results so far follow" in err


def test_an_interrupted_trial_shows_the_runs_that_ended(monkeypatch, capsys):
    real, made = trials.run_trial, []

    def run_two(*args):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(trials, "run_trial", run_two)
    flags = "--loads 0.5 --runs 3 --slots 10 --slot 3 --dp 2 --workers 1"
    assert main(["trial", *flags.split()]) == 130
    out, err = capsys.readouterr()
    assert "interrupted after 2 of 3 runs; the results so far follow" in err and out


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_with_progress", interrupt)
    assert main(["paper-3k"]) == 130
    assert capsys.readouterr() == ("", "sglang-sbs simulate: interrupted\n")


@pytest.mark.parametrize("command", ["trace:{}", "plan --slo-ttft 1 --trace {}"])
def test_a_trace_in_another_encoding_is_refused_by_every_command(command, tmp_path, capsys):
    trace = tmp_path / "latin.csv"
    trace.write_bytes(b"TIMESTAMP,ContextTokens,GeneratedTokens\n\xff,1,1\n")
    with pytest.raises(SystemExit) as ended:
        main(command.format(trace).split())
    assert ended.value.code == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "latin.csv:2: this is not UTF-8 text" in err
    assert "--at" not in err.partition("error:")[2]


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("paper-3k", ["--json", "--plot"]),
        ("plan --scenario paper-3k --slo-ttft 1", ["--json", "--plot"]),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_run(command, flags, tmp_path, capsys):
    file, folder = tmp_path / "file", tmp_path / "folder.png"
    file.write_text("kept")
    folder.mkdir()
    for flag in flags:
        for path in [file / "below.png", folder]:
            with pytest.raises(SystemExit) as ended:
                main([*command.split(), flag, str(path)])
            assert ended.value.code == 2
            captured = capsys.readouterr()
            assert f"{flag} {path}: cannot be written" in " ".join(captured.err.split())
            assert not captured.out
    assert file.read_text() == "kept"


def test_an_old_file_stays_until_there_are_new_rows(tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "deep" / "new.json"
    old.write_text("[]")
    for path in (old, new):
        with pytest.raises(SystemExit):
            main(["paper-4k", "--json", str(path)])
    assert old.read_text() == "[]"
    assert not new.exists()
