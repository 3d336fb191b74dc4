"""The checks of ``sglang_router``'s own integration tests, asked of this router in PD form.

Read in SGLang's ``sgl-router/py_test/integration`` and
``sgl-model-gateway/py_test/integration_mock``. Those whose subject has tests of its own here (TLS,
payload size, header forwarding, discovery, starting without workers, random and round robin
placement) are there. What is meant otherwise here is in ``docs/differences.md``, "Its own tests".
"""

from __future__ import annotations

import asyncio
import collections
import math
from typing import Any

import pytest
from router_harness import Cluster, cluster, until

from sglang_sbs.router.workers.worker import Worker
from tools.stand_ins.mock_engine import Behaviour, MockEngine

NO_RETRIES = ("--policy", "round_robin", "--disable-retries")
BREAKER = ("--cb-failure-threshold", "2", "--cb-success-threshold", "2")
FAILS = Behaviour(status=500)
COMPLETION = {"model": "mock", "prompt": "x", "max_tokens": 1, "stream": False}


async def ask(c: Cluster, key: str | None = None) -> int:
    headers = {} if key is None else {"X-SMG-Routing-Key": key}
    async with c.post("/v1/completions", COMPLETION, headers=headers) as response:
        await response.read()
        return int(response.status)


def worker_of(c: Cluster, engine: MockEngine) -> Worker:
    worker = c.server.registry.get(engine.url)
    assert worker is not None
    return worker


def time_out(c: Cluster, worker: Worker) -> None:
    """Let ``--cb-timeout-duration-secs`` be over."""
    worker.breaker.opened_at_s = -math.inf
    c.server.registry.tick()


def legs(c: Cluster, leg: str) -> list[MockEngine]:
    return c.prefill if leg == "prefill" else c.decode


# Circuit breaker ----------------------------------------------------------------------------------


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_breaker_opens_keeps_requests_away_and_recovers(leg: str) -> None:
    async with cluster(*NO_RETRIES, *BREAKER, real=True, prefill=2, decode=2, decode_dp=1) as c:
        sick = legs(c, leg)[0]
        worker = worker_of(c, sick)
        sick.behaviours.extend([FAILS] * 2)
        assert collections.Counter([await ask(c) for _ in range(4)]) == {200: 2, 500: 2}
        assert worker.breaker.state == "open"
        others = [w for w in c.server.registry if w is not worker]
        assert {w.breaker.state for w in others} == {"closed"}
        arrived = len(sick.requests)
        assert {await ask(c) for _ in range(6)} == {200}
        assert len(sick.requests) == arrived
        time_out(c, worker)
        assert worker.breaker.state == "half_open"
        assert {await ask(c) for _ in range(4)} == {200}
        assert len(sick.requests) == arrived + 2
        assert worker.breaker.state == "closed"


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_one_failure_opens_a_half_open_breaker_again(leg: str) -> None:
    async with cluster(*NO_RETRIES, *BREAKER, real=True, prefill=2, decode=2, decode_dp=1) as c:
        sick = legs(c, leg)[0]
        worker = worker_of(c, sick)
        sick.behaviour = FAILS
        await asyncio.gather(*(ask(c) for _ in range(4)))
        assert worker.breaker.state == "open"
        time_out(c, worker)
        assert sorted([await ask(c), await ask(c)]) == [200, 500]
        assert worker.breaker.state == "open"
        arrived = len(sick.requests)
        assert {await ask(c) for _ in range(6)} == {200}
        assert len(sick.requests) == arrived


async def test_without_a_breaker_failures_go_on() -> None:
    flags = (*NO_RETRIES, *BREAKER, "--disable-circuit-breaker")
    async with cluster(*flags, real=True, decode=2, decode_dp=1) as c:
        c.decode[0].behaviour = FAILS
        assert collections.Counter([await ask(c) for _ in range(12)]) == {200: 6, 500: 6}


