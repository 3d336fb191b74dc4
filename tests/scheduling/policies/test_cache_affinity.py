"""Cache-aware placement: where the prefix is, unless that makes somebody wait too long."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from driver import Driver
from harness.learned_instance import instance

from sglang_sbs.scheduling import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    InstanceDown,
    InstanceUp,
    PrefillDone,
    RequestEnded,
)
from sglang_sbs.scheduling.policies.adaptive import batch
from sglang_sbs.scheduling.policies.adaptive.cache_affinity import (
    BatchAffinity,
    CacheAffinity,
    ForecastAffinity,
)
from sglang_sbs.scheduling.policies.adaptive.pass_forecast import Home
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefix.places import Hits, Upcoming
from sglang_sbs.scheduling.reasons import WaitReason
from sglang_sbs.scheduling.request import Request

PAGE = 10
PREFIX = list(range(1, 81))
"""800 tokens."""


def moment(starts_s: dict[str, float]) -> SimpleNamespace:
    """A :class:`.Moment` at which a batch would start at these times, by instance id."""
    return SimpleNamespace(now_s=0.0, starts_s=lambda instance: (starts_s[instance.id], 0.0))


def cluster(source: str = "events", *, trigger: str = "adaptive", prefill: int = 2) -> Driver:
    it = Driver(policy="sbs", trigger=trigger, t_default_s=0.2)
    for i in range(prefill):
        it.tell(
            InstanceUp(
                instance=f"p{i}",
                role="prefill",
                dp_size=2,
                chunk_tokens=1000,
                page_size=PAGE,
                prefix_source=source,  # type: ignore[arg-type]
            )
        )
    it.tell(InstanceUp(instance="d0", role="decode", dp_size=4))
    return it


def stored(it: Driver, instance: str, rank: int, blocks: list[int]) -> None:
    it.tell(BlocksStored(instance=instance, dp_rank=rank, blocks=blocks))


def arrive(it: Driver, rid: str, tokens: int, blocks: list[int]):
    return it.arrive(rid, tokens, blocks=blocks, block_tokens=PAGE)


@pytest.mark.parametrize("trigger", ["adaptive", "paper"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_goes_to_its_prefix_and_is_charged_the_rest(trigger: str, rank: int):
    it = cluster(trigger=trigger, prefill=1)
    stored(it, "p0", rank, PREFIX)
    (dispatch,) = arrive(it, "r", 900, [*PREFIX, *range(500, 510)])
    assert (dispatch.prefill, dispatch.prefill_rank) == ("p0", rank)
    assert dispatch.cached_tokens == 800
    state = it.prefill_state("p0")
    assert state.ranks[rank].c_avail == 1000 - 100


def test_of_idle_instances_the_one_that_has_it():
    it = cluster()
    stored(it, "p1", 1, PREFIX)
    (dispatch,) = arrive(it, "r", 900, PREFIX)
    assert (dispatch.prefill, dispatch.prefill_rank) == ("p1", 1)


def test_evicted_and_cleared_blocks_are_not_looked_for():
    it = cluster()
    stored(it, "p1", 1, PREFIX)
    it.tell(BlocksRemoved(instance="p1", dp_rank=1, blocks=PREFIX[40:]))
    (dispatch,) = arrive(it, "a", 900, PREFIX)
    assert dispatch.cached_tokens == 400
    it = cluster()
    stored(it, "p1", 1, PREFIX)
    it.tell(BlocksCleared(instance="p1", dp_rank=1))
    (dispatch,) = arrive(it, "b", 900, PREFIX)
    assert dispatch.cached_tokens == 0


def test_an_instance_that_is_down_has_nothing():
    it = cluster()
    stored(it, "p1", 1, PREFIX)
    it.tell(InstanceDown(instance="p1"))
    (dispatch,) = arrive(it, "r", 900, PREFIX)
    assert (dispatch.prefill, dispatch.cached_tokens) == ("p0", 0)
    assert it.scheduler.queue.tokens == 0


def test_waiting_requests_count_with_what_is_cached_now():
    it = cluster(prefill=1)
    arrive(it, "a", 990, [])
    arrive(it, "r", 900, PREFIX)
    assert it.scheduler.queue.tokens == 900
    stored(it, "p0", 1, PREFIX[:50])
    assert it.scheduler.queue.tokens == 400
    it.tell(RequestEnded(rid="r", outcome="aborted"))
    assert it.scheduler.queue.tokens == 0


def test_a_hot_prefix_is_computed_again_where_there_is_room():
    """Twenty requests of which only one rank has the prefix do not wait five passes for it."""
    it = cluster(prefill=1)
    stored(it, "p0", 0, PREFIX[:20])
    it.report("p0", 0, kind="launch", forward_id=1, extend_tokens=9, tokens_per_rank=[9, 9])
    for i in range(20):
        arrive(it, f"r{i}", 400, [*PREFIX[:20], *range(1000 * i, 1000 * i + 20)])
    it.wait(0.3)
    assert {dispatch.prefill_rank for dispatch in it.dispatched} == {0, 1}


def test_what_a_launched_pass_computes_is_found_by_later_requests():
    it = cluster()
    arrive(it, "first", 900, PREFIX)
    (first,) = it.dispatched
    it.wait(1.0)
    it.tell(PrefillDone(rid="first", cached_tokens=0))
    (second,) = arrive(it, "second", 950, [*PREFIX, *range(200, 215)])
    assert (second.prefill, second.prefill_rank) == (first.prefill, first.prefill_rank)
    assert second.cached_tokens == 800


def test_approximate_follows_its_own_placements_until_an_answer_contradicts():
    it = cluster("approximate")
    arrive(it, "first", 900, PREFIX)
    it.wait(1.0)
    it.tell(PrefillDone(rid="first", cached_tokens=0))
    it.tell(RequestEnded(rid="first", outcome="completed", completion_tokens=5))
    it.wait(60.0)
    (second,) = arrive(it, "second", 900, PREFIX)
    assert second.cached_tokens == 800
    it.wait(1.0)
    it.tell(PrefillDone(rid="second", cached_tokens=0))
    rank = it.scheduler.prefix.prefill.find(PREFIX, PAGE, 900).by_instance[second.prefill]
    assert max(rank) == 800


def test_a_report_of_whole_prompts_is_read_by_what_is_cached():
    """SGLang finds a prefix when it schedules a request; what waits counts whole until then."""
    it = cluster(prefill=1)
    stored(it, "p0", 1, PREFIX)
    arrive(it, "r", 900, PREFIX)
    it.report("p0", 1, kind="heartbeat", rids=["r"], waiting_requests=1, waiting_tokens=900)
    state = it.prefill_state("p0")
    assert state.ranks[1].c_avail == 900


def test_not_sent_away_from_its_prefix_when_that_is_free_soon():
    it = cluster()
    stored(it, "p0", 0, PREFIX)
    for rank in range(2):
        it.report(
            "p0", rank, kind="launch", forward_id=1, extend_tokens=500, tokens_per_rank=[500, 500]
        )
    it.wait(0.1)
    arrive(it, "r", 890, PREFIX)
    it.wait(0.5)
    (dispatch,) = it.dispatched
    assert (dispatch.prefill, dispatch.prefill_rank) == ("p0", 0)


def test_computed_again_when_waiting_takes_longer():
    it = cluster()
    stored(it, "p0", 0, PREFIX[:2])
    for rank in range(2):
        it.report(
            "p0", rank, kind="launch", forward_id=1, extend_tokens=500, tokens_per_rank=[500, 500]
        )
    (dispatch,) = arrive(it, "r", 890, PREFIX)
    assert (dispatch.prefill, dispatch.cached_tokens) == ("p1", 0)


def decode_up(it: Driver, source: str = "events") -> None:
    it.tell(
        InstanceUp(
            instance="d0",
            role="decode",
            dp_size=4,
            page_size=PAGE,
            prefix_source=source,  # type: ignore[arg-type]
        )
    )


def test_a_decode_rank_with_a_radix_cache_gets_what_it_holds():
    """Its KV is shared there: nothing is transferred for it and K does not grow by it."""
    it = cluster()
    decode_up(it)
    stored(it, "d0", 2, PREFIX)
    (dispatch,) = arrive(it, "r", 900, PREFIX)
    assert dispatch.decode_rank == 2
    assert dispatch.cached_tokens == 0


def test_but_not_when_it_holds_far_too_much_already():
    it = cluster()
    decode_up(it)
    stored(it, "d0", 2, PREFIX)
    it.report("d0", 2, dp=4, kind="heartbeat", running_requests=20, kv_tokens=200_000)
    (dispatch,) = arrive(it, "r", 900, PREFIX)
    assert dispatch.decode_rank != 2


def test_another_boot_has_nothing_of_what_was_sent():
    it = cluster("approximate", prefill=1)
    it.report("p0", 0, kind="heartbeat", boot_id="one")
    it.report("p0", 1, kind="heartbeat", boot_id="one")
    arrive(it, "first", 900, PREFIX)
    (first,) = it.dispatched
    it.wait(0.5)
    it.tell(PrefillDone(rid="first"))
    rank = first.prefill_rank
    it.report("p0", rank, kind="heartbeat", boot_id="two", seq=0)
    assert not it.scheduler.prefix.prefill.find(PREFIX, PAGE, 900).by_instance


def test_a_changed_role_starts_with_nothing():
    it = cluster()
    stored(it, "p1", 0, PREFIX)
    it.tell(
        InstanceUp(instance="p1", role="decode", dp_size=2, page_size=PAGE, prefix_source="events")
    )
    (dispatch,) = arrive(it, "r", 900, PREFIX)
    assert (dispatch.prefill, dispatch.cached_tokens) == ("p0", 0)
    assert dispatch.decode == "d0"


def test_samples_of_one_prompt_wait_for_the_first_of_them():
    """n = 6: one computes the prompt, the others find it there."""
    it = cluster()
    for i in range(6):
        arrive(it, f"r{i}", 900, PREFIX)
    assert [dispatch.rid for dispatch in it.dispatched] == ["r0"]
    (first,) = it.dispatched
    place = first.prefill
    fields = {"forward_id": 1, "tokens_per_rank": [900, 0], "extend_tokens": 900}
    it.report(place, first.prefill_rank, kind="launch", rids=["r0"], **fields)
    it.wait(0.15)
    it.report(place, first.prefill_rank, kind="forward", forward_s=0.15, **fields)
    it.tell(PrefillDone(rid="r0", cached_tokens=0))
    it.wait(0.3)
    assert len(it.dispatched) >= 4
    assert {dispatch.cached_tokens for dispatch in it.dispatched[1:]} == {800}
    assert {(dispatch.prefill, dispatch.prefill_rank) for dispatch in it.dispatched} == {
        (first.prefill, first.prefill_rank)
    }


def test_they_do_not_wait_for_one_that_is_gone():
    it = cluster()
    for i in range(3):
        arrive(it, f"r{i}", 900, PREFIX)
    (first,) = it.dispatched
    it.tell(RequestEnded(rid=first.rid, outcome="aborted"))
    assert [dispatch.rid for dispatch in it.dispatched] == ["r0", "r1"]
    assert it.dispatched[1].cached_tokens == 0


def test_nor_for_one_whose_instance_went_down():
    it = cluster()
    for i in range(3):
        arrive(it, f"r{i}", 900, PREFIX)
    it.tell(InstanceDown(instance=it.dispatched[0].prefill))
    assert [dispatch.rid for dispatch in it.dispatched] == ["r0", "r1"]
    assert it.dispatched[1].prefill != it.dispatched[0].prefill


def test_a_short_common_beginning_is_not_waited_for():
    it = cluster()
    for i in range(2):
        arrive(it, f"r{i}", 900, [1, 2, *range(1000 * (i + 1), 1000 * (i + 1) + 80)])
    assert [dispatch.rid for dispatch in it.dispatched] == ["r0", "r1"]
    assert it.dispatched[0].prefill != it.dispatched[1].prefill


@pytest.mark.parametrize(("tokens", "waits"), [(10, False), (19, False), (20, True), (800, True)])
def test_nor_is_it_when_everybody_waits_and_each_token_counts(tokens: int, waits: bool):
    """Two prompts that begin with the same page of one token had waited for each other for more
    than a second."""
    it = cluster()
    p0, p1 = it.scheduler.prefill.values()
    blocks = list(range(1, 900))

    def decision() -> CacheAffinity:
        # p1, for which the batch is, starts much later than p0: whatever is there would be sooner.
        starts_s = {"p0": 100.0, "p1": 105.0}
        return CacheAffinity(moment(starts_s), {"p0": p0, "p1": p1}, p1, load=0.95)

    coming = Upcoming("p0", 0, tokens, visible_s=100.0)
    cached = Hits({"p0": [tokens, 0]}, tokens)
    for fields in ({"upcoming": [coming]}, {"hits": cached}):
        request = Request("r", 1, 900, None, 100.0, 200.0, blocks=blocks, block_tokens=1, **fields)
        here = BatchAffinity(decision(), p1)
        assert bool(here.skip(request)) is waits


def test_a_prefix_that_is_overdue_wakes_the_scheduler_later_than_now():
    """A wake at the same moment would decide the same again, for as long as a clock stands
    still."""
    it = cluster()
    p0, p1 = it.scheduler.prefill.values()
    by_id = {"p0": p0, "p1": p1}
    decision = CacheAffinity(moment({"p0": 0.0, "p1": 5.0}), by_id, p1, load=0.95)
    overdue = Upcoming("p0", 0, 800, visible_s=-1.0)
    request = Request("r", 1, 900, None, 100.0, 200.0, blocks=PREFIX, upcoming=[overdue])
    assert BatchAffinity(decision, p1).skip(request) is WaitReason.PREFIX_COMING
    assert 0.0 < decision.wake_s < 0.001


def test_who_was_left_for_a_home_is_taken_once_nothing_is_cached_there():
    """Also in the same decision, which remembers who was left."""
    it = cluster(prefill=3)
    by_id = dict(it.scheduler.prefill)
    starts_s = {"p0": 100.0, "p1": 105.0, "p2": 105.0}
    decision = CacheAffinity(moment(starts_s), by_id, by_id["p1"], load=0.95)
    hits = Hits({"p0": [800, 0]}, 800)
    request = Request("r", 1, 900, None, 100.0, 200.0, blocks=PREFIX, block_tokens=PAGE, hits=hits)
    assert BatchAffinity(decision, by_id["p1"]).skip(request) is WaitReason.BETTER_ELSEWHERE
    assert BatchAffinity(decision, by_id["p2"]).skip(request) is WaitReason.BETTER_ELSEWHERE
    assert BatchAffinity(decision, by_id["p0"]).skip(request) is None
    assert decision.deferred == 2
    request.hits, request.uncached_tokens = Hits({}, 0), 900
    assert BatchAffinity(decision, by_id["p2"]).skip(request) is None


def test_a_request_goes_to_the_rank_of_its_forecast():
    p0 = cluster().scheduler.prefill["p0"]
    decision = CacheAffinity(moment({"p0": 0.0}), {"p0": p0}, p0, load=0.5)
    hits = Hits({"p0": [800, 800]}, 800, {"p0": [800, 0]})
    request = Request("r", 1, 900, None, 0.0, 60.0, blocks=PREFIX, block_tokens=PAGE, hits=hits)
    assert BatchAffinity(decision, p0).rank_of(request, [1000, 1000]) == 1
    at_home = ForecastAffinity(decision, p0, {"r": Home("p0", 0)}, {})
    assert at_home.skip(request) is None
    assert at_home.rank_of(request, [1000, 1000]) == 0


def test_many_that_wait_for_one_instance_do_not_hide_those_of_another(monkeypatch):
    """A decision looks at few of those that belong elsewhere, and then tries the next instance."""
    monkeypatch.setattr(batch, "TUNING", replace(TUNING, most_deferred=3))
    it = cluster()
    stored(it, "p1", 0, PREFIX)
    for name in ("p0", "p1"):
        it.report(name, 0, kind="launch", forward_id=1, extend_tokens=9, tokens_per_rank=[9, 9])
    for i in range(8):
        arrive(it, f"r{i}", 900, PREFIX)
    for name in ("p0", "p1"):
        for rank in range(2):
            it.report(name, rank, kind="idle", forward_id=1)
    it.wait(0.05)
    assert it.dispatched
    assert {dispatch.prefill for dispatch in it.dispatched} == {"p1"}


def test_no_request_waits_for_a_prefix_forever(monkeypatch):
    """Whatever is predicted, and however often."""
    monkeypatch.setattr(
        "sglang_sbs.scheduling.policies.adaptive.cache_affinity.BatchAffinity.skip",
        lambda *_: WaitReason.PREFIX_COMING,
    )
    it = cluster()
    hold_s = it.scheduler.config.max_hold_s
    arrive(it, "r", 900, PREFIX)
    it.wait(0.9 * hold_s)
    assert not it.dispatched
    it.wait(0.2 * hold_s)
    assert [dispatch.rid for dispatch in it.dispatched] == ["r"]


def test_blocks_of_no_size_are_no_blocks():
    it = cluster()
    for i in range(3):
        it.arrive(f"r{i}", 900, blocks=PREFIX)
    it.wait(1.0)
    assert {dispatch.cached_tokens for dispatch in it.dispatched} == {0}
    assert {"r0", "r1"} <= {dispatch.rid for dispatch in it.dispatched}


def test_a_request_costs_what_its_pass_takes():
    """The tokens of the slowest rank had counted twice."""
    it = instance(dp_size=4)
    decision = CacheAffinity(moment({"p0": 0.0}), {"p0": it}, it, load=0.5)
    request = Request("r", 1, 900, None, 0.0, 60.0)
    expected_s = it.model.predict_s([900, 0, 0, 0], [900**2 / 2, 0, 0, 0])
    assert decision.best_on(request, it).cost_s == pytest.approx(expected_s)


def test_far_away_engines_get_requests_at_once_and_where_the_prefix_is():
    it = cluster(prefill=1)
    it.scheduler.interval.on_flight(0.3, it.now_s)
    stored(it, "p0", 1, PREFIX)
    # Rank 0 would have fewer tokens to compute, and eta would choose it.
    (other,) = arrive(it, "other", 1700, [*PREFIX, *range(600, 690)])
    (dispatch,) = arrive(it, "r", 810, [*PREFIX, 500])
    assert [d.prefill_rank for d in (other, dispatch)] == [1, 1]
    assert "L_net" in dispatch.reason
