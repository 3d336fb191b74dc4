"""DP ranks that join or leave an instance while it runs (elastic EP)."""

from __future__ import annotations

import pytest
from driver import Driver

from sglang_sbs.scheduling import InstanceDown, InstanceUp, PrefillDone, RequestEnded


def resize(driver: Driver, role: str, size: int) -> None:
    name = "p0" if role == "prefill" else "d0"
    driver.tell(InstanceUp(instance=name, role=role, dp_size=size, chunk_tokens=1000))


def outstanding(driver: Driver) -> list[int]:
    return [rank.outstanding_requests for rank in driver.prefill_state().ranks]


@pytest.mark.parametrize("size", [1, 4])
def test_requests_on_the_prefill_ranks_that_stay_are_still_counted(size: int) -> None:
    driver = Driver(policy="least_tokens").up(dp=2)
    made = {rid: driver.arrive(rid, 400)[0].prefill_rank for rid in ("a", "b")}
    assert sorted(made.values()) == [0, 1]
    resize(driver, "prefill", size)
    left = [rid for rid, rank in made.items() if rank < size]
    assert sum(outstanding(driver)) == len(left)
    assert driver.scheduler.prefill["p0"].ranks.backlog_tokens == 400 * len(left)
    for rid in made:
        driver.tell(PrefillDone(rid=rid))
        driver.tell(RequestEnded(rid=rid, outcome="completed"))
    assert outstanding(driver) == [0] * size
    assert driver.scheduler.in_flight_requests == 0


def test_a_rank_that_joined_gets_requests_and_one_that_left_gets_none() -> None:
    driver = Driver(policy="least_tokens").up(dp=2)
    resize(driver, "prefill", 3)
    sent = {driver.arrive(f"r{n}", 400)[0].prefill_rank for n in range(6)}
    assert sent == {0, 1, 2}
    resize(driver, "prefill", 1)
    assert {driver.arrive(f"s{n}", 400)[0].prefill_rank for n in range(6)} == {0}


def test_what_was_learned_and_received_survives_a_resize() -> None:
    driver = Driver(policy="least_tokens").up(dp=2)
    for number in range(5):
        driver.now_s += 0.2
        driver.report("p0", 0, kind="launch", forward_id=number, tokens_per_rank=[500, 500])
        driver.now_s += 0.2
        driver.report("p0", 0, forward_id=number, forward_s=0.2, tokens_per_rank=[500, 500])
    driver.report("p0", 0, kind="launch", forward_id=9, tokens_per_rank=[500, 500])
    before = driver.prefill_state()
    resize(driver, "prefill", 3)
    after = driver.prefill_state()
    assert (after.passes, after.tier) == (before.passes, "endforward") == (5, "endforward")
    assert after.predicted_free_in_s == pytest.approx(before.predicted_free_in_s, rel=0.5)
    assert after.ranks[0] == before.ranks[0]
    # The ranks that were there may go on with messages of the old size.
    driver.report("p0", 1, dp=2, forward_id=9, forward_s=0.2, tokens_per_rank=[500, 500])
    driver.report("p0", 2, dp=3, forward_id=10, forward_s=0.2, tokens_per_rank=[500, 500, 9])
    assert driver.prefill_state().passes >= 6


def test_an_instance_that_was_down_is_another_one() -> None:
    driver = Driver(policy="least_tokens").up(dp=2)
    driver.report("p0", 0, forward_id=1, forward_s=0.2, tokens_per_rank=[500, 500])
    driver.tell(InstanceDown(instance="p0"))
    resize(driver, "prefill", 3)
    assert driver.prefill_state().passes == 0


@pytest.mark.parametrize("size", [1, 3])
def test_requests_on_the_decode_ranks_that_stay_are_still_counted(size: int) -> None:
    driver = Driver(policy="least_tokens").up(decode_dp=2)
    made = {rid: driver.arrive(rid, 400)[0].decode_rank for rid in ("a", "b")}
    assert sorted(made.values()) == [0, 1]
    resize(driver, "decode", size)
    running = [load.running for load in driver.scheduler.decode["d0"].loads()]
    assert running == [int(rank < 2) for rank in range(size)]
    new = {driver.arrive(f"r{n}", 400)[0].decode_rank for n in range(6)}
    assert new == set(range(size))
    for rid in [*made, *(f"r{n}" for n in range(6))]:
        driver.tell(RequestEnded(rid=rid, outcome="completed"))
    assert not driver.scheduler.decode["d0"].has_outstanding
