"""When a worker's circuit breaker opens, half opens and closes."""

from __future__ import annotations

from sglang_sbs.router.options.config import BreakerConfig
from sglang_sbs.router.workers.breaker import Breaker


def test_the_breaker_opens_on_consecutive_failures_and_closes_on_successes() -> None:
    breaker = Breaker(BreakerConfig(failure_threshold=3, success_threshold=2, timeout_s=10))
    for _ in range(2):
        assert not breaker.failed(0, may_open=True)
    breaker.succeeded()
    for _ in range(2):
        assert not breaker.failed(0, may_open=True)
    assert breaker.failed(5, may_open=True)
    assert not breaker.try_half_open(14)
    assert breaker.try_half_open(15)
    breaker.succeeded()
    assert breaker.state == "half_open"
    breaker.succeeded()
    assert breaker.state == "closed"


def test_one_failure_reopens_a_half_open_breaker() -> None:
    breaker = Breaker(BreakerConfig(failure_threshold=1, timeout_s=10))
    assert breaker.failed(0, may_open=True)
    assert breaker.try_half_open(10)
    assert breaker.failed(11, may_open=True)
    assert breaker.state == "open"
