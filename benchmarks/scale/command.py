"""How large a cluster one router takes: DP ranks, streams in flight, EndForward storms."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp
import msgspec
import uvloop
from rich.console import Console

from benchmarks.command_line import command_parser, make_writable, raise_file_limit
from benchmarks.scale.client import Clients
from benchmarks.scale.router import Reading, ScaledRouter, running_fleet, running_router, shape_of
from sglang_sbs.simulator.options.common import integers, positive, positive_number
from tools.stand_ins.ports import free_ports

_EPILOG = """\
Everything runs on this machine: engines that cost next to nothing (one process, one EndForward
socket per DP rank), the router with --workers front ends and its scheduler process, and the
clients. A quarter of the ranks is prefill, in instances of 8, the rest decode, in instances of 32.
A case opens --streams that stay, then sends --churn short requests per second besides for
--seconds, with a scrape of /metrics every 5 s, and lets all end.

  decision        Scheduler.handle of one event, wall time, inside the live router (the histogram
                  sbs_decision_seconds, always on): p50 and p99 as the bucket they are in, and so
                  is the max if there was a longer one before the measurement
  lag             how late the scheduler process's own clock ticks: what a decision waits for
  stall           a stream's gap between two tokens, beyond the pace the engines keep
  lost            requests that failed or did not come to their end: must be 0
  CPU             of one core, user and system time

examples:
  scripts/bench-scale                                    # 256, 512 and 1,000 ranks: 5 minutes
  scripts/bench-scale --quick --json scale.json          # 256 ranks, 500 streams: half a minute
  scripts/bench-scale --ranks 1000 --streams 10000 --reports 20 --workers 2
"""
_CASES = {256: 2500, 512: 5000, 1000: 10_000}
_QUICK = {256: 500}
_SCRAPE_EVERY_S = 5.0
_SETTLE_S = 2.0
_SPARE_FILES = 600


class Case(msgspec.Struct, kw_only=True, frozen=True):
    ranks: int
    streams: int
    reports_per_s: float
    workers: int
    churn_per_s: float
    seconds: float
    token_s: float
    open_per_s: float
    flags: tuple[str, ...] = ()
    tcp: bool = False
    """The scheduler is reached as on another machine."""


class Spread(msgspec.Struct, kw_only=True, frozen=True):
    """Quantiles of durations in seconds; ``None``: there were none."""

    count: int
    p50_s: float | None
    p99_s: float | None
    max_s: float | None


class Result(msgspec.Struct, kw_only=True):
    """The figures of one case. CPU is in cores (1.0: one core is busy), memory in bytes."""

    case: Case
    instances: int
    reports_sent_per_s: float
    reports_handled_per_s: float
    reports_dropped: int
    """Not taken by an engine's own socket, because the router was behind."""
    in_flight: int
    sent: int
    lost: int
    failures: dict[str, int]
    cpu: dict[str, float]
    memory: dict[str, int]
    memory_idle: dict[str, int]
    decisions: dict[str, Spread]
    """Duration of decisions by kind of event."""
    lag: Spread
    first_token: Spread
    stalls: Spread
    stalls_over_1_s: int
    fleet_late_s: float
    """The worst lateness of the engines' own pace: no stall below it is the router's."""
    scrape_s: float
    scrape_bytes: int


# Measuring --------------------------------------------------------------------------------------


