"""What the plugin does about the sleep of an idle DP rank with SGLang's Rust server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_sbs.engine import install


def scheduler(*, rust: bool = True) -> SimpleNamespace:
    sleeper = SimpleNamespace(timeout_ms=1000)
    return SimpleNamespace(rust_server=object() if rust else None, idle_sleeper=sleeper)


@pytest.mark.parametrize(
    ("rust", "barrier", "timeout_ms"),
    [(True, True, install.NAP_MS), (True, False, 1000), (False, True, 1000)],
)
def test_only_a_rank_that_others_wait_for_naps_briefly(
    monkeypatch: pytest.MonkeyPatch, rust: bool, barrier: bool, timeout_ms: int
) -> None:
    monkeypatch.setattr(install, "shares_barrier", lambda _scheduler: barrier)
    rank = scheduler(rust=rust)
    install.nap_briefly(None, rank)
    assert rank.idle_sleeper.timeout_ms == timeout_ms