async def test_the_only_worker_of_its_role_is_never_shut_out() -> None:
    """Here and there differ: ``sglang_router`` answers 503 for a minute, whatever failed."""
    async with cluster(*NO_RETRIES, *BREAKER, real=True) as c:
        c.decode[0].behaviours.extend([FAILS] * 3)
        assert [await ask(c) for _ in range(5)] == [500, 500, 500, 200, 200]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_with_nobody_else_left_an_open_breaker_does_not_count(leg: str) -> None:
    flags = (*BREAKER, "--policy", "round_robin")
    async with cluster(*flags, real=True, prefill=2, decode=2, decode_dp=1) as c:
        sick, well = legs(c, leg)
        sick.behaviours.extend([FAILS] * 2)
        assert {await ask(c) for _ in range(4)} == {200}
        assert worker_of(c, sick).breaker.state == "open"
        await well.stop()
        assert {await ask(c) for _ in range(4)} == {200}
        assert not worker_of(c, well).usable


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_request_that_every_engine_refuses_opens_no_breaker(leg: str) -> None:
    """Else one sender could shut out all engines of a role but one."""
    flags = (*BREAKER, "--policy", "round_robin")
    async with cluster(*flags, real=True, prefill=3, decode=3, decode_dp=1) as c:
        for engine in legs(c, leg):
            engine.behaviour = FAILS
        assert {await ask(c) for _ in range(8)} == {500}
        assert {w.breaker.state for w in c.server.registry} == {"closed"}
        # One that others serve is the engine's doing.
        for engine in legs(c, leg)[1:]:
            engine.behaviour = Behaviour()
        assert {await ask(c) for _ in range(8)} == {200}
        states = {engine.url: worker_of(c, engine).breaker.state for engine in legs(c, leg)}
        assert list(states.values()) == ["open", "closed", "closed"]


async def test_a_busy_engine_is_no_witness() -> None:
    async with cluster(*BREAKER, "--policy", "round_robin", real=True, decode=2, decode_dp=1) as c:
        busy, sick = c.decode
        busy.behaviour, sick.behaviour = Behaviour(status=429), FAILS
        assert {await ask(c) for _ in range(2)} <= {429, 500}
        assert worker_of(c, busy).breaker.state == "closed"
        assert worker_of(c, sick).breaker.state == "open"


# Retries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("sickness", [FAILS, Behaviour(fault="reset_before_head")])
async def test_a_failure_is_retried_on_a_healthy_worker(leg: str, sickness: Behaviour) -> None:
    flags = ("--policy", "round_robin", "--retry-max-retries", "3", *BREAKER)
    async with cluster(*flags, real=True, prefill=3, decode=3) as c:
        legs(c, leg)[0].behaviour = sickness
        assert {await ask(c) for _ in range(6)} == {200}


async def test_without_retries_the_failure_is_the_answer() -> None:
    async with cluster(*NO_RETRIES, real=True) as c:
        c.decode[0].behaviour = FAILS
        assert await ask(c) == 500
        c.decode[0].behaviour = Behaviour(fault="reset_before_head")
        assert await ask(c) == 502


async def test_the_engines_own_key_is_the_clients_business_without_one_here() -> None:
    async with cluster(*NO_RETRIES, *BREAKER, real=True) as c:
        c.prefill[0].behaviour = c.decode[0].behaviour = Behaviour(status=401)
        assert [await ask(c) for _ in range(3)] == [401] * 3
        assert {w.breaker.consecutive[0] for w in c.server.registry} == {0}
        c.prefill[0].behaviour = c.decode[0].behaviour = Behaviour()
        headers = {"Authorization": "Bearer theirs"}
        async with c.post("/v1/completions", COMPLETION, headers=headers) as response:
            assert response.status == 200
        for engine in (*c.prefill, *c.decode):
            assert engine.requests[-1].headers["authorization"] == "Bearer theirs"


# Rate limit ---------------------------------------------------------------------------------------


