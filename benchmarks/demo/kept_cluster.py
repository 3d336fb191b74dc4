"""``sglang-sbs demo --keep``: the demo's cluster under load, until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from benchmarks.breakable import BreakableCluster
from benchmarks.demo.load import Arrival, Latency, Sample, Workload, send_one
from benchmarks.demo.virtual_cluster import CHUNK_TOKENS, capacity_qps, rig_options
from sglang_sbs.cluster.local import DEFAULT_STARTUP_TIMEOUT_S, ClusterStartError
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, Role, plan_cluster
from sglang_sbs.cluster.ports import free_port_blocks, is_port_free
from sglang_sbs.cluster.serve import serve_until_stopped
from sglang_sbs.cluster.supervise import ProcessDiedError, describe_exit

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


class EnduringCluster(BreakableCluster):
    """An engine that ends by itself is started again, so that it can be killed to see what happens.
    Any other process is missed."""

    revive_s = 15.0
    """After the death of an engine: long enough to see on the dashboard what it does."""

    async def serve(self, meanwhile: Coroutine[Any, Any, object]) -> None:
        """See :meth:`.LocalCluster.serve`."""
        work = asyncio.create_task(meanwhile)
        self._on_progress = lambda _progress: None
        dead: list[str] = []
        try:
            while True:
                try:
                    if not dead:
                        await self.unless_one_dies(_end_of(work))
                        return
                    await self.unless_one_dies(asyncio.sleep(self.revive_s))
                    await self.start_instance(dead[0])
                    name = dead.pop(0)
                    print(f"\n{name} is back as process {self.pid(name)}", flush=True)
                except ProcessDiedError as death:
                    if death.name not in {instance.name for instance in self.instances}:
                        raise
                    print(
                        f"\n{death.name} ended ({describe_exit(death.returncode)}). Requests go to "
                        f"the others; it is started again in {self.revive_s:.0f} s.",
                        flush=True,
                    )
                    await self.kill(death.name)  # what is left of it
                    dead.append(death.name)
                except ClusterStartError as error:
                    print(f"\n{error}", file=sys.stderr)
                    with contextlib.suppress(KeyError):  # it was not even started
                        await self.kill(dead[0])
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def _end_of(work: asyncio.Task[object]) -> None:
    await asyncio.shield(work)
    await asyncio.Event().wait()


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
        if sample.error:
            self.failed += 1
            self.last_error = sample.error
        else:
            self.answered += 1
            self.recent.append((time.monotonic(), sample.ttft_s))

    def describe(self) -> str:
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


def keep(args: argparse.Namespace, router_flags: Sequence[str], console: Console) -> int:
    """Bring the cluster up and keep it under load until SIGINT or SIGTERM; the exit code.

    ``args``: the demo's command line, checked. Raises: RuntimeError, a port is taken; nothing is
    started then.
    """
    for flag, port in (("--port", args.port), ("--prometheus-port", args.prometheus_port)):
        if not is_port_free(port):
            raise RuntimeError(
                f"port {port} is in use: end what listens there, or choose another with {flag}"
            )
    prefill, decode = args.topology_counts
    options = rig_options(
        *(prefill, decode, args.dp, args.out),
        os.environ,
        attention_tp=args.attention_tp,
        dwdp=args.dwdp,
    )
    metrics = ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(args.prometheus_port))
    flags = [*router_flags, *metrics]
    options = replace(options, with_router=True, router_flags=flags, router_port=args.port)
    plan = plan_cluster(options, free_port_blocks(PORTS_PER_INSTANCE))
    qps = args.load * capacity_qps(prefill, args.dp, barrier=not args.dwdp)

    async def meanwhile(cluster: EnduringCluster) -> None:
        assert cluster.router is not None
        url = cluster.router.url
        print(f"Ready.\n{_places(url, args.prometheus_port, args.out)}", flush=True)
        last = next(
            instance.name
            for instance in reversed(cluster.instances)
            if instance.role == Role.PREFILL
        )
        print(f"Try:\n{to_try(url, last, cluster.pid(last))}", flush=True)
        console.print(
            f"Load: {qps:.1f} requests/s, {args.load:.0%} of what full chunks would serve. "
            "[bold]Ctrl-C stops everything.[/]",
            highlight=False,
        )
        traffic = Traffic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(steady_load(url, qps, args.seed, traffic))
            tasks.create_task(_show(traffic, console))

    code = asyncio.run(
        serve_until_stopped(plan, DEFAULT_STARTUP_TIMEOUT_S, meanwhile, EnduringCluster)
    )
    console.print("everything that was started has stopped" if code == 0 else f"logs: {args.out}")
    return code


def to_try(url: str, engine: str, pid: int) -> str:
    """Commands to try on the cluster, each with what it shows."""
    command = _command()
    steps = {
        f"kill -9 {pid}": f"{engine} dies: the dashboard turns red and says why; it comes back",
        f"{command} policy round_robin --router {url}": "the policy; TTFT rises, and sbs brings it "
        "down again (the dashboard has a button)",
        f"{command} why ID --router {url}": "why one request took so long; the dashboard lists the "
        "slowest with their reasons: click on one",
        f"curl -s {url}/well": "is all well? also what was wrong in the last hour",
    }
    return "\n".join(f"  {step}\n      {what}" for step, what in steps.items())


def _command() -> Path:
    command = Path(sys.executable).with_name("sglang-sbs")
    return command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command


def _places(url: str, prometheus_port: int, log_dir: Path) -> str:
    """Where everything is, and how to ask for it: one line each, to copy."""
    body = '{"text": "hello world", "sampling_params": {"max_new_tokens": 8}}'
    places = {
        "dashboard": f"{url}/dashboard",
        "router": url,
        "metrics": f"http://127.0.0.1:{prometheus_port}/metrics",
        "terminal": f"{_command()} top --router {url}",
        "workers": f"curl {url}/workers",
        "a request": f"curl -H 'Content-Type: application/json' {url}/generate -d '{body}'",
        "logs": f"{log_dir}/*.log",
    }
    return "\n".join(f"  {name:<10} {place}" for name, place in places.items())


async def steady_load(url: str, qps: float, seed: int, traffic: Traffic) -> None:
    """Poisson arrivals at ``qps`` until cancelled, with at most ``MOST_IN_FLIGHT`` at once.

    Being cancelled breaks what is in flight off: the router aborts it on the engines.
    """
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
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
