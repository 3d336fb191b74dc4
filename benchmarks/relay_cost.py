"""The cost of relaying: this router against ``sglang_router`` (Rust) and its mini_lb.

All contenders run from the start, over the same engines, and take turns: what else happens on the
machine hits them alike, and only ratios within one run mean much.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import command_parser, raise_file_limit
from benchmarks.raw_client import closed_loop, open_streams, probe_first_byte
from benchmarks.router_processes import Contender, Running, raw_engines, running, select, set_pace
from sglang_sbs.simulator.options.common import integers, positive, positive_number

_EPILOG = """\
What is measured, per contender and number of streams, on loopback:

  CPU per chunk    user and system time of the router's processes, by the kernel's clock, divided by
                   the events that reached the clients, with nothing else going on. --chunk-rate
                   events are sent per second in all, in eight groups that take turns, as the DP
                   ranks of a decode instance do.
  added TTFB       time to the first byte of short streams, one after another, while the long ones
                   run on; less the same without a router (client to decode engine). Each on a new
                   connection, and ("kept") all on one, where Nagle's algorithm shows.
  requests/s       short requests that are not streamed, --clients of them at a time, and their CPU.
  memory           growth of resident memory from idle to the most streams, per stream.

Contenders: ours (--policy round_robin, as the Rust router), ours-sbs (--policy sbs; the engines
send no EndForward, so it works on load polls), rust and mini_lb (sglang_router 0.3.2; dev extra).
A ratio below 1 means that ours is cheaper. The ratios at the top of the JSON are the worst over all
numbers of streams; "by_streams" has them all, "ratios_sbs" the same for --policy sbs.

examples:
  scripts/bench-relay                                  # everything, 5 to 6 minutes
  scripts/bench-relay --streams 200 --rounds 5 --contenders ours,rust --json relay.json
  git worktree add ../before v0.1.0                    # only: CPU per request against that version
  scripts/bench-relay --against ../before --rounds 15

--against DIR measures CPU per short request of two versions of this router, ours with an access log
of every request (what else answers "why" is always on). The answer is the median over rounds of the
ratio within a round, with its quartiles.
"""
_SETTLE_S = 0.3
_QUIET_LIMIT = 20
"""How many times that is waited for a router to become idle."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_parser("scripts/bench-relay", (__doc__ or "").split("\n", 1)[0], _EPILOG)
    add = parser.add_argument
    add("--streams", type=integers, default=[1, 50, 200, 1000], help="(1,50,200,1000)")
    add("--seconds", type=positive_number, default=2.0, help="of each measurement (2)")
    add("--rounds", type=positive, default=3, help="each contender has a turn in each round (3)")
    add("--workers", type=positive, default=1, help="--workers of ours (1)")
    add("--contenders", default="ours,ours-sbs,rust,mini_lb", help="which, by commas (all)")
    add("--chunk-rate", type=positive_number, default=5000.0, help="events per s in all (5000)")
    add("--clients", type=positive, default=32, help="of the short requests (32)")
    add("--against", type=Path, metavar="DIR", help="only: against the version checked out there")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    if options.against is not None and not (options.against / "sglang_sbs").is_dir():
        parser.error(f"--against {options.against}: there is no checkout of sglang_sbs")
    try:
        options.contenders = select(options.contenders.split(","), options.workers)
    except ValueError as error:
        parser.error(f"--contenders: {error}")
    return options


# Measuring --------------------------------------------------------------------------------------


