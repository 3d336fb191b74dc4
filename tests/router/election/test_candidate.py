"""The election of a leader, decided without a store or a clock: times and answers go in."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.router.election.candidate import (
    MAX_TERM,
    Candidate,
    ElectionTimes,
    Read,
    Record,
    Renew,
    Sleep,
    Step,
    Take,
)

TIMES = ElectionTimes(lease_s=2, renew_s=1.5, retry_s=0.25)
OTHER = Record("other#1", term=4, sign="a", lasts_s=2.0, version="7")


def leading(now_s: float = 100.0, term: int = 5) -> Candidate:
    """A candidate that took a free lock at ``now_s``."""
    candidate = Candidate("me#1", TIMES)
    candidate.observed(Record(term=term - 1, version="7"), now_s)
    step = candidate.next_step(now_s)
    assert step == Take(Record(term=term - 1, version="7"), term)
    candidate.on_taken(mine(term), now_s, now_s)
    assert candidate.term_at(now_s) == term
    return candidate


def mine(term: int = 5, sign: str = "b", version: str = "8") -> Record:
    return Record("me#1", term, sign, 2.0, version)


def test_a_free_lock_is_taken_in_a_higher_term() -> None:
    candidate = Candidate("me#1", TIMES)
    assert candidate.next_step(0.0) == Read()
    candidate.observed(Record(), 0.1)
    assert candidate.next_step(0.1) == Take(Record(), 1)


def test_anothers_lock_is_taken_when_nothing_changed_for_as_long_as_it_lasts() -> None:
    candidate = Candidate("me#1", TIMES)
    candidate.observed(OTHER, 10.0)
    assert candidate.leader_at(10.0) == "other#1"
    assert candidate.next_step(10.0) == Sleep(0.25)
    assert candidate.next_step(10.25) == Read()
    # Read again, unchanged but for its version: an annotation is no sign of life.
    again = Record("other#1", 4, "a", 2.0, version="9")
    candidate.observed(again, 11.9)
    assert candidate.next_step(11.9) == Sleep(pytest.approx(0.1))
    assert candidate.next_step(12.0) == Take(again, 5)
    assert candidate.leader_at(12.0) is None


def test_every_renewal_of_another_begins_its_time_anew() -> None:
    candidate = Candidate("me#1", TIMES)
    for turn in range(20):
        candidate.observed(Record("other#1", 4, str(turn), 2.0, str(turn)), turn * 1.5)
        assert isinstance(candidate.next_step(turn * 1.5 + 0.2), Sleep)


def test_what_the_store_itself_removes_is_never_taken_by_the_clock() -> None:
    candidate = Candidate("me#1", TIMES)
    candidate.observed(Record("other#1", 4), 0.0)
    assert candidate.next_step(1e6) == Read()


def test_renewals_keep_the_lead() -> None:
    candidate = leading(100.0)
    assert candidate.next_step(100.0) == Sleep(0.25)
    assert candidate.next_step(100.25) == Renew(mine())
    candidate.renewed(mine(sign="c", version="9"), 100.25, 100.3)
    assert candidate.term_at(100.25 + 1.49) == 5
    assert candidate.term_at(100.25 + 1.5) is None


def test_a_store_out_of_reach_ends_the_lead_before_it_can_be_anothers() -> None:
    candidate = leading(100.0)
    now_s = 100.25
    while candidate.term_at(now_s) is not None:
        assert candidate.next_step(now_s) == Renew(mine())
        candidate.unreachable(now_s, now_s)
        assert candidate.next_step(now_s) == Sleep(pytest.approx(0.25))
        now_s += 0.25
    assert now_s == 101.5  # renew_s; others wait lease_s, and saw the renewal later
    assert candidate.leader_at(now_s) is None


def test_the_time_of_a_lead_counts_from_when_the_renewal_was_sent() -> None:
    candidate = leading(100.0)
    candidate.renewed(mine(), asked_s=101.0, now_s=101.4)
    assert candidate.term_at(102.4) == 5
    assert candidate.term_at(102.5) is None


def test_an_answer_that_comes_too_late_gives_no_lead() -> None:
    candidate = Candidate("me#1", TIMES)
    candidate.on_taken(mine(), asked_s=100.0, now_s=101.5)
    assert candidate.term_at(101.5) is None
    assert candidate.next_step(101.5) == Take(mine(), 6)
    candidate = leading(100.0)
    candidate.renewed(mine(sign="c"), asked_s=101.4, now_s=101.6)
    # In that term it said that it leads no more.
    assert candidate.term_at(101.6) is None
    assert candidate.next_step(101.6) == Take(mine(sign="c"), 6)


def test_a_process_that_was_stopped_leads_no_more_when_it_goes_on() -> None:
    candidate = leading(100.0)
    assert candidate.term_at(160.0) is None
    assert not isinstance(candidate.next_step(160.0), Renew)


def test_a_clock_that_jumps_forward_ends_a_lead_and_never_gives_one() -> None:
    candidate = leading(100.0)
    assert candidate.term_at(1e9) is None
    follower = Candidate("me#1", TIMES)
    follower.observed(OTHER, 100.0)
    # The machine slept: the lock may be taken, and the store knows whether it is the same still.
    assert follower.next_step(1e9) == Take(OTHER, 5)
    follower.on_refused(1e9)
    assert follower.term_at(1e9) is None and follower.next_step(1e9 + 0.25) == Read()


def test_whoever_is_refused_leads_no_more_and_looks_again() -> None:
    candidate = leading(100.0)
    candidate.on_refused(100.3)
    assert candidate.term_at(100.3) is None
    assert candidate.next_step(100.3) == Read()


def test_a_lost_race_is_no_busy_loop() -> None:
    candidate = Candidate("me#1", TIMES)
    candidate.observed(Record(), 0.0)
    candidate.on_refused(0.0)
    assert candidate.next_step(0.0) == Sleep(0.25)
    assert candidate.next_step(0.25) == Read()


def test_a_store_that_fails_at_once_is_not_asked_without_a_pause() -> None:
    candidate = Candidate("me#1", TIMES)
    candidate.observed(Record(), 0.0)
    candidate.unreachable(0.0, 0.01)
    assert isinstance(candidate.next_step(0.01), Sleep)
    # One that took its time has had its pause.
    candidate.unreachable(0.25, 1.0)
    assert candidate.next_step(1.0) == Take(Record(), 1)


def test_another_leader_of_the_same_or_a_higher_term_ends_a_lead() -> None:
    candidate = leading(100.0)
    candidate.exceed(5, 100.1)
    assert candidate.term_at(100.1) is None
    candidate = leading(100.0)
    candidate.exceed(4, 100.1)
    assert candidate.term_at(100.1) == 5
    candidate.exceed(40, 100.1)
    assert candidate.term_at(100.1) is None
    assert candidate.next_step(100.1) == Read()
    candidate.observed(mine(), 100.2)
    # Still its own: the store knows of no other, and terms must rise.
    assert candidate.next_step(100.2) == Take(mine(), 41)


def test_two_that_lead_by_two_locks_do_not_take_turns_for_ever() -> None:
    candidate, now_s, waits = leading(100.0), 100.0, []
    for turn in range(1, 9):
        candidate.exceed(10 * turn, now_s)
        candidate.observed(mine(4, version=str(turn)), now_s)
        assert candidate.leader_at(now_s) is None
        begin_s = now_s
        while not isinstance(step := candidate.next_step(now_s), Take):
            # Reading goes on meanwhile: whoever else has this lock may lead.
            now_s += step.for_s if isinstance(step, Sleep) else 0.25
            if isinstance(step, Read):
                candidate.observed(Record(term=4, version=str(turn)), now_s)
        waits.append(now_s - begin_s)
        assert step.term == 10 * turn + 1
        candidate.on_taken(mine(step.term, version=f"{turn}"), now_s, now_s)
        assert candidate.term_at(now_s) == step.term
    assert waits == pytest.approx([0, 2, 4, 8, 16, 32, 64, 64], abs=0.5)
    # A lead that nobody disputed for long ends the series.
    while now_s < 1000:
        now_s += 0.3
        candidate.renewed(mine(step.term, sign=str(now_s)), now_s, now_s)
    candidate.exceed(100, now_s)
    candidate.observed(Record(term=81), now_s)
    assert candidate.next_step(now_s) == Take(Record(term=81), 101)


def test_a_term_that_was_seen_while_it_was_being_taken_gives_no_lead() -> None:
    candidate = Candidate("me#1", TIMES)
    candidate.observed(Record(term=4), 100.0)
    candidate.exceed(5, 100.0)
    candidate.on_taken(mine(5), 100.0, 100.1)
    assert candidate.term_at(100.1) is None
    assert candidate.next_step(100.1) == Take(mine(5), 6)


@pytest.mark.parametrize("term", [-1, MAX_TERM, 2**63])
def test_a_term_that_no_store_can_have_given_is_ignored(term: int) -> None:
    candidate = leading(100.0)
    candidate.exceed(term, 100.1)
    assert candidate.term_at(100.1) == 5


def test_a_lock_that_was_deleted_does_not_make_terms_fall() -> None:
    candidate = leading(100.0, term=9)
    candidate.on_refused(100.3)
    candidate.observed(Record(), 100.4)
    assert candidate.next_step(100.4) == Take(Record(), 10)


def test_what_is_given_back_is_the_lock_if_it_is_its_own() -> None:
    candidate = leading(100.0)
    candidate.term_at(200.0)
    assert candidate.resign() == mine()  # lapsed, and still written in the store
    candidate.observed(OTHER, 200.0)
    assert candidate.resign() is None


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ((0.5, 0.3, 0.1), "the lease must last 1 to 60 whole seconds"),
        ((2.5, 1.5, 0.25), "whole seconds"),
        ((61, 1.5, 0.25), "1 to 60"),
        ((math.nan, 1.5, 0.25), "1 to 60"),
        ((2, 2, 0.25), "the renew deadline must be shorter than the lease"),
        ((2, math.nan, 0.25), "the renew deadline"),
        ((2, 1.5, 0.8), "fit twice"),
        ((2, 1.5, 0.0), "0.05 s or more"),
    ],
)
def test_times_that_contradict_each_other(times: tuple[float, float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElectionTimes(*times)


# Any number of candidates, any delay --------------------------------------------------------------


@dataclass
class ModelStore:
    """A lock whose writes name a version. Renewals have to change ``sign``."""

    record: Record = field(default_factory=Record)
    writes: int = 0

    def write(self, version: str, holder: str, term: int) -> Record | None:
        if version != self.record.version:
            return None
        self.writes += 1
        number = str(self.writes)
        self.record = Record(holder, term, number, TIMES.lease_s, number)
        return self.record


def answer(store: ModelStore, candidate: Candidate, step: Step) -> Record | None:
    if isinstance(step, Read):
        return store.record
    if isinstance(step, Take):
        return store.write(step.seen.version, candidate.holder, step.term)
    assert isinstance(step, Renew)
    return store.write(step.mine.version, candidate.holder, step.mine.term)


@dataclass
class Machine:
    """A candidate with a clock of its own, and a way to the store that is good for a while."""

    candidate: Candidate
    clock_s: float
    """Reading of its clock when others show 0."""
    way: str = "good"
    until_s: float = 0.0

    def delays(self, chance: random.Random, at_s: float) -> tuple[float, float, bool, bool]:
        """There and back; whether the store gets it, and this machine the answer."""
        if at_s >= self.until_s:
            self.way = chance.choice(["good", "good", "cut", "deaf", "slow"])
            self.until_s = at_s + chance.expovariate(1 / 4.0)
        if self.way == "slow":
            return chance.uniform(0, 1), chance.uniform(0, 3), True, True
        there_s, back_s = chance.uniform(0, 0.05), chance.uniform(0, 0.05)
        return there_s, back_s, self.way != "cut", self.way == "good"

    def take_in(self, step: Step, found: Record | None, asked_s: float, now_s: float) -> None:
        if found is None:
            self.candidate.on_refused(now_s)
        elif isinstance(step, Read):
            self.candidate.observed(found, now_s)
        elif isinstance(step, Take):
            self.candidate.on_taken(found, asked_s, now_s)
        else:
            self.candidate.renewed(found, asked_s, now_s)


def course(seed: int, seconds: float = 120.0) -> list[tuple[int, int]]:
    """Return the leaders with their terms, in this order. Raises: AssertionError, two at once."""
    chance = random.Random(seed)
    store, led = ModelStore(), list[tuple[int, int]]()
    machines = [
        Machine(Candidate(f"{n}#1", TIMES), chance.uniform(-1e3, 1e3))
        for n in range(chance.choice([2, 3]))
    ]
    order = itertools.count()
    due: list[tuple[float, int, Callable[[float], None]]] = []

    def later(at_s: float, what: Callable[[float], None]) -> None:
        heapq.heappush(due, (at_s, next(order), what))

    def think(machine: Machine, at_s: float) -> None:
        step = machine.candidate.next_step(at_s + machine.clock_s)
        if isinstance(step, Sleep):
            later(at_s + max(step.for_s, 1e-6), partial(think, machine))
            return
        there_s, back_s, arrives, answered = machine.delays(chance, at_s)
        asked_s = at_s + machine.clock_s

        def arrive(then_s: float) -> None:
            found = answer(store, machine.candidate, step) if arrives else None

            def come_back(now_s: float) -> None:
                if arrives and answered:
                    machine.take_in(step, found, asked_s, now_s + machine.clock_s)
                else:
                    machine.candidate.unreachable(asked_s, now_s + machine.clock_s)
                think(machine, now_s)

            later(then_s + back_s, come_back)

        later(at_s + there_s, arrive)

    for machine in machines:
        later(0.0, partial(think, machine))
    while due[0][0] < seconds:
        at_s, _, what = heapq.heappop(due)
        what(at_s)
        terms = [machine.candidate.term_at(at_s + machine.clock_s) for machine in machines]
        leaders = [(term, n) for n, term in enumerate(terms) if term is not None]
        assert len(leaders) <= 1, f"at {at_s:.2f} s: {leaders}"
        led += [leader for leader in leaders if not led or leader != led[-1]]
    return led


@given(st.integers(0, 2**32))
def test_no_two_lead_at_once_and_terms_rise(seed: int) -> None:
    terms = [term for term, _ in course(seed)]
    assert terms == sorted(set(terms))


def test_such_courses_have_changes_of_hands() -> None:
    assert all(len({who for _, who in course(seed)}) > 1 for seed in range(10))
