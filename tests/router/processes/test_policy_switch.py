"""A switch of the policy reaches every front end, and outlives schedulers."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest
from harness.front_ends import complete
from link_harness import HOLDING
from many_schedulers import Several
from router_harness import until
from router_processes import Group, fresh_client, kill, running

from sglang_sbs.router.policy_in_force import PolicyState
from sglang_sbs.router.processes.messages import DrainWorker, SwitchPolicy


async def test_a_policy_switch_reaches_all_front_ends_and_the_standby(several: Several) -> None:
    side, other = several.scheduler("a", HOLDING), several.scheduler("b", HOLDING)
    several.ballots["a"].win(1)
    first, second = [await several.front_end() for _ in range(2)]
    waiting = [one_.ask(f"{n}") for n, one_ in enumerate((first, second) * 5)]
    await until(lambda: side.books[0] > 0 and sum(side.books[:2]) == 10)
    await first.link.ask(SwitchPolicy(policy="least_tokens"))
    # What waited is placed by the new rule.
    placed = await asyncio.gather(*waiting)
    assert len({dispatch.rid for dispatch in placed}) == 10
    assert side.scheduler.snapshot(0.0).policy == "least_tokens"
    assert first.link.policy.policy == "least_tokens"
    await until(lambda: second.link.policy.policy == "least_tokens")
    assert second.link.policy.state.by == "front end 0"

    several.crash("a")
    await until(lambda: not any(one_.link.connected for one_ in several.front_ends))
    several.ballots["b"].win(2)
    await several.all_follow("b")
    await until(lambda: other.books == (0, 10, 20))
    assert other.scheduler.snapshot(0.0).policy == "least_tokens"
    assert other.hub.policy.state.by == "front end 0"
    await second.ask("after")
    await second.link.ask(SwitchPolicy(policy="round_robin"))
    assert other.hub.policy.state.age == (2, 2)
    for number, one_ in enumerate((first, second) * 5):
        one_.link.on_ended(str(number), "completed", 1)
    second.link.on_ended("after", "completed", 1)
    await several.books_are_empty()


async def test_a_scheduler_that_was_cut_off_learns_of_the_switch_made_meanwhile(
    several: Several,
) -> None:
    side = several.scheduler("a")
    several.scheduler("b")
    several.ballots["a"].win(1)
    front_end = await several.front_end()
    await front_end.link.ask(SwitchPolicy(policy="eta"))
    several.ballots["a"].lose()
    several.ballots["b"].win(2)
    await several.all_follow("b")
    await front_end.link.ask(SwitchPolicy(policy="random"))
    assert side.hub.policy.policy == "eta"
    several.ballots["b"].lose()
    several.ballots["a"].win(3)
    await several.all_follow("a")
    assert side.hub.policy.policy == "random"
    assert side.scheduler.snapshot(0.0).policy == "random"


async def test_a_drained_worker_stays_drained_when_a_standby_takes_over(several: Several) -> None:
    side, other = several.scheduler("a"), several.scheduler("b")
    several.ballots["a"].win(1)
    first, second = [await several.front_end() for _ in range(2)]
    url = "http://p0:1"
    running_there = [await first.ask(f"{n}") for n in range(4)]
    assert {dispatch.prefill for dispatch in running_there} == {url, "http://p1:1"}
    worker = first.registry.get(url)
    assert worker is not None
    await first.link.ask(DrainWorker(worker_id=worker.id, draining=True))
    assert worker.draining
    assert {(await first.ask(f"drained {n}")).prefill for n in range(4)} == {"http://p1:1"}
    await until(lambda: second.registry.get(url).draining)
    several.crash("a")
    await until(lambda: not any(one_.link.connected for one_ in several.front_ends))
    assert {(await second.ask(f"alone {n}")).prefill for n in range(4)} == {"http://p1:1"}
    several.ballots["b"].win(2)
    await several.all_follow("b")
    assert other.registry.get(url).draining
    assert {(await second.ask(f"later {n}")).prefill for n in range(4)} == {"http://p1:1"}
    await second.link.ask(DrainWorker(worker_id=worker.id, draining=False))
    assert {(await second.ask(f"again {n}")).prefill for n in range(4)} == {url, "http://p1:1"}
    assert side.registry.get(url).draining


async def test_a_front_end_that_knows_less_changes_nothing(several: Several) -> None:
    side = several.scheduler("a")
    several.ballots["a"].win(1)
    first = await several.front_end()
    await first.link.ask(SwitchPolicy(policy="eta"))
    side.hub.policy.inherit(PolicyState("random", term=1))
    second = await several.front_end()
    assert side.hub.policy.policy == second.link.policy.policy == "eta"


async def test_a_policy_that_the_scheduler_does_not_have_is_an_error(several: Several) -> None:
    several.scheduler("a")
    several.ballots["a"].win(1)
    front_end = await several.front_end()
    with pytest.raises(ValueError, match="unknown policy of_a_later_release"):
        await front_end.link.ask(SwitchPolicy(policy="of_a_later_release"))


async def policies(group: Group) -> list[dict[str, Any]]:
    """Asked on connections of their own, so that most likely both front ends answer."""
    found = []
    for _ in range(12):
        async with fresh_client() as client, client.get(group.url + "/policy") as got:
            assert got.status == 200
            found.append(await got.json())
    return found


async def switch(group: Group, policy: str) -> int:
    body = {"policy": policy}
    async with fresh_client() as client, client.put(group.url + "/policy", json=body) as got:
        return got.status


async def test_two_front_ends_and_a_scheduler_that_is_killed_under_load() -> None:
    async with running("--policy", "sbs") as (engines, group):
        engines.decode[0].token_gate.close()
        streams = [asyncio.create_task(engines.generate(group.url)) for _ in range(40)]
        await engines.decode[0].token_gate.arrived(40)
        assert await switch(group, "round_robin") == 200
        await engines.shows(group, "sbs_front_ends", 2)
        build = 'policy="round_robin",trigger="immediate"'
        assert build in await engines.metrics(group)
        kill(group.pids["scheduler"], signal.SIGKILL)
        await group.says(r"scheduler serves", times=2)
        await engines.shows(group, "sbs_front_ends", 2)
        assert build in await engines.metrics(group)
        assert {answer["policy"] for answer in await policies(group)} == {"round_robin"}
        engines.decode[0].token_gate.open()
        assert all(map(complete, await asyncio.gather(*streams)))
        assert await switch(group, "sbs") == 200
        assert complete(await engines.generate(group.url))
        await engines.shows(group, "sbs_in_flight_requests", 0)
