"""The order in which batches would start, kept for many instances while single ones change."""

from __future__ import annotations

import random

import pytest
from harness.learned_instance import instance

from sglang_sbs.scheduling.policies.adaptive.lineup import Begins, Lineup, Moment, Starts
from sglang_sbs.scheduling.prefill.agenda import Timetable
from sglang_sbs.scheduling.prefill.passes import Pass

NOW = Moment(10.0, 0.02)


def shuffle(instance, rng: random.Random, now_s: float) -> None:
    """Some state: idle, about to launch, or with passes that end late or soon, two at once."""
    instance.reset()
    instance.overlap = rng.random() < 0.5
    if rng.random() < 0.3:
        instance.on_dispatched(f"r{rng.random()}", 0, 300, now_s - 0.01)
    for number in range(rng.choice([0, 1, 1, 1, 2])):
        end_s = now_s + rng.choice([-0.1, 0.0, 0.01, 0.2, 0.2]) + number * 0.3
        instance.passes.append(Pass(end_s - 0.3, end_s, [100, 100], number))


def asked(instances, at: Moment) -> Starts:
    """The same of everybody, one by one."""
    return Starts(instances, at, range(len(instances)))


@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_that_of_all_asked_anew(seed: int):
    rng = random.Random(seed)
    instances = [instance(f"p{i}") for i in range(12)]
    lineup = Lineup()
    lineup.on_topology_change(instances)
    for step in range(60):
        at = NOW._replace(now_s=10.0 + step * 0.01)
        for engine in rng.sample(instances, 3):
            shuffle(engine, rng, at.now_s)
        lineup.refresh()
        starts, anew = lineup.starts(at), asked(instances, at)
        assert list(starts) == list(anew)
        assert lineup.all_idle == all(instance.idle for instance in instances)
        first = instances[rng.randrange(12)]
        begins, others = Begins(starts), Begins(anew)
        assert begins.first(first) is others.first(first)
        than_s = begins.begin_s(first)
        assert begins.later(than_s, [first]) == others.later(than_s, [first])
        delays = [
            max(0.0, others.begin_s(instance) - than_s)
            for instance in instances
            if instance is not first
        ]
        assert [delay_s for delay_s, _ in begins.later(than_s, [first])] == sorted(delays)


def test_computing_instances_are_listed_up_to_a_limit_that_may_fall_meanwhile():
    instances = [instance(f"p{i}") for i in range(5)]
    for number, engine in enumerate(instances[1:]):
        engine.passes.append(Pass(0.0, 11.0 + number, [1, 1], 1))
    lineup = Lineup()
    lineup.on_topology_change(instances)
    lineup.refresh()
    starts, listed = lineup.starts(NOW), []
    for _, _, number in starts.until(lambda: 11.5 if listed else 99.0):
        listed.append(number)
    assert listed == [0, 1]
    assert [number for _, _, number in starts] == [0, 1, 2, 3, 4]


def test_times_stand_in_order_while_they_change():
    rng = random.Random(1)
    table, times = Timetable(), {}
    for _ in range(300):
        number, time_s = rng.randrange(20), rng.choice([None, *range(8)])
        table.set(number, time_s)
        times[number] = time_s
        expected = sorted((s, n) for n, s in times.items() if s is not None)
        assert table.ordered == expected
