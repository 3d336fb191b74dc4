"""A drained instance takes no new requests; what is known of it stays true."""

from __future__ import annotations

from driver import Driver

from sglang_sbs.scheduling import InstanceDown, InstanceUp, RequestEnded


def drained(**config) -> Driver:
    """Two instances with a request each, of which ``p0`` is drained."""
    driver = Driver(policy="round_robin", **config).up(prefill=2)
    assert [driver.arrive(f"r{number}", 500)[0].prefill for number in range(2)] == ["p0", "p1"]
    driver.tell(InstanceDown(instance="p0", drained=True))
    return driver


def outstanding(driver: Driver, instance: str = "p0") -> int:
    return sum(rank.outstanding_requests for rank in driver.prefill_state(instance).ranks)


def test_new_requests_go_elsewhere_and_what_runs_is_still_counted() -> None:
    driver = drained()
    assert {driver.arrive(f"more{number}")[0].prefill for number in range(4)} == {"p1"}
    state = driver.prefill_state()
    assert (state.up, state.drained) == (False, True)
    assert sum(rank.flight_tokens for rank in state.ranks) == 500
    assert outstanding(driver) == 1
    driver.tell(RequestEnded(rid="r0", outcome="completed", completion_tokens=3))
    assert outstanding(driver) == 0
    driver.tell(InstanceUp(instance="p0", role="prefill", dp_size=2, chunk_tokens=1000))
    assert not driver.prefill_state().drained
    assert "p0" in {driver.arrive(f"again{number}")[0].prefill for number in range(2)}


def test_a_drained_instance_that_dies_is_lost_and_one_that_is_back_is_drained_again() -> None:
    driver = drained()
    driver.tell(InstanceDown(instance="p0"))
    state = driver.prefill_state()
    assert (state.up, state.drained) == (False, False)
    assert sum(rank.flight_tokens for rank in state.ranks) == 0
    driver.tell(InstanceDown(instance="p0", drained=True))
    assert driver.prefill_state().drained
    assert driver.arrive("more")[0].prefill == "p1"


def test_however_long_it_is_drained_it_is_not_forgotten() -> None:
    driver = drained()
    driver.wait(3600.0)
    driver.tell(InstanceDown(instance="p1"))
    driver.tell(InstanceUp(instance="p1", role="prefill", dp_size=2, chunk_tokens=1000))
    assert driver.prefill_state().drained
    driver.tell(InstanceDown(instance="p0"))
    driver.wait(3600.0)


def test_a_drained_decode_instance_keeps_its_books() -> None:
    driver = Driver(policy="round_robin").up(prefill=1)
    driver.tell(InstanceUp(instance="d1", role="decode", dp_size=1))
    driver.arrive("r0", 500)
    first = driver.dispatched[0].decode
    driver.tell(InstanceDown(instance=first, drained=True))
    (state,) = [
        instance
        for instance in driver.scheduler.snapshot(driver.now_s).decode
        if instance.instance == first
    ]
    assert (state.up, state.drained) == (False, True)
    assert sum(rank.running for rank in state.ranks) == 1
    assert first not in {driver.arrive(f"more{number}")[0].decode for number in range(3)}
