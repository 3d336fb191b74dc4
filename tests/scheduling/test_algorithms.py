"""Algorithms 1-3 of the paper, on cases small enough to check by hand."""

from __future__ import annotations

import pytest
from harness.plain_requests import request
from harness.ranks_to_place_on import placed_on, target
from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.scheduling.decode.rules import (
    DecodeLoad,
    fewest_requests,
    iqr_lexicographic,
    outlier_threshold,
    percentile,
    potential,
    schedule_decode,
)
from sglang_sbs.scheduling.policies.paper import pbaa
from sglang_sbs.scheduling.policies.pbaa import first_part, top_up
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.request import Request


class TestInterval:
    def test_before_any_sample_it_is_t_default_plus_latency_over_instances(self):
        interval = IntervalController(t_default_s=0.3, window=4, latency_s=0.03)
        interval.on_topology_change(3)
        assert interval.interval_s == pytest.approx(0.11)

    def test_the_window_evicts_the_oldest_sample(self):
        interval = IntervalController(t_default_s=9.0, window=2, latency_s=0.0)
        interval.on_topology_change(1)
        for sample in (0.1, 0.2, 0.4):
            interval.on_end_forward(sample)
        assert interval.mean_forward_s == pytest.approx(0.3)

    def test_a_topology_change_takes_effect_at_once(self):
        interval = IntervalController(t_default_s=0.4, window=2, latency_s=0.0)
        interval.on_topology_change(2)
        before = interval.interval_s
        interval.on_topology_change(4)
        assert interval.interval_s == pytest.approx(before / 2)

    @pytest.mark.parametrize("instances", [1, 3])
    def test_a_slow_first_pass_of_each_instance_is_in_i_opt_and_not_in_the_usual_time(
        self, instances: int
    ):
        interval = IntervalController(t_default_s=0.3, window=100, latency_s=0.0)
        interval.on_topology_change(instances)
        samples = [20.0] * instances + [0.2] * (instances + 1)
        for sample in samples:
            interval.on_end_forward(sample)
        assert interval.mean_forward_s == pytest.approx(0.2)
        assert interval.interval_s == pytest.approx(sum(samples) / len(samples) / instances)

    def test_a_single_pause_later_is_not_in_the_usual_time(self):
        interval = IntervalController(t_default_s=0.3, window=100, latency_s=0.0)
        for sample in [0.2] * 200 + [20.0]:
            interval.on_end_forward(sample)
        assert interval.mean_forward_s == pytest.approx(0.2)

    @pytest.mark.parametrize("seconds", [3.0, 0.02])
    def test_another_forward_time_than_the_default_is_believed_at_once(self, seconds: float):
        interval = IntervalController(t_default_s=0.3, window=100, latency_s=0.0)
        for _ in range(2):
            interval.on_end_forward(seconds)
        assert interval.mean_forward_s == pytest.approx(seconds)

    def test_long_passes_that_come_again_and_again_are_usual(self):
        interval = IntervalController(t_default_s=0.3, window=100, latency_s=0.0)
        for _ in range(20):
            for sample in [0.02] * 9 + [1.0]:
                interval.on_end_forward(sample)
        assert interval.mean_forward_s == pytest.approx(0.118)

    def test_to_the_letter_nothing_is_left_out(self):
        interval = IntervalController(t_default_s=0.3, window=100, latency_s=0.0)
        interval.literal = True
        for sample in [20.0] + [0.2] * 9:
            interval.on_end_forward(sample)
        assert interval.mean_forward_s == pytest.approx(2.18)


