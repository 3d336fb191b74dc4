"""``sglang-sbs demo --keep``: the demo's cluster under light load, until it is stopped."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from rich.console import Console

from sglang_sbs.cluster.local import DEFAULT_STARTUP_TIMEOUT_S, LocalCluster
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, ClusterOptions, ClusterPlan, plan_cluster
from sglang_sbs.cluster.ports import free_port_blocks, is_port_free
from sglang_sbs.cluster.serve import serve_until_stopped
from sglang_sbs.demo.load import Arrival, Latency, Sample, Workload, send_one
from sglang_sbs.demo.virtual_cluster import (
    CHUNK_TOKENS,
    COST,
    capacity_qps,
    parallel_flags,
    prefill_flags,
)
from sglang_sbs.testing.tiny_model import cached_tiny_model

OUTPUT_TOKENS = 24
MOST_IN_FLIGHT = 64
"""Requests beyond this are not sent: the load is for looking at, not for breaking things."""
REQUEST_TIMEOUT_S = 120.0
_STATUS_EVERY_S = 2.0
_LINE_EVERY_S = 30.0
"""Where the output is no terminal."""
_RECENT_S = 30.0
_ROUND = 200
"""Requests that are drawn at a time."""


class PortTakenError(RuntimeError):
    """A port the demo was to serve at is in use; the message names the flag."""


@dataclass(frozen=True, slots=True)
class KeepOptions:
    prefill: int
    decode: int
    dp_size: int
    attention_tp: int
    dwdp: bool
    router_flags: list[str]
    load: float
    """Arrival rate as a share of the prefill capacity."""
    seed: int
    port: int
    prometheus_port: int
    out: Path


@dataclass(slots=True)
class Traffic:
    answered: int = 0
    failed: int = 0
    in_flight: int = 0
    skipped: int = 0
    last_error: str = ""
    recent: deque[tuple[float, float]] = field(default_factory=deque)
    """Monotonic time of an answer's end, its TTFT in seconds."""

    def add(self, sample: Sample) -> None:
        """Count one that ended."""
        if sample.error:
            self.failed += 1
            self.last_error = sample.error
        else:
            self.answered += 1
            self.recent.append((time.monotonic(), sample.ttft_s))

    def describe(self) -> str:
        """One line about now."""
        oldest_s = time.monotonic() - _RECENT_S
        while self.recent and self.recent[0][0] < oldest_s:
            self.recent.popleft()
        line = f"{self.answered} answered, {self.failed} failed, {self.in_flight} in flight"
        if self.recent:
            ttft = Latency.of([ttft_s for _, ttft_s in self.recent])
            line += f"; last {_RECENT_S:.0f} s: TTFT mean {ttft.mean:.0f} ms, p99 {ttft.p99:.0f} ms"
        if self.skipped:
            line += f"; {self.skipped} not sent, as {MOST_IN_FLIGHT} were in flight"
        return f"{line}; last error: {self.last_error}" if self.last_error else line


def keep(options: KeepOptions, console: Console) -> int:
    """Bring the cluster up and keep it under load until SIGINT or SIGTERM; the exit code.

    Raises:
        PortTakenError: before anything is started.
    """
    _check_ports(options)
    plan = plan_of(options)
    capacity = capacity_qps(options.prefill, options.dp_size, barrier=not options.dwdp)
    qps = options.load * capacity

    async def meanwhile(cluster: LocalCluster) -> None:
        assert cluster.router is not None
        print(f"Ready.\n{_places(cluster, options)}", flush=True)
        console.print(
            f"Load: {qps:.1f} requests/s, {options.load:.0%} of what full chunks would serve. "
            "[bold]Ctrl-C stops everything.[/]",
            highlight=False,
        )
        traffic = Traffic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(steady_load(cluster.router.url, qps, options.seed, traffic))
            tasks.create_task(_show(traffic, console))

    code = asyncio.run(serve_until_stopped(plan, DEFAULT_STARTUP_TIMEOUT_S, meanwhile))
    console.print(
        "everything that was started has stopped" if code == 0 else f"logs: {options.out}"
    )
    return code


