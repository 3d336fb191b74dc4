"""Holding back in the handshake queue: which requests, and until when."""

from __future__ import annotations

from typing import Any

import pytest
from gang_fakes import GATE_MS, READY, WAITING, Clock, Hearsay, Rank, Req

from sglang_sbs.engine.gang_board import MAX_SILENCES, SocketBoard, Word
from sglang_sbs.engine.gang_hold import (
    ARRIVAL_SHARE,
    MAX_ERRORS,
    MOST_TURN_S,
)
from sglang_sbs.wire.endforward import GATE_ALONE, GATE_ERRORS, GATE_UNSUPPORTED
from sglang_sbs.wire.gangs import TAG_BITS, GangPart, part_of_room


def test_a_gang_starts_when_its_last_request_is_there() -> None:
    rank, part = Rank(Clock()), GangPart(1, 2, 1)
    rank.queue.queue.append(Req("a", part))
    assert [rank.turn() for _ in range(5)] == [[]] * 5
    rank.queue.queue.append(Req("b", part))
    assert rank.turn() == ["a", "b"]


def test_a_gang_starts_when_its_last_handshake_is_over() -> None:
    rank, part = Rank(Clock()), GangPart(1, 2, 1)
    late = Req("b", part, WAITING)
    rank.queue.queue += [Req("a", part), late]
    assert rank.turn() == []
    late.state = READY
    assert rank.turn() == ["a", "b"]


def test_a_batch_does_not_wait_for_a_failed_handshake() -> None:
    rank, part = Rank(Clock()), GangPart(1, 2, 1)
    rank.queue.queue += [Req("a", part), Req("b", part, state=0)]
    assert rank.turn() == ["a", "b"]


def test_a_request_lost_on_its_way_costs_one_bounded_wait() -> None:
    rank, part = Rank(Clock()), GangPart(1, 3, 1)
    rank.queue.queue += [Req("a", part), Req("b", part)]
    assert rank.turns_until_pop() == pytest.approx(GATE_MS, abs=2)
    rank.queue.queue.append(Req("late after all", part))
    assert rank.turn() == ["late after all"]


def lost_one_costs(rank: Rank, tag: int) -> int:
    """Turns that a gang waits for a request that never comes."""
    rank.queue.queue.append(Req(f"a{tag}", GangPart(tag, 2, 1)))
    return rank.turns_until_pop()


def test_where_requests_come_late_they_are_waited_for_longer() -> None:
    rank = Rank(Clock())
    assert lost_one_costs(rank, 1) == pytest.approx(GATE_MS, abs=2)
    rank.queue.queue.append(Req("late", GangPart(1, 2, 1)))
    assert rank.turn() == ["late"]
    assert lost_one_costs(rank, 2) == pytest.approx(ARRIVAL_SHARE * GATE_MS, abs=2)
    for tag in range(3, 40):
        rank.queue.queue += [Req("b", GangPart(tag, 2, 1)), Req("c", GangPart(tag, 2, 1))]
        assert rank.turn() == ["b", "c"]
    assert lost_one_costs(rank, 50) == pytest.approx(GATE_MS, abs=2)


def test_a_request_without_decode_room_costs_one_bounded_wait() -> None:
    rank, part = Rank(Clock()), GangPart(1, 2, 1)
    stuck = Req("b", part, WAITING)
    rank.queue.queue += [Req("a", part), stuck]
    assert rank.turns_until_pop() == pytest.approx(GATE_MS, abs=2)
    assert rank.queue.queue == [stuck]
    stuck.state = READY
    assert rank.turn() == ["b"]


def test_more_gangs_in_the_handshake_than_are_remembered_are_no_error() -> None:
    """A decode instance that is full keeps them there."""
    rank = Rank(Clock())
    for tag in range(300):
        part = GangPart(tag, 2, 1)
        rank.queue.queue += [Req(f"a{tag}", part), Req(f"b{tag}", part, WAITING)]
    popped: list[str] = []
    for _ in range(30):
        popped += rank.turn()
    assert popped == [f"a{tag}" for tag in range(300)]
    for req in rank.queue.queue:
        req.state = READY
    assert rank.turn() == [f"b{tag}" for tag in range(300)]
    rank.queue.queue += [Req("new", GangPart(999, 2, 1))]
    assert rank.turn() == []