async def measure(case: Case, console: Console, log: Path) -> Result:
    """Run one case.

    Raises:
        RuntimeError: the engines or the router did not start; the router's words are in ``log``.
    """
    endforward = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    shape = shape_of(case.ranks, endforward, case.reports_per_s, case.token_s)
    async with (
        running_fleet(shape) as fleet,
        running_router(
            fleet, shape, case.workers, endforward, case.flags, log, tcp=case.tcp
        ) as router,
    ):
        others = {"engines": [fleet.process.pid], "clients": [os.getpid()]}
        idle = await router.read(others)
        console.print(f"  {shape.ranks} ranks report; opening {case.streams} streams", style="dim")
        clients = Clients(router.port)
        await clients.hold(case.streams, case.open_per_s)
        await asyncio.sleep(_SETTLE_S)
        console.print(f"  {clients.open} open; measuring {case.seconds:g} s", style="dim")
        before_counts = await fleet.ask("counts")
        before = await router.read(others)
        in_flight = clients.open
        clients.notes.noting = True
        scraping = asyncio.create_task(_scrape(router))
        await clients.churn(case.seconds, case.churn_per_s)
        scraping.cancel()
        clients.notes.noting = False
        after = await router.read(others)
        counts = await fleet.ask("counts")
        await clients.settle(30 + 2 * case.token_s)
        await fleet.ask("finish")
        await clients.ended(60 + 2 * case.token_s)
    took_s = after.at_s - before.at_s
    notes = clients.notes
    gaps_s = [gap - case.token_s for gap in notes.gaps_s]
    received = _grown(before, after, "sbs_endforward_messages_total")
    kinds = {
        dict(labels)["event"] for (n, labels) in after.series if n == "sbs_decision_seconds_sum"
    }
    decisions = {kind: _histogram(before, after, "sbs_decision", kind) for kind in sorted(kinds)}
    return Result(
        case=case,
        instances=len(shape.prefill) + len(shape.decode),
        reports_sent_per_s=(counts.reports - before_counts.reports) / took_s,
        reports_handled_per_s=sum(received.values()) / took_s,
        reports_dropped=counts.dropped_reports,
        in_flight=in_flight,
        sent=notes.sent,
        lost=notes.sent - notes.complete,
        failures=dict(notes.failures),
        cpu={name: (after.cpu_s[name] - before.cpu_s[name]) / took_s for name in after.cpu_s},
        memory=after.memory_bytes,
        memory_idle=idle.memory_bytes,
        decisions=decisions,
        lag=_histogram(before, after, "sbs_scheduler_lag"),
        first_token=_spread(notes.first_s),
        stalls=_spread([max(0.0, gap) for gap in gaps_s]),
        stalls_over_1_s=sum(gap > 1.0 for gap in gaps_s),
        fleet_late_s=counts.late_s,
        scrape_s=after.scrape_s,
        scrape_bytes=after.scrape_bytes,
    )


async def _scrape(router: ScaledRouter) -> None:
    while True:
        await asyncio.sleep(_SCRAPE_EVERY_S)
        with contextlib.suppress(OSError, aiohttp.ClientError):
            await router.scrape(Reading(0.0, {}, {}))


def _grown(before: Reading, after: Reading, name: str, **labels: str) -> dict[str, float]:
    """Return the growth of the series of that name and labels, per bucket ("": no buckets)."""
    grown: dict[str, float] = defaultdict(float)
    for (series, found), value in after.series.items():
        if series == name and set(labels.items()) <= set(found):
            grown[dict(found).get("le", "")] += value - before.series.get((series, found), 0.0)
    return grown


def _histogram(before: Reading, after: Reading, name: str, event: str | None = None) -> Spread:
    """Return the spread of the values between two readings, as the upper bounds of the buckets.

    The longest is known if it is the longest the process has seen; if that was earlier, it is at
    most the bound of the last bucket that anything came to.
    """
    labels = {} if event is None else {"event": event}
    grown = _grown(before, after, f"{name}_seconds_bucket", **labels)
    counted = sorted((float(bound), by) for bound, by in grown.items())
    count = int(counted[-1][1]) if counted else 0
    if not count:
        return Spread(count=0, p50_s=None, p99_s=None, max_s=None)
    longest_s = _longest_s(after, name, labels)

    def below(share: float) -> float:
        return min(next(bound for bound, by in counted if by >= share * count), longest_s)

    return Spread(
        count=count,
        p50_s=below(0.5),
        p99_s=below(0.99),
        max_s=longest_s if longest_s > _longest_s(before, name, labels) else below(1.0),
    )