class TestPbaa:
    def test_pending_requests_go_before_longer_new_ones(self):
        placed, left = pbaa([request("old", 10)], [request("new", 100)], [1, -5])
        assert [(r.rid, d) for r, d in placed] == [("old", 0)]
        assert [r.rid for r in left] == ["new"]

    def test_longest_first_into_the_emptiest_rank(self):
        batch = [request("a", 100), request("b", 300), request("c", 200)]
        placed, left = pbaa([], batch, [400, 390])
        assert [(r.rid, d) for r, d in placed] == [("b", 0), ("c", 1), ("a", 1)]
        assert left == []

    def test_positive_capacity_admits_an_overshoot_as_the_paper_writes_it(self):
        placed, _ = pbaa([], [request("big", 1000)], [1, 0])
        assert [(r.rid, d) for r, d in placed] == [("big", 0)]

    def test_a_request_costs_whole_pages_as_in_the_engine(self):
        batch = [request("a", 65), request("b", 1), request("c", 1)]
        placed, left = pbaa([], batch, [192], page=64)
        assert [r.rid for r, _ in placed] == ["a", "b"]
        assert [r.rid for r in left] == ["c"]

    def test_no_capacity_leaves_everything_for_the_next_cycle(self):
        placed, left = pbaa([request("a", 1)], [request("b", 2)], [0, -3])
        assert placed == []
        assert [r.rid for r in left] == ["a", "b"]

    def test_cache_aware_mode_prefers_the_rank_that_holds_the_prefix(self):
        def hit(_request: Request, rank: int) -> int:
            return 90 if rank == 1 else 0

        placed, _ = pbaa([], [request("r", 100)], [120, 60], hit)
        assert [(r.rid, d) for r, d in placed] == [("r", 1)]

    @given(
        tokens=st.lists(st.integers(1, 5000), max_size=40),
        capacity=st.lists(st.integers(-500, 4000), min_size=1, max_size=8),
    )
    def test_every_request_is_placed_once_or_left_and_a_rank_is_overshot_by_one_at_most(
        self, tokens, capacity
    ):
        batch = [request(str(i), t, order=i) for i, t in enumerate(tokens)]
        placed, left = pbaa(batch[::2], batch[1::2], capacity)
        assert {r.rid for r, _ in placed} | {r.rid for r in left} == {r.rid for r in batch}
        assert len(placed) + len(left) == len(batch)
        for rank, free in enumerate(capacity):
            mine = [r.prompt_tokens for r, d in placed if d == rank]
            assert not mine or free - sum(mine[:-1]) > 0

    @given(
        tokens=st.lists(st.integers(1, 3000), max_size=40),
        capacity=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    )
    def test_fitting_placement_never_costs_a_prompt_more_passes_than_it_has_chunks(
        self, tokens, capacity
    ):
        batch = [request(str(i), t, order=i) for i, t in enumerate(tokens)]
        placed, left = placed_on(batch, target(capacity, 1000))
        assert len(placed) + len(left) == len(batch)
        for rank, free in enumerate(capacity):
            mine = [r.prompt_tokens for r, d in placed if d == rank]
            if sum(mine) > free:
                assert len(mine) == 1
                full_chunks, first_part = divmod(mine[0], 1000)
                assert full_chunks >= 1
                assert free >= (first_part or 1000)

    def test_a_request_that_was_left_out_of_several_batches_is_placed_first(self):
        old, long, short = batch = [
            request("old", 300, order=0),
            request("long", 800, order=1),
            request("short", 200, order=2),
        ]
        old.waited_batches = TUNING.left_out_batches - 1
        assert placed_on(batch, target([1000], 1000)).placed == [(long, 0), (short, 0)]
        old.waited_batches = TUNING.left_out_batches
        assert placed_on(batch, target([1000], 1000)) == ([(old, 0), (short, 0)], [long])
        assert placed_on(batch, target([1300], 1000)).placed == [(long, 0), (old, 0), (short, 0)]
        long.priority = 1
        assert placed_on(batch, target([1000], 1000)).placed == [(old, 0), (short, 0)]
        long.waited_batches = TUNING.left_out_batches
        assert placed_on(batch, target([1000], 1000)).placed == [(long, 0), (short, 0)]

    @given(
        tokens=st.lists(
            st.tuples(st.integers(1, 1200), st.integers(0, TUNING.left_out_batches + 1)),
            max_size=40,
        ),
        capacity=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    )
    def test_requests_left_out_before_lose_no_request_and_overfill_no_rank(self, tokens, capacity):
        batch = [request(str(i), t, order=i) for i, (t, _) in enumerate(tokens)]
        for asked, (_, waited) in zip(batch, tokens, strict=True):
            asked.waited_batches = waited
        placed, left = placed_on(batch, target(capacity, 1000))
        rids = [r.rid for r, _ in placed] + [r.rid for r in left]
        assert sorted(rids) == sorted(r.rid for r in batch)
        for rank, free in enumerate(capacity):
            mine = [r.prompt_tokens for r, d in placed if d == rank]
            assert sum(first_part(tokens, 1000) for tokens in mine) <= free

    def test_top_up_splits_the_oldest_leftover_only_under_backlog(self):
        batch = [request("a", 600, order=0), request("b", 600, order=1), request("c", 900, order=2)]
        fitted = placed_on(batch, target([1000], 1000))
        assert [r.rid for r, _ in fitted.placed] == ["c"]
        quiet = top_up(fitted, target([1000], 1000), keep_tokens=5000)
        assert [r.rid for r, _ in quiet.placed] == ["c"]
        busy = top_up(fitted, target([1000], 1000), keep_tokens=500)
        assert [r.rid for r, _ in busy.placed] == ["c", "a"]


