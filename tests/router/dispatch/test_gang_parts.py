"""Requests name the batch they leave with, or follow."""

from __future__ import annotations

import msgspec

from sglang_sbs.router.dispatch.gang_parts import GangParts
from sglang_sbs.scheduling.events import Dispatch, WakeAt
from sglang_sbs.wire.gangs import DRAWN_BITS, SIZED_RID_PREFIX, GangPart, gang_room


def leave(
    rid: str, rank: int, batch: int, *, joins: bool = False, to: str = "p0", barrier: bool = True
) -> Dispatch:
    return Dispatch(
        rid=SIZED_RID_PREFIX + rid,
        prefill=to,
        prefill_rank=rank,
        decode="d0",
        decode_rank=0,
        batch=batch,
        held_s=0.0,
        reason="",
        joins=joins,
        barrier=barrier,
    )


def parts_of(gangs: GangParts, *commands: Dispatch) -> list[GangPart]:
    labelled = gangs.labelled([*commands, WakeAt(time_s=1.0)])
    assert labelled[-1] == WakeAt(time_s=1.0)
    return [
        command.gang
        for command in labelled
        if isinstance(command, Dispatch) and command.gang is not None
    ]


def says(part: GangPart) -> tuple[int, int, int]:
    return part.tag, part.members, part.ranks


def test_requests_that_leave_together_carry_their_number():
    a, b, c = parts_of(GangParts(), leave("a", 0, 7), leave("b", 0, 7), leave("c", 1, 7))
    assert a.tag == b.tag == c.tag
    assert [(part.members, part.ranks) for part in (a, b, c)] == [(2, 2), (2, 2), (1, 2)]


def test_who_leaves_later_for_the_same_pass_follows_the_gang():
    gangs = GangParts()
    first, _ = parts_of(gangs, leave("a", 0, 7), leave("b", 1, 7))
    for number in (8, 9):
        (late,) = parts_of(gangs, leave("late", 3, number, joins=True))
        assert says(late) == (first.tag, 0, 2)


def test_requests_that_pass_no_part_on_get_none_and_are_not_followed():
    gangs = GangParts()
    parts_of(gangs, leave("a", 0, 7), leave("b", 1, 7))
    plain = [msgspec.structs.replace(leave("c", 0, 8), rid=rid) for rid in ("c", "resp_d")]
    assert parts_of(gangs, *plain) == []
    (late,) = parts_of(gangs, leave("late", 3, 9, joins=True))
    assert (late.members, late.ranks) == (1, 1)


def test_a_gang_of_another_instance_is_not_followed():
    gangs = GangParts()
    parts_of(gangs, leave("a", 0, 7))
    first, second = parts_of(
        gangs, leave("b", 0, 8, joins=True, to="p1"), leave("c", 0, 8, joins=True, to="p1")
    )
    assert says(first) == says(second) == (first.tag, 2, 1)


def test_the_newest_gang_is_followed():
    gangs = GangParts()
    parts_of(gangs, leave("a", 0, 7), leave("b", 1, 7))
    newest, _ = parts_of(gangs, leave("c", 0, 8), leave("d", 0, 8))
    (late,) = parts_of(gangs, leave("e", 0, 9, joins=True))
    assert says(late) == (newest.tag, 0, 1)


def test_two_batches_of_one_moment_are_one_gang():
    """They are for one pass, or the engine cuts them where a chunk is full."""
    first, second = parts_of(GangParts(), leave("a", 0, 7), leave("b", 1, 8))
    assert says(first) == says(second) == (first.tag, 1, 2)


def test_ranks_without_a_barrier_have_gangs_of_their_own():
    gangs = GangParts()
    first, _ = parts_of(gangs, *(leave(rid, 0, 7, barrier=False) for rid in "ab"))
    other, _ = parts_of(gangs, *(leave(rid, 1, 8, barrier=False) for rid in "cd"))
    (late,) = parts_of(gangs, leave("e", 0, 9, joins=True, barrier=False))
    assert other.tag != first.tag
    assert says(late) == (first.tag, 0, 1)


def test_no_two_requests_share_a_room():
    """They would get each other's KV cache."""
    gangs = GangParts()
    parts = parts_of(gangs, *(leave(f"r{i}", 0, 7) for i in range(100)))
    parts += [p for i in range(100) for p in parts_of(gangs, leave(f"f{i}", 0, 8 + i, joins=True))]
    step = (1 << DRAWN_BITS) // 150  # as if few numbers were left by the ranks
    assert len({gang_room(part, step, 0) for part in parts[:100]}) == 100
    assert len({part.number for part in parts}) == 200


def test_a_single_request_is_not_followed():
    """The engine holds it for nobody."""
    gangs = GangParts()
    parts_of(gangs, leave("a", 0, 7), leave("b", 1, 7))
    parts_of(gangs, leave("c", 0, 8))
    (part,) = parts_of(gangs, leave("d", 1, 9, joins=True))
    assert (part.members, part.ranks) == (1, 1)