def _check_ports(options: KeepOptions) -> None:
    for flag, port in (
        ("--port", options.port),
        ("--prometheus-port", options.prometheus_port),
    ):
        if not is_port_free(port):
            raise PortTakenError(
                f"port {port} is in use: end what listens there, or choose another with {flag}"
            )


def plan_of(options: KeepOptions) -> ClusterPlan:
    """The demo's engines and a router in front of them."""
    flags = [
        *options.router_flags,
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(options.prometheus_port)),
    ]
    cluster = ClusterOptions(
        model_path=str(cached_tiny_model()),
        prefill_instances=options.prefill,
        decode_instances=options.decode,
        engine_flags=parallel_flags(options.dp_size, options.attention_tp),
        prefill_flags=prefill_flags(options.dp_size, dwdp=options.dwdp),
        virtual_gpu=COST,
        log_dir=options.out,
        environment=dict(os.environ),
        router_flags=flags,
        router_port=options.port,
    )
    return plan_cluster(cluster, free_port_blocks(PORTS_PER_INSTANCE))


def _places(cluster: LocalCluster, options: KeepOptions) -> str:
    """Where everything is, and how to ask for it: one line each, to copy."""
    assert cluster.router is not None
    url = cluster.router.url
    command = Path(sys.executable).with_name("sglang-sbs")
    if command.is_relative_to(Path.cwd()):
        command = command.relative_to(Path.cwd())
    body = '{"text": "hello world", "sampling_params": {"max_new_tokens": 8}}'
    places = {
        "dashboard": f"{url}/dashboard",
        "router": url,
        "metrics": f"http://127.0.0.1:{options.prometheus_port}/metrics",
        "terminal": f"{command} top --router {url}",
        "workers": f"curl {url}/workers",
        "a request": f"curl -H 'Content-Type: application/json' {url}/generate -d '{body}'",
        "logs": f"{options.out}/*.log",
    }
    return "\n".join(f"  {name:<10} {place}" for name, place in places.items())


async def steady_load(url: str, qps: float, seed: int, traffic: Traffic) -> None:
    """Poisson arrivals at ``qps`` until cancelled, with at most ``MOST_IN_FLIGHT`` at once.

    Being cancelled breaks what is in flight off: the router aborts it on the engines.
    """
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        asyncio.TaskGroup() as tasks,
    ):
        rounds = random.Random(seed)
        due_s = time.monotonic()
        while True:
            round_ = rounds.getrandbits(32)
            workload = Workload(
                qps=qps,
                requests=_ROUND,
                max_prompt_tokens=CHUNK_TOKENS,
                max_new_tokens=OUTPUT_TOKENS,
                seed=round_,
                content=f"keep/{round_}",
            )
            arrivals = workload.arrivals()
            for arrival in arrivals:
                await asyncio.sleep(max(0.0, due_s + arrival.at_s - time.monotonic()))
                if traffic.in_flight >= MOST_IN_FLIGHT:
                    traffic.skipped += 1
                    continue
                traffic.in_flight += 1
                tasks.create_task(_send(session, url, arrival, traffic))
            due_s += arrivals[-1].at_s


async def _send(
    session: aiohttp.ClientSession, url: str, arrival: Arrival, traffic: Traffic
) -> None:
    try:
        traffic.add(await send_one(session, url, arrival))
    finally:
        traffic.in_flight -= 1


async def _show(traffic: Traffic, console: Console) -> None:
    """Say every few seconds how it goes: in place on a terminal, in lines elsewhere."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(_LINE_EVERY_S)
            console.print(traffic.describe(), highlight=False)
    with console.status("the first requests are on their way") as status:
        while True:
            await asyncio.sleep(_STATUS_EVERY_S)
            status.update(traffic.describe())
