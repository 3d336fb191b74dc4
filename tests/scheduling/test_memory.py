"""The scheduler's memory of requests that are over, under every policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_sbs.scheduling import (
    Dispatch,
    InstanceUp,
    PrefillDone,
    RequestAdopted,
    RequestArrived,
    RequestEnded,
    Scheduler,
    SchedulerConfig,
    TimerFired,
    WakeAt,
)
from sglang_sbs.scheduling.policy_registry import policy_names
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.request import Request

FINISHED = 600
MOST_ENTRIES = 150
"""Most entries of one container: the window of forward times, spare entries of the queue's
heaps."""


def containers(of: Any, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """Every dict, list, set, deque and tuple that can be reached, with its length."""
    if id(of) in seen or isinstance(of, str | bytes | int | float | type | None):
        return
    seen.add(id(of))
    if isinstance(of, dict | list | set | frozenset | deque | tuple):
        yield path, len(of)
        for inner in of.values() if isinstance(of, dict) else of:
            yield from containers(inner, path + "[]", seen)
        return
    names = set(getattr(of, "__dict__", ()))
    for base in type(of).__mro__:
        slots = getattr(base, "__slots__", ())
        names.update([slots] if isinstance(slots, str) else slots)
    for name in sorted(names - {"__dict__", "__weakref__"}):
        if hasattr(of, name):
            yield from containers(getattr(of, name), f"{path}.{name}", seen)


class Cluster:
    """Every request is prefilled and over the moment it is dispatched."""

    def __init__(self, instances: int, **config: Any) -> None:
        self.scheduler = Scheduler(SchedulerConfig(**config))
        self.now_s = 0.0
        self.finished = 0
        self._wake_s: float | None = None
        for i in range(instances):
            self.tell(InstanceUp(instance=f"p{i}", role="prefill", dp_size=2, chunk_tokens=3000))
        self.tell(InstanceUp(instance="d0", role="decode", dp_size=2))

    def tell(self, event: Any) -> None:
        for command in self.scheduler.handle(event, self.now_s):
            if isinstance(command, WakeAt):
                self._wake_s = command.time_s
            elif isinstance(command, Dispatch):
                self.tell(PrefillDone(rid=command.rid))
                ended = RequestEnded(rid=command.rid, outcome="completed", completion_tokens=10)
                self.tell(ended)
                self.finished += 1

    def wait(self, until_s: float) -> None:
        while self._wake_s is not None and self._wake_s <= until_s:
            self.now_s, self._wake_s = max(self.now_s, self._wake_s), None
            self.tell(TimerFired())
        self.now_s = until_s


@pytest.mark.parametrize("instances", [1, 3])
@pytest.mark.parametrize(
    "config", [{"policy": policy} for policy in policy_names()] + [{"trigger": "paper"}], ids=str
)
def test_nothing_grows_with_the_requests_that_are_over(config: dict[str, Any], instances: int):
    cluster = Cluster(instances, **config)
    for i in range(FINISHED):
        cluster.wait(cluster.now_s + 0.5)
        cluster.tell(RequestArrived(rid=f"r{i}", prompt_tokens=500 + i % 700))
    cluster.wait(cluster.now_s + 10)
    assert cluster.finished == FINISHED
    # The generator of the policies that draw at random has a state of 625 numbers.
    sizes = [
        entry
        for entry in containers(cluster.scheduler, "scheduler", set())
        if "_random" not in entry[0]
    ]
    assert max(size for _, size in sizes) <= MOST_ENTRIES, max(sizes, key=lambda entry: entry[1])


def test_adopted_requests_are_forgotten_by_ranks_that_never_report():
    cluster = Cluster(1)
    for i in range(FINISHED):
        cluster.tell(
            RequestAdopted(
                rid=f"a{i}",
                prompt_tokens=100,
                prefill="p0",
                prefill_rank=0,
                decode="d0",
                decode_rank=1,
                prefilled=False,
            )
        )
        cluster.tell(RequestEnded(rid=f"a{i}", outcome="completed", completion_tokens=1))
    sizes = list(containers(cluster.scheduler, "scheduler", set()))
    assert max(size for _, size in sizes) <= MOST_ENTRIES, max(sizes, key=lambda entry: entry[1])


def waiting(rid: str, order: int, tokens: int, deadline_s: float) -> Request:
    return Request(
        rid=rid,
        order=order,
        prompt_tokens=tokens,
        max_new_tokens=None,
        arrived_s=0.0,
        deadline_s=deadline_s,
    )


def test_a_queue_that_is_asked_for_deadlines_only_forgets_the_lengths_of_who_left():
    queue = RequestQueue()
    queue.add(waiting("stays", 0, 5000, 9.0))
    for order in range(1, 1000):
        queue.add(waiting(f"r{order}", order, order, 8.0))
        queue.remove(f"r{order}")
        assert queue.next_deadline_s() == 9.0
    assert max(size for _, size in containers(queue, "queue", set())) <= MOST_ENTRIES
    assert (queue.longest_prompt_tokens, queue.next_deadline_s()) == (5000, 9.0)


def test_an_id_that_comes_again_has_its_own_deadline_and_length():
    queue = RequestQueue()
    queue.add(waiting("again", 0, 5000, 1.0))
    queue.remove("again")
    queue.add(waiting("again", 1, 10, 60.0))
    assert (queue.longest_prompt_tokens, queue.next_deadline_s()) == (10, 60.0)
    assert queue.expired(2.0) == []
    assert [request.order for request in queue.expired(60.0)] == [1]
