"""Requests that were sent after a gang, to be in the same pass, start with it and not before."""

from __future__ import annotations

from gang_fakes import GATE_MS, TURN_S, WAITING, Clock, Hearsay, Rank, Req

from sglang_sbs.wire.gangs import GangPart

FOLLOWS = 0


def test_a_follower_waits_for_the_batch_at_its_rank():
    rank = Rank(Clock())
    late = Req("late", GangPart(1, 2, 1), state=WAITING)
    rank.queue.queue += [Req("first", GangPart(1, 2, 1)), late, Req("f", GangPart(1, FOLLOWS, 1))]
    assert rank.turn() == []
    late.state = 2
    assert sorted(rank.turn()) == ["f", "first", "late"]


def test_the_gang_waits_for_the_handshake_of_who_follows():
    rank = Rank(Clock())
    follows = Req("f", GangPart(1, FOLLOWS, 1), state=WAITING)
    rank.queue.queue += [Req("a", GangPart(1, 2, 1)), Req("b", GangPart(1, 2, 1)), follows]
    assert rank.turn() == []
    follows.state = 2
    assert sorted(rank.turn()) == ["a", "b", "f"]


def three_ranks() -> tuple[Rank, Rank, Rank]:
    clock, hearsay = Clock(), Hearsay()
    first, second, third = (Rank(clock, rank=i, ranks=3, hearsay=hearsay) for i in range(3))
    return first, second, third


def test_a_follower_at_another_rank_starts_with_the_batch():
    first, second, third = three_ranks()
    part = GangPart(1, 1, 2)
    late = Req("b", part, state=WAITING)
    first.queue.queue.append(Req("a", part))
    second.queue.queue.append(late)
    third.queue.queue.append(Req("f", GangPart(1, FOLLOWS, 2)))
    for _ in range(3):
        assert [first.turn(), second.turn(), third.turn()] == [[], [], []]
    late.state = 2
    assert [first.turn(), second.turn(), third.turn()] == [[], [], []]
    assert [first.turn(), second.turn(), third.turn()] == [["a"], ["b"], ["f"]]


def test_a_gang_that_never_comes_costs_one_bounded_wait():
    _, _, third = three_ranks()
    third.queue.queue.append(Req("f", GangPart(1, FOLLOWS, 2)))
    assert third.turns_until_pop() <= GATE_MS / 1e3 / TURN_S + 2


def test_no_request_is_held_through_several_passes():
    """Turns are rare while passes run: what is counted in turns would take long to be over."""
    first, _, third = three_ranks()
    third.queue.queue.append(Req("f", GangPart(1, FOLLOWS, 2)))
    first.queue.queue.append(Req("a", GangPart(2, 1, 2)))
    for rank in (first, third):
        rank.queue.scheduler.forward_ct = 10
        assert rank.turn() == []
        rank.queue.scheduler.forward_ct = 11
        assert rank.turn(after_s=1.0) == []
        rank.queue.scheduler.forward_ct = 12
    assert third.turn(after_s=1.0) == ["f"]
    assert first.turn(after_s=1.0) + first.turn() == ["a"]


def test_a_batch_of_one_rank_is_not_sent_elsewhere_and_not_waited_for():
    _, _, third = three_ranks()
    third.queue.queue.append(Req("f", GangPart(1, FOLLOWS, 1)))
    assert third.turn() == ["f"]
