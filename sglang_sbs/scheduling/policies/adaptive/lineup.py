"""Keeps instances in the order in which a batch sent now would start on them, so that a decision
need not examine all. Must not know which requests wait, or which instance gets a batch.

A computing instance is free when its passes end, whatever the present time. Such instances are kept
sorted by that time, and a decision looks at the first ones. All others are examined at each
decision: they are idle, about to launch or late, or will form the pass behind a queued one (overlap
scheduling)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from heapq import merge
from itertools import islice, takewhile
from typing import NamedTuple

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.agenda import Timetable
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance
from sglang_sbs.scheduling.prefill.ranks import Cached


class Moment(NamedTuple):
    """The time of a decision, and the dispatch latency at that time."""

    now_s: float
    latency_s: float
    """Dispatch latency (L_net) of a batch that leaves now, in seconds."""

    @property
    def arrives_s(self) -> float:
        """Time at which a batch that is sent now arrives."""
        return self.now_s + self.latency_s

    def starts_s(self, instance: PrefillInstance) -> tuple[float, float]:
        """Return two times: when the pass starts that would contain a batch sent now, and when the
        instance is free."""
        free_s = self.free_at_s(instance)
        if self.misses_next(instance):
            return free_s + instance.next_pass_s(), free_s
        return max(free_s, self.arrives_s), free_s

    def misses_next(self, instance: PrefillInstance) -> bool:
        """Return whether an instance forms its next pass from requests that it has already, before
        a batch sent now arrives."""
        return self.forms_at_s(instance) < self.arrives_s and instance.ranks.backlog_tokens > 0

    def free_at_s(self, instance: PrefillInstance) -> float:
        """Return when an instance could launch a new pass; not before ``now_s``."""
        return max(self.now_s, instance.free_at_s(self.now_s, self.latency_s))

    def forms_at_s(self, instance: PrefillInstance) -> float:
        """Return when an instance's engine forms the next batch that could include a request sent
        now; not before ``now_s``."""
        return max(self.now_s, instance.forms_at_s(self.now_s, self.latency_s))


class Starts:
    """When a batch sent at one moment would start on each instance that is up."""

    def __init__(
        self,
        instances: Instances,
        at: Moment,
        near: Collection[int],
        far: Sequence[tuple[float, int]] = (),
        first: int = 0,
    ) -> None:
        """
        Args:
            instances: all that are up. The other arguments refer to them by index.
            at: the moment of sending.
            near: instances whose start must be computed.
            far: pairs of time and instance, sorted: when the other computing instances are free.
            first: position in ``far`` of the first one that is not free before the batch arrives;
                the ones before it are in ``near``.
        """
        self.instances = instances
        self.at = at
        self.far = far
        self.first = first
        self.near = sorted([(*at.starts_s(instances[number]), number) for number in near])
        """Start of the batch, time when the instance is free, and the instance's index; sorted."""

    def __iter__(self) -> Iterator[tuple[float, float, int]]:
        """Iterate over the start times on all instances, as in :attr:`near`, soonest first."""
        return self.until(lambda: math.inf)

    def in_order(self) -> Iterator[PrefillInstance]:
        """Iterate over all instances in the order in which the batch would start on them."""
        return (self.instances[number] for _, _, number in self)

    def until(self, limit_s: Callable[[], float]) -> Iterator[tuple[float, float, int]]:
        """Iterate over start times as in :attr:`near`, soonest first, without those instances of
        ``far`` that are free after ``limit_s()``. It is called for each of them and must not
        rise."""
        far = ((free_s, free_s, number) for free_s, number in islice(self.far, self.first, None))
        return merge(self.near, takewhile(lambda start: start[0] <= limit_s(), far))

    def soonest(self, count: int) -> list[tuple[float, float, int]]:
        """Return the first ``count`` start times, as in :attr:`near`."""
        return list(islice(self, count))


class Begins:
    """Start times, by instance, of the pass that could contain a batch sent at a given moment.
    Unlike :class:`Starts`, assumes that the batch reaches the instance's next pass."""

    def __init__(self, starts: Starts, joins: Container[PrefillInstance] = ()) -> None:
        """``joins``: instances where requests sent now still join a batch on its way."""
        self.instances = starts.instances
        self._starts = starts
        self._joins = joins

    def begin_s(self, instance: PrefillInstance) -> float:
        at = self._starts.at
        free_s = at.free_at_s(instance)
        return free_s if instance in self._joins else max(at.arrives_s, free_s)

    def first(self, besides: PrefillInstance) -> PrefillInstance:
        """Return the instance other than ``besides`` where a pass begins first."""
        instances = self.instances
        return next(instances[n] for _, n in self._in_order if instances[n] is not besides)

    def later(
        self, than_s: float, besides: Collection[PrefillInstance]
    ) -> list[tuple[float, PrefillInstance]]:
        """Return pairs for all instances not in ``besides``, soonest first: how many seconds after
        ``than_s`` a pass begins there (at least 0), and the instance. Equal delays are in the order
        of ``instances``."""
        delays = sorted([(max(0.0, begin_s - than_s), n) for begin_s, n in self._in_order])
        instances = self.instances
        return [(delay_s, instances[n]) for delay_s, n in delays if instances[n] not in besides]

    @Cached
    def _in_order(self) -> list[tuple[float, int]]:
        """Pairs of :meth:`begin_s` and index of all instances, sorted."""
        starts = self._starts
        near = [(self.begin_s(self.instances[n]), n) for _, _, n in starts.near]
        return sorted([*near, *starts.far[starts.first :]])


