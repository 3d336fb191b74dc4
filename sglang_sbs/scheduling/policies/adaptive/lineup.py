"""The order in which a batch sent now would start on the instances, without looking at all of them.
Must not know what waits, or which instance gets a batch.

A computing instance is free when its passes end, whatever the time is. These instances are kept in
that order, and a decision looks at the first. The others are asked at each decision: they are idle,
about to launch or late, or will form the pass behind a queued one (overlap scheduling)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from typing import NamedTuple

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.agenda import Timetable
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance


class Moment(NamedTuple):
    """The time of a decision, and how long the way to an instance takes then."""

    now_s: float
    latency_s: float
    """L_net of a batch that leaves now."""

    @property
    def arrives_s(self) -> float:
        """When a batch that is sent now arrives."""
        return self.now_s + self.latency_s

    def starts_s(self, instance: PrefillInstance) -> tuple[float, float]:
        """When the pass starts that a batch sent now would be in, and when the instance is free."""
        free_s = self.free_at_s(instance)
        if self.forms_at_s(instance) >= self.arrives_s:
            return free_s, free_s
        if instance.ranks.backlog_tokens:
            # It starts its next pass before, with what it has.
            return free_s + instance.next_pass_s(), free_s
        return self.arrives_s, free_s

    def free_at_s(self, instance: PrefillInstance) -> float:
        """When an instance could launch something new."""
        return max(self.now_s, instance.free_at_s(self.now_s, self.latency_s))

    def forms_at_s(self, instance: PrefillInstance) -> float:
        """When an instance forms the next batch that a request can still be in."""
        return max(self.now_s, instance.forms_at_s(self.now_s, self.latency_s))


class Starts:
    """When a batch that is sent at one moment would start, on each instance that is up."""

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
            instances: all that are up. Below they are given by their numbers in it.
            at: the moment.
            near: instances that must be asked.
            far: when the others are free, in order. From position ``first`` on that is not before a
                batch that is sent now arrives.
        """
        self.instances = instances
        self.at = at
        self.far = far
        self.first = first
        self.near = sorted([(*at.starts_s(instances[number]), number) for number in near])
        """Start of a batch, when the instance is free, and its number; sorted."""

    def __iter__(self) -> Iterator[tuple[float, float, int]]:
        """The same as :attr:`near` for all instances."""
        return self.until(lambda: math.inf)

    def until(self, limit_s: Callable[[], float]) -> Iterator[tuple[float, float, int]]:
        """The same without computing instances that are free after ``limit_s()``, which is asked
        anew for each."""
        far, position = self.far, self.first
        for start in (*self.near, None):
            while position < len(far):
                free_s, number = far[position]
                if start is not None and start < (free_s, free_s, number):
                    break
                if free_s > limit_s():
                    position = len(far)
                    break
                yield free_s, free_s, number
                position += 1
            if start is not None:
                yield start

    def soonest(self, count: int) -> list[tuple[float, float, int]]:
        """The first ``count`` of all."""
        far = [(free_s, free_s, n) for free_s, n in self.far[self.first : self.first + count]]
        return sorted([*self.near[:count], *far])[:count]


class Begins:
    """When passes begin that a batch sent at one moment could be in."""

    def __init__(self, starts: Starts, joins: Container[InstanceId] = ()) -> None:
        """``joins``: instances where what is sent now still reaches a batch on its way."""
        self.instances = starts.instances
        self._starts = starts
        self._joins = joins
        self._in_order: list[tuple[float, int]] | None = None

    def begin_s(self, instance: PrefillInstance) -> float:
        at = self._starts.at
        free_s = at.free_at_s(instance)
        return free_s if instance.id in self._joins else max(at.arrives_s, free_s)

    def first(self, besides: PrefillInstance) -> PrefillInstance:
        """The instance where a pass begins first, except for this one."""
        begins = (self.instances[number] for _, number in self._ordered())
        return next(instance for instance in begins if instance is not besides)

    def later(
        self, than_s: float, besides: Collection[PrefillInstance]
    ) -> list[tuple[float, PrefillInstance]]:
        """How much later than ``than_s`` passes begin on the other instances, the soonest first;
        those that begin no later in the order of their numbers."""
        begins, instances = self._ordered(), self.instances
        first = bisect_left(begins, (than_s, len(instances)))
        at_once = sorted([number for _, number in begins[:first]])
        delays = [(0.0, number) for number in at_once]
        delays += [(begin_s - than_s, number) for begin_s, number in begins[first:]]
        return [
            (s, instance) for s, number in delays if (instance := instances[number]) not in besides
        ]

    def _ordered(self) -> list[tuple[float, int]]:
        """:meth:`begin_s` of all with their numbers."""
        if self._in_order is None:
            starts = self._starts
            near = [(self.begin_s(self.instances[n]), n) for _, _, n in starts.near]
            self._in_order = sorted([*near, *starts.far[starts.first :]])
        return self._in_order


