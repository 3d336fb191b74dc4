"""Early refusal: a request that cannot meet its SLO is refused at once, if enabled."""

from __future__ import annotations

import pytest
from harness.learned_instance import CHUNK, FIXED_S, PAIR_S, TOKEN_S, instance

from sglang_sbs.scheduling import (
    InstanceUp,
    Refuse,
    RequestArrived,
    Scheduler,
    SchedulerConfig,
)
from sglang_sbs.scheduling.events import Command
from sglang_sbs.scheduling.queue.flow_control import first_token_in_s


def busy(waiting: int, **config) -> Scheduler:
    """One instance of two ranks with a pass of about 0.3 s, and so many chunks of high priority
    that wait."""
    scheduler = Scheduler(SchedulerConfig(t_default_s=0.3, max_hold_s=1e6, **config))
    scheduler.handle(InstanceUp(instance="p0", role="prefill", dp_size=2, chunk_tokens=1000), 0.0)
    scheduler.handle(InstanceUp(instance="d0", role="decode", dp_size=2), 0.0)
    for number in range(waiting):
        scheduler.handle(RequestArrived(rid=f"w{number}", prompt_tokens=1000, priority=1), 0.0)
    return scheduler


def arrive(scheduler: Scheduler, slo_s: float | None, **more) -> list[Command]:
    event = RequestArrived(rid="new", prompt_tokens=500, ttft_slo_s=slo_s, **more)
    return scheduler.handle(event, 0.0)


def refusals(commands: list[Command]) -> list[Refuse]:
    return [command for command in commands if isinstance(command, Refuse)]


def test_it_is_off_by_default():
    assert refusals(arrive(busy(100), 0.001)) == []


@pytest.mark.parametrize("slo_s", [None, 60.0])
def test_who_can_meet_the_slo_or_has_none_waits(slo_s):
    assert refusals(arrive(busy(100, refuse_missed_slo=True), slo_s)) == []


def test_who_cannot_is_refused_with_the_time_until_the_queue_is_empty():
    (refusal,) = refusals(arrive(busy(100, refuse_missed_slo=True), 2.0))
    assert refusal.cause == "slo"
    assert refusal.retry_after_s > 2.0
    assert "2000 ms" in refusal.message


def test_an_idle_cluster_refuses_only_what_no_pass_is_quick_enough_for():
    assert refusals(arrive(busy(0, refuse_missed_slo=True), 1.0)) == []
    assert len(refusals(arrive(busy(0, refuse_missed_slo=True), 0.01))) == 1


def test_a_higher_priority_has_less_ahead_of_it():
    assert len(refusals(arrive(busy(40, refuse_missed_slo=True), 2.0))) == 1
    assert refusals(arrive(busy(40, refuse_missed_slo=True), 2.0, priority=3)) == []


def test_a_tenant_waits_for_its_own_requests_not_for_the_flood_of_another():
    scheduler = busy(3, refuse_missed_slo=True)
    for number in range(100):
        flood = RequestArrived(rid=f"f{number}", prompt_tokens=1000, priority=1, tenant="flood")
        scheduler.handle(flood, 0.0)
    assert len(refusals(arrive(scheduler, 2.0, tenant="flood"))) == 1
    assert refusals(arrive(scheduler, 2.0, tenant="other")) == []


def test_the_attention_of_a_long_prompt_counts() -> None:
    tokens, latency_s = 5 * CHUNK, 0.02
    found_s = first_token_in_s(tokens, 0.0, 0, 0.0, [instance()], 0.0, latency_s)
    passes_s = 5 * (FIXED_S + TOKEN_S * CHUNK)
    assert found_s == pytest.approx(latency_s + passes_s + PAIR_S * tokens**2 / 2, rel=0.03)
