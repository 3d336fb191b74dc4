"""The scheduler explains every request: why it left for where it went, or what it waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from driver import Driver
from harness.why_cluster import Cluster

from sglang_sbs.scheduling import (
    BlocksStored,
    InstanceUp,
    RequestEnded,
    Scheduler,
    SchedulerConfig,
)
from sglang_sbs.scheduling.explained.decisions import Why, _launch_of, note
from sglang_sbs.scheduling.prefill.completion import NextPass, PassFormula, attention_pairs
from sglang_sbs.scheduling.reasons import Opening, Term, WaitReason

PAGE = 100


class Asked(Driver):
    """A driver whose scheduler remembers its decisions."""

    def __init__(self, **config):
        super().__init__(**config)
        self.scheduler = Scheduler(SchedulerConfig(**config), remembers=64)

    def why(self, rid: str) -> Why:
        why = self.scheduler.why(rid, self.now_s)
        assert why is not None
        return why

    def starts_pass(self, instance: str, rids: list[str], tokens: int, forward_id: int = 1):
        """Both ranks report that a pass of two ranks was launched."""
        for rank in (0, 1):
            self.report(
                instance,
                rank,
                kind="launch",
                forward_id=forward_id,
                tokens_per_rank=[tokens, 0],
                extend_tokens=0 if rank else tokens,
                rids=[] if rank else rids,
            )


def test_a_request_to_an_idle_cluster_names_the_candidates_with_what_was_predicted_of_them():
    driver = Asked().up(prefill=3)
    (dispatch,) = driver.arrive("r", 500)
    why = driver.why("r")
    assert why.opening is Opening.IDLE
    assert why.term is Term.SOONEST
    assert why.waits == []
    assert why.instances == 3
    chosen = [candidate for candidate in why.candidates if candidate.chosen]
    assert [candidate.instance for candidate in chosen] == [dispatch.prefill]
    assert sorted(candidate.instance for candidate in why.candidates) == ["p0", "p1", "p2"]
    for candidate in why.candidates:
        assert 0 < candidate.start_s < candidate.finish_s
        assert candidate.delay_s == 0  # nobody else is in the pass
        assert candidate.cached_tokens == 0
    assert why.launch_s == pytest.approx(driver.now_s + chosen[0].start_s)
    assert why.end_s == pytest.approx(driver.now_s + chosen[0].finish_s)


def test_a_request_that_waits_for_a_busy_instance_says_for_which_one_and_until_when():
    driver = Asked(t_default_s=0.5).up()
    driver.arrive("first", 800)
    driver.now_s += 0.01
    driver.starts_pass("p0", ["first"], 800)
    assert driver.arrive("second", 100) == []
    arrived_s = driver.now_s
    driver.now_s += 0.001
    (waited,) = driver.why("second").waits
    assert waited.reason is WaitReason.NOT_YET
    assert waited.at_s == arrived_s
    assert waited.instance == "p0"
    (running,) = driver.scheduler.prefill["p0"].passes
    assert waited.until_s == pytest.approx(running.end_s, abs=0.01)
    assert driver.why("second").decided_s is None

    (dispatch,) = driver.wait(2.0)
    why = driver.why("second")
    assert why.opening is Opening.ABOUT_TO_END
    assert why.term is Term.ONLY_ONE
    assert why.waits == [waited]
    assert why.decided_s - why.arrived_s == pytest.approx(dispatch.held_s)
    assert why.launch_s == pytest.approx(waited.until_s, abs=0.01)


def test_a_request_that_waits_for_decode_room_has_that_reason():
    driver = Asked().up(prefill=3, kv_capacity_tokens=1000)
    driver.arrive("small", 500, max_new_tokens=300)
    driver.arrive("also small", 500, max_new_tokens=300)
    assert driver.arrive("large", 500, max_new_tokens=300) == []
    driver.now_s += 0.1
    assert driver.why("large").waits[-1].reason is WaitReason.NO_DECODE_ROOM
    driver.tell(RequestEnded(rid="small", outcome="aborted"))
    why = driver.why("large")
    assert why.decided_s is not None
    assert [wait.reason for wait in why.waits] == [WaitReason.NO_DECODE_ROOM]


def test_waiting_for_a_cached_prefix_names_the_place_and_the_gain():
    driver = Asked()
    for name in ("p0", "p1"):
        driver.tell(
            InstanceUp(
                instance=name,
                role="prefill",
                dp_size=2,
                chunk_tokens=1000,
                page_size=PAGE,
                prefix_source="events",
            )
        )
    driver.tell(InstanceUp(instance="d0", role="decode", dp_size=2))
    blocks = [*range(1, 10)]
    (first,) = driver.arrive("first", 900)
    driver.now_s += 0.01
    driver.starts_pass(first.prefill, ["first"], 900)
    (second,) = driver.arrive("second", 950)
    driver.now_s += 0.02
    driver.starts_pass(second.prefill, ["second"], 950)
    holder = second.prefill  # is ready after the other one
    driver.tell(BlocksStored(instance=holder, dp_rank=0, blocks=blocks))
    driver.arrive("cached", 950, blocks=blocks, block_tokens=PAGE)
    driver.wait(3.0)
    why = driver.why("cached")
    (chosen,) = [candidate for candidate in why.candidates if candidate.chosen]
    assert (chosen.instance, chosen.cached_tokens) == (holder, 900)
    assert why.term is Term.CACHED
    elsewhere = [wait for wait in why.waits if wait.reason is WaitReason.BETTER_ELSEWHERE]
    assert [wait.instance for wait in elsewhere] == [holder]
    assert elsewhere[0].gain_s > 0


@pytest.mark.parametrize(("cost_s", "gain_s"), [(0.2, 0.2), (0.0, None), (-0.2, None)])
def test_a_place_that_costs_no_less_is_no_gain(cost_s, gain_s):
    driver = Asked().up()
    driver.arrive("first", 800)
    driver.arrive("r", 800)
    (request,) = driver.scheduler.queue
    note(request, WaitReason.BETTER_ELSEWHERE, driver.now_s, "p1", gain_s=cost_s)
    driver.now_s += 0.1
    assert driver.why("r").waits[-1].gain_s == gain_s


@pytest.mark.parametrize(
    ("config", "opening"),
    [({"policy": "eta"}, Opening.AT_ONCE), ({"trigger": "paper"}, Opening.INTERVAL)],
)
def test_policies_without_predictions_name_their_rule(config, opening):
    driver = Asked(**config).up(prefill=2)
    (dispatch,) = driver.arrive("r")
    why = driver.why("r")
    assert (why.opening, why.term) == (opening, Term.RULE)
    assert [candidate.instance for candidate in why.candidates] == [dispatch.prefill]


def test_only_so_many_decisions_are_remembered_and_none_unless_wanted():
    driver = Asked(policy="eta").up()
    for number in range(100):
        driver.arrive(f"r{number}")
        driver.tell(RequestEnded(rid=f"r{number}", outcome="completed"))
    known = [
        number
        for number in range(100)
        if driver.scheduler.why(f"r{number}", driver.now_s) is not None
    ]
    assert known == [*range(36, 100)]
    plain = Driver().up()
    plain.arrive("r")
    assert plain.scheduler.why("r", plain.now_s) is None


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nothing_leaves_or_waits_without_a_reason_and_a_replay_gives_the_same_ones(seed):
    cluster = Cluster(seed).run(120)
    assert cluster.unexplained == []
    assert len(cluster.sent) == 120
    again = Scheduler(cluster.config, remembers=10_000)
    for now_s, event in cluster.events:
        again.handle(event, now_s)
    openings, reasons = set(), set()
    for sent in cluster.sent:
        why = cluster.scheduler.why(sent.rid, cluster.now_s)
        assert [candidate.instance for candidate in why.candidates if candidate.chosen] == [
            sent.prefill
        ]
        assert why.decided_s - why.arrived_s == pytest.approx(sent.held_s)
        assert bool(why.waits) == (sent.held_s > 0)
        assert why.launch_s >= why.decided_s
        openings.add(why.opening)
        reasons.update(wait.reason for wait in why.waits)
        assert msgspec.json.encode(again.why(sent.rid, cluster.now_s)) == msgspec.json.encode(why)
    assert {Opening.IDLE, Opening.ABOUT_TO_END} <= openings
    assert {WaitReason.NOT_YET, WaitReason.SHARE_FULL, WaitReason.DOES_NOT_FIT} <= reasons


def test_where_costs_decide_the_chosen_one_costs_least():
    cluster = Cluster(4).run(150)
    weighed = [
        why
        for sent in cluster.sent
        if (why := cluster.scheduler.why(sent.rid, cluster.now_s)).term is Term.LEAST_COST
    ]
    assert weighed
    for why in weighed:
        chosen = [candidate.cost_s for candidate in why.candidates if candidate.chosen]
        assert chosen == [0.0]


def test_the_first_pass_of_a_long_prompt_is_predicted_and_not_its_last() -> None:
    """The attention of the last chunk is many times that of the first."""
    formula = PassFormula(0.1, 0.0, 1e-5, 1e-8)
    look: Any = SimpleNamespace(instance="p0", next_pass=lambda: NextPass(formula, 1000, [0]))
    batch: Any = SimpleNamespace(looks=[look], launch_s=5.0, placed=[(0, 20_000)])
    first_s = formula.of_ranks_s([1000], [attention_pairs(1000, 0)])
    assert _launch_of(batch, "p0") == {"launch_s": 5.0, "end_s": pytest.approx(5.0 + first_s)}
