"""Real engines with SGLang's Rust server behind the router."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from sglang_sbs.cluster.plan import RUST_SERVER_ENV
from sglang_sbs.demo.tokens import match_tokens

pytestmark = pytest.mark.cluster


async def test_every_pair_of_ranks_gives_the_tokens_of_an_engine_of_the_old_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1P1D with two DP ranks each, through the router, against one engine asked directly."""
    monkeypatch.setenv(RUST_SERVER_ENV, "1")
    report = await match_tokens(tmp_path, Console(quiet=True))
    assert report.difference == ""
    assert report.pairs == 4
    logs = tmp_path / "token-match"
    for name in ("prefill-0", "decode-0"):
        assert "Rust server listen on" in (logs / f"{name}.log").read_text()
    assert "Rust server listen on" not in (logs / "unified-0.log").read_text()