class Marginals(dict[PrefillInstance, tuple[float, float, float]]):
    """Inputs of :func:`.few_requests.fair_share` per instance, computed on first use: tokens
    to add per second of level, the length of the next pass without more tokens, and the part of it
    for the tokens it holds (seconds)."""

    def __missing__(self, instance: PrefillInstance) -> tuple[float, float, float]:
        slope_s = 1 / instance.tokens_per_s
        held = instance.ranks.backlog_tokens
        pass_s = instance.next_pass_s() if held else instance.model.formula.fixed_s
        self[instance] = found = 1 / (2 * slope_s), pass_s, slope_s * held
        return found


class Lineup:
    """The instances that are up, and figures of them that every decision needs."""

    def __init__(self) -> None:
        self.instances: Instances = ()
        self.by_id: dict[InstanceId, PrefillInstance] = {}
        self._number_of: dict[PrefillInstance, int] = {}
        self._changed: set[PrefillInstance] = set()
        self._busy: set[int] = set()
        self._free = Timetable()
        """Times at which computing instances are free, by index in ``instances``."""
        self._others: set[int] = set()
        self._long = Timetable()
        """Length of the longest prompt at each instance in its chunks, by index; only above 1."""
        self._rooms: dict[int, int] = {}
        self.marginals = Marginals()
        self.room_tokens = 0
        """Charged tokens that still fit into the next passes of instances without request limit."""
        self.overlap = False
        """Whether any engine uses overlap scheduling, which forms a pass ahead."""

    def on_topology_change(self, instances: Instances) -> None:
        for instance in self.instances:
            instance.unsubscribe(self._changed)
        self.instances = instances
        self.by_id = {instance.id: instance for instance in instances}
        self._number_of = {instance: number for number, instance in enumerate(instances)}
        self._changed = set(instances)
        self._busy, self._others = set(), set()
        self.marginals.clear()
        self._free, self._long = Timetable(), Timetable()
        self._rooms, self.room_tokens = dict.fromkeys(range(len(instances)), 0), 0
        self.overlap = any(instance.overlap for instance in instances)
        for instance in instances:
            instance.subscribe(self._changed)

    def refresh(self) -> None:
        """Update figures of instances that have changed. Call this before each decision."""
        for instance in self._changed:
            number = self._number_of[instance]
            self.marginals.pop(instance, None)
            computes = bool(instance.passes) and not instance.forms_ahead
            self._free.set(number, instance.free_at_s(0.0, 0.0) if computes else None)
            _enter(self._others, number, not computes)
            _enter(self._busy, number, not instance.idle)
            chunks = instance.ranks.longest_prompt_tokens / instance.chunk_tokens
            self._long.set(number, chunks if chunks > 1 else None)
            room = 0
            if not instance.prefill_max_requests:
                room = max(0, instance.capacity_tokens - instance.ranks.charged_tokens)
            self.room_tokens += room - self._rooms[number]
            self._rooms[number] = room
        self._changed.clear()

    @property
    def most_chunks(self) -> float:
        """Length of the longest prompt still to be computed, in chunks of its instance; at least
        1."""
        return self._long.ordered[-1][0] if self._long.ordered else 1.0

    @property
    def all_idle(self) -> bool:
        """Whether no instance computes or has anything to compute."""
        return not self._busy

    def starts(self, at: Moment) -> Starts:
        """Return when a batch that is sent at that moment would start on each instance."""
        far = self._free.ordered
        first = bisect_left(far, (at.arrives_s, -1))
        near = [number for _, number in far[:first]]
        return Starts(self.instances, at, [*near, *self._others], far, first)


def _enter(numbers: set[int], number: int, wanted: bool) -> None:
    """Add a number to a set if it is ``wanted`` there, otherwise remove it."""
    (numbers.add if wanted else numbers.discard)(number)


class PlannedStarts:
    """Predicted start times of the last dispatched batches' passes. Later batches keep a distance
    from them: a soft form of the stagger in section 4.1 of the paper."""

    __slots__ = ("at_s",)

    def __init__(self) -> None:
        self.at_s: list[float] = []
        """Start times on the scheduler's clock, sorted."""

    def add(self, start_s: float, forget_s: float) -> None:
        """Add a start, and drop those before ``forget_s``."""
        del self.at_s[: bisect_left(self.at_s, forget_s)]
        insort(self.at_s, start_s)

    def first_apart(self, start_s: float, apart_s: float) -> float:
        """Return the first time from ``start_s`` on that is at least ``apart_s`` from every planned
        start."""
        least_s = apart_s - TUNING.epsilon_s
        for planned_s in self.at_s[bisect_right(self.at_s, start_s - least_s) :]:
            if planned_s - start_s >= least_s:
                break
            start_s = planned_s + apart_s
        return start_s
