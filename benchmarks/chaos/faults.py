"""The faults: what is done to which process or message, and for how long."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable

import aiohttp

from benchmarks.chaos.endforward_relay import Disturbance
from benchmarks.chaos.run import Fault, Scene
from benchmarks.demo.load import Workload

PAUSE_S = 5.0
DISTURBED_S = 10.0
AWAY_S = 15.0
"""From the kill of an instance to its start: decode engines notice by two heartbeats 5 s apart."""
SHORTLY_S = 1.0
"""A restart that they do not notice."""
STORM_CLIENTS = 300
STORM_SPREAD_S = 3.0
STORM_PATIENCE_S = 0.2
FULL_POOL_TOKENS = 8192
"""KV tokens per decode rank: about ten requests of the load, with what SGLang reserves."""
FULL_POOL_REQUESTS = 40

Inject = Callable[[Scene], Awaitable[None]]


def killed(name: str, away_s: float = AWAY_S) -> Inject:
    """kill -9 of every process of an instance, and its start after a while."""

    async def inject(scene: Scene) -> None:
        cluster, load = scene.site.cluster, scene.load
        await cluster.kill(name)
        await asyncio.sleep(away_s)
        begin_s = load.elapsed_s
        await cluster.start_instance(name)
        scene.notes.append(f"{name} took {load.elapsed_s - begin_s:.0f} s to start again")

    return inject


def paused(name: str, for_s: float = PAUSE_S) -> Inject:
    async def inject(scene: Scene) -> None:
        cluster = scene.site.cluster
        cluster.signal(name, signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            cluster.signal(name, signal.SIGCONT)

    return inject


def router_process_killed(name: str) -> Inject:
    """kill -9 of one process of the router; its supervisor starts another."""

    async def inject(scene: Scene) -> None:
        old = scene.router_pids()[name]
        begin_s = scene.load.elapsed_s
        os.kill(old, signal.SIGKILL)
        async with asyncio.timeout(60):
            while scene.router_pids()[name] == old:  # noqa: ASYNC110 (nothing announces it)
                await asyncio.sleep(0.05)
        scene.notes.append(f"{name} was back after {scene.load.elapsed_s - begin_s:.1f} s")

    return inject


def disturbed(disturbance: Disturbance, for_s: float = DISTURBED_S) -> Inject:
    async def inject(scene: Scene) -> None:
        relay = scene.site.relay
        received, sent = relay.received, relay.sent
        relay.disturbance = disturbance
        try:
            await asyncio.sleep(for_s)
        finally:
            relay.disturbance = Disturbance()
        scene.notes.append(f"{relay.received - received} messages in, {relay.sent - sent} out")

    return inject


async def storm(scene: Scene) -> None:
    """Clients that ask for a long answer and leave at once, whatever state it is in."""
    draw = random.Random(1)
    seen: Counter[str] = Counter()

    async def client(delay_s: float, patience_s: float, prompt: list[int]) -> None:
        await asyncio.sleep(delay_s)
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 500, "ignore_eos": True},
            "stream": True,
        }
        try:
            async with (
                asyncio.timeout(patience_s),
                aiohttp.ClientSession() as session,
                session.post(f"{scene.url}/generate", json=body) as response,
            ):
                await response.read()
                seen[f"status {response.status}"] += 1
        except TimeoutError:
            seen["left"] += 1
        except aiohttp.ClientError as error:
            seen[type(error).__name__] += 1

    await asyncio.gather(
        *(
            client(
                draw.uniform(0, STORM_SPREAD_S),
                draw.uniform(0, STORM_PATIENCE_S),
                [draw.randrange(10, 400) for _ in range(draw.randrange(1, 600))],
            )
            for _ in range(STORM_CLIENTS)
        )
    )
    scene.notes.append(
        f"{STORM_CLIENTS} clients: " + ", ".join(f"{n} {what}" for what, n in seen.items())
    )


async def full_pool(scene: Scene) -> None:
    """Several times as many KV tokens as the decode instance has, at once."""
    burst = Workload(
        qps=1000, requests=FULL_POOL_REQUESTS, max_prompt_tokens=1000, max_new_tokens=100, seed=7
    )
    wanted = scene.load.outcomes
    already = len(wanted)
    scene.load.send(burst.arrivals())
    async with asyncio.timeout(120):
        while len(wanted) < already + FULL_POOL_REQUESTS:  # noqa: ASYNC110 (polls a count)
            await asyncio.sleep(0.2)


ALL = (
    Fault("kill-prefill", "kill -9 of a prefill instance", killed("prefill-0")),
    Fault("stop-prefill", "SIGSTOP of a prefill instance for 5 s", paused("prefill-1")),
    Fault("kill-decode", "kill -9 of the decode instance", killed("decode-0")),
    Fault("stop-decode", "SIGSTOP of the decode instance for 5 s", paused("decode-0")),
    Fault(
        "kill-front-end",
        "kill -9 of one of two front ends",
        router_process_killed("front end 0"),
        workers=2,
        breaks_connections=True,
    ),
    Fault(
        "kill-scheduler",
        "kill -9 of the scheduler process",
        router_process_killed("scheduler"),
        workers=2,
    ),
    Fault("lose-10", "10 % of EndForward lost", disturbed(Disturbance(lost=0.1))),
    Fault("lose-50", "50 % of EndForward lost", disturbed(Disturbance(lost=0.5))),
    Fault("lose-100", "EndForward lost", disturbed(Disturbance(lost=1.0))),
    Fault("duplicate", "EndForward twice", disturbed(Disturbance(duplicated=1.0))),
    Fault(
        "reorder", "EndForward out of order by up to 0.5 s", disturbed(Disturbance(scatter_s=0.5))
    ),
    Fault("late", "EndForward late by 3 s", disturbed(Disturbance(late_s=3.0))),
    Fault("storm", "300 clients leave within 0.2 s", storm),
    Fault(
        "full-kv",
        "a full decode KV pool",
        full_pool,
        decode_flags=["--max-total-tokens", str(FULL_POOL_TOKENS)],
    ),
    Fault(
        "restart-prefill",
        "kill -9 of a prefill instance, back before decode engines miss it",
        killed("prefill-0", SHORTLY_S),
    ),
)
BY_NAME = {fault.name: fault for fault in ALL}