def test_waiting_is_not_counted_while_nothing_could_start() -> None:
    rank, part = Rank(Clock()), GangPart(1, 2, 1)
    both = [Req("a", part, WAITING), Req("b", part, WAITING)]
    rank.queue.queue += both
    for _ in range(500):
        assert rank.turn() == []
    both[0].state = READY
    assert rank.turn() == []
    both[1].state = READY
    assert rank.turn() == ["a", "b"]


def test_a_pass_between_two_turns_counts_little() -> None:
    rank, part = Rank(Clock()), GangPart(1, 2, 1)
    rank.queue.queue.append(Req("a", part))
    assert rank.turn() == []
    assert rank.turn(after_s=0.6) == []
    assert rank.hold._gangs[1].arrival_s < 2 * MOST_TURN_S
    rank.queue.queue.append(Req("b", part))
    assert rank.turn() == ["a", "b"]


def test_two_gangs_do_not_wait_for_each_other() -> None:
    rank, first, second = Rank(Clock()), GangPart(1, 2, 1), GangPart(2, 2, 1)
    rank.queue.queue += [Req("a1", first), Req("b1", second), Req("b2", second)]
    assert rank.turn() == ["b1", "b2"]
    rank.queue.queue.append(Req("a2", first))
    assert rank.turn() == ["a1", "a2"]


def test_requests_of_others_and_single_ones_are_neither_held_nor_asked() -> None:
    rank = Rank(Clock())
    others = [Req("3f9a"), Req("sbs-3f9a"), Req("HEALTH_CHECK_1"), Req("one", GangPart(3, 1, 1))]
    held = Req("a", GangPart(1, 2, 1))
    rank.queue.queue += [held, *others]
    assert rank.turn() == ["3f9a", "sbs-3f9a", "HEALTH_CHECK_1", "one"]
    assert rank.queue.queue == [held]
    assert not any(req.polls for req in others)


def test_a_held_request_keeps_its_place_in_the_queue() -> None:
    rank, part = Rank(Clock()), GangPart(1, 2, 1)
    held, waiting = Req("a", part), Req("foreign", state=WAITING)
    rank.queue.queue += [held, waiting]
    rank.turn()
    assert rank.queue.queue == [held, waiting]


@pytest.mark.parametrize(
    "engine",
    [{"gate_ms": 0.0}, {"attn_tp": 0}, {"pipeline": 2}, {"nodes": 0}],
    ids=["off", "unknown processes", "pipeline", "unknown hosts"],
)
def test_where_it_does_not_work_nothing_is_held(engine: dict[str, Any]) -> None:
    rank = Rank(Clock(), **engine)
    rank.queue.queue.append(Req("a", GangPart(1, 2, 1)))
    assert rank.turn() == ["a"]
    assert rank.hold.fault() == ""


