"""Long prompts that are cancelled leave prefill at once, also where decode must keep them."""

from __future__ import annotations

import pytest
from driver import Driver

from sglang_sbs.scheduling.events import PrefillDone, RequestEnded

LONG_TOKENS, CHUNK_TOKENS = 8000, 1000
PASS_S = 0.1


def short_prompt_waits_s(cancelled: bool, parked: bool) -> float:
    """How long a short prompt is held behind ten long ones whose clients leave. The engine gets
    the aborts before it has taken the first one in; it reports once a pass."""
    driver = Driver(t_default_s=PASS_S).up(dp=1, chunk=CHUNK_TOKENS)
    driver.report("p0", dp=1, kind="heartbeat")
    if cancelled:
        for number in range(10):
            driver.arrive(f"long-{number}", LONG_TOKENS)
        sent = {command.rid for command in driver.dispatched}
        for number in range(10):
            rid = f"long-{number}"
            if parked and rid in sent:
                driver.tell(PrefillDone(rid=rid, aborted=True))
            else:
                driver.tell(RequestEnded(rid=rid, outcome="aborted"))
        held = driver.scheduler.snapshot(driver.now_s).in_flight_requests
        assert sent and held == (len(sent) if parked else 0)
    driver.arrive("short", 100)
    for _ in range(100):
        for command in driver.dispatched:
            if command.rid == "short":
                return command.held_s
        driver.wait(PASS_S)
        driver.report("p0", dp=1, kind="heartbeat")
    raise AssertionError("it never left")


@pytest.mark.parametrize("parked", [False, True])
def test_ten_cancelled_long_prompts_hold_up_a_short_one_by_a_pass_at_most(parked: bool) -> None:
    alone_s = short_prompt_waits_s(cancelled=False, parked=parked)
    assert short_prompt_waits_s(cancelled=True, parked=parked) <= alone_s + PASS_S + 1e-6