async def test_over_the_limit_without_a_queue_is_a_429() -> None:
    flags = ("--max-concurrent-requests", "2", "--queue-size", "0")
    async with cluster(*flags, real=True) as c:
        c.decode[0].gate.close()
        asked = [asyncio.create_task(ask(c)) for _ in range(16)]
        await until(lambda: sum(task.done() for task in asked) == 14)
        c.decode[0].gate.open()
        assert collections.Counter(await asyncio.gather(*asked)) == {200: 2, 429: 14}
        assert await ask(c) == 200


async def test_the_queue_of_the_limit_has_a_size_and_an_end() -> None:
    flags = ("--max-concurrent-requests", "1", "--queue-size", "1", "--queue-timeout-secs", "0.3")
    async with cluster(*flags, real=True) as c:
        c.decode[0].gate.close()

        async def refusal_or_answer() -> tuple[int, str | None, bool]:
            async with c.post("/v1/completions", COMPLETION) as response:
                await response.read()
                headers = response.headers
                return response.status, headers.get("X-SMG-Error-Code"), "Retry-After" in headers

        asked = [asyncio.create_task(refusal_or_answer()) for _ in range(4)]
        await until(lambda: sum(task.done() for task in asked) == 3)
        c.decode[0].gate.open()
        answers = collections.Counter(await asyncio.gather(*asked))
        # There the one that waited too long gets a 408, which blames the client.
        assert answers == {
            (200, None, False): 1,
            (429, "queue_full", True): 2,
            (503, "queue_timeout", True): 1,
        }
        assert await ask(c) == 200


# Placement ----------------------------------------------------------------------------------------


async def test_power_of_two_spares_a_slow_decode_worker() -> None:
    flags = ("--policy", "power_of_two")
    async with cluster(*flags, real=True, prefill=2, decode=2, decode_dp=1) as c:
        slow, fast = c.decode
        slow.gate.close()
        tasks: list[asyncio.Task[int]] = []
        for number in range(1, 31):
            task = asyncio.create_task(ask(c))
            tasks.append(task)
            arrived = len(slow.requests)
            await until(lambda task=task, a=arrived: task.done() or len(slow.requests) > a)
            assert len(slow.requests) + len(fast.requests) == number
        assert len(slow.requests) == 1
        slow.gate.open()
        assert set(await asyncio.gather(*tasks)) == {200}


async def test_power_of_two_uses_several_decode_workers() -> None:
    async with cluster("--policy", "power_of_two", real=True, prefill=2, decode=3) as c:
        assert {await ask(c) for _ in range(30)} == {200}
        assert sum(bool(engine.requests) for engine in c.decode) >= 2
        assert sum(len(engine.requests) for engine in c.decode) == 30


async def test_manual_keeps_a_routing_key_on_one_prefill_rank() -> None:
    async with cluster("--policy", "manual", real=True, prefill=2) as c:
        homes: dict[str, set[tuple[str, Any]]] = {}
        for key in (f"user-{number}" for number in range(12)):
            for _ in range(3):
                before = [len(engine.requests) for engine in c.prefill]
                assert await ask(c, key) == 200
                (home,) = (
                    engine
                    for engine, had in zip(c.prefill, before, strict=True)
                    if len(engine.requests) > had
                )
                rank = home.requests[-1].body["routed_dp_rank"]
                homes.setdefault(key, set()).add((home.url, rank))
        assert {len(places) for places in homes.values()} == {1}
        assert len({url for places in homes.values() for url, _ in places}) == 2


async def test_manual_without_a_key_uses_everybody() -> None:
    async with cluster("--policy", "manual", real=True, prefill=2) as c:
        assert {await ask(c) for _ in range(30)} == {200}
        assert all(engine.requests for engine in c.prefill)


async def test_a_removed_worker_gets_nothing_more() -> None:
    async with cluster(*NO_RETRIES, real=True, decode=2, decode_dp=1) as c:
        gone, stays = c.decode
        assert {await ask(c) for _ in range(4)} == {200}
        arrived = len(gone.requests)
        assert arrived and stays.requests
        async with c.client.delete(f"{c.url}/workers/{worker_of(c, gone).id}") as response:
            assert response.status == 202
        assert {await ask(c) for _ in range(6)} == {200}
        assert len(gone.requests) == arrived
