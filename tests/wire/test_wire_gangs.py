"""Rooms that say what a request was sent with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.wire.gangs import (
    DRAWN_BITS,
    MOST,
    GangPart,
    gang_room,
    part_of_room,
)


@given(
    tag=st.integers(0, 2**40),
    members=st.integers(1, MOST),
    ranks=st.integers(1, MOST),
    step=st.integers(1, 4096),
    data=st.data(),
)
def test_a_room_says_its_part_and_keeps_its_rank(
    tag: int, members: int, ranks: int, step: int, data: st.DataObject
) -> None:
    remainder = data.draw(st.integers(0, step - 1))
    room = gang_room(GangPart(tag, members, ranks), step, remainder)
    assert 0 <= room < 2**63
    assert room % step == remainder
    assert part_of_room(room) == GangPart(tag % 2**20, members, ranks)


def test_a_gang_too_large_for_a_room_is_waited_for_by_nobody() -> None:
    part = part_of_room(gang_room(GangPart(7, MOST + 1, 2), 2, 1))
    assert (part.members, part.ranks) == (1, 1)


def test_requests_of_one_gang_have_rooms_of_their_own() -> None:
    """However few numbers the ranks leave, and wherever counting began."""
    step = 1 << (DRAWN_BITS - 5)
    rooms = {gang_room(GangPart(7, 20, 2, 2**29 - 10 + i), step, 0) for i in range(20)}
    assert len(rooms) == 20