class Marginals(dict[PrefillInstance, tuple[float, float, float]]):
    """What another token costs on each instance, worked out when it is asked for: tokens per second
    of water level (:func:`.few_requests.fair_share`), the length of the next pass as it is, and the
    time for the tokens in it."""

    def __missing__(self, instance: PrefillInstance) -> tuple[float, float, float]:
        slope_s = 1 / instance.tokens_per_s
        held = instance.ranks.backlog_tokens
        pass_s = instance.next_pass_s() if held else instance.model.formula.fixed_s
        self[instance] = found = 1 / (2 * slope_s), pass_s, slope_s * held
        return found


class Lineup:
    """The instances that are up, in the order in which they are free."""

    def __init__(self) -> None:
        self.instances: Instances = ()
        self.by_id: dict[InstanceId, PrefillInstance] = {}
        self._number_of: dict[PrefillInstance, int] = {}
        self._changed: set[PrefillInstance] = set()
        self._busy: set[int] = set()
        self._free = Timetable()
        """When computing instances are free."""
        self._others: set[int] = set()
        self._long = Timetable()
        """Longest prompt at each instance in its chunks, if that is more than one."""
        self._rooms: dict[int, int] = {}
        self.marginals = Marginals()
        self.room_tokens = 0
        """What the next passes of all instances still take, where only the chunk limits them."""
        self.overlap = False
        """Whether any engine launches a pass ahead."""

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
        """Take in the instances that have changed. Call this before each decision."""
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
        """Length of the longest prompt that an instance still has to compute, in its chunks; at
        least 1."""
        return self._long.ordered[-1][0] if self._long.ordered else 1.0

    @property
    def all_idle(self) -> bool:
        """Whether no instance computes or has anything to compute."""
        return not self._busy

    def starts(self, at: Moment) -> Starts:
        """When a batch that is sent at that moment would start on each instance."""
        far = self._free.ordered
        first = bisect_left(far, (at.arrives_s, -1))
        near = [number for _, number in far[:first]]
        return Starts(self.instances, at, [*near, *self._others], far, first)


def _enter(numbers: set[int], number: int, wanted: bool) -> None:
    """Add a number to a set, or take it out."""
    (numbers.add if wanted else numbers.discard)(number)


class PlannedStarts:
    """When the passes begin whose batches left last. Others are kept apart from them: a soft form
    of the stagger in section 4.1 of the paper."""

    __slots__ = ("at_s",)

    def __init__(self) -> None:
        self.at_s: list[float] = []
        """Sorted, seconds."""

    def add(self, start_s: float, forget_s: float) -> None:
        """Add a start, and forget those before ``forget_s``."""
        del self.at_s[: bisect_left(self.at_s, forget_s)]
        insort(self.at_s, start_s)

    def first_apart(self, start_s: float, apart_s: float) -> float:
        """The first time from ``start_s`` on that is at least ``apart_s`` from all of them."""
        least_s = apart_s - TUNING.epsilon_s
        for planned_s in self.at_s[bisect_right(self.at_s, start_s - least_s) :]:
            if planned_s - start_s >= least_s:
                break
            start_s = planned_s + apart_s
        return start_s
