"""Decode has no room, or retries may not go everywhere: nobody waits for longer than it must."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from driver import Driver

from sglang_sbs.scheduling import (
    InstanceDown,
    InstanceUp,
    PrefillDone,
    RequestArrived,
    RequestEnded,
)
from sglang_sbs.scheduling.policies.adaptive.trigger import AdaptiveTrigger
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import LOST_S
from sglang_sbs.scheduling.queue.request import arrived


def driver(**config) -> Driver:
    return Driver(policy="sbs", trigger="adaptive", **config)


def decode(it: Driver, name: str, rooms: list[int], capacity: int = 10_000, **up) -> None:
    """A decode instance whose ranks have so much room left."""
    dp = len(rooms)
    it.tell(InstanceUp(instance=name, role="decode", dp_size=dp, kv_capacity_tokens=capacity, **up))
    for rank, room in enumerate(rooms):
        if room < capacity:
            it.report(
                name, rank, dp, running_requests=3, kv_tokens=capacity - room, accepted_requests=3
            )


def prefill(it: Driver, count: int = 1, **up) -> None:
    for index in range(count):
        it.tell(
            InstanceUp(instance=f"p{index}", role="prefill", dp_size=2, chunk_tokens=3000, **up)
        )


class TestExcluded:
    def test_a_retry_finds_the_only_instance_it_may_use_behind_idle_ones(self):
        it = driver().up(prefill=4)
        sent = it.arrive("r", exclude=("p0", "p1", "p2"))
        assert [dispatch.prefill for dispatch in sent] == ["p3"]

    def test_a_retry_without_the_largest_chunk_does_not_wait_for_it(self):
        it = driver()
        it.tell(InstanceUp(instance="small", role="prefill", dp_size=2, chunk_tokens=1000))
        it.tell(InstanceUp(instance="large", role="prefill", dp_size=2, chunk_tokens=4000))
        it.tell(InstanceUp(instance="d0", role="decode", dp_size=2))
        sent = it.arrive("r", 3000, exclude=("large",))
        assert [dispatch.prefill for dispatch in sent] == ["small"]

    def test_retries_for_a_full_decode_instance_hold_nobody_up(self):
        it = driver()
        prefill(it)
        decode(it, "d0", [10_000, 10_000])
        decode(it, "d1", [0])
        for index in range(4):
            assert it.arrive(f"retry{index}", 900, exclude=("d0",)) == []
        assert [dispatch.decode for dispatch in it.arrive("fresh", 800)] == ["d0"]
        assert it.refused == []

    def test_whether_a_retry_may_use_one_instance_takes_no_look_at_the_others(self):
        event = RequestArrived(rid="r", prompt_tokens=1, exclude=("p0", "p1"))
        request = arrived(event, 0, 0.0, 1.0)
        places = [SimpleNamespace(id=f"p{number}") for number in range(9)]
        looked_at = iter(places)
        assert request.may_use(places[4], looked_at)
        assert next(looked_at) is places[0]
        for some in (places, places[:2], places[1:3]):
            for instance in some:
                assert request.may_use(instance, some) == (instance in request.allowed_on(some))


class TestReservation:
    def crowded(self) -> Driver:
        """One decode rank of 10,000 tokens with ten requests of 1,000, and a large one waits."""
        it = driver(default_output_tokens=0)
        prefill(it)
        decode(it, "d0", [10_000])
        for index in range(10):
            assert it.arrive(f"s{index}", 1000)
            it.tell(PrefillDone(rid=f"s{index}"))
            it.report("p0", 0, rids=[f"s{index}"], accepted_requests=index + 1)
        assert it.arrive("large", 5000) == []
        return it

    def churn(self, it: Driver, count: int) -> list[str]:
        """Every 0.3 s one of the small requests ends and another one comes."""
        before = len(it.dispatched)
        for index in range(count):
            it.tell(RequestEnded(rid=f"s{index}", outcome="completed", completion_tokens=0))
            it.arrive(f"s{index + 10}", 1000)
            for sent in it.dispatched[before:]:
                it.tell(PrefillDone(rid=sent.rid))
            it.wait(0.3)
        return [dispatch.rid for dispatch in it.dispatched[before:]]

    def test_small_requests_do_not_take_what_a_large_one_waits_for(self):
        sent = self.churn(self.crowded(), 40)
        assert 10 <= sent.index("large") < 20
        assert len(sent) > 20

    def test_a_late_request_waits_for_decode_room_like_all(self):
        it = self.crowded()
        it.tell(RequestEnded(rid="s0", outcome="completed", completion_tokens=0))
        assert [dispatch.rid for dispatch in it.arrive("next", 900)] == ["next"]

    def test_a_rank_is_not_kept_for_a_request_that_is_gone(self):
        it = self.crowded()
        it.wait(20)
        it.tell(RequestEnded(rid="s0", outcome="completed", completion_tokens=0))
        it.tell(RequestEnded(rid="large", outcome="aborted"))
        assert [dispatch.rid for dispatch in it.arrive("next", 900)] == ["next"]

    def test_nor_on_an_instance_that_is_gone(self):
        it = self.crowded()
        it.wait(20)
        decode(it, "d1", [6000])
        assert "large" in [dispatch.rid for dispatch in it.dispatched]


class TestWork:
    def test_a_report_of_a_full_decode_rank_starts_no_planning(self, monkeypatch):
        it = driver()
        prefill(it)
        decode(it, "d0", [100])
        for index in range(5):
            it.arrive(f"r{index}", 500)
        planned = []
        plan = AdaptiveTrigger.plan

        def counted(self, *args):
            planned.append(args)
            return plan(self, *args)

        monkeypatch.setattr(AdaptiveTrigger, "plan", counted)
        it.report("d0", 0, 1, running_requests=3, kv_tokens=9900, accepted_requests=3)
        assert planned == []
        sent = it.report("d0", 0, 1, running_requests=2, kv_tokens=7000, accepted_requests=3)
        assert planned
        assert sent

    def test_a_decision_does_not_look_at_everything_that_decode_has_no_room_for(self, monkeypatch):
        it = driver(default_output_tokens=10)
        prefill(it)
        decode(it, "d0", [100])
        for index in range(4 * TUNING.most_refused):
            it.arrive(f"r{index}", 500)
        asked = []
        admits = it.scheduler._admission.admits

        def counted(request):
            asked.append(request.rid)
            return admits(request)

        monkeypatch.setattr(it.scheduler._admission, "admits", counted)
        it.arrive("one more", 500)
        assert len(asked) <= 3 * TUNING.most_refused


class TestLostOnItsWay:
    def test_what_never_reaches_the_engine_does_not_close_the_instance(self):
        it = driver().up(prefill=1)
        it.arrive("stuck")
        instance = it.scheduler.prefill["p0"]
        for index in range(round((LOST_S + 1) / 0.2)):
            rid = f"r{index}"
            it.arrive(rid)
            for rank in (0, 1):
                rids = [
                    dispatch.rid for dispatch in it.dispatched if dispatch.prefill_rank == rank
                ][-1:]
                accepted = [named for named in rids if named == rid]
                it.report("p0", rank, kind="launch", forward_id=index, rids=accepted)
            it.wait(0.2)
            for rank in (0, 1):
                it.report("p0", rank, forward_id=index, forward_s=0.2)
            it.tell(PrefillDone(rid=rid))
        assert not any("stuck" in rank.flight for rank in instance.ranks)
        assert it.scheduler.in_flight_requests > 0


class TestLateAllocation:
    """``--disaggregation-decode-allocation-policy prefill_complete``."""

    @pytest.mark.parametrize("late", [False, True])
    def test_a_share_of_one_pass_leaves_before_decode_has_room(self, late: bool):
        """Two prefill instances compute 12,000 tokens per pass, for two decode ranks."""
        it = driver()
        prefill(it, 2)
        decode(it, "d0", [100, 100], allocates_late=late)
        assert it.arrive("more than the share", 6500) == []
        assert [dispatch.rid for dispatch in it.arrive("r", 2500)] == ["r"] * late

    def test_the_share_follows_the_prefill_instances_that_are_up(self):
        it = driver()
        prefill(it, 2)
        decode(it, "d0", [100], allocates_late=True)
        (instance,) = it.scheduler.decode.values()
        assert instance.room_tokens == 12_100
        it.tell(InstanceDown(instance="p1"))
        assert instance.room_tokens == 6_100

    def test_no_rank_runs_more_requests_for_it(self):
        it = driver()
        prefill(it)
        decode(it, "d0", [100], allocates_late=True, max_running_requests=3)
        (instance,) = it.scheduler.decode.values()
        assert instance.room_tokens == 0
