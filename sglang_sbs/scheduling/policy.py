"""The interface every prefill policy implements, and the immediate policies behind it.

Owns :class:`PrefillPolicy`, :class:`Plan` and the baselines that place a request the moment it
arrives. Must not know the queue's bookkeeping, decode, or how instances keep their state true.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sglang_sbs.scheduling.prefill_instance import PrefillInstance
from sglang_sbs.scheduling.request import Request, RequestQueue

Admissible = Callable[[Request], bool]
"""Whether some decode rank has room for the request now."""


class Placement(NamedTuple):
    """One request on one prefill DP rank."""

    request: Request
    instance: PrefillInstance
    rank: int


@dataclass(slots=True)
class Plan:
    """What to dispatch now, and when to ask again if nothing happens before."""

    placements: list[Placement] = field(default_factory=list)
    reason: str = ""
    wake_s: float | None = None
    passed_over: list[Request] = field(default_factory=list)
    """Requests that took part in this cycle and were not allocated: Q_next of Algorithm 2."""


class PrefillPolicy(Protocol):
    """Decides which waiting requests leave now, for which instance and DP rank."""

    holds: bool
    """Whether requests may wait in the scheduler. If not, decode admission does not hold either."""

    def key_of(self, request: Request) -> float:
        """Its place in the queue's order, smallest first; asked once, when it arrives."""

    def on_topology_change(self, instances: Sequence[PrefillInstance]) -> None:
        """These are the prefill instances that are up now."""

    def on_arrival(self, tokens: int, now_s: float) -> None:
        """A request of this many prompt tokens was queued."""

    def on_landing(self, landed_s: Sequence[float], missed_s: Sequence[float]) -> None:
        """A rank launched: how long before it those requests were sent that were in time, and those
        that were not."""

    def plan(
        self,
        queue: RequestQueue,
        instances: Sequence[PrefillInstance],
        admissible: Admissible,
        now_s: float,
    ) -> Plan:
        """One decision. Called again until it places nothing; neither ``queue`` nor ``instances``
        is ever empty."""


def permitted(
    request: Request, instance: PrefillInstance, instances: Sequence[PrefillInstance]
) -> bool:
    """A retry avoids the instances it failed on, while there are others."""
    return instance.id not in request.exclude or all(i.id in request.exclude for i in instances)


class ImmediatePolicy:
    """Places every request when it arrives; subclasses choose where."""

    holds = False

    def key_of(self, request: Request) -> float:
        return request.arrived_s

    def on_topology_change(self, instances: Sequence[PrefillInstance]) -> None:
        """Nothing to adapt to."""

    def on_arrival(self, tokens: int, now_s: float) -> None:
        """Immediate policies keep no statistics."""

    def on_landing(self, landed_s: Sequence[float], missed_s: Sequence[float]) -> None:
        """Immediate policies aim at no pass."""

    def plan(
        self,
        queue: RequestQueue,
        instances: Sequence[PrefillInstance],
        admissible: Admissible,
        now_s: float,
    ) -> Plan:
        request = queue.oldest
        if request is None:
            return Plan()
        candidates = [i for i in instances if permitted(request, i, instances)]
        instance, rank = self.choose(candidates)
        return Plan([Placement(request, instance, rank)], reason="immediate")

    def choose(self, instances: Sequence[PrefillInstance]) -> tuple[PrefillInstance, int]:
        """The instance and DP rank of the next request."""
        raise NotImplementedError


class RoundRobin(ImmediatePolicy):
    """Instances in turn; within an instance, DP ranks in turn."""

    def __init__(self) -> None:
        self._next = 0
        self._next_rank: dict[str, int] = {}

    def choose(self, instances: Sequence[PrefillInstance]) -> tuple[PrefillInstance, int]:
        instance = instances[self._next % len(instances)]
        self._next += 1
        rank = self._next_rank.get(instance.id, 0) % instance.dp_size
        self._next_rank[instance.id] = rank + 1
        return instance, rank


class Random(ImmediatePolicy):
    """A random instance and a random DP rank: gateway `random` over SGLang's room mod dp."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, instances: Sequence[PrefillInstance]) -> tuple[PrefillInstance, int]:
        instance = self._random.choice(instances)
        return instance, self._random.randrange(instance.dp_size)


class RandomRank(Random):
    """Instances in turn, a random DP rank: gateway `round_robin` over SGLang's room mod dp."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._next = 0

    def choose(self, instances: Sequence[PrefillInstance]) -> tuple[PrefillInstance, int]:
        instance = instances[self._next % len(instances)]
        self._next += 1
        return instance, self._random.randrange(instance.dp_size)


class LeastRequests(ImmediatePolicy):
    """The instance with the fewest unfinished requests, then its DP rank with the fewest."""

    def choose(self, instances: Sequence[PrefillInstance]) -> tuple[PrefillInstance, int]:
        instance = min(instances, key=lambda i: sum(len(r.outstanding) for r in i.ranks))
        rank = min(range(instance.dp_size), key=lambda d: len(instance.ranks[d].outstanding))
        return instance, rank


class LeastTokens(ImmediatePolicy):
    """The DP rank with the fewest unfinished prompt tokens, over all instances."""

    def choose(self, instances: Sequence[PrefillInstance]) -> tuple[PrefillInstance, int]:
        return min(
            ((i, d) for i in instances for d in range(i.dp_size)),
            key=lambda place: place[0].ranks[place[1]].outstanding.total,
        )
