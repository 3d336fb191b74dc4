"""``sglang-sbs simulate``: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json

import pytest
from simulator_fixtures import ROW_FIELDS, lengths, write_azure, write_mooncake

from sglang_sbs.simulator.cli import main

SMALL = ["--prefill", "1", "--dp", "2", "--duration", "24", "--workers", "1"]


def test_loads_are_printed_and_written(tmp_path, capsys):
    rows = tmp_path / "deep" / "rows.json"
    flags = f"--policies sbs,eta --loads 0.1,0.2 --seeds 2 --cost table,mixed --json {rows}"
    assert main(["paper-3k", *SMALL, *flags.split()]) == 0
    written = json.loads(rows.read_text())
    assert len(written) == 2 * 2 * 2 * 2
    assert all(row.keys() >= ROW_FIELDS for row in written)
    assert "load 0.2" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "write"), [("t.jsonl", write_mooncake), ("t.csv", write_azure)])
def test_a_trace_file_is_a_scenario(tmp_path, name, write):
    trace = write(tmp_path / name, lengths(300))
    rows = tmp_path / "rows.json"
    flags = ["--policies", "sbs", "--loads", "0.3", "--json", str(rows)]
    assert main([f"trace:{trace}", *SMALL, *flags]) == 0
    (row,) = json.loads(rows.read_text())
    assert row["scenario"] == f"trace:{trace}"
    assert row["completed"] > 0 == row["rejected"]


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
        (["paper-decode", "--policies", "eta"], "--policies: 'eta' is not one of sbs_potential"),
        (["paper-decode", "--max-qps"], "paper-decode has none"),
        (["paper-3k", "--cost", "free"], "--cost: 'free' is not one of table"),
        (["paper-3k", "--loads", "0.5,much"], "write positive numbers"),
        (["paper-3k", "--chunks", "0"], "write positive integers"),
        (["paper-3k", "--duration", "5"], "longer than the warm-up"),
        (["paper-3k", "--plot", "x.pdf"], "must end in .png, .svg, .html"),
        (["trace:/absent.jsonl"], "no such file"),
    ],
)
def test_bad_flags_are_named(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_log_that_is_none_is_refused(tmp_path, capsys):
    assert main(["--replay", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().out
