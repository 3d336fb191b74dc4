"""The gate: what is waited for, for how long, and when not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine_fakes import Req

from sglang_sbs.engine.gang_gate import GangGate
from sglang_sbs.wire.endforward import GANG_RID_PREFIX


class BootstrapQueue:
    """``PrefillBootstrapQueue``: a request is ready from the n-th poll on."""

    def __init__(self) -> None:
        self.queue: list[Req] = []
        self.ready_at: dict[str, int] = {}
        self.polls = 0

    def add(self, rid: str, ready_at: int) -> None:
        self.queue.append(Req(rid, 100))
        self.ready_at[rid] = ready_at

    def pop_bootstrapped(self) -> list[Req]:
        self.polls += 1
        ready = [req for req in self.queue if self.ready_at[req.rid] <= self.polls]
        self.queue = [req for req in self.queue if req not in ready]
        return ready


def scheduler(*, attn_tp: int = 1, pipeline: int = 1) -> Any:
    return SimpleNamespace(
        ps=SimpleNamespace(attn_tp_size=attn_tp, attn_cp_size=1, pp_size=pipeline),
        disagg_prefill_bootstrap_queue=BootstrapQueue(),
        waiting_queue=[],
        chunked_req=None,
        result_queue=[],
    )


def gate(ms: float | None = 20.0) -> tuple[GangGate, list[float]]:
    slept: list[float] = []
    return GangGate(ms, sleep=slept.append), slept


def late(s: Any, *ready_at: int, prefix: str = GANG_RID_PREFIX) -> list[str]:
    rids = [f"{prefix}{len(s.disagg_prefill_bootstrap_queue.queue)}{at}" for at in ready_at]
    for rid, at in zip(rids, ready_at, strict=True):
        s.disagg_prefill_bootstrap_queue.add(rid, at)
    return rids


def test_a_batch_waits_until_its_late_requests_are_ready() -> None:
    s = scheduler()
    s.waiting_queue.append(Req("sbs-first", 100))
    rids = late(s, 3, 7)
    g, slept = gate()
    assert g.before_next_batch(s) is None
    assert [req.rid for req in s.waiting_queue] == ["sbs-first", *rids]
    assert len(slept) == 7


def test_a_rank_with_none_ready_waits_too_as_another_may_have_some() -> None:
    s = scheduler()
    late(s, 4)
    g, _ = gate()
    g.before_next_batch(s)
    assert len(s.waiting_queue) == 1


def test_one_that_decode_has_no_room_for_costs_a_single_wait() -> None:
    s = scheduler()
    late(s, 10**9)
    g, slept = gate(20.0)
    for _ in range(5):
        g.before_next_batch(s)
    assert len(slept) == 20
    late(s, s.disagg_prefill_bootstrap_queue.polls + 5)  # the next one is waited for all the same
    g.before_next_batch(s)
    assert len(slept) == 25
    assert len(s.waiting_queue) == 1


def test_behind_a_running_pass_only_a_rank_that_would_launch_anyway_waits() -> None:
    s = scheduler()
    s.result_queue.append("pass")
    late(s, 2)
    g, slept = gate()
    g.before_next_batch(s)
    assert not slept
    s.chunked_req = Req("sbs-long", 5000)
    g.before_next_batch(s)
    assert len(slept) == 2


def test_other_routers_requests_are_not_waited_for() -> None:
    s = scheduler()
    late(s, 5, prefix="3f9a")
    g, slept = gate()
    g.before_next_batch(s)
    assert not slept
    assert s.disagg_prefill_bootstrap_queue.polls == 0


@pytest.mark.parametrize(
    ("ms", "attn_tp", "pipeline", "polls"),
    [
        (None, 1, 1, 40),
        # Every process of a DP rank must poll equally often, and some may lack the plugin.
        (None, 4, 1, 0),
        (5.0, 4, 1, 5),
        (0.0, 1, 1, 0),
        (20.0, 1, 2, 0),
    ],
)
def test_how_long(ms: float | None, attn_tp: int, pipeline: int, polls: int) -> None:
    s = scheduler(attn_tp=attn_tp, pipeline=pipeline)
    late(s, 10**9)
    g, slept = gate(ms)
    g.before_next_batch(s)
    assert len(slept) == polls


def test_a_release_that_does_not_say_how_many_processes_share_a_rank_is_left_alone() -> None:
    s = scheduler()
    del s.ps.attn_tp_size
    late(s, 10**9)
    g, slept = gate(None)
    g.before_next_batch(s)
    assert not slept


def test_what_left_the_handshake_is_forgotten() -> None:
    s = scheduler()
    late(s, 3)
    g, _ = gate()
    g.before_next_batch(s)
    g.before_next_batch(s)
    assert not g._polled
