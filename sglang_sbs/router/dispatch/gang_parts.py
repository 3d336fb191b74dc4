"""Labels each dispatched request with its part of a batch: the requests dispatched to one prefill
instance at one moment. Requests dispatched while the batch is on its way follow it, and the engine
starts all in the same pass (``engine.gang_hold``)."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from sglang_sbs.scheduling.events import Command, Dispatch, InstanceId
from sglang_sbs.wire.gangs import DRAWN_BITS, TAG_BITS, GangPart, is_sized

_MOST_INSTANCES = 4096
"""Limit on instances whose latest batch is remembered; the least recently used are forgotten."""

_Instance = tuple[InstanceId, int]
"""Unit that runs its own passes: a worker and -1, or a worker without a barrier and one of its
ranks."""


@dataclass(slots=True)
class _LabelledBatch:
    tag: int
    number: int
    """Number of the last request labelled with this tag; it starts at random."""
    ranks: int

    def part(self, members: int) -> GangPart:
        self.number += 1
        return GangPart(self.tag, members, self.ranks, self.number)


class GangParts:
    def __init__(self) -> None:
        self._tag = random.getrandbits(TAG_BITS)
        """Tag of the last batch. It starts at random, so that routers of the same engines use
        different ones."""
        self._newest: dict[_Instance, _LabelledBatch] = {}
        """Latest batch of each unit, if it had several requests: engines do not wait for a batch of
        one. Later requests may follow it."""

    def labelled(self, commands: Sequence[Command]) -> Sequence[Command]:
        """Return the commands with a :class:`GangPart` added to each dispatch, which has the number
        of its batch's requests for its DP rank, so that the engine waits for them. ``commands``:
        all of one decision. They are returned unchanged if no bootstrap room describes a batch
        (:func:`.is_sized`)."""
        dispatched = [command for command in commands if isinstance(command, Dispatch)]
        for dispatch in dispatched:
            if is_sized(dispatch.rid):
                break
        else:  # no engine reads it
            for dispatch in dispatched if self._newest else ():
                self._newest.pop(_instance_of(dispatch), None)
            return commands
        members: dict[_Instance, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for dispatch in dispatched:
            members[_instance_of(dispatch)][dispatch.prefill_rank] += 1
        gangs: dict[_Instance, _LabelledBatch] = {}
        parts: dict[str, GangPart] = {}
        for dispatch in dispatched:
            instance = _instance_of(dispatch)
            leader = self._newest.get(instance)
            if instance not in gangs and dispatch.joins and leader is not None:
                parts[dispatch.rid] = leader.part(0)
                continue
            if instance not in gangs:
                self._tag = (self._tag + 1) % (1 << TAG_BITS)
                drawn = random.getrandbits(DRAWN_BITS)
                gangs[instance] = _LabelledBatch(self._tag, drawn, len(members[instance]))
            parts[dispatch.rid] = gangs[instance].part(members[instance][dispatch.prefill_rank])
        for instance, gang in gangs.items():
            self._newest.pop(instance, None)
            if sum(members[instance].values()) > 1:
                self._newest[instance] = gang
        while len(self._newest) > _MOST_INSTANCES:
            del self._newest[next(iter(self._newest))]
        return [
            msgspec.structs.replace(command, gang=parts[command.rid])
            if isinstance(command, Dispatch)
            else command
            for command in commands
        ]


def _instance_of(dispatch: Dispatch) -> _Instance:
    return dispatch.prefill, -1 if dispatch.barrier else dispatch.prefill_rank
