"""Where ranks on several hosts cannot tell each other anything: a rank polls within its turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gang_fakes import READY, WAITING, Clock, Queue, Rank, Req

from sglang_sbs.wire.gangs import GangPart


class Poller(Rank):
    """Old SGLang on two hosts: in the n-th poll decode takes a request in."""

    def __init__(self, **engine: Any) -> None:
        super().__init__(Clock(), nodes=2, ranks=2, **engine)
        self.polls = 0
        self.slept = 0

    def sleep(self, _seconds: float) -> None:
        self.slept += 1

    def late(self, *ready_at: int, sized: bool = True) -> None:
        for at in ready_at:
            part = GangPart(1, 2, 2) if sized else None
            req = Req(f"{len(self.queue.queue)}-{at}", part, WAITING)
            req.ready_at = at  # type: ignore[attr-defined]
            self.queue.queue.append(req)

    def original(self) -> Callable[[Queue], list[Req]]:
        def pop_bootstrapped(queue: Queue) -> list[Req]:
            self.polls += 1
            for req in queue.queue:
                if req.ready_at < self.polls:  # type: ignore[attr-defined]
                    req.state = READY
            return Queue.pop_bootstrapped(queue)

        return pop_bootstrapped


def test_a_batch_waits_until_its_late_requests_are_ready() -> None:
    rank = Poller()
    rank.late(3, 7)
    assert len(rank.turn()) == 2
    assert rank.slept == 7


def test_one_that_decode_has_no_room_for_costs_a_single_wait() -> None:
    rank = Poller()
    rank.late(10**9)
    for _ in range(5):
        rank.turn()
    assert rank.slept == 20
    rank.late(rank.polls + 5)  # the next one is waited for all the same
    assert len(rank.turn()) == 1
    assert rank.slept == 25


def test_behind_a_running_pass_only_a_rank_that_would_launch_anyway_waits() -> None:
    rank = Poller()
    rank.queue.scheduler.result_queue = ["pass"]
    rank.late(2)
    assert not rank.turn()
    assert not rank.slept
    rank.queue.scheduler.chunked_req = object()
    assert rank.turn()
    assert rank.slept == 1


def test_other_routers_requests_are_not_waited_for() -> None:
    rank = Poller()
    rank.late(5, sized=False)
    rank.turn()
    assert (rank.slept, rank.polls) == (0, 1)


@pytest.mark.parametrize(
    ("gate_ms", "attn_tp", "pipeline", "polls"),
    [
        (None, 1, 1, 40),
        # Every process of a DP rank must poll equally often, and some may lack the plugin.
        (None, 4, 1, 0),
        (5.0, 4, 1, 5),
        (0.0, 1, 1, 0),
        (20.0, 1, 2, 0),
    ],
)
def test_how_long(gate_ms: float | None, attn_tp: int, pipeline: int, polls: int) -> None:
    rank = Poller(gate_ms=gate_ms, attn_tp=attn_tp, pipeline=pipeline)
    rank.late(10**9)
    rank.turn()
    assert rank.slept == polls


def test_what_left_the_handshake_is_forgotten() -> None:
    rank = Poller()
    rank.late(3)
    rank.turn()
    assert rank.hold._polled
    rank.turn()
    assert not rank.hold._polled
