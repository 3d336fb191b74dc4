"""A request joins a batch on its way only when a batch could leave for that pass."""

from __future__ import annotations

from driver import Driver

from sglang_sbs.scheduling import Dispatch, InstanceUp
from sglang_sbs.scheduling.policies.adaptive.trigger import AdaptiveTrigger
from sglang_sbs.scheduling.prefill.observation import Observation


def with_a_batch_on_its_way() -> Driver:
    """A pass of 0.3 s runs on ``p0``, and more waited than the next takes: its batch left early."""
    it = Driver(policy="sbs", trigger="adaptive", max_hold_s=10.0, t_default_s=0.3)
    it.tell(InstanceUp(instance="d0", role="decode", dp_size=1))
    it.tell(InstanceUp(instance="p0", role="prefill", dp_size=1, chunk_tokens=1000, overlap=True))
    it.arrive("first", 900)
    it.wait(0.02)
    it.report("p0", dp=1, kind="launch", forward_id=1, extend_tokens=900, rids=["first"])
    it.arrive("second", 800)
    it.arrive("third", 800)
    assert [dispatch.rid for dispatch in it.dispatched] == ["first", "second"]
    return it


def sent(it: Driver, rid: str) -> list[Dispatch]:
    return [dispatch for dispatch in it.dispatched if dispatch.rid == rid]


def test_nobody_joins_long_before_the_pass_is_formed():
    """Else whoever comes while it runs is committed to a pass that is not the next to start."""
    it = with_a_batch_on_its_way()
    it.arrive("short", 50)
    it.wait(0.1)
    assert not sent(it, "short")


def test_a_joining_request_is_marked_and_makes_the_pass():
    it = with_a_batch_on_its_way()
    it.arrive("short", 50)
    it.wait(0.3)
    (joined,) = sent(it, "short")
    assert joined.joins
    assert not sent(it, "second")[0].joins


def test_a_joining_request_starts_with_the_batch():
    it = with_a_batch_on_its_way()
    trigger = it.scheduler.policy
    assert isinstance(trigger, AdaptiveTrigger)
    starts_s = list(trigger.starts.at_s)
    assert starts_s[-1] > it.now_s
    it.arrive("short", 50)
    it.wait(0.3)
    assert sent(it, "short")
    assert trigger.starts.at_s == starts_s


def test_one_may_join_when_it_is_too_late_for_a_batch():
    """However long before the end batches leave, as their last requests come late."""
    it = with_a_batch_on_its_way()
    trigger, latency_s = it.scheduler.policy, it.scheduler.interval.lone_s
    assert isinstance(trigger, AdaptiveTrigger)
    while trigger.lead_s < 3.5 * latency_s:
        trigger.on_landing(Observation(left_behind_s=[trigger.lead_s]), 1, it.now_s)
    it.wait(it.scheduler.prefill["p0"].passes[-1].end_s - it.now_s - 3 * latency_s)
    it.arrive("short", 50)
    assert sent(it, "short")
    assert trigger.holding


def test_few_leave_before_the_end_of_a_pass_after_large_batches():
    """The usual batch is on its way much longer than they are: its latency is not theirs."""
    it = Driver(policy="sbs", trigger="adaptive", max_hold_s=10.0, t_default_s=0.3)
    it.tell(InstanceUp(instance="d0", role="decode", dp_size=1))
    it.tell(InstanceUp(instance="p0", role="prefill", dp_size=1, chunk_tokens=1000))
    for size in (60, 62, 64, 66, 68):
        it.scheduler.interval.observe([0.005 + 0.0005 * (size - 1)], it.now_s, [size])
    it.arrive("first", 900)
    it.wait(0.04)
    it.report("p0", dp=1, kind="launch", forward_id=1, extend_tokens=900, rids=["first"])
    end_s = it.scheduler.prefill["p0"].passes[-1].end_s
    it.arrive("few", 50)
    it.wait(end_s - it.now_s - 0.001)
    assert sent(it, "few")
