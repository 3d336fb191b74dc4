"""What the dashboard costs: the router with and without watchers, and the browser that shows it.

Owns the measurement: a router with a synthetic cluster in a process of its own, watchers that only
read, and headless Chromium with the page; CPU time from ``/proc``. Must not know what is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import orjson

from benchmarks.router_processes import Processes, helper
from benchmarks.synthetic_cluster import SyntheticCluster, WatchedScheduler
from sglang_sbs.dashboard.client import frames
from sglang_sbs.dashboard.feed import FRAME_S
from sglang_sbs.dashboard.pages import EVENTS_PATH
from sglang_sbs.dashboard.recorder import Recorder
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.server import RouterServer
from sglang_sbs.scheduling import Event, SchedulerConfig

_WARM_UP_S = 5.0
_LINGER_S = 16.0
"""After the last watcher the router goes on recording for a while."""
BROWSER_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1400,1600",
)


class Cost(NamedTuple):
    """One phase."""

    what: str
    router_share: float
    """Of a core."""
    browser_share: float | None = None
    kib_per_s: float | None = None


async def serve(arguments: argparse.Namespace) -> None:
    """The router's process: says its port, serves until its standard input closes."""
    options = parse_flags(
        [
            *("--host", "127.0.0.1", "--port", "0", "--prometheus-host", "127.0.0.1"),
            *("--prometheus-port", "0", "--sbs-endforward-bind", "none", "--policy", "sbs"),
        ]
    )
    scheduler = WatchedScheduler(options.scheduler)
    server = RouterServer(options, scheduler)
    await server.start()
    cluster = _cluster(scheduler, server.dispatcher.submit, arguments)
    cluster.begin()
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await cluster.end()
    await server.stop(grace_s=0.0)


async def recording_cost(arguments: argparse.Namespace, frames_wanted: int = 25) -> list[float]:
    """CPU microseconds per event the recorder hears of, CPU milliseconds per frame, its bytes."""
    scheduler = WatchedScheduler(SchedulerConfig())
    recorder: Recorder | None = None
    heard = [0, 0]

    def submit(event: Event) -> None:
        now_s = time.monotonic()
        commands = scheduler.handle(event, now_s)
        if recorder is not None:
            began_ns = time.thread_time_ns()
            recorder.observe(event, commands, now_s)
            heard[0] += 1
            heard[1] += time.thread_time_ns() - began_ns

    cluster = _cluster(scheduler, submit, arguments)
    cluster.begin()
    await asyncio.sleep(1.0)
    recorder = Recorder(scheduler, time.monotonic())
    took_s, size = [], 0
    for _ in range(frames_wanted):
        await asyncio.sleep(FRAME_S)
        began_s = time.thread_time()
        size = len(orjson.dumps(recorder.frame(time.monotonic())))
        took_s.append(time.thread_time() - began_s)
    await cluster.end()
    return [heard[1] / max(1, heard[0]) / 1e3, 1e3 * median(took_s), float(size)]


def _cluster(
    scheduler: WatchedScheduler, submit: Callable[[Event], None], arguments: argparse.Namespace
) -> SyntheticCluster:
    return SyntheticCluster(
        scheduler,
        submit,
        prefill=arguments.prefill,
        prefill_dp=arguments.prefill_dp,
        decode=arguments.decode,
        decode_dp=arguments.decode_dp,
        load=arguments.load,
    )


async def _share(pid: int, seconds: float) -> float:
    processes = Processes(pid)
    began_s, used_s = time.monotonic(), processes.cpu_s()
    await asyncio.sleep(seconds)
    return (processes.cpu_s() - used_s) / (time.monotonic() - began_s)


