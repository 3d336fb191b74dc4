"""The decode side's books against ground truth, and the potential on loads of any size."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_engine import DecodeEngine

from sglang_sbs.scheduling import InstanceUp, SchedulerConfig
from sglang_sbs.scheduling.decode.departures import Departures
from sglang_sbs.scheduling.decode.instance import DecodeInstance
from sglang_sbs.scheduling.decode.rules import (
    _B_TEMPERATURE,
    _KV_EMPHASIS,
    TOKENS_PER_REQUEST,
    DecodeBoard,
    DecodeLoad,
    iqr_lexicographic,
    outlier_threshold,
    potential,
    schedule_decode,
)
from sglang_sbs.scheduling.request import Request

OUTPUT = 40
STEP_S = 0.03


def request(rid: str, prompt: int, output: int = OUTPUT) -> Request:
    return Request(
        rid=rid,
        order=0,
        prompt_tokens=prompt,
        max_new_tokens=None,
        arrived_s=0.0,
        deadline_s=100.0,
        total_tokens=prompt + output,
    )


class World:
    """One decode DP rank, and a router that learns of it over two channels of any delay.

    ``messages`` are the reports under way, ``answers`` the responses whose end the router has not
    seen. Requests leave the rank and end at the router in the same order.
    """

    def __init__(self) -> None:
        self.engine = DecodeEngine("d0", 1)
        self.books = DecodeInstance(InstanceUp(instance="d0", role="decode", dp_size=1))
        self.now_s = 10.0
        self.prompts: dict[str, int] = {}
        self.on_the_wire: list[str] = []
        self.answers: list[str] = []
        self.ended: set[str] = set()
        self.messages: list = []
        self.delivered: list = []
        self.reported: set[str] = set()
        """Requests in the last report, by the engine's account."""
        self.seen: set[str] = set()
        """Accepted, by the reports that came."""

    def dispatch(self, prompt: int) -> None:
        rid = f"r{len(self.prompts)}"
        self.prompts[rid] = prompt
        self.on_the_wire.append(rid)
        self.books.on_dispatched(rid, 0, prompt, prompt + OUTPUT, self.now_s)

    def accept(self) -> None:
        rid = self.on_the_wire.pop(0)
        self.engine.accept(rid, 0, self.prompts[rid])

    def leave(self) -> None:
        rid = next(iter(self.engine.running[0]))
        self.engine.end(rid)
        self.answers.append(rid)

    def answer(self) -> None:
        rid = self.answers.pop(0)
        self.ended.add(rid)
        self.books.on_ended(rid, 0, self.prompts[rid])

    def say(self) -> None:
        self.now_s += STEP_S
        self.messages.append((self.engine.message(0), set(self.engine.running[0])))

    def hear(self, index: int = 0) -> None:
        message, running = self.messages.pop(index)
        self.delivered.append((message, running))
        self.tell(message, running)

    def tell(self, message, running: set[str]) -> None:
        if message.seq > self.newest:
            self.newest = message.seq
            self.reported = running
            self.seen |= set(message.rids)
        self.books.on_report(message, self.now_s)

    newest = -1

    @property
    def load(self) -> DecodeLoad:
        (load,) = self.books.loads()
        return load

    @property
    def truth(self) -> tuple[int, int]:
        """<B, K> with everything that the router can know."""
        flight = [r for r in self.prompts if r not in self.seen and r not in self.ended]
        there = [*flight, *(self.reported - self.ended)]
        return len(there), sum(self.prompts[rid] for rid in there)

    def settle(self) -> None:
        """All that is under way arrives, and two more reports."""
        while self.on_the_wire:
            self.accept()
        while self.answers:
            self.answer()
        while self.messages:
            self.hear()
        for _ in range(2):
            self.say()
            self.hear()


STEPS = st.lists(st.integers(0, 60 * 5000 - 1), max_size=60)
"""Each picks one of the steps that can be done (60 divides by 1 to 6) and a prompt length."""