@pytest.mark.parametrize("attn_tp", [1, 4])
@pytest.mark.parametrize("gate_ms", [None, GATE_MS])
def test_engines_on_several_hosts_before_0_5_22_have_no_gate_and_report_it_once(
    gate_ms: float | None, attn_tp: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Their ranks cannot tell each other anything (``columns`` is None in such releases)."""
    engine = {"nodes": 2, "ranks": 2, "attn_tp": attn_tp, "gate_ms": gate_ms}
    ranks = [
        Rank(Clock(), rank=rank, attn_tp_rank=process, **engine)
        for rank in range(2)
        for process in range(attn_tp)
    ]
    for rank in ranks:
        late = Req("late", GangPart(1, 2, 2), WAITING)
        rank.queue.queue += [Req("a", GangPart(1, 2, 2)), late]
        assert rank.turn() == ["a"]
        assert late.polls == 0
        late.state = READY
        assert rank.turn() == ["late"]
        assert rank.hold.fault() == GATE_UNSUPPORTED
    assert caplog.messages == ["no batch gate over several hosts before SGLang 0.5.22"]


@pytest.mark.parametrize("engine", [{"ranks": 1}, {"ranks": 2, "skips": "1"}])
def test_several_hosts_before_0_5_22_have_a_gate_where_ranks_share_no_barrier(
    engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", engine.pop("skips", ""))
    rank = Rank(Clock(), nodes=2, **engine)
    rank.queue.queue.append(Req("a", GangPart(1, 2, 1)))
    assert rank.turn() == []
    assert rank.hold.fault() == ""


def test_an_error_holds_nothing_back_and_some_end_it() -> None:
    rank, part = Rank(Clock()), GangPart(1, 2, 1)
    broken = Req("a", part)
    broken.disagg_kv_sender = None  # type: ignore[assignment]
    for _ in range(MAX_ERRORS):
        rank.queue.queue = [broken]
        assert rank.turn() == ["a"]
    assert rank.hold.fault() == GATE_ERRORS
    rank.queue.queue = [Req("b", GangPart(2, 2, 1))]
    assert rank.turn() == ["b"]


def test_the_queue_is_whole_again_if_sglang_fails() -> None:
    rank = Rank(Clock())
    held = Req("a", GangPart(1, 2, 1))
    rank.queue.queue = [held]

    def failing(_queue: Any) -> list[Any]:
        raise RuntimeError("of SGLang")

    with pytest.raises(RuntimeError, match="of SGLang"):
        rank.hold.around_pop_bootstrapped(failing, rank.queue)
    assert rank.queue.queue == [held]


# Several ranks --------------------------------------------------------------------------------


def pair() -> tuple[Rank, Rank, Hearsay]:
    clock, hearsay = Clock(), Hearsay()
    first, second = (Rank(clock, rank=rank, ranks=2, hearsay=hearsay) for rank in range(2))
    return first, second, hearsay


def test_without_a_barrier_a_rank_waits_for_its_own_part_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of a router that does not know that there is none name two ranks."""
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "1")
    first, _, hearsay = pair()
    part = GangPart(1, 2, 2)
    first.queue.queue.append(Req("a", part))
    assert first.turn() == []
    first.queue.queue.append(Req("b", part))
    assert first.turn() == ["a", "b"]
    assert not hearsay.said


def test_a_rank_waits_for_the_part_of_another_that_has_seen_nothing_of_it() -> None:
    first, second, _ = pair()
    part = GangPart(1, 1, 2)
    first.queue.queue.append(Req("a", part))
    for _ in range(3):
        assert (first.turn(), second.turn()) == ([], [])
    second.queue.queue.append(Req("b", part))
    assert (first.turn(), second.turn()) == ([], [])
    assert (first.turn(), second.turn()) == (["a"], ["b"])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_is_said_in_a_turn_counts_from_the_next_on_for_all(order: tuple[int, int]) -> None:
    """Within a turn some ranks hear it and others do not yet."""
    ranks = pair()
    part = GangPart(1, 1, 2)
    for rank, rid in zip(ranks, "ab", strict=False):
        rank.queue.queue.append(Req(rid, part))
    assert [ranks[index].turn() for index in order] == [[], []]
    assert sorted(ranks[index].turn()[0] for index in order) == ["a", "b"]


def test_a_part_that_was_lost_costs_the_other_rank_one_bounded_wait() -> None:
    first, second, _ = pair()
    first.queue.queue.append(Req("a", GangPart(1, 1, 2)))
    begun_s = first.clock.now_s
    while not first.turn():
        second.turn()
    assert GATE_MS / 1e3 <= first.clock.now_s - begun_s <= 2 * GATE_MS / 1e3


