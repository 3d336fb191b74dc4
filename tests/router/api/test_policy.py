"""The policy is switched at runtime: ``/policy``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from router_harness import Cluster, cluster, sse_events, until

from sglang_sbs.router.policy_in_force import PolicyInForce, PolicyState
from sglang_sbs.scheduling.eventlog import read_event_log
from sglang_sbs.scheduling.events import PolicySwitched
from sglang_sbs.scheduling.policy_registry import policy_names
from sglang_sbs.simulator.replay import replay

ADMIN = {"Authorization": "Bearer the-admin-key"}
KEYS = ("--admin-api-key", "the-admin-key", "--api-key", "the-clients-key")


async def put(c: Cluster, policy: Any, **kwargs: Any) -> tuple[int, Any]:
    async with c.client.put(c.url + "/policy", json={"policy": policy}, **kwargs) as response:
        return response.status, await response.json(content_type=None)


async def shown(c: Cluster) -> dict[str, Any]:
    async with c.get("/policy") as response:
        assert response.status == 200
        answer: dict[str, Any] = await response.json()
        return answer


async def test_policy_shows_the_rule_in_force_since_when_and_by_whom() -> None:
    async with cluster("--policy", "eta", real=True) as c:
        before = await shown(c)
        assert (before["policy"], before["in_force"]) == ("eta", "eta")
        assert (before["set_by"], before["switches"]) == ("command line", 0)
        assert before["policies"] == list(policy_names())
        status, answer = await put(c, "round_robin")
        assert status == 200
        assert answer == await shown(c)
        assert (answer["policy"], answer["in_force"]) == ("round_robin", "round_robin")
        assert answer["switches"] == 1
        assert answer["set_by"] != "command line"
        assert answer["since"] >= before["since"]
        assert c.server.dispatcher.snapshot().policy == "round_robin"
        async with c.get("/server_info") as response:
            assert (await response.json())["sbs_options"]["policy"] == "round_robin"


async def test_the_admin_key_is_needed() -> None:
    async with cluster(*KEYS, real=True, prefill=0, decode=0, wait=False) as c:
        for headers in ({}, {"Authorization": "Bearer the-clients-key"}):
            async with c.get("/policy", headers=headers) as response:
                assert response.status == 401
            body = {"policy": "eta"}
            async with c.client.put(c.url + "/policy", json=body, headers=headers) as response:
                assert response.status == 401
        assert c.server.scheduler.policy.policy == "sbs"
        assert (await put(c, "eta", headers=ADMIN))[0] == 200
        assert c.server.scheduler.policy.policy == "eta"


@pytest.mark.parametrize("name", ["etta", "", 7, None, ["eta"], "x" * 100_000])
async def test_an_unknown_name_is_a_400_with_those_that_there_are(name: Any) -> None:
    async with cluster(real=True, prefill=0, decode=0, wait=False) as c:
        status, answer = await put(c, name)
        assert status == 400
        assert answer["error"]["code"] == "unknown_policy"
        assert all(policy in answer["error"]["message"] for policy in policy_names())
        assert len(answer["error"]["message"]) < 500
        assert (await shown(c))["switches"] == 0


async def test_spelled_as_on_the_command_line() -> None:
    async with cluster(real=True, prefill=0, decode=0, wait=False) as c:
        assert (await put(c, "Round-Robin"))[1]["policy"] == "round_robin"


async def test_two_hundred_streams_outlive_switches_and_each_ends_once() -> None:
    async with cluster(real=True, prefill=2, decode=2) as c:
        ended: list[str] = []
        pump = c.server.dispatcher.pump
        observed: list[tuple[str, str]] = []

        def observe(event: Any, commands: Any, now_s: float) -> None:
            observed.extend(("dispatched", o.rid) for o in commands if hasattr(o, "prefill_rank"))
            if type(event).__name__ == "RequestEnded":
                observed.append(("ended", event.rid))

        pump.observer = observe
        for engine in c.decode:
            engine.token_gate.close()

        async def stream() -> None:
            body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 4}}
            async with c.post("/generate", body) as response:
                assert response.status == 200
                events = sse_events(await response.read())
            assert events[-1] == "[DONE]"
            assert not any("error" in event for event in events[:-1])
            ended.append(events[-1])

        tasks = [asyncio.create_task(stream()) for _ in range(100)]
        for policy in ("eta", "sbs", "round_robin", "sbs"):
            assert (await put(c, policy))[0] == 200
            tasks += [asyncio.create_task(stream()) for _ in range(25)]
        await until(lambda: c.server.dispatcher.open == 200)
        assert (await put(c, "least_tokens"))[0] == 200
        # An immediate policy leaves nobody waiting.
        await until(lambda: c.server.dispatcher.waiting == 0)
        for engine in c.decode:
            engine.token_gate.open()
        await asyncio.gather(*tasks)
        assert len(ended) == 200
        await c.settled()
        for what in ("dispatched", "ended"):
            rids = [rid for kind, rid in observed if kind == what]
            assert len(rids) == len(set(rids)) == 200
        state = c.server.dispatcher.snapshot()
        assert (state.queue_requests, state.in_flight_requests) == (0, 0)


async def test_the_event_log_has_the_switches_and_replays_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "router.events"
    async with cluster("--sbs-event-log", str(path), real=True, prefill=2, decode=2) as c:
        for policy in ("random", "sbs", "cache_aware", "sbs"):
            await asyncio.gather(*(c.generate(text="hello") for _ in range(5)))
            await put(c, policy)
        await asyncio.gather(*(c.generate(text="hello") for _ in range(5)))
        await c.settled()
    switches = [
        entry.event.policy
        for entry in read_event_log(path)
        if isinstance(entry.event, PolicySwitched)
    ]
    assert switches == ["random", "sbs", "cache_aware", "sbs"]
    result = replay(path)
    assert (result.difference, result.events > 50) == ("", True)


async def test_what_a_policy_looks_at_is_there_once_it_decides() -> None:
    """A router that starts with a simple policy has what the default one needs."""
    async with cluster("--policy", "round_robin", real=True, sbs_block=True) as c:
        server = c.server
        monitor = server.scheduler._watch._monitor
        parts = (
            lambda: server.tokenizers.names_blocks,
            lambda: server.relay.attempts.sends_gangs,
            lambda: server.registry._expects_endforward,
            lambda: monitor.polls_loads,
        )
        assert not any(part() for part in parts)
        await put(c, "sbs")
        assert all(part() for part in parts)
        await put(c, "round_robin")
        assert not any(part() for part in parts)


async def test_metrics_tell_both_sides_of_an_a_b_apart() -> None:
    async with cluster(real=True) as c:

        async def page() -> str:
            async with c.client.get(
                f"http://127.0.0.1:{c.server.prometheus_port}/metrics"
            ) as response:
                return await response.text()

        def selections(text: str, policy: str) -> list[str]:
            return [
                line.rpartition(" ")[2]
                for line in text.splitlines()
                if line.startswith("smg_worker_selection_total{") and f'policy="{policy}"' in line
            ]

        await c.generate(text="hello")
        before = await page()
        assert 'sbs_build_info{policy="sbs",trigger="adaptive",version="' in before
        assert selections(before, "sbs") == ["1.0", "1.0"]
        await put(c, "eta")
        await c.generate(text="hello")
        await c.generate(text="hello")
        after = await page()
        assert 'sbs_build_info{policy="eta",trigger="immediate",version="' in after
        assert 'policy="sbs",trigger' not in after
        assert selections(after, "sbs") == ["1.0", "1.0"]
        assert selections(after, "eta") == ["2.0", "2.0"]


def test_the_later_of_two_policy_switches_wins() -> None:
    scheduler, switched = PolicyInForce("sbs"), []
    scheduler.listeners.append(switched.append)
    scheduler.switch("eta", "a", term=1)
    scheduler.switch("eta", "b", term=1)
    assert (scheduler.state.switches, scheduler.state.by) == (1, "a")
    scheduler.inherit(PolicyState("random", switches=1))  # of an earlier term
    scheduler.inherit(None)
    assert scheduler.policy == "eta"
    scheduler.inherit(PolicyState("random", term=1, switches=2))
    scheduler.inherit(PolicyState("of a later release", term=9, switches=9))
    assert scheduler.policy == "random"
    # A front end does as its scheduler, whose command line may be another than its own.
    front_end = PolicyInForce("sbs")
    front_end.follow(PolicyState("round_robin"))
    assert front_end.policy == "round_robin"
    front_end.follow(scheduler.state)
    front_end.follow(PolicyState("eta", term=1, switches=1))
    assert front_end.policy == "random"
    assert switched == ["eta", "random"]
