"""A DP rank of several processes: one decides, and the others follow as SGLang has them agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gang_fakes import GATE_MS, READY, WAITING, Clock, Hearsay, Queue, Rank, Req

from sglang_sbs.engine.gang_board import MAX_SILENCES
from sglang_sbs.engine.gang_hold import MAX_ERRORS
from sglang_sbs.wire.gangs import SIZED_RID_PREFIX, GangPart

FAILED = 0


class Team:
    """The processes of a DP rank. Each has all requests in its queue, and handshakes of its own."""

    def __init__(self, clock: Clock, hearsay: Hearsay, size: int = 2, **ranks: Any) -> None:
        self.processes = [
            Rank(clock, attn_tp=size, attn_tp_rank=number, hearsay=hearsay, **ranks)
            for number in range(size)
        ]

    @property
    def first(self) -> Rank:
        return self.processes[0]

    def add(self, rid: str, part: GangPart | None, *states: int) -> list[Req]:
        """``states``: of its handshake in the first process and so on; READY in the others."""
        size = len(self.processes)
        reqs = [Req(rid, part, state) for state in (*states, *[READY] * (size - len(states)))]
        for process, req in zip(self.processes, reqs, strict=True):
            process.queue.queue.append(req)
        return reqs

    def pop(self) -> list[str]:
        """``pop_bootstrapped`` of all processes at once.

        Raises:
            AssertionError: they do not look at the same requests, so that the engine would hang.
        """
        reported: list[list[int]] = []

        def reduce(_queue: Queue) -> list[Req]:
            rids = {tuple(req.rid for req in each.queue.queue) for each in self.processes}
            assert len(rids) == 1, "processes see different queues"
            reported.extend(
                [req.disagg_kv_sender.poll() for req in each.queue.queue] for each in self.processes
            )
            return []

        pop: Callable[[Queue], list[Req]] = reduce
        for process in reversed(self.processes):
            pop = _around(process, pop)
        pop(self.first.queue)
        agreed = [min(states) for states in zip(*reported, strict=True)]
        gone = [
            req.rid
            for req, state in zip(self.first.queue.queue, agreed, strict=True)
            if state != WAITING
        ]
        for each in self.processes:
            each.queue.queue = [req for req in each.queue.queue if req.rid not in gone]
        return [rid.removeprefix(SIZED_RID_PREFIX) for rid in gone]

    def turn(self, after_s: float = 0.001) -> list[str]:
        self.first.clock.now_s += after_s
        popped = self.pop()
        for each in self.processes:
            each.hold.before_next_batch(each.queue.scheduler)
        return popped

    def turns_until_pop(self) -> int:
        for number in range(1, 1000):
            if self.turn():
                return number
        raise AssertionError("it is held for ever")


def _around(process: Rank, inner: Callable[[Queue], list[Req]]) -> Callable[[Queue], list[Req]]:
    def pop(_queue: Queue) -> list[Req]:
        held: list[Req] = process.hold.around_pop_bootstrapped(
            lambda _queue: inner(process.queue), process.queue
        )
        return held

    return pop


def team(size: int = 2) -> tuple[Team, Hearsay]:
    hearsay = Hearsay()
    return Team(Clock(), hearsay, size), hearsay


def test_a_gang_starts_with_its_last_request_in_all_processes() -> None:
    rank, part = team(4)[0], GangPart(1, 2, 1)
    rank.add("a", part)
    assert [rank.turn() for _ in range(5)] == [[]] * 5
    rank.add("b", part)
    rank.turn()  # in which the first process hears that the others are ready
    assert rank.turn() == ["a", "b"]


def test_others_are_not_held_and_a_sender_is_left_as_it_was() -> None:
    rank, part = team()[0], GangPart(1, 2, 1)
    held, _ = rank.add("a", part)
    rank.add("3f9a", None)
    assert rank.turn() == ["3f9a"]
    assert [req.rid for req in rank.first.queue.queue] == [held.rid]
    assert held.disagg_kv_sender.poll() == READY
    assert not vars(held.disagg_kv_sender).keys() & {"poll"}


def test_a_gang_waits_for_the_handshake_of_every_process() -> None:
    """Else SGLang would start what is ready in all of them, and the rest in the next pass."""
    rank, part = team(3)[0], GangPart(1, 2, 1)
    rank.add("a", part)
    late = rank.add("b", part, READY, READY, WAITING)[2]
    assert [rank.turn() for _ in range(5)] == [[]] * 5
    late.state = READY
    rank.turn()
    assert rank.turn() == ["a", "b"]


def test_what_failed_in_one_process_is_out_of_the_queue_of_all() -> None:
    rank, part = team()[0], GangPart(1, 4, 1)
    rank.add("a", part)
    rank.add("b", part, READY, FAILED)
    rank.add("c", part, FAILED, READY)
    assert rank.turn() == ["b", "c"]


def test_what_is_lost_or_stuck_costs_one_bounded_wait() -> None:
    rank, _ = team()
    rank.add("a", GangPart(1, 2, 1))
    assert rank.turns_until_pop() == pytest.approx(GATE_MS, abs=2)
    rank.add("b", GangPart(2, 2, 1))
    rank.add("c", GangPart(2, 2, 1), READY, WAITING)
    assert rank.turns_until_pop() == pytest.approx(GATE_MS, abs=3)
    assert [req.rid for req in rank.first.queue.queue] == [SIZED_RID_PREFIX + "c"]


def test_processes_that_never_report_are_not_waited_for_any_more() -> None:
    rank, hearsay = team()
    hearsay.deaf = True
    for tag in range(MAX_SILENCES):
        rank.add(f"a{tag}", GangPart(tag, 2, 1))
        rank.add(f"b{tag}", GangPart(tag, 2, 1))
        assert rank.turns_until_pop() == pytest.approx(GATE_MS, abs=2)
    rank.add("a", GangPart(100, 2, 1))
    rank.add("b", GangPart(100, 2, 1))
    assert rank.turn() == ["a", "b"]


def test_only_silences_in_a_row_count() -> None:
    rank, hearsay = team()
    for tag in range(4 * MAX_SILENCES):
        hearsay.deaf = tag % MAX_SILENCES > 0
        rank.add(f"a{tag}", GangPart(tag, 2, 1))
        rank.add(f"b{tag}", GangPart(tag, 2, 1))
        assert (rank.turns_until_pop() > 2) == hearsay.deaf


def test_requests_that_never_come_are_no_silence_of_the_others() -> None:
    rank, _ = team()
    for tag in range(2 * MAX_SILENCES):
        rank.add(f"a{tag}", GangPart(tag, 2, 1))
        rank.turns_until_pop()
    part = GangPart(100, 2, 1)
    rank.add("a", part)
    rank.add("b", part, READY, WAITING)
    assert [rank.turn() for _ in range(5)] == [[]] * 5


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_in_one_process_leaves_all_with_the_same_queue(number: int) -> None:
    rank, _ = team()
    for tag in range(MAX_ERRORS + 1):
        rank.processes[number].hold._gangs = None  # type: ignore[assignment]
        rank.add(f"a{tag}", GangPart(tag, 2, 1))
        rank.turns_until_pop()


def test_what_starts_without_its_handshake_is_not_held() -> None:
    rank, part = team()[0], GangPart(1, 2, 1)
    for process in rank.processes:
        process.queue.can_prefill_before_bootstrap = lambda _req: True  # type: ignore[attr-defined]
    rank.add("a", part)
    assert rank.turn() == ["a"]


def test_two_dp_ranks_of_two_processes_start_a_gang_in_the_same_turn() -> None:
    clock, hearsay = Clock(), Hearsay()
    first, second = (Team(clock, hearsay, rank=rank, ranks=2) for rank in range(2))
    part = GangPart(1, 1, 2)
    first.add("a", part)
    late = second.add("b", part, READY, WAITING)[1]
    for _ in range(3):
        assert (first.turn(), second.turn()) == ([], [])
    late.state = READY
    started = [(first.turn(), second.turn()) for _ in range(4)]
    assert [batch for batch in started if any(batch)] == [(["a"], ["b"])]
    assert len(hearsay.opened) == len(set(hearsay.opened)) == 2 * 2 + 2, "an address is taken twice"


def test_a_dp_rank_on_several_hosts_goes_by_the_handshakes_of_its_first_process() -> None:
    hearsay = Hearsay()
    rank, part = Team(Clock(), hearsay, nodes=2), GangPart(1, 2, 1)
    rank.add("a", part)
    assert [rank.turn() for _ in range(3)] == [[]] * 3
    rank.add("b", part, READY, WAITING)
    assert rank.turn() == ["a"]
    assert not hearsay.opened