def _longest_s(reading: Reading, name: str, labels: Mapping[str, str]) -> float:
    return max(
        value
        for (series, found), value in reading.series.items()
        if series == f"{name}_longest_seconds" and set(labels.items()) <= set(found)
    )


def _spread(values_s: Sequence[float]) -> Spread:
    ordered = sorted(values_s)

    def at(share: float) -> float | None:
        return ordered[int(share * (len(ordered) - 1))] if ordered else None

    return Spread(count=len(ordered), p50_s=at(0.5), p99_s=at(0.99), max_s=at(1.0))


# Saying it --------------------------------------------------------------------------------------


def markdown(results: Sequence[Result]) -> str:
    """The figures as a table, one column per case."""
    rows: list[tuple[str, list[str]]] = []

    def row(label: str, cells: list[str]) -> None:
        rows.append((label, cells))

    def ms(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{1e3 * value:,.{digits}f}"

    def three(spread: Spread, digits: int = 2) -> str:
        return " / ".join(ms(v, digits) for v in (spread.p50_s, spread.p99_s, spread.max_s))

    row("DP ranks (instances)", [f"{r.case.ranks:,} ({r.instances})" for r in results])
    row("streams in flight", [f"{r.in_flight:,}" for r in results])
    row(
        "EndForward per s, sent / handled",
        [f"{r.reports_sent_per_s:,.0f} / {r.reports_handled_per_s:,.0f}" for r in results],
    )
    row("requests sent / lost", [f"{r.sent:,} / {r.lost}" for r in results])
    for name in ("front ends", "scheduler", "supervisor"):
        count = [f" ({r.case.workers})" if name == "front ends" else "" for r in results]
        cells = [f"{100 * r.cpu[name]:.0f} %{c}" for r, c in zip(results, count, strict=True)]
        row(f"CPU, {name}", cells)
    for name in ("front ends", "scheduler"):
        row(
            f"memory, {name}: idle / loaded, MiB",
            [f"{r.memory_idle[name] / 2**20:.0f} / {r.memory[name] / 2**20:.0f}" for r in results],
        )
    for kind, label in (("request", "of a request"), ("report", "of a report"), ("timer", "timer")):
        row(f"decision, {label}: p50 / p99 / max, ms", [three(r.decisions[kind]) for r in results])
    row("lag of the scheduler: p50 / p99 / max, ms", [three(r.lag, 0) for r in results])
    row("first token: p50 / p99 / max, ms", [three(r.first_token, 0) for r in results])
    row("stall: p50 / p99 / max, ms", [three(r.stalls, 0) for r in results])
    row("stalls over 1 s", [str(r.stalls_over_1_s) for r in results])
    row("engines late by at most, ms", [ms(r.fleet_late_s, 0) for r in results])
    row(
        "scrape of /metrics, ms (MiB)",
        [f"{ms(r.scrape_s, 0)} ({r.scrape_bytes / 2**20:.2f})" for r in results],
    )
    (head, cells), *rest = rows
    lines = [f"| {head} | {' | '.join(cells)} |", "|---|" + "---|" * len(results)]
    return "\n".join([*lines, *(f"| {label} | {' | '.join(cells)} |" for label, cells in rest)])


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_parser("scripts/bench-scale", (__doc__ or "").split("\n", 1)[0], _EPILOG)
    add = parser.add_argument
    add("--ranks", type=integers, help="DP ranks per case, by commas (256,512,1000)")
    add("--streams", type=integers, help="streams that stay, as many numbers (2500,5000,10000)")
    add("--reports", type=positive_number, default=20.0, help="EndForward per s and rank (20)")
    add("--workers", type=positive, default=2, help="front ends (2)")
    add(
        "--tcp",
        action="store_true",
        help="the scheduler is a process of its own, over encrypted TCP, as on another machine",
    )
    add("--churn", type=positive_number, default=100.0, help="short requests per s besides (100)")
    add("--seconds", type=positive_number, help="of each measurement (20; with --quick 6)")
    add("--token-s", type=positive_number, default=1.0, help="between tokens of a stream (1)")
    add("--open-per-s", type=positive_number, default=250.0, help="streams opened per s (250)")
    add("--policy", default="sbs", help="of the router (sbs)")
    add("--quick", action="store_true", help="256 ranks, 500 streams, half a minute")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    add("--log", type=Path, metavar="FILE", help="what the router says (a temporary file)")
    options = parser.parse_args(arguments)
    if options.workers < 2:
        parser.error("--workers must be 2 or more: one process has no scheduler process to weigh")
    if options.seconds is None:
        options.seconds = 6.0 if options.quick else 20.0
    if options.seconds < 1:
        parser.error("--seconds must be 1 or more")
    known = _QUICK if options.quick else _CASES
    ranks = options.ranks or list(known)
    streams = options.streams or [known.get(count, 10 * count) for count in ranks]
    if len(ranks) != len(streams):
        parser.error(f"--streams needs as many numbers as --ranks: {len(ranks)}")
    if min(ranks) < 16:
        parser.error("--ranks must be 16 or more each")
    options.cases = [
        Case(
            ranks=count,
            streams=some,
            reports_per_s=options.reports,
            workers=options.workers,
            churn_per_s=options.churn,
            seconds=options.seconds,
            token_s=options.token_s,
            open_per_s=options.open_per_s,
            flags=("--policy", options.policy),
            tcp=options.tcp,
        )
        for count, some in zip(ranks, streams, strict=True)
    ]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a request was lost, 2 if a case could not be measured, 130 if interrupted.

    What was measured before is printed and written nevertheless.
    """
    options = parse_arguments(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    try:
        for path in (options.json, options.log):
            if path is not None:
                make_writable(path)
    except OSError as error:
        console.print(error.strerror, style="red", markup=False)
        return 2
    hard = raise_file_limit()
    for case in options.cases:
        # A front end has its share of the clients' connections and one to an engine for each.
        wanted = max(case.streams, math.ceil(2.3 * case.streams / case.workers)) + _SPARE_FILES
        if hard < wanted:
            console.print(
                f"[red]{case.streams} streams over {case.workers} front ends need {wanted} open "
                f"files per process, the limit is {hard}: raise it (ulimit -n) or --workers[/]"
            )
            return 2
    results: list[Result] = []
    stopped, status = "", 0
    with tempfile.TemporaryDirectory() as folder:
        log = options.log or Path(folder) / "router.log"
        for number, case in enumerate(options.cases, 1):
            console.print(f"case {number} of {len(options.cases)}: {case.ranks} DP ranks")
            log.write_bytes(b"")
            try:
                results.append(uvloop.run(measure(case, console, log)))
            except KeyboardInterrupt:
                stopped, status = "interrupted", 130
            except (RuntimeError, OSError, aiohttp.ClientError, msgspec.DecodeError) as error:
                stopped, status = f"{error}" or type(error).__name__, 2
            if stopped:
                stopped = f"{case.ranks} ranks: {stopped}"
                console.print(stopped, style="red", markup=False)
                console.print(log.read_text(errors="replace")[-2000:], markup=False)
            if options.json is not None:
                options.json.write_text(_json(results, stopped))
            if stopped:
                break
    if results:
        print(markdown(results))
    for result in results:
        if result.lost:
            console.print(
                f"[red]{result.case.ranks} ranks: {result.lost} requests lost: {result.failures}[/]"
            )
    return status or int(any(result.lost for result in results))


def _json(results: Sequence[Result], stopped: str) -> str:
    """``stopped``: why there are no more."""
    about = {"cpus": os.cpu_count(), "python": platform.python_version()}
    cases = [msgspec.to_builtins(result) for result in results]
    why = {"stopped": stopped} if stopped else {}
    return json.dumps({**about, "cases": cases, **why}, indent=1) + "\n"
