"""Several front ends and one scheduler process, for real: what a client sees of their faults."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from harness.front_ends import IN_FLIGHT, Load, complete
from router_harness import until
from router_processes import fresh_client, kill, running

from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.schedulers import RemoteScheduler
from sglang_sbs.router.telemetry.metrics import RouterMetrics


async def test_both_front_ends_serve_and_one_scheduler_places_everything() -> None:
    async with running("--policy", "round_robin") as (engines, group):
        answers = await asyncio.gather(*(engines.generate(group.url) for _ in range(40)))
        assert all(map(complete, answers))
        # One scheduler: round robin over instances is exact, whoever took the request.
        assert [len(engine.requests) for engine in engines.prefill] == [20, 20]
        assert sorted(group.pids) == ["front end 0", "front end 1", "scheduler"]
        await engines.shows(group, "sbs_front_ends", 2)
        # Counters of both front ends, added up.
        served = 'smg_http_requests_total{method="POST",path="/generate"}'
        assert await engines.metric(group, served) == 40
        assert await engines.metric(group, IN_FLIGHT) == 0
        assert await engines.metric(group, 'sbs_attempts_total{outcome="completed"}') == 40


async def test_all_front_ends_together_keep_to_the_limit() -> None:
    flags = ("--max-concurrent-requests", "10", "--queue-size", "0")
    async with running(*flags) as (engines, group):
        engines.decode[0].token_gate.close()
        requests = [asyncio.create_task(engines.generate(group.url)) for _ in range(60)]
        # Of 60 connections each front end is given more than the 5 it may serve at once.
        await engines.decode[0].token_gate.arrived(10)
        await until(lambda: sum(request.done() for request in requests) == 50)
        refused = Counter(request.result()[0] for request in requests if request.done())
        assert refused == {429: 50}
        engines.decode[0].token_gate.open()
        answers = await asyncio.gather(*requests)
        assert sum(map(complete, answers)) == len(engines.decode[0].requests) == 10
        allowed = 'smg_http_rate_limit_total{result="allowed"}'
        await engines.shows(group, allowed, 10)


async def test_a_killed_front_end_frees_its_capacity_and_the_others_streams_go_on() -> None:
    async with running() as (engines, group):
        engines.decode[0].token_gate.close()
        requests = [asyncio.create_task(engines.generate(group.url)) for _ in range(24)]
        await engines.decode[0].token_gate.arrived(24)
        await engines.shows(group, IN_FLIGHT, 24)
        kill(group.pids["front end 0"])
        await group.says(r"front end 0 serves", times=2)
        await group.says(r"front end \S+ is gone")
        broken = 24 - int(await engines.metric(group, IN_FLIGHT))
        assert 0 < broken < 24, "both had some"
        await until(lambda: sum(request.done() for request in requests) == broken)
        engines.decode[0].token_gate.open()
        answers = await asyncio.gather(*requests, return_exceptions=True)
        assert sum(isinstance(a, tuple) and complete(a) for a in answers) == 24 - broken
        await engines.shows(group, IN_FLIGHT, 0)
        await engines.shows(group, "sbs_front_ends", 2)
        assert complete(await engines.generate(group.url))


async def test_whoever_connects_to_a_dead_front_end_waits_for_its_successor() -> None:
    async with running() as (engines, group):
        kill(group.pids["front end 0"])
        kill(group.pids["front end 1"])
        answers = await asyncio.gather(*(engines.generate(group.url) for _ in range(20)))
        assert all(map(complete, answers))
        await engines.shows(group, "sbs_front_ends", 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_without_the_scheduler_every_request_is_answered(number: signal.Signals) -> None:
    """Queued, running and new ones; then it is back and knows what is in flight."""
    async with running() as (engines, group):
        scheduler = group.pids["scheduler"]
        load = Load(engines, group)
        await load.more()
        held = Counter(r.aborted.is_set() for e in engines.decode for r in e.requests)
        kill(scheduler, number)
        await group.says("lost the scheduler", times=2)
        await load.more()
        if number == signal.SIGSTOP:
            kill(scheduler, signal.SIGCONT)
        # At the start each of the two connected once.
        await group.says("connected to the", times=4)
        await load.more()
        outcomes = await load.end()
        assert set(outcomes) == {"complete"}, outcomes
        assert held[True] == 0
        await engines.shows(group, IN_FLIGHT, 0)
        await engines.shows(group, "sbs_front_ends", 2)


async def test_a_restarted_scheduler_learns_what_is_in_flight_and_when_it_ends() -> None:
    async with running() as (engines, group):
        engines.decode[0].token_gate.close()
        streams = [asyncio.create_task(engines.generate(group.url)) for _ in range(20)]
        await engines.decode[0].token_gate.arrived(20)
        kill(group.pids["scheduler"])
        await group.says("connected to the restarted scheduler", times=2)
        async with engines.client.get(group.url + "/server_info") as got:
            assert got.status == 200
        await group.says("scheduler serves", times=2)
        # Submitted by both front ends, each with its own.
        submitted = [line.rsplit("submitted ", 1)[1] for line in group.find("the restarted")]
        assert sum(int(text.split()[0]) for text in submitted) == 20
        engines.decode[0].token_gate.open()
        assert all(map(complete, await asyncio.gather(*streams)))


async def test_requests_that_wait_in_the_queue_are_placed_when_the_scheduler_is_lost() -> None:
    # The paper's trigger sends one batch and waits an interval; without an answer it stays long.
    flags = ("--sbs-trigger", "paper", "--sbs-t-default-ms", "40000")
    async with running(*flags) as (engines, group):
        for engine in engines.prefill:
            engine.gate.close()
        requests = [asyncio.create_task(engines.generate(group.url)) for _ in range(12)]
        async with asyncio.timeout(20):
            while await engines.metric(group, "sbs_queue_requests") == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert sum(len(engine.requests) for engine in engines.prefill) < 12
        kill(group.pids["scheduler"], signal.SIGSTOP)
        try:
            await until(lambda: sum(len(engine.requests) for engine in engines.prefill) == 12)
            for engine in engines.prefill:
                engine.gate.open()
            assert all(map(complete, await asyncio.gather(*requests)))
        finally:
            kill(group.pids["scheduler"], signal.SIGCONT)
        await engines.shows(group, IN_FLIGHT, 0)
        await engines.shows(group, "sbs_queue_requests", 0)


async def test_a_worker_added_through_one_front_end_is_used_and_removed_by_both() -> None:
    async with running("--policy", "round_robin") as (engines, group):
        spare = engines.prefill[1]

        async def known_everywhere(count: int) -> None:
            good = 0
            while good < 8:
                async with fresh_client() as client, client.get(group.url + "/workers") as got:
                    value: Any = await got.json()
                good = good + 1 if value["total"] == count else 0

        async with engines.client.get(group.url + "/workers") as got:
            listed = (await got.json())["workers"]
        worker_id = next(w["id"] for w in listed if w["url"] == spare.url)
        async with engines.client.delete(f"{group.url}/workers/{worker_id}") as got:
            assert got.status == 202
        async with asyncio.timeout(20):
            await known_everywhere(2)
        assert all(map(complete, [await engines.generate(group.url) for _ in range(8)]))
        assert not spare.requests
        body = {"url": spare.url, "worker_type": "prefill", "bootstrap_port": 9000}
        async with engines.client.post(group.url + "/workers", json=body) as got:
            assert got.status == 202, await got.text()
        async with asyncio.timeout(20):
            await known_everywhere(3)
        async with asyncio.timeout(20):
            while not spare.requests:
                assert complete(await engines.generate(group.url))
        # A restarted scheduler takes over what was changed, not what the flags say.
        async with engines.client.get(group.url + "/workers") as got:
            ids = {w["url"]: w["id"] for w in (await got.json())["workers"]}
        async with engines.client.delete(f"{group.url}/workers/{ids[spare.url]}") as got:
            assert got.status == 202
        kill(group.pids["scheduler"])
        await group.says("connected to the restarted scheduler", times=2)
        async with asyncio.timeout(20):
            await known_everywhere(2)
            async with engines.client.get(group.url + "/workers") as got:
                after = {w["url"]: w["id"] for w in (await got.json())["workers"]}
        assert spare.url not in after
        assert after.items() <= ids.items()


async def test_an_abort_and_a_worker_update_reach_every_front_end() -> None:
    async with running() as (engines, group):
        engines.decode[0].token_gate.close()
        rids = [f"mine-{number}" for number in range(12)]
        streams = [asyncio.create_task(engines.generate(group.url, rid=rid)) for rid in rids]
        await engines.decode[0].token_gate.arrived(12)
        await engines.shows(group, "smg_pd_ttft_seconds_count", 12)  # first bytes have been relayed
        url = group.url + "/abort_request"
        async with engines.client.post(url, json={"rid": "mine-"}) as got:
            assert (await got.json())["aborted"] == 12
        for status, body in await asyncio.gather(*streams):
            assert status == 200 and b"request_aborted" in body
        await engines.shows(group, IN_FLIGHT, 0)
        async with engines.client.get(group.url + "/workers") as got:
            worker_id = (await got.json())["workers"][0]["id"]
        body = {"priority": 7, "labels": {"rack": "3"}}
        async with engines.client.put(f"{group.url}/workers/{worker_id}", json=body) as got:
            assert got.status == 202
        good = 0
        async with asyncio.timeout(20):
            while good < 8:
                address = f"{group.url}/workers/{worker_id}"
                async with fresh_client() as client, client.get(address) as got:
                    worker = await got.json()
                known = (worker["priority"], worker["metadata"].get("rack")) == (7, "3")
                good = good + 1 if known else 0


async def test_a_dashboard_that_fails_keeps_no_front_end_from_watching_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = ("--sbs-role", "front-end", "--sbs-scheduler", f"ipc://{tmp_path}/s")
    options = parse_flags(
        [*role, "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]
    )
    async with aiohttp.ClientSession() as session:
        scheduler = RemoteScheduler(options, RouterMetrics(), session)
        monkeypatch.setattr(scheduler.feed, "scheduler_changed", lambda: 1 / 0)
        for alone in (True, False):
            with pytest.raises(ZeroDivisionError):
                scheduler._alone_changed(alone)
            assert (scheduler._monitor is not None) is alone
        monkeypatch.undo()
        await scheduler.close()


async def test_every_front_end_explains_a_request_of_another_one() -> None:
    async with running("--policy", "sbs") as (_, group):
        url, body = f"{group.url}/generate", {"text": "hello", "stream": True}
        headers = {"x-request-id": "of the client", "x-sbs-server-timing": "1"}
        async with fresh_client() as client, client.post(url, json=body, headers=headers) as answer:
            assert complete((answer.status, await answer.read()))
            assert answer.headers["Server-Timing"].startswith("admission;dur=")
        url = f"{group.url}/requests/of the client"
        for _ in range(12):  # each connection may be another front end's
            async with fresh_client() as client, client.get(url) as answer:
                assert answer.status == 200
                story = await answer.json()
            assert story["request_id"] == "of the client"
            (attempt,) = story["attempts"]
            assert list(attempt["parts"]) == ["admission", "hold", "engine", "decode"]
            assert attempt["why"]["opening"] == "idle"
