"""The plugin's handling of the sleep of an idle DP rank with SGLang's Rust server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_sbs.engine import install


def scheduler(*, rust: bool) -> SimpleNamespace:
    ranks = {"attn_dp_rank": 0, "attn_dp_size": 2, "attn_tp_rank": 0, "pp_rank": 0}
    return SimpleNamespace(
        rust_server=object() if rust else None,
        idle_sleeper=SimpleNamespace(timeout_ms=1000),
        ps=SimpleNamespace(**ranks),
    )


@pytest.mark.parametrize(
    ("rust", "barrier", "timeout_ms"),
    [(True, True, install.NAP_MS), (True, False, 1000), (False, True, 1000)],
)
def test_only_a_rank_that_others_wait_for_naps_briefly(
    monkeypatch: pytest.MonkeyPatch, rust: bool, barrier: bool, timeout_ms: int
) -> None:
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", str(int(not barrier)))
    rank = scheduler(rust=rust)
    install.nap_briefly(None, rank)
    assert rank.idle_sleeper.timeout_ms == timeout_ms