def play(world: World, draw: int) -> None:
    """Do one of the steps that are possible now."""
    possible: list[Callable[[], None]] = [lambda: world.dispatch(1 + draw // 60), world.say]
    if world.on_the_wire:
        possible.append(world.accept)
    if world.engine.running[0]:
        possible.append(world.leave)
    if world.answers:
        possible.append(world.answer)
    if world.messages:
        possible.append(world.hear)
    possible[draw % len(possible)]()


@given(steps=STEPS)
@settings(max_examples=300, deadline=None)
def test_with_every_message_the_books_are_the_truth_at_all_times(steps):
    world = World()
    world.say()
    world.hear()
    for draw in steps:
        play(world, draw)
        # An answer may be ahead of the report that knows its end, or behind it.
        assert (world.load.running, world.load.kv_tokens) == world.truth
        assert world.load.committed_tokens >= world.load.kv_tokens
    world.settle()
    assert (world.load.running, world.load.kv_tokens) == world.truth


@given(
    steps=STEPS,
    faults=st.lists(
        st.tuples(st.sampled_from(["lose", "repeat", "overtake"]), st.integers(0, 59)), max_size=12
    ),
)
@settings(max_examples=300, deadline=None)
def test_lost_repeated_and_reordered_reports_heal(steps, faults):
    world = World()
    by_step: dict[int, list[str]] = {}
    for fault, at in faults:
        by_step.setdefault(at, []).append(fault)
    for i, draw in enumerate(steps):
        play(world, draw)
        for fault in by_step.get(i, ()):
            if fault == "lose" and world.messages:
                world.messages.pop(0)
            elif fault == "overtake" and len(world.messages) > 1:
                world.hear(1)
            elif fault == "repeat" and world.delivered:
                before = world.load
                world.tell(*world.delivered[draw % len(world.delivered)])
                assert world.load == before, "a message said again changed the books"
        assert world.load.running >= 0
        assert world.load.kv_tokens >= 0
    world.settle()
    world.now_s += 6.0  # what no message ever said is taken for lost by now
    world.say()
    world.hear()
    running = world.engine.running[0]
    assert (world.load.running, world.load.kv_tokens) == (len(running), sum(running.values()))
    assert world.load.committed_tokens == sum(running.values()) + OUTPUT * len(running)


class TestDepartures:
    def test_an_end_that_the_report_was_faster_to_know_is_not_taken_off_again(self):
        world = World()
        for _ in range(2):
            world.dispatch(100)
            world.accept()
        world.say()
        world.hear()
        world.leave()
        world.say()
        world.hear()
        assert (world.load.running, world.load.kv_tokens) == (1, 100)
        world.answer()
        assert (world.load.running, world.load.kv_tokens) == (1, 100)

    def test_an_end_counts_at_once_and_once(self):
        world = World()
        for _ in range(2):
            world.dispatch(100)
            world.accept()
        world.say()
        world.hear()
        world.say()  # still contains both
        world.leave()
        world.answer()
        assert (world.load.running, world.load.kv_tokens) == (1, 100)
        world.hear()
        assert (world.load.running, world.load.kv_tokens) == (1, 100)
        world.say()
        world.hear()
        assert (world.load.running, world.load.kv_tokens) == (1, 100)

    def test_an_end_the_rank_never_confirms_is_dropped_for_what_the_rank_says(self):
        departures = Departures()
        departures.reported(5, 5, 1.0)
        departures.on_ended(300, 1.0)
        departures.reported(5, 5, 1.5)
        assert (len(departures), departures.kv_tokens) == (1, 300)
        departures.reported(5, 5, 4.0)
        assert (len(departures), departures.kv_tokens) == (0, 0)

    def test_requests_of_another_router_that_leave_do_not_hide_own_ends_for_long(self):
        departures = Departures()
        departures.reported(5, 5, 1.0)
        departures.reported(5, 4, 2.0)
        departures.reported(5, 4, 5.0)
        departures.on_ended(300, 5.0)
        assert len(departures) == 1

    @pytest.mark.parametrize("presents", [(4, 5), (6, 5)])
    def test_a_number_that_swings_back_leaves_nothing_behind(self, presents):
        departures = Departures()
        departures.reported(5, 5, 1.0)
        for present in presents:
            departures.reported(5, present, 1.1)
        departures.on_ended(300, 1.1)
        assert len(departures) == 1
        departures.reported(5, 4, 1.2)
        assert len(departures) == 0

    def test_an_absurd_number_is_not_counted_one_by_one(self):
        departures = Departures()
        departures.reported(0, 0, 1.0)
        departures.reported(1 << 60, 0, 1.1)
        departures.reported(0, 0, 1.2)
        assert len(departures) == 0


class TestBooks:
    def test_a_new_boot_forgets_what_ended_on_the_old_one(self):
        world = World()
        world.dispatch(100)
        world.accept()
        world.say()
        world.hear()
        world.leave()
        world.answer()
        world.engine.start()
        world.newest = -1
        world.dispatch(70)
        world.accept()
        world.say()
        world.books.down()
        world.hear()
        assert (world.load.running, world.load.kv_tokens) == (1, 70)

    def test_a_new_boot_that_names_a_request_has_it(self):
        world = World()
        world.say()
        world.hear()
        world.engine.start()
        world.newest = -1
        world.dispatch(100)  # no report of the restart has arrived
        world.dispatch(200)
        world.accept()
        world.say()
        world.hear()
        assert list(world.books.ranks[0].requests) == ["r0"]
        assert "1 requests, 0 in flight, 140 tokens committed" in repr(world.books)
        assert world.load.committed_tokens == 100 + OUTPUT

    def test_a_rank_is_not_empty_while_a_request_there_has_not_ended(self):
        world = World()
        up = InstanceUp(instance="d0", role="decode", dp_size=1, kv_capacity_tokens=1000)
        world.books.set_limits(up)
        world.say()
        world.hear()
        world.dispatch(100)
        world.accept()
        world.say()
        world.messages.clear()  # the report that names it is lost
        world.leave()
        world.answer()
        world.dispatch(600)
        world.say()
        world.hear()  # it counts one more acceptance than were named, which was of the first
        assert world.load.room_tokens == 1000 - 600 - OUTPUT
        world.accept()
        world.leave()
        world.answer()
        assert world.load.has_room(5000), "an empty rank takes whatever its engine takes"

    def test_kv_counts_the_prompt_and_admission_what_it_grows_to(self):
        up = InstanceUp(instance="d0", role="decode", dp_size=1, kv_capacity_tokens=1000)
        books = DecodeInstance(up)
        books.on_report(DecodeEngine("d0", 1, 1000).message(0), 1.0)
        books.on_dispatched("a", 0, 100, 450, 1.0)
        books.on_dispatched("b", 0, 100, 450, 1.0)
        (load,) = books.loads()
        assert (load.running, load.kv_tokens, load.committed_tokens) == (2, 200, 900)
        assert books.room_tokens == 100
        assert not load.has_room(101)

    def test_an_end_on_the_way_takes_nothing_off_what_runs(self):
        world = World()
        world.dispatch(100)
        world.accept()
        world.say()
        world.hear()
        world.dispatch(70)
        world.books.on_ended("r1", 0, 70)
        assert (world.load.running, world.load.kv_tokens) == (1, 100)
        world.accept()
        world.say()
        world.hear()
        assert (world.load.running, world.load.kv_tokens) == (1, 100), (
            "it came and is to be aborted"
        )

    def test_a_first_message_that_is_lost_does_not_count_its_requests_twice_for_good(self):
        world = World()
        world.dispatch(100)
        world.accept()
        world.say()
        world.messages.clear()
        world.say()
        world.hear()
        assert world.load.running == 2, "nobody can tell yet that it is the same"
        world.now_s += 6.0
        world.say()
        world.hear()
        assert (world.load.running, world.load.kv_tokens) == (1, 100)

    def test_the_wrong_request_taken_for_the_lost_one_is_put_right(self):
        world = World()
        world.say()
        world.hear()
        world.dispatch(100)
        world.dispatch(70)
        world.on_the_wire.reverse()  # the second gets there first
        world.accept()
        world.say()
        world.messages.clear()
        world.say()
        world.hear()
        assert world.load.running == 2
        world.accept()
        world.say()
        world.hear()
        assert (world.load.running, world.load.kv_tokens) == (2, 170)

    def test_negative_numbers_in_a_report_count_as_none(self):
        engine = DecodeEngine("d0", 1)
        engine.running[0] = {"x": -500}
        books = DecodeInstance(InstanceUp(instance="d0", role="decode", dp_size=1))
        books.on_report(engine.message(0), 1.0)
        assert books.loads()[0].kv_tokens == 0


LOADS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 4_000_000)), min_size=1, max_size=40)