async def _read(url: str, counted: list[int]) -> None:
    """A watcher that only takes bytes."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
        session.get(url + EVENTS_PATH) as answer,
    ):
        async for piece in answer.content.iter_any():
            counted[0] += len(piece)


async def _watched(url: str, pid: int, watchers: int, seconds: float) -> Cost:
    counted = [0]
    tasks = [asyncio.create_task(_read(url, counted)) for _ in range(watchers)]
    await asyncio.sleep(_WARM_UP_S)
    before = counted[0]
    began_s = time.monotonic()
    share = await _share(pid, seconds)
    rate = (counted[0] - before) / (time.monotonic() - began_s) / watchers / 1024
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return Cost(f"{watchers} watcher{'s' if watchers > 1 else ''}", share, kib_per_s=rate)


async def _browsed(url: str, pid: int, chromium: str, seconds: float) -> Cost:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = await asyncio.create_subprocess_exec(
            chromium,
            *BROWSER_FLAGS,
            *(f"--user-data-dir={profile}", "--remote-debugging-port=0", url + "/dashboard"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            await asyncio.sleep(2 * _WARM_UP_S)
            router, shown = await asyncio.gather(_share(pid, seconds), _share(browser.pid, seconds))
        finally:
            browser.terminate()
            await browser.wait()
    return Cost("the page in headless Chromium", router, browser_share=shown)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All phases, one after another, over one router."""
    words = ["--serve"]
    for name in ("prefill", "prefill_dp", "decode", "decode_dp", "load"):
        words += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    async with helper("benchmarks.dashboard_cost", *words) as router:
        url = f"http://127.0.0.1:{int(await router.stdout.readline())}"
        await asyncio.sleep(_WARM_UP_S)
        chromium = shutil.which("chromium")
        if chromium is None:
            print("no chromium: the browser's part is left out", file=sys.stderr)
        costs: list[Cost] = []
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", flush=True)
            costs.append(Cost("no watcher", await _share(router.pid, arguments.seconds)))
            _say(costs[-1])
            for watchers in (1, 8):
                costs.append(await _watched(url, router.pid, watchers, arguments.seconds))
                _say(costs[-1])
            if chromium is not None:
                costs.append(await _browsed(url, router.pid, chromium, arguments.seconds))
                _say(costs[-1])
            await asyncio.sleep(_LINGER_S)
        async for frame in frames(url, None):
            ranks = [len(one["age"]) for role in ("prefill", "decode") for one in frame[role]]
            break
    return {"dp_ranks": sum(ranks), "costs": [cost._asdict() for cost in costs]}


def summarize(costs: Sequence[Cost]) -> list[str]:
    """Medians over the rounds, with the least and the most."""
    lines = []
    for what in dict.fromkeys(cost.what for cost in costs):
        mine = [cost for cost in costs if cost.what == what]
        line = f"{what:<30} router {_spread([cost.router_share for cost in mine])}"
        browser = [cost.browser_share for cost in mine if cost.browser_share is not None]
        if browser:
            line += f", browser {_spread(browser)}"
        lines.append(line)
    return lines


def _spread(shares: Sequence[float]) -> str:
    low, middle, high = (100 * share for share in (min(shares), median(shares), max(shares)))
    return f"{middle:.1f} % ({low:.1f}..{high:.1f}) of a core"


def _say(cost: Cost) -> None:
    line = f"{cost.what:<30} router {100 * cost.router_share:5.1f} % of a core"
    if cost.browser_share is not None:
        line += f", browser {100 * cost.browser_share:5.1f} %"
    if cost.kib_per_s is not None:
        line += f", {cost.kib_per_s:.0f} KiB/s each"
    print(line, flush=True)


def parser() -> argparse.ArgumentParser:
    """The flags of ``scripts/bench-dashboard``."""
    made = argparse.ArgumentParser(
        prog="scripts/bench-dashboard",
        description="CPU of a router with 256 DP ranks (synthetic engines, a real scheduler) "
        "while nobody looks at its dashboard, while 1 and 8 watchers read it, and while headless "
        "Chromium shows it at 5 frames/s. The router's figure includes playing the engines and "
        "scheduling: the difference to the first line is the dashboard's.",
        epilog="example: scripts/bench-dashboard --seconds 20 --json out/dashboard.json",
    )
    made.add_argument("--seconds", type=float, default=20.0, help="per phase (default 20)")
    made.add_argument("--rounds", type=int, default=3, help="of all phases (default 3)")
    made.add_argument("--prefill", type=int, default=24, help="instances (default 24)")
    made.add_argument("--prefill-dp", type=int, default=8, help="DP ranks of each (default 8)")
    made.add_argument("--decode", type=int, default=2, help="instances (default 2)")
    made.add_argument("--decode-dp", type=int, default=32, help="DP ranks of each (default 32)")
    made.add_argument("--load", type=float, default=0.1, help="share of full passes (default 0.1)")
    made.add_argument("--json", type=Path, help="write the figures there")
    made.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    arguments = parser().parse_args(argv)
    if arguments.serve:
        asyncio.run(serve(arguments))
        return 0
    event_us, frame_ms, size = asyncio.run(recording_cost(arguments))
    print(
        f"recording: {event_us:.1f} us of CPU per event, {frame_ms:.1f} ms per frame of "
        f"{size / 1024:.0f} KiB, {100 * frame_ms / 1e3 / FRAME_S:.1f} % of a core at "
        f"{1 / FRAME_S:.0f} frames/s"
    )
    figures = asyncio.run(measure(arguments)) | {"event_us": event_us, "frame_ms": frame_ms}
    print("\n".join(["", "medians:", *summarize([Cost(**cost) for cost in figures["costs"]])]))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