class Samples:
    """Values by (contender, streams, quantity), one per round; streams 0: no number."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, int, str], list[float]] = {}

    def add(self, contender: str, streams: int, quantity: str, value: float) -> None:
        self._values.setdefault((contender, streams, quantity), []).append(value)

    def get(self, contender: str, streams: int, quantity: str) -> list[float]:
        return self._values.get((contender, streams, quantity), [])

    def median(self, contender: str, streams: int, quantity: str) -> float | None:
        values = self.get(contender, streams, quantity)
        return statistics.median(values) if values else None

    def report(self) -> list[dict[str, Any]]:
        return [
            {
                "contender": contender,
                "streams": streams,
                "quantity": quantity,
                "median": statistics.median(values),
                "min": min(values),
                "max": max(values),
                "rounds": values,
            }
            for (contender, streams, quantity), values in self._values.items()
        ]


class Bench:
    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = options
        self.samples = Samples()
        self._console = console

    async def run(self) -> None:
        """Raises: RuntimeError, a router does not start or fails requests."""
        options = self.options
        async with AsyncExitStack() as stack:
            prefill, decode = await stack.enter_async_context(raw_engines())
            contenders = [
                await stack.enter_async_context(running(contender, prefill, decode))
                for contender in options.contenders
            ]
            for number in range(options.rounds):
                turn = number % len(contenders)
                order = contenders[turn:] + contenders[:turn]
                for streams in sorted(options.streams):
                    interval_s = max(0.002, streams / options.chunk_rate)
                    await set_pace(decode, interval_s)
                    direct = await self._direct(decode, streams)
                    for router in order:
                        await self._relay(router, streams, direct)
                for router in order:
                    await self._requests(router)
                self._console.print(f"round {number + 1} of {options.rounds} done", style="dim")

    async def against(self, contenders: Sequence[Contender]) -> None:
        """Short requests only; the order within a round turns. Raises: RuntimeError, as ``run``."""
        async with AsyncExitStack() as stack:
            prefill, decode = await stack.enter_async_context(raw_engines())
            routers = [
                await stack.enter_async_context(running(contender, prefill, decode))
                for contender in contenders
            ]
            for number in range(-1, self.options.rounds):
                turn = number % len(routers)
                for router in routers[turn:] + routers[:turn]:
                    await self._requests(router, counted=number >= 0)

    async def _direct(self, decode: int, streams: int) -> dict[str, float]:
        exchanges, _ = await open_streams(decode, streams)
        taken = await self._first_bytes(decode)
        for quantity, value in taken.items():
            self.samples.add("direct", streams, quantity, value)
        for exchange in exchanges:
            exchange.close()
        await asyncio.sleep(_SETTLE_S)
        return taken

    async def _first_bytes(self, port: int) -> dict[str, float]:
        found = {}
        for connection in ("new", "kept"):
            taken_s = await probe_first_byte(
                port, self.options.seconds / 2, kept=connection == "kept"
            )
            if len(taken_s) < 2:
                raise RuntimeError("too few probes; use more --seconds")
            cuts_s = statistics.quantiles(taken_s, n=100, method="inclusive")
            found[f"ttfb_{connection}_p50_us"] = cuts_s[49] * 1e6
            found[f"ttfb_{connection}_p99_us"] = cuts_s[98] * 1e6
        return found

    async def _relay(self, router: Running, streams: int, direct: dict[str, float]) -> None:
        name, add = router.contender.name, self.samples.add
        exchanges, tally = await open_streams(router.port, streams)
        await asyncio.sleep(_SETTLE_S)
        gc.collect()
        events, cpu_s = tally.events, router.processes.cpu_s()
        await asyncio.sleep(self.options.seconds)
        cpu_s = router.processes.cpu_s() - cpu_s
        events = tally.events - events
        if tally.failures or not events:
            raise RuntimeError(f"{name} failed at {streams} streams: {dict(tally.failures)}")
        add(name, streams, "cpu_us_per_chunk", cpu_s / events * 1e6)
        for quantity, value in (await self._first_bytes(router.port)).items():
            add(name, streams, f"added_{quantity}", value - direct[quantity])
        if streams == max(self.options.streams):
            grown = router.processes.resident_bytes() - router.idle_bytes
            add(name, 0, "memory_kib_per_stream", grown / streams / 1024)
        for exchange in exchanges:
            exchange.close()
        await self._quiet(router)

    @staticmethod
    async def _quiet(router: Running) -> None:
        """Until the router is through with the streams that were hung up."""
        for _ in range(_QUIET_LIMIT):
            cpu_s = router.processes.cpu_s()
            await asyncio.sleep(_SETTLE_S)
            if router.processes.cpu_s() - cpu_s < 0.05 * _SETTLE_S:
                return

    async def _requests(self, router: Running, *, counted: bool = True) -> None:
        name = router.contender.name
        cpu_s = router.processes.cpu_s()
        tally = await closed_loop(router.port, self.options.clients, self.options.seconds)
        cpu_s = router.processes.cpu_s() - cpu_s
        if tally.failures or not tally.complete:
            raise RuntimeError(f"{name} failed short requests: {dict(tally.failures)}")
        if not counted:  # the first requests pay for connections and imports
            return
        self.samples.add(name, 0, "requests_per_s", tally.complete / self.options.seconds)
        self.samples.add(name, 0, "cpu_us_per_request", cpu_s / tally.complete * 1e6)


# Saying it ---------------------------------------------------------------------------------------

_RATIOS = {
    "cpu_per_chunk_vs_rust": "cpu_us_per_chunk",
    "ttfb_p50_vs_rust": "added_ttfb_new_p50_us",
    "ttfb_p99_vs_rust": "added_ttfb_new_p99_us",
    "ttfb_kept_p50_vs_rust": "added_ttfb_kept_p50_us",
    "ttfb_kept_p99_vs_rust": "added_ttfb_kept_p99_us",
}


def ratios_of(samples: Samples, ours: str, streams: Sequence[int]) -> dict[str, Any]:
    """Medians of ours by those of Rust: the worst, and by number of streams."""
    by_streams: dict[str, dict[str, float]] = {}
    for count in streams:
        for name, quantity in _RATIOS.items():
            mine = samples.median(ours, count, quantity)
            theirs = samples.median("rust", count, quantity)
            if mine is not None and theirs is not None and theirs > 0:
                by_streams.setdefault(str(count), {})[name] = mine / theirs
    worst = {
        name: max(values[name] for values in by_streams.values() if name in values)
        for name in _RATIOS
        if any(name in values for values in by_streams.values())
    }
    return {**worst, "by_streams": by_streams}


def versions_of(checkout: Path) -> list[Contender]:
    """``before`` and ``ours`` under two policies; ours with an access log of every request."""
    ours = {contender.name: contender for contender in select(["ours", "ours-sbs"], 1)}
    found = []
    for name, contender in ours.items():
        at = checkout.resolve()  # python -m looks in its working directory first
        # Its default, and an older version may know it by another name.
        at_frontends = contender.flags.index("--frontends")
        flags = contender.flags[:at_frontends] + contender.flags[at_frontends + 2 :]
        before = ("env", f"--chdir={at}", f"PYTHONPATH={at}", *contender.wrapper)
        found += [
            replace(contender, name=name.replace("ours", "before"), wrapper=before, flags=flags),
            replace(contender, flags=(*flags, "--access-log", "all")),
        ]
    return found


def ratio_of_versions(samples: Samples, ours: str) -> tuple[float, float, float]:
    """Quartiles over rounds of CPU per request, ours over before: lower, median, upper."""
    mine, old = (
        samples.get(name, 0, "cpu_us_per_request")
        for name in (ours, ours.replace("ours", "before"))
    )
    each = [new / other for new, other in zip(mine, old, strict=True)]
    if len(each) < 2:
        return each[0], each[0], each[0]
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
    return low, middle, high


def _against(options: argparse.Namespace, console: Console) -> int:
    bench = Bench(options, console)
    try:
        uvloop.run(bench.against(versions_of(options.against)))
    except RuntimeError as error:
        console.print(f"{error}", style="red", markup=False)
        return 1
    found = {name: ratio_of_versions(bench.samples, name) for name in ("ours", "ours-sbs")}
    for name, (low, middle, high) in found.items():
        now, before = (
            bench.samples.median(version, 0, "cpu_us_per_request")
            for version in (name, name.replace("ours", "before"))
        )
        policy = "sbs" if name == "ours-sbs" else "round_robin"
        console.print(
            f"--policy {policy}: {middle:.3f}x ({low:.3f} to {high:.3f}) the CPU per request of "
            f"{options.against}: {now:.0f} us against {before:.0f}",
            highlight=False,
        )
    _write(options.json, {"against": found, "samples": bench.samples.report()})
    return 0


def _cell(samples: Samples, contender: str, streams: int, quantity: str) -> str:
    values = samples.get(contender, streams, quantity)
    if not values:
        return "-"
    digits = 1 if max(values) < 100 else 0
    low, middle, high = (
        f"{v:,.{digits}f}" for v in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} [dim]({low}..{high})[/dim]"


def print_tables(samples: Samples, options: argparse.Namespace, console: Console) -> None:
    names = [contender.name for contender in options.contenders]
    columns = {
        "CPU us/chunk": "cpu_us_per_chunk",
        "added TTFB p50, us": "added_ttfb_new_p50_us",
        "p99, us": "added_ttfb_new_p99_us",
        "kept p50, us": "added_ttfb_kept_p50_us",
        "kept p99, us": "added_ttfb_kept_p99_us",
    }
    table = Table("streams", "router", *columns, title="median (least..most) over rounds")
    for count in sorted(options.streams):
        for name in names:
            cells = [_cell(samples, name, count, quantity) for quantity in columns.values()]
            table.add_row(str(count), name, *cells)
        table.add_section()
    console.print(table)
    columns = {
        "short requests/s": "requests_per_s",
        "CPU us/request": "cpu_us_per_request",
        "KiB/stream": "memory_kib_per_stream",
    }
    table = Table("router", *columns)
    for name in names:
        table.add_row(name, *(_cell(samples, name, 0, quantity) for quantity in columns.values()))
    console.print(table)


def _versions() -> dict[str, str]:
    packages = ("sglang-sbs", "sglang-router", "aiohttp", "uvloop")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def _write(path: Path | None, result: dict[str, Any]) -> None:
    about = {"versions": _versions(), "cpus": os.cpu_count()}
    if path is not None:
        path.write_text(json.dumps(about | result, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a router does not start or fails requests."""
    options = parse_arguments(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    raise_file_limit()
    if options.against is not None:
        return _against(options, console)
    bench = Bench(options, console)
    try:
        uvloop.run(bench.run())
    except RuntimeError as error:
        console.print(f"{error}", style="red", markup=False)
        return 1
    print_tables(bench.samples, options, console)
    result: dict[str, Any] = {
        "ratios": ratios_of(bench.samples, "ours", options.streams),
        "ratios_sbs": ratios_of(bench.samples, "ours-sbs", options.streams),
        "settings": {
            "streams": options.streams,
            "seconds": options.seconds,
            "rounds": options.rounds,
            "chunk_rate": options.chunk_rate,
            "workers": options.workers,
        },
        "samples": bench.samples.report(),
    }
    _write(options.json, result)
    for key in ("ratios", "ratios_sbs"):
        values = result[key]
        worst = ", ".join(f"{name} {values[name]:.2f}" for name in _RATIOS if name in values)
        console.print(f"{key}, the worst over the numbers of streams: {worst or 'none'}")
    return 0
