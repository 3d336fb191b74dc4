"""The measuring of the dashboard's cost, without measuring anything here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.dashboard_cost import Cost, summarize
from benchmarks.router_processes import Processes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["bench-dashboard", "dashboard-pictures"])
def test_help_teaches_with_an_example(script: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"example: scripts/{script}" in done.stdout
    assert "--serve" not in done.stdout


def test_pictures_are_small() -> None:
    pictures = [ROOT / "docs/dashboard.png", *(ROOT / "docs/images").glob("dashboard-*.png")]
    assert len(pictures) == 3
    assert max(picture.stat().st_size for picture in pictures) < 300 * 1024


def test_cpu_time_includes_children() -> None:
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = Processes(os.getpid()).cpu_s()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        own = Processes(child.pid).cpu_s()
        both = Processes(os.getpid()).cpu_s()
        child.communicate(b"\n")
    assert own >= 0.25
    assert both - before >= 0.25
    assert Processes(child.pid).cpu_s() == 0.0, "it is gone"


def test_the_summary_has_medians_and_the_spread() -> None:
    costs = [
        Cost("no watcher", 0.10),
        Cost("the page", 0.2, browser_share=0.1),
        Cost("no watcher", 0.12),
        Cost("the page", 0.3, browser_share=0.3),
        Cost("no watcher", 0.20),
    ]
    first, second = summarize(costs)
    assert "12.0 % (10.0..20.0) of a core" in first
    assert "browser 20.0 % (10.0..30.0) of a core" in second
