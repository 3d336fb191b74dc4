"""What a request tells its prefill instance of the gang it was sent with.

It travels in the bootstrap room, the one number that reaches SGLang's scheduler process untouched
through every endpoint of every release. :func:`is_sized` tells such requests by their ids. Owns how
the number is put together.

A room has 63 bits: ``tag`` (20), ``members`` (7), ``ranks`` (7) and 29 that tell the requests of a
gang apart, so that the room has the remainder by which SGLang finds the DP rank. Two requests with
one room would get each other's KV cache.
"""

from __future__ import annotations

import random

import msgspec

SIZED_RID_PREFIX = "sbs-g"
RESPONSE_RID_PREFIX = "resp_"
"""Ids of ``/v1/responses`` begin with it, sized or not: their clients see them."""
TAG_BITS, COUNT_BITS, DRAWN_BITS = 20, 7, 29
MOST = (1 << COUNT_BITS) - 1


class GangPart(msgspec.Struct, array_like=True, frozen=True):
    """The part of a gang that goes to one DP rank."""

    tag: int
    """Tells gangs apart that are on their way to an instance at the same time."""
    members: int
    """Requests of the gang for this rank. 0: it is not of the gang, but follows it and is to start
    in the same pass."""
    ranks: int
    """DP ranks of the instance that get requests of the gang, this one included if it has any."""
    number: int | None = None
    """Of the request among those with its tag, counted from anywhere; it is not in the room as it
    is. None: drawn, for one that shares its tag with nobody."""


def is_sized(rid: str) -> bool:
    """Whether the bootstrap room of the request with this id has a gang's part in it."""
    return rid.removeprefix(RESPONSE_RID_PREFIX).startswith(SIZED_RID_PREFIX)


def gang_room(part: GangPart, step: int, remainder: int) -> int:
    """A fresh room that says ``part``, with ``room % step == remainder``. Counts that do not fit
    are left out: the engine waits for nobody then."""
    members, ranks = part.members, part.ranks
    if members > MOST or ranks > MOST:
        members = ranks = 1
    number = random.getrandbits(DRAWN_BITS) if part.number is None else part.number
    tag = part.tag % (1 << TAG_BITS)
    least = ((tag << COUNT_BITS | members) << COUNT_BITS | ranks) << DRAWN_BITS
    first = least + (remainder - least) % step
    return first + step * (number % ((1 << DRAWN_BITS) // step - 1))


def part_of_room(room: int) -> GangPart:
    """What :func:`gang_room` was given."""
    head = room >> DRAWN_BITS
    return GangPart(
        tag=head >> 2 * COUNT_BITS & ((1 << TAG_BITS) - 1),
        members=head >> COUNT_BITS & MOST,
        ranks=head & MOST,
    )