class TestRules:
    def test_the_potential_is_the_default_and_algorithm_3_can_be_had(self):
        assert SchedulerConfig().decode_rule == "potential"
        assert SchedulerConfig(decode_rule="iqr").decode_rule == "iqr"

    @given(loads=LOADS, tokens=st.integers(1, 1_000_000))
    @settings(max_examples=200, deadline=None)
    def test_the_potential_finds_the_least_growth_of_all_ranks(self, loads, tokens):
        board = DecodeBoard([DecodeLoad(b, k) for b, k in loads])
        chosen = potential(request("r", tokens), board, lambda _: True)
        mean_b = sum(b for b, _ in loads) / len(loads)
        mean_k = sum(k for _, k in loads) / len(loads)

        def growth(b: int, k: int) -> float:
            x, y = b - mean_b, (k - mean_k) / TOKENS_PER_REQUEST
            more = tokens / TOKENS_PER_REQUEST
            y_step = more + math.log(-math.expm1(-more)) + math.log(_KV_EMPHASIS)
            terms = (x / _B_TEMPERATURE + math.log(math.expm1(1 / _B_TEMPERATURE)), y + y_step)
            return max(terms) + math.log1p(math.exp(-abs(terms[0] - terms[1])))

        best = min(growth(b, k) for b, k in loads)
        assert chosen is not None
        assert growth(*loads[chosen]) == pytest.approx(best, abs=1e-6)

    def test_a_rank_far_behind_in_kv_gets_more_than_its_share_of_requests(self):
        loads = [DecodeLoad(35, 85_000) for _ in range(8)]
        loads[3].kv_tokens = 40_000
        batch = [request("r", 2000)]
        assert schedule_decode(batch, loads, potential) == {"r": 3}

    @pytest.mark.parametrize("rule", [potential, iqr_lexicographic(1.5)])
    @given(loads=LOADS, tokens=st.integers(1, 100_000), full=st.sets(st.integers(0, 39)))
    @settings(max_examples=100, deadline=None)
    def test_only_feasible_ranks_are_chosen(
        self, rule: Callable[..., int | None], loads, tokens, full
    ):
        state = [DecodeLoad(b, k, k) for b, k in loads]
        for i in full & set(range(len(state))):
            state[i].max_running = state[i].running
        feasible = [i for i, load in enumerate(state) if load.has_room(tokens + OUTPUT)]
        chosen = schedule_decode([request("r", tokens)], state, rule)
        assert bool(chosen) == bool(feasible)
        assert set(chosen.values()) <= set(feasible)

    @given(loads=LOADS, full=st.sets(st.integers(0, 39)), k=st.floats(0, 3))
    @settings(max_examples=200, deadline=None)
    def test_a_masked_rank_is_not_chosen_while_a_safe_one_has_room(self, loads, full, k):
        state = [DecodeLoad(b, kv, kv) for b, kv in loads]
        for i in full & set(range(len(state))):
            state[i].max_running = state[i].running
        limit = outlier_threshold(sorted(kv for _, kv in loads), k)
        feasible = [i for i, load in enumerate(state) if load.has_room(1 + OUTPUT)]
        safe = [i for i in feasible if loads[i][1] <= limit]
        chosen = schedule_decode([request("r", 1)], state, iqr_lexicographic(k))
        assert set(chosen.values()) <= set(safe or feasible)
