"""A trial and the scheduler that runs it: where that is lost, nobody stays on the baseline."""

from __future__ import annotations

import json
from typing import Any

import pytest
from link_harness import FrontEnd, SchedulerSide
from many_schedulers import Several
from router_harness import until

from sglang_sbs.router.policy_in_force import PolicyInForce, PolicyState
from sglang_sbs.router.processes.messages import AskTrial, SwitchPolicy
from sglang_sbs.scheduling import SchedulerConfig

HOME = SchedulerConfig(policy="least_tokens")
BODY = json.dumps({"baseline": "round_robin", "slot": "1h", "seed": 0}).encode()
"""A trial whose first slot is the baseline's with this seed."""


async def ask(front_end: FrontEnd, do: str) -> dict[str, Any]:
    done = await front_end.link.ask(AskTrial(do=do, body=BODY))
    answer: dict[str, Any] = json.loads(done.payload)
    return answer


async def in_a_slot_of_the_baseline(several: Several) -> tuple[SchedulerSide, list[FrontEnd]]:
    side = several.scheduler("a", HOME)
    side.hub.policy.state = PolicyState("least_tokens")
    several.ballots["a"].win(1)
    front_ends = [await several.front_end() for _ in range(2)]
    assert (await ask(front_ends[0], "begin"))["now"] == "baseline"
    await until(lambda: all(f.link.policy.policy == "round_robin" for f in front_ends))
    assert side.scheduler.snapshot(0.0).policy == "round_robin"
    return side, front_ends


async def test_any_front_end_can_ask_for_it_and_it_is_the_same_for_all(several: Several) -> None:
    side, (first, second) = await in_a_slot_of_the_baseline(several)
    with pytest.raises(ValueError, match="a trial is already running"):
        await second.link.ask(AskTrial(do="begin", body=BODY))
    assert (await ask(second, "show"))["running"]
    assert (await ask(second, "end"))["cause"] == "stopped"
    # The front end that asked knows before its client asks again.
    assert second.link.policy.policy == "least_tokens"
    assert side.scheduler.snapshot(0.0).policy == "least_tokens"
    await until(lambda: first.link.policy.policy == "least_tokens")


async def test_a_standby_that_takes_over_goes_back_to_the_policy_before_it(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = several.scheduler("b", HOME)
    two.hub.policy.state = PolicyState("least_tokens")
    side, (first, second) = await in_a_slot_of_the_baseline(several)
    monkeypatch.setattr(side.hub.trials, "close", lambda: None)  # it is killed
    several.crash("a")
    await until(lambda: not any(f.link.connected for f in several.front_ends))
    # Alone they place by the policy that the trial began with.
    assert {f.link.policy.lasting for f in several.front_ends} == {"least_tokens"}
    several.ballots["b"].win(2)
    await several.all_follow("b")
    await until(lambda: all(f.link.policy.policy == "least_tokens" for f in several.front_ends))
    assert two.scheduler.snapshot(0.0).policy == "least_tokens"
    assert two.hub.policy.state.back_to == ""
    answer = await ask(first, "show")
    assert answer["running"] is False
    assert "because its scheduler is gone" in answer["text"]
    assert (await ask(second, "begin"))["running"]


async def test_a_scheduler_that_leads_no_more_ends_its_trial(several: Several) -> None:
    several.scheduler("b", HOME).hub.policy.state = PolicyState("least_tokens")
    side, (first, _) = await in_a_slot_of_the_baseline(several)
    several.ballots["a"].lose()
    assert not side.hub.trials.running
    shown = side.hub.trials.shown()
    assert shown is not None
    assert (shown["cause"], side.hub.policy.policy) == ("lost", "least_tokens")
    several.ballots["b"].win(2)
    await several.all_follow("b")
    await first.link.ask(SwitchPolicy(policy="eta"))
    several.ballots["b"].lose()
    several.ballots["a"].win(3)
    await several.all_follow("a")
    # Its own switch back is older than what was switched meanwhile.
    assert side.hub.policy.policy == "eta"


async def test_a_scheduler_that_ends_in_order_leaves_the_policy_behind(several: Several) -> None:
    side, front_ends = await in_a_slot_of_the_baseline(several)
    side.hub.close()
    await until(lambda: all(f.link.policy.policy == "least_tokens" for f in front_ends))


def test_what_a_trial_leaves_to_others() -> None:
    switched: list[str] = []
    policy = PolicyInForce("sbs")
    policy.listeners.append(switched.append)
    policy.switch("eta", "a trial", term=1, back_to="sbs")
    assert (policy.policy, policy.lasting) == ("eta", "sbs")
    before = policy.state
    policy.switch("eta", "somebody", term=1)
    assert policy.state is not before
    assert (policy.policy, policy.lasting, switched) == ("eta", "eta", ["eta"])
    other = PolicyInForce("round_robin")
    assert other.inherit(before, term=2)
    assert (other.policy, other.state.back_to, other.state.age) == ("sbs", "", (2, 2))
    assert not other.inherit(PolicyState("eta", term=3, switches=1), term=4)
    assert not other.inherit(PolicyState("eta", term=9, back_to="of a later release"), term=9)
    assert other.policy == "eta"