def test_a_part_of_another_rank_that_comes_late_is_waited_for_longer_next_time() -> None:
    first, second, _ = pair()
    first.queue.queue.append(Req("a", GangPart(1, 1, 2)))
    while not first.turn():
        second.turn()
    second.queue.queue.append(Req("b", GangPart(1, 1, 2)))
    assert second.turn() == ["b"], "the first had reported that it goes"
    first.queue.queue.append(Req("c", GangPart(2, 1, 2)))
    begun_s = first.clock.now_s
    while not first.turn():
        second.turn()
    assert first.clock.now_s - begun_s >= ARRIVAL_SHARE * GATE_MS / 1e3


def test_a_part_without_room_at_decode_costs_the_other_rank_less() -> None:
    first, second, _ = pair()
    part = GangPart(1, 1, 2)
    stuck = Req("b", part, WAITING)
    first.queue.queue.append(Req("a", part))
    second.queue.queue.append(stuck)
    begun_s = first.clock.now_s
    while not first.turn():
        assert second.turn() == []
    assert first.clock.now_s - begun_s <= 3 * GATE_MS / 1e3
    stuck.state = READY
    assert second.turn() == ["b"], "the first had reported that it goes"


def test_ranks_that_never_report_are_not_waited_for_any_more() -> None:
    first, _, hearsay = pair()
    hearsay.deaf = True
    for tag in range(MAX_SILENCES):
        first.queue.queue.append(Req(f"a{tag}", GangPart(tag, 1, 2)))
        assert first.turns_until_pop() > 1
    assert first.hold.fault() == GATE_ALONE
    first.queue.queue.append(Req("next", GangPart(100, 1, 2)))
    assert first.turn() == ["next"]


def test_ranks_hear_each_other_through_sockets(request: pytest.FixtureRequest) -> None:
    name = f"sglang-sbs-test.{id(request)}"
    boards = [SocketBoard(name, rank, 3) for rank in range(3)]
    try:
        boards[0].publish(7, Word(ready_turn=3, arrived=True))
        boards[2].publish(7, Word(arrived=True, gave_up_turn=4))
        boards[1].listen()
        assert boards[1].words_of(7) == {
            0: Word(ready_turn=3, arrived=True),
            2: Word(arrived=True, gave_up_turn=4),
        }
        assert boards[0].words_of(7) == {0: Word(ready_turn=3, arrived=True)}
        assert boards[1].words_of(8) == {}
        with pytest.raises(OSError, match="in use"):
            SocketBoard(name, 0, 3)
    finally:
        for board in boards:
            board.close()


def test_a_rank_that_is_not_up_yet_is_no_error() -> None:
    board = SocketBoard("sglang-sbs-test.alone", 0, 2)
    board.publish(1, Word(ready_turn=1))
    board.listen()
    assert board.words_of(1).keys() == {0}
    board.close()


def test_a_rank_silent_for_long_is_not_polled_every_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = SocketBoard("sglang-sbs-test.silent", 0, 2)
    for tag in range(MAX_SILENCES):
        board.listen()
        board.waited(tag)
    assert (board.is_open, board.failed) == (False, True)
    asked: list[int] = []
    monkeypatch.setattr(SocketBoard, "_read", lambda _board, peer, _inbox: asked.append(peer))
    board.listen()
    board.publish(MAX_SILENCES, Word(arrived=True))
    board.publish_later(MAX_SILENCES, Word(taken_turn=1))
    board.listen()
    board.close()
    assert asked == []


def test_nothing_is_held_where_no_turns_are_counted() -> None:
    """The same happens with a release of SGLang whose event loop the hook does not find."""
    rank = Rank(Clock(), ranks=2, hearsay=Hearsay())
    rank.pop()
    rank.queue.queue = [Req("a", GangPart(1, 2, 2))]
    assert rank.pop() == ["a"]


@pytest.mark.parametrize("room", [-1, 1 << 80])
def test_a_room_that_no_router_gave_has_a_tag_that_can_be_said(room: int) -> None:
    assert 0 <= part_of_room(room).tag < 1 << TAG_BITS
