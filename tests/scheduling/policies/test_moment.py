"""Which pass a request that is sent now would be in."""

from __future__ import annotations

import pytest
from harness.learned_instance import instance

from sglang_sbs.scheduling.policies.moment import Moment
from sglang_sbs.scheduling.prefill.instance import PrefillInstance

NOW_S, LATENCY_S = 10.0, 0.02
AT = Moment(NOW_S, LATENCY_S)


def computing(end_s: float, *waiting: int) -> PrefillInstance:
    """Runs a pass until then. Requests of these lengths wait on its first rank."""
    it = instance()
    it.dispatched("running", 0, 500, NOW_S - 1)
    it.advance(NOW_S - 0.5, LATENCY_S)
    it.passes[0].end_s = end_s
    for number, tokens in enumerate(waiting):
        it.dispatched(f"r{number}", 0, tokens, NOW_S - 0.1)
    return it


def test_an_idle_instance_starts_when_the_request_arrives() -> None:
    there = AT.next_pass(instance())
    assert there.start_s == NOW_S + LATENCY_S
    assert there.ahead_tokens == [0, 0]


def test_a_pass_that_is_about_to_start_is_missed_with_what_it_takes() -> None:
    it = instance()
    it.dispatched("r", 0, 900, NOW_S)
    there = AT.next_pass(it)
    assert there.start_s == pytest.approx(it.free_at_s(NOW_S, LATENCY_S))
    assert there.ahead_tokens == [0, 0], "the pass before it computes them"


@pytest.mark.parametrize(
    ("end_s", "waiting", "ahead"),
    [(NOW_S + 1, 300, 300), (NOW_S + 0.001, 300, 0), (NOW_S + 0.001, 1300, 300)],
)
def test_a_request_that_comes_late_finds_a_chunk_less_ahead(
    end_s: float, waiting: int, ahead: int
) -> None:
    it = computing(end_s, waiting)
    there = AT.next_pass(it)
    free_s = it.free_at_s(NOW_S, LATENCY_S)
    is_late = free_s < AT.arrives_s
    assert there.start_s == pytest.approx(free_s + is_late * it.next_pass_s())
    assert there.ahead_tokens == [ahead, 0]


def test_a_computing_instance_with_nothing_waiting_starts_when_the_request_arrives() -> None:
    assert AT.next_pass(computing(NOW_S + 0.001)).start_s == NOW_S + LATENCY_S
