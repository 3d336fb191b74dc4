"""How a few requests are divided between the batch that leaves and the next one."""

from __future__ import annotations

import pytest
from harness.learned_instance import CHUNK, instance
from harness.learned_instance import request as request_of
from msgspec.structs import replace

from sglang_sbs.scheduling.policies.adaptive import few_requests
from sglang_sbs.scheduling.policies.adaptive.few_requests import (
    NextPasses,
    WaitingWork,
    best_cut,
    cut_of,
    fair_share,
    prefix,
)
from sglang_sbs.scheduling.policies.adaptive.lineup import Begins, Marginals, Moment, Starts
from sglang_sbs.scheduling.policies.offered_load import OfferedLoad


def begins_at(instances, begin_of) -> Begins:
    """Passes begin at these times, by instance id."""
    begins = Begins(Starts(instances, Moment(0.0, 0.0), range(len(instances))))
    begins.begin_s = lambda instance: begin_of[instance.id]
    return begins


def waiting_of(
    now_s: float, tokens: int, begins: Begins, offered: OfferedLoad, whole=1.0
) -> WaitingWork:
    return WaitingWork(now_s, tokens, begins, offered, Marginals(), whole)


def cut(tokens, *, delay_s, coming=(), cycle=2.0, least=0, usual=0, waited_s=0.0, dp_size=4) -> int:
    turns = NextPasses(instance("p0", dp_size), instance("p1", dp_size), delay_s, coming, cycle)
    return best_cut(
        [request_of(f"r{i}", n) for i, n in enumerate(tokens)],
        turns,
        least=least,
        usual=usual,
        now_s=waited_s,
        pass_s=0.15,
    )


def test_what_costs_the_pass_nothing_leaves_with_it():
    # On four ranks the fourth short one makes it no longer; of a fluid half would be left.
    assert cut([200, 200, 200, 200], delay_s=0.1, usual=2) == 4


def test_a_long_one_waits_for_the_next_instance():
    assert cut([50, 50, 50, 950], delay_s=0.05, coming=[900], usual=4) == 3


def test_a_request_that_waited_is_not_left_for_a_late_pass():
    tokens, delay_s = [50, 50, 50, 950], 0.5
    assert cut(tokens, delay_s=delay_s, coming=[900], usual=4) == 3
    assert cut(tokens, delay_s=delay_s, coming=[900], usual=3, waited_s=5.0) == 4


def test_the_usual_division_stays_where_another_is_hardly_better():
    four = [200, 200, 200, 200]
    assert cut(four, delay_s=0.02, coming=[300], usual=3) == 3
    assert cut(four, delay_s=0.02, coming=[300], usual=2) == 4


def test_an_idle_instance_takes_one_at_least():
    short = [50, 50, 50, 950]
    assert cut(short, delay_s=0.005, cycle=6.0, usual=4) == 0
    assert cut(short, delay_s=0.005, cycle=6.0, usual=4, least=1) >= 1


@pytest.mark.parametrize("idle", [True, False])
def test_nothing_that_fits_is_no_request(idle):
    now, later = instance("p0", 4), instance("p1", 4)
    assert now.idle
    if not idle:
        now.on_dispatched("other", 0, 100, 0.0)
    starts = {"p0": 0.0, "p1": 0.1}
    offered = OfferedLoad()
    offered.on_topology_change([now, later])
    offered.measure([now, later], 0.0)
    assert cut_of(now, [], waiting_of(0.0, 5000, begins_at([now, later], starts), offered)) <= 1


def test_a_prompt_of_several_chunks_is_left_to_the_fluid():
    now, later = instance("p0", 4), instance("p1", 4)
    offered = OfferedLoad()
    offered.on_topology_change([now, later])
    offered.measure([now, later], 0.0)
    head = [request_of("a", 3 * CHUNK)]
    waiting = waiting_of(0.0, 3 * CHUNK, begins_at([now, later], {"p0": 0.0, "p1": 0.1}), offered)
    assert cut_of(now, head, waiting) == 1


def test_passes_without_a_fixed_time_are_no_division_by_zero():
    now, later = instance("p0", 4), instance("p1", 4)
    for engine in (now, later):
        engine.model.formula = replace(engine.model.formula, fixed_s=0.0)  # the fit has dropped it
    offered = OfferedLoad()
    offered.on_topology_change([now, later])
    offered.measure([now, later], 0.0)
    head = [request_of("a", 300), request_of("b", 300)]
    waiting = waiting_of(1.0, 600, begins_at([now, later], {"p0": 1.0, "p1": 1.1}), offered)
    assert offered.pass_s > 0
    assert cut_of(now, head, waiting) in (1, 2)


def test_an_idle_instance_that_is_slow_takes_nothing_by_force():
    slow, fast = instance("p0", 4), instance("p1", 4)
    for _ in range(60):
        slow.model.observe([300, 0, 0, 0], 2.0)
    fast.on_dispatched("other", 0, 100, 0.0)
    offered = OfferedLoad()
    offered.on_topology_change([slow, fast])
    offered.measure([slow, fast], 0.0)
    waiting = waiting_of(0.0, 100, begins_at([slow, fast], {"p0": 0.0, "p1": 0.05}), offered)
    assert slow.idle
    assert cut_of(slow, [request_of("a", 100)], waiting) == 0


def test_where_batches_are_split_a_fine_division_is_for_passes_that_nobody_makes(monkeypatch):
    now, later = instance("p0", 4), instance("p1", 4)
    offered = OfferedLoad()
    offered.on_topology_change([now, later])
    offered.measure([now, later], 0.0)
    head = [request_of(f"r{i}", 200) for i in range(4)]
    begins = begins_at([now, later], {"p0": 0.0, "p1": 0.01})
    monkeypatch.setattr(few_requests, "best_cut", lambda *_args, **_more: -1)

    def cut_with(whole: float) -> int:
        return cut_of(now, head, waiting_of(0.0, 800, begins, offered, whole))

    offered.request_rate = 10.0
    assert cut_with(1.0) == -1
    usual = OfferedLoad()
    share = fair_share(now, [(0.01, later)], 800, 0.0, waiting_of(0.0, 800, begins, usual))
    assert cut_with(0.0) == prefix(head, share)
