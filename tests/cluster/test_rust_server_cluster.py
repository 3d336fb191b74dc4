"""Real engines with SGLang's Rust server behind the router."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.demo.tokens import match_tokens
from sglang_sbs.cluster.plan import RUST_SERVER_ENV
from sglang_sbs.scheduling import Dispatch, ForwardEnded
from sglang_sbs.scheduling.eventlog import read_event_log

pytestmark = pytest.mark.cluster


def rids_of(event_log: Path) -> tuple[set[str], set[str]]:
    """Ids of the requests that the router sent, and of those that prefill says it started."""
    sent, started = set(), set()
    for entry in read_event_log(event_log):
        sent |= {command.rid for command in entry.commands if isinstance(command, Dispatch)}
        if isinstance(entry.event, ForwardEnded) and entry.event.report.role == "prefill":
            started |= {request.rid for request in entry.event.report.started}
    return sent, started


async def test_every_pair_of_ranks_gives_the_tokens_of_an_engine_of_the_old_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1P1D with two DP ranks each, through the router, against one engine asked directly."""
    monkeypatch.setenv(RUST_SERVER_ENV, "1")
    report = await match_tokens(tmp_path, Console(quiet=True))
    assert report.difference == ""
    assert report.pairs == 4
    logs = tmp_path / "token-match"
    sent, started = rids_of(tmp_path / "token-match.events")
    # What is said before the router's socket is connected is lost, so not all of them.
    assert started, "engines report what they start"
    assert started <= sent, "the router knows its requests again in what the engines report"
    for name in ("prefill-0", "decode-0"):
        assert "Rust server listen on" in (logs / f"{name}.log").read_text()
    assert "Rust server listen on" not in (logs / "unified-0.log").read_text()
