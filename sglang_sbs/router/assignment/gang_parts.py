"""Tells each dispatched request which part of which gang it is, for its engine to wait by.

A gang is what leaves for one prefill instance at one moment. A request that leaves while a gang is
on its way follows that gang: the engine starts both in the same pass (``engine.gang_hold``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from sglang_sbs.scheduling.events import Command, Dispatch, InstanceId
from sglang_sbs.wire.gangs import GangPart

_MOST_INSTANCES = 4096
"""Whose newest gangs are remembered; those that left no trace for longest are forgotten."""


class GangParts:
    """The gangs of one scheduler."""

    def __init__(self) -> None:
        self._tag = random.getrandbits(32)
        """Of the next gang; other routers of the same engines begin elsewhere."""
        self._newest: dict[InstanceId, GangPart] = {}
        """What says that a request follows it."""

    def told(self, commands: Sequence[Command]) -> Sequence[Command]:
        """The decisions of one moment, each dispatch with its part."""
        dispatched = [one for one in commands if isinstance(one, Dispatch)]
        if not dispatched:
            return commands
        members = Counter((one.prefill, one.batch, one.prefill_rank) for one in dispatched)
        ranks = Counter((prefill, batch) for prefill, batch, _rank in members)
        tags: dict[tuple[InstanceId, int], int] = {}

        def part_of(one: Dispatch) -> GangPart:
            batch = one.prefill, one.batch
            leader = self._newest.get(one.prefill)
            if one.joins and leader is not None and batch not in tags:
                return leader
            part = GangPart(
                tags.setdefault(batch, self._tag + len(tags)),
                members[*batch, one.prefill_rank],
                ranks[batch],
            )
            self._newest.pop(one.prefill, None)
            if part.members > 1 or part.ranks > 1:  # nobody is held for one request
                self._newest[one.prefill] = GangPart(part.tag, 0, part.ranks)
            return part

        told = [
            msgspec.structs.replace(one, gang=part_of(one)) if isinstance(one, Dispatch) else one
            for one in commands
        ]
        self._tag += len(tags)
        while len(self._newest) > _MOST_INSTANCES:
            del self._newest[next(iter(self._newest))]
        return told
