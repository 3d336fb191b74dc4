"""Treats each rank of a worker without a barrier (DWDP, SGLANG_SCHEDULER_SKIP_ALL_GATHER, no DP
attention) as a prefill instance, because such ranks number and end their passes independently.

Outside the scheduler such a worker stays one instance: this module translates between the driver's
names (worker, rank) and the scheduler's (instance, 0)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from sglang_sbs.scheduling import events as ev


class WorkerRank(NamedTuple):
    """A DP rank as the driver names it, by its worker and its number there."""

    worker: ev.InstanceId
    rank: int
    dp_size: int
    """DP size of the worker."""


class LoneRanks:
    """Translates names from the driver (:meth:`inside`) and back to it (:meth:`outside`)."""

    def __init__(self) -> None:
        self._instances: dict[ev.InstanceId, list[ev.InstanceId]] = {}
        """Instances of a worker's ranks in order, by worker; only workers without a barrier."""
        self._ranks: dict[ev.InstanceId, WorkerRank] = {}
        """Worker and rank of each instance that is a single rank, by instance."""

    def instances(self, worker: ev.InstanceId) -> list[ev.InstanceId]:
        """Return a worker's instances: itself, or one per rank without a barrier."""
        return self._instances.get(worker) or [worker]

    def ranks_of(self, worker: ev.InstanceId) -> dict[ev.InstanceId, tuple[ev.InstanceId, int]]:
        """Return (worker, rank) of each instance that is a rank of a worker without a barrier."""
        names = self._instances.get(worker, ())
        return {name: (worker, rank) for rank, name in enumerate(names)}

    def outside(self, instance: ev.InstanceId, rank: int, dp_size: int) -> WorkerRank:
        """Return the driver's name of a rank. ``dp_size``: number of ranks of ``instance``."""
        return self._ranks.get(instance) or WorkerRank(instance, rank, dp_size)

    def place(self, worker: ev.InstanceId, rank: int) -> tuple[ev.InstanceId, int]:
        """Return the scheduler's (instance, rank) for the driver's names, which are the same with a
        barrier. For a rank that does not exist, the result matches no instance."""
        instances = self._instances.get(worker)
        if instances is None or not 0 <= rank < len(instances):
            return worker, rank
        return instances[rank], 0

    def up(self, event: ev.InstanceUp) -> tuple[list[ev.InstanceUp], list[ev.InstanceId]]:
        """Record that a worker is up. Return an event for each of its instances, and the ids of
        instances that no longer belong to it."""
        worker = event.instance
        before = self.instances(worker)
        for name in before:
            self._ranks.pop(name, None)
        self._instances.pop(worker, None)
        if event.barrier or event.role != "prefill" or event.dp_size == 1:
            return [event], [name for name in before if name != worker]
        names = [f"{worker} rank {rank}" for rank in range(event.dp_size)]
        self._instances[worker] = names
        for rank, name in enumerate(names):
            self._ranks[name] = WorkerRank(worker, rank, event.dp_size)
        alone = [msgspec.structs.replace(event, instance=name, dp_size=1) for name in names]
        return alone, [name for name in before if name not in self._ranks]

    def forget(self, instance: ev.InstanceId) -> None:
        known = self._ranks.pop(instance, None)
        if known is not None:
            self._instances.pop(known.worker, None)

    def polls(self, event: ev.LoadPolled) -> Iterable[ev.LoadPolled]:
        names = self._instances.get(event.instance)
        figures = event.queued_tokens, event.running_requests, event.kv_tokens
        if names is None:
            return [event]
        if any(len(values) != len(names) for values in figures):
            return []
        return [
            ev.LoadPolled(instance=name, queued_tokens=[a], running_requests=[b], kv_tokens=[c])
            for name, a, b, c in zip(names, *figures, strict=True)
        ]

    def inside(self, event: ev.Event) -> ev.Event:
        """Return the event with the scheduler's names if it concerns one rank or request; other
        events are returned unchanged."""
        if not self._instances:
            return event
        match event:
            case ev.ForwardEnded():
                name, rank = self.place(event.instance, event.report.dp_rank)
                if name == event.instance:
                    return event
                # Its information about other ranks, if any, does not concern this pass.
                report = msgspec.structs.replace(
                    event.report, dp_rank=rank, dp_size=1, tokens_per_rank=None
                )
                return ev.ForwardEnded(instance=name, report=report)
            case ev.BlocksStored() | ev.BlocksRemoved() | ev.BlocksCleared():
                name, rank = self.place(event.instance, event.dp_rank)
                return msgspec.structs.replace(event, instance=name, dp_rank=rank)
            case ev.RequestAdopted():
                name, rank = self.place(event.prefill, event.prefill_rank)
                return msgspec.structs.replace(event, prefill=name, prefill_rank=rank)
            case ev.RequestArrived(exclude=workers) if workers:
                names = tuple(name for worker in workers for name in self.instances(worker))
                return msgspec.structs.replace(event, exclude=names)
            case _:
                return event
