"""Encodes in a request which batch it was sent with, for its prefill instance.

The description is part of the bootstrap room, the one number that reaches SGLang's scheduler
process unchanged through every endpoint of every release. :func:`is_sized` recognizes such requests
by their ids.

A room has 63 bits: ``tag`` (20), ``members`` (7), ``ranks`` (7) and 29 that distinguish the
requests of a batch, so that the room has the remainder by which SGLang finds the DP rank. Two
requests with the same room would get each other's KV cache."""

from __future__ import annotations

import random

import msgspec

SIZED_RID_PREFIX = "sbs-g"
RESPONSE_RID_PREFIX = "resp_"
"""Prefix of ids of ``/v1/responses``, which clients see."""
TAG_BITS, COUNT_BITS, DRAWN_BITS = 20, 7, 29
MOST = (1 << COUNT_BITS) - 1


class GangPart(msgspec.Struct, array_like=True, frozen=True):
    """The part of a batch that goes to one DP rank."""

    tag: int
    """Number that distinguishes batches on their way to an instance at the same time."""
    members: int
    """Number of requests of the batch for this rank. 0: the request is not in the batch, but
    follows it and should start in the same pass."""
    ranks: int
    """DP ranks of the instance that get requests of the batch, this one included if it has any."""
    number: int | None = None
    """Number of the request among those with its tag, in any order. The room encodes it in another
    form. None selects a random number, for a request whose tag is unique."""


def is_sized(rid: str) -> bool:
    """Return whether the bootstrap room of the request with this id describes a batch."""
    return rid.removeprefix(RESPONSE_RID_PREFIX).startswith(SIZED_RID_PREFIX)


def gang_room(part: GangPart, step: int, remainder: int) -> int:
    """Return a fresh room that describes ``part``, with ``room % step == remainder``. Counts that
    do not fit are omitted, and the engine then waits for no other request."""
    members, ranks = part.members, part.ranks
    if members > MOST or ranks > MOST:
        members = ranks = 1
    number = random.getrandbits(DRAWN_BITS) if part.number is None else part.number
    tag = part.tag % (1 << TAG_BITS)
    least = ((tag << COUNT_BITS | members) << COUNT_BITS | ranks) << DRAWN_BITS
    first = least + (remainder - least) % step
    return first + step * (number % ((1 << DRAWN_BITS) // step - 1))


def part_of_room(room: int) -> GangPart:
    """Return the part encoded by :func:`gang_room`."""
    head = room >> DRAWN_BITS
    return GangPart(
        tag=head >> 2 * COUNT_BITS & ((1 << TAG_BITS) - 1),
        members=head >> COUNT_BITS & MOST,
        ranks=head & MOST,
    )
