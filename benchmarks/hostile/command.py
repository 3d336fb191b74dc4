"""The command line of ``scripts/bench-hostile``: runs the cases, prints the table, writes JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import command_parser
from benchmarks.hostile.case import Case
from benchmarks.hostile.cases import all_cases
from benchmarks.hostile.measure import Row, measure, write_files
from benchmarks.router_processes import raw_engines

MOST_DELAY_MS = 50.0
MOST_RATIO = 4.0
FREE_MIB = 8.0
"""Growth that is within the target whatever was sent: 700 connections that send nothing take it."""
_ENGINES = "benchmarks.hostile.engines"
_EPILOG = """\
Every case has a router of its own, with its defaults, in front of two engines that cost next to
nothing. A probe, a process of its own, asks it for a small chat every 5 ms: for two seconds before
the attack (baseline), and during it (worst delay). Memory is the peak of what is resident, less
what was before, over the size of what the case sent (or over 1 MiB, if that is less). Growth of
8 MiB is within the target whatever was sent.

The machine must be quiet: a delay is the router's only where the baseline is a few milliseconds.
Where it is shared, take the best of three runs. What a policy holds a request for counts, too: a
prompt that engines take occupies them.

examples:
  scripts/bench-hostile --json hostile.json           # every case, a few minutes
  scripts/bench-hostile --cases gzip-bomb,unfinished
  scripts/bench-hostile --list
"""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    known = all_cases()
    what = "What one hostile sender costs everybody else: delay and memory, by case."
    parser = command_parser("scripts/bench-hostile", what, _EPILOG)
    parser.add_argument("--cases", default=",".join(known), help="which, by commas (all)")
    parser.add_argument("--list", action="store_true", help="say which there are, and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args(arguments)
    names = options.cases.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"--cases: no case {', '.join(unknown)}; --list says which there are")
    options.cases = [known[name] for name in names]
    return options


async def run(cases: Sequence[Case], console: Console) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        for number, case in enumerate(cases, 1):
            console.print(f"{number} of {len(cases)}: {case.name}, {case.about}", style="dim")
            async with raw_engines(_ENGINES) as engines:
                rows.append(await measure(case, engines, Path(folder)))
    return rows


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(
        title=f"targets: at most {MOST_DELAY_MS:.0f} ms above quiet, no failed probe, and memory "
        f"of at most {MOST_RATIO:g} times the input or {FREE_MIB:g} MiB"
    )
    table.add_column("case", no_wrap=True)
    for name in ("worst ms", "quiet ms", "memory", "MiB", "MiB sent"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("answers", overflow="fold")
    for row in rows:
        late = row.worst_delay_ms - row.baseline_ms > MOST_DELAY_MS
        fat = row.memory_ratio > MOST_RATIO and row.grown_mib > FREE_MIB
        answers = " ".join(f"{count}x{status}" for status, count in row.answers.items())
        if row.probe_failures:
            answers += f"; [red]{row.probe_failures} of {row.probes} probes failed"
        table.add_row(
            row.case,
            f"{'[red]' if late else ''}{row.worst_delay_ms:.1f}",
            f"{row.baseline_ms:.1f}",
            f"{'[red]' if fat else ''}{row.memory_ratio:.1f}",
            f"{row.grown_mib:.1f}",
            f"{row.sent_bytes / (1 << 20):.1f}",
            answers,
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.list:
        for case in options.cases:
            print(f"{case.name:24}{case.about}")
        return 0
    try:
        rows = uvloop.run(run(options.cases, Console(stderr=True)))
    except (RuntimeError, OSError) as error:
        print(f"scripts/bench-hostile: {error}", file=sys.stderr)
        return 1
    Console().print(table_of(rows))
    if options.json is not None:
        machine = {"python": platform.python_version(), "cpus": os.cpu_count()}
        found = {"machine": machine, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0