class TestDecode:
    def test_percentiles_interpolate_linearly(self):
        assert percentile([10, 20, 30, 40], 0.25) == pytest.approx(17.5)
        assert percentile([7], 0.75) == 7

    def test_the_outlier_threshold_is_q3_plus_k_times_iqr(self):
        assert outlier_threshold([0, 10, 20, 30, 40], 1.5) == pytest.approx(30 + 1.5 * 20)

    def test_a_rank_with_an_outlier_kv_load_is_masked_even_with_the_smallest_batch(self):
        loads = [DecodeLoad(5, 100), DecodeLoad(5, 110), DecodeLoad(5, 105), DecodeLoad(0, 9000)]
        chosen = schedule_decode([request("r", 10)], loads, iqr_lexicographic(1.5))
        assert chosen == {"r": 0}

    def test_lexicographic_batch_size_first_then_kv(self):
        loads = [DecodeLoad(3, 10), DecodeLoad(2, 30), DecodeLoad(2, 20)]
        assert schedule_decode([request("r", 1)], loads, iqr_lexicographic(9.0)) == {"r": 2}

    def test_long_requests_choose_first_and_the_state_follows_each_placement(self):
        loads = [DecodeLoad(0, 0), DecodeLoad(0, 0)]
        batch = [request("short", 10), request("long", 1000), request("mid", 100)]
        chosen = schedule_decode(batch, loads, iqr_lexicographic(1.5))
        assert chosen == {"long": 0, "mid": 1, "short": 1}
        assert [(load.running, load.kv_tokens) for load in loads] == [(1, 1000), (2, 110)]

    def test_a_rank_without_room_is_not_feasible_and_nothing_fits_nowhere(self):
        full = DecodeLoad(1, 90, 90, kv_capacity_tokens=100)
        assert schedule_decode([request("r", 50)], [full], iqr_lexicographic(1.5)) == {}
        assert schedule_decode([request("r", 50)], [full], iqr_lexicographic(1.5), admit=False)

    @given(
        loads=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10**5)), min_size=1),
        tokens=st.lists(st.integers(1, 4000), min_size=1, max_size=20),
        k=st.floats(0, 5),
    )
    def test_a_masked_rank_is_never_chosen_while_a_safe_one_exists(self, loads, tokens, k):
        state = [DecodeLoad(b, kv) for b, kv in loads]
        rule = iqr_lexicographic(k)

        def checked(r, board, fits):
            current = board.loads
            assert board.kv_sorted == sorted(load.kv_tokens for load in current)
            chosen = rule(r, board, fits)
            feasible = range(len(current))
            threshold = outlier_threshold(sorted(x.kv_tokens for x in current), k)
            safe = [i for i in feasible if current[i].kv_tokens <= threshold]
            assert not safe or chosen in safe
            best = min((current[i].running, current[i].kv_tokens) for i in safe or feasible)
            assert (current[chosen].running, current[chosen].kv_tokens) == best
            return chosen

        batch = [request(str(i), t) for i, t in enumerate(tokens)]
        assert len(schedule_decode(batch, state, checked)) == len(batch)

    def test_the_potential_avoids_the_rank_that_is_ahead_in_either_dimension(self):
        loads = [DecodeLoad(10, 5000), DecodeLoad(2, 90_000), DecodeLoad(8, 6000)]
        assert schedule_decode([request("r", 1000)], loads, potential) == {"r": 2}


@pytest.mark.parametrize("rule", [potential, fewest_requests, iqr_lexicographic(1.5)])
def test_ties_go_to_each_rank_in_turn(rule):
    """Short requests, each over before the next one comes: all 16 ranks get some."""
    alone, empty = [request("r", 10)], DecodeLoad(0, 0)
    chosen = [schedule_decode(alone, [empty] * 16, rule, first=n)["r"] for n in range(16)]
    assert sorted(chosen) == list(range(16))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8), st.integers()
)
def test_the_first_among_equals_changes_nothing_else(ranks, first):
    def choose(first):
        loads = [DecodeLoad(running, kv) for running, kv in ranks]
        rank = schedule_decode([request("r", 10)], loads, potential, first=first)["r"]
        return ranks[rank]

    assert choose(first) == choose(0)
