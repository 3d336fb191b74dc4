"""A gang that decode has taken in while a pass ran starts in the first turn after that pass."""

from __future__ import annotations

import time

from gang_fakes import WAITING, Clock, Hearsay, Rank, Req

from sglang_sbs.engine.gang_board import SocketBoard, Word
from sglang_sbs.engine.room_status import TAKEN_IN
from sglang_sbs.wire.gangs import GangPart

PART = GangPart(1, 2, 2)


def two_ranks(**of_rank: int) -> list[Rank]:
    clock, hearsay = Clock(), Hearsay()
    return [Rank(clock, rank=rank, ranks=2, hearsay=hearsay, **of_rank) for rank in range(2)]


def running(ranks: list[Rank], part: GangPart = PART) -> list[list[Req]]:
    """A pass runs; two requests for each rank are in the handshake, still in its socket."""
    for rank in ranks:
        assert rank.turn() == []
    return [[Req(f"{n}a", part, WAITING), Req(f"{n}b", part, WAITING)] for n, _ in enumerate(ranks)]


def pass_ends(ranks: list[Rank], reqs: list[list[Req]]) -> list[list[str]]:
    """Return the requests that each starts in the turn after it."""
    for rank, its in zip(ranks, reqs, strict=True):
        rank.ends_pass()
        rank.queue.queue += its
    return [rank.turn() for rank in ranks]


def test_all_start_without_another_turn():
    ranks = two_ranks()
    reqs = running(ranks)
    for rank, its in zip(ranks, reqs, strict=True):
        rank.takes_in(*its)
    assert pass_ends(ranks, reqs) == [["0a", "0b"], ["1a", "1b"]]


def test_no_part_starts_before_the_last_is_taken_in():
    ranks = two_ranks()
    reqs = running(ranks)
    ranks[0].takes_in(*reqs[0])
    ranks[1].takes_in(reqs[1][0])
    assert pass_ends(ranks, reqs) == [[], []]
    reqs[1][1].state = TAKEN_IN
    assert [rank.turn() for rank in ranks] == [[], []]
    assert [rank.turn() for rank in ranks] == [["0a", "0b"], ["1a", "1b"]]


def test_what_is_taken_in_after_the_pass_waits_for_the_turn_in_which_all_know():
    """One rank may hear of it before its look at the queue, and another after its own."""
    ranks = two_ranks()
    reqs = running(ranks)
    ranks[0].takes_in(*reqs[0])
    for rank, its in zip(ranks, reqs, strict=True):
        rank.ends_pass()
        rank.queue.queue += its
    ranks[1].takes_in(*reqs[1])
    assert [rank.turn() for rank in ranks] == [[], []]
    assert [rank.turn() for rank in ranks] == [["0a", "0b"], ["1a", "1b"]]


def test_no_pass_no_short_cut():
    """Ranks of an idle loop look at different times: what one knows another may not."""
    ranks = two_ranks()
    reqs = running(ranks)
    for rank, its in zip(ranks, reqs, strict=True):
        rank.takes_in(*its)
        rank.queue.queue += its
    assert [rank.turn() for rank in ranks] == [[], []]
    assert [rank.turn() for rank in ranks] == [["0a", "0b"], ["1a", "1b"]]


def test_where_idle_ranks_have_their_result_before_the_pass_ends_there_is_no_short_cut():
    """A device without overlap scheduling: who computes would know more than who is idle."""
    ranks = two_ranks()
    reqs = running(ranks)
    for rank, its in zip(ranks, reqs, strict=True):
        rank.takes_in(*its)
        rank.ends_pass(is_awaited=False)
        rank.queue.queue += its
    assert [rank.turn() for rank in ranks] == [[], []]
    assert [rank.turn() for rank in ranks] == [["0a", "0b"], ["1a", "1b"]]


def test_a_follower_at_a_rank_without_a_part_starts_with_the_batch():
    clock, hearsay = Clock(), Hearsay()
    ranks = [Rank(clock, rank=rank, ranks=3, hearsay=hearsay) for rank in range(3)]
    reqs = running(ranks[:2])
    assert ranks[2].turn() == []
    for rank, its in zip(ranks[:2], reqs, strict=True):
        rank.takes_in(*its)
    follows = Req("f", GangPart(1, 0, 2))
    assert pass_ends(ranks, [*reqs, [follows]]) == [["0a", "0b"], ["1a", "1b"], ["f"]]


def test_a_handshake_of_who_follows_keeps_no_part_back_that_the_others_let_go():
    ranks = two_ranks()
    reqs = running(ranks)
    for rank, its in zip(ranks, reqs, strict=True):
        rank.takes_in(*its)
    late = Req("f", GangPart(1, 0, 2), WAITING)
    assert pass_ends(ranks, [[*reqs[0], late], reqs[1]]) == [["0a", "0b"], ["1a", "1b"]]
    late.state = TAKEN_IN
    assert ranks[0].turn() == ["f"]


def test_of_several_processes_none_speaks_for_the_others():
    """Decode takes a request in with each of them by itself."""
    clock, hearsay = Clock(), Hearsay()
    rank = Rank(clock, ranks=2, attn_tp=2, hearsay=hearsay)
    reqs = running([rank])
    rank.takes_in(*reqs[0])
    assert not any(words._words for words in hearsay.said.values())


def test_rooms_of_strangers_are_forgotten_and_end_no_thread():
    rank = two_ranks()[0]
    rank.turn()
    for room in range(1 << 40, 1 << 63, 1 << 53):
        rank.hold.after_update_status(None, None, room, TAKEN_IN)
    rank.hold.after_update_status(None, None, "room", TAKEN_IN)
    assert len(rank.hold._taken) <= 64


def test_words_of_two_threads_add_up():
    name = f"sglang-sbs.test.{time.monotonic_ns()}"
    first, second = SocketBoard(name, 0, 2), SocketBoard(name, 1, 2)
    try:
        first.publish(1, Word(arrived=True))
        first.publish_later(1, Word(taken_turn=7))
        first.publish(1, Word(ready_turn=8))
        for board in (first, second):
            board.listen()
            assert board.words_of(1)[0] == Word(ready_turn=8, arrived=True, taken_turn=7)
    finally:
        first.close()
        second.close()
