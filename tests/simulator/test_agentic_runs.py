"""``sglang-sbs simulate agentic``: load is a number of agents, and rows say how they fared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_sbs.simulator.cli import main

SMALL = ["--prefill", "1", "--duration", "75", "--loads", "0.1,0.2", "--workers", "1"]


def rows_of(path: Path, *flags: str) -> list[dict]:
    assert main(["agentic", *SMALL, "--json", str(path), *flags]) == 0
    return json.loads(path.read_text())


def test_rows_of_a_closed_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(tmp_path / "rows.json", "--policies", "sbs,session,cache_aware")
    assert [row["agents"] for row in rows[:2]] == [3, 6]
    for row in rows:
        assert row["unfinished"] == row["rejected"] == 0
        assert row["e2e_mean_s"] > row["ttft_mean_s"] > 0
        assert 1 <= row["active_rank_count"] <= 8
        assert row["computed_tokens"] == row["optimal_tokens"], "storage has the rest"
    for policy in ("sbs", "session", "cache_aware"):
        few, more = (row for row in rows if row["policy"] == policy)
        assert more["tokens_per_s_instance"] > few["tokens_per_s_instance"]
    assert "load 0.2, 6 agents" in capsys.readouterr().out


def test_without_storage_random_ranks_compute_again(tmp_path: Path) -> None:
    flags = ("--policies", "cache_aware,session", "--host-kv-tokens", "0", "--loads", "0.2")
    rows = {row["policy"]: row for row in rows_of(tmp_path / "rows.json", *flags)}
    assert all(row["fetched_share"] == row["loaded_share"] == 0 for row in rows.values())
    lost = {name: row["computed_tokens"] / row["optimal_tokens"] for name, row in rows.items()}
    assert lost["cache_aware"] > 1.5 > lost["session"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--duration", "50"], "--duration must be longer than the warm-up of 60 s"),
        (["--burstiness", "2"], "agents send after an answer"),
        (["--load-counts", "uncached"], "agents send after an answer"),
        (["--kv-tokens", "200000"], "the longest prompt has 262144"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["agentic", *flags])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
