"""The bench of hostile senders: its cases, one of them against a real router, and its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, str(ROOT / "scripts" / "bench-hostile")]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SCRIPT, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_case_gives_a_row(tmp_path: Path) -> None:
    path = tmp_path / "hostile.json"
    result = run("--cases", "gzip-bomb,nested-tools", "--json", str(path))
    assert result.returncode == 0, result.stderr
    assert "1 of 2: gzip-bomb" in result.stderr
    bomb, rendered = json.loads(path.read_text())["rows"]
    assert (bomb["case"], rendered["case"]) == ("gzip-bomb", "nested-tools")
    assert bomb["answers"] == {"415": 1}
    assert rendered["answers"]["200"] == 2, "tokenized or estimated, the chats are served"
    assert rendered["answers"]["400"] == 2, "the template would make too much of them"
    for row in (bomb, rendered):
        assert row["worst_delay_ms"] > 0
        assert row["baseline_ms"] > 0
        assert row["memory_ratio"] >= 0
        assert row["probe_failures"] == 0
    assert 400_000 < bomb["sent_bytes"] < 600_000


def test_an_unknown_case_is_reported() -> None:
    result = run("--cases", "nonsense")
    assert result.returncode == 2
    assert "no case nonsense" in result.stderr
    assert "gzip-bomb" in run("--list").stdout
