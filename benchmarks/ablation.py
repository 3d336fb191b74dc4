"""``scripts/ablate``: what each constant of the default trigger is worth, in the simulator.

A constant whose removal costs nothing in any cell has no place in the code. Runs are
:mod:`sglang_sbs.simulator.experiments.sweep`'s.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import sglang_sbs.scheduling
from benchmarks.command_line import command_parser
from sglang_sbs.scheduling.policies.tuning import TUNING, Tuning
from sglang_sbs.simulator.experiments.sweep import Job, run_job
from sglang_sbs.simulator.experiments.tables import ResultTable, mean_of
from sglang_sbs.simulator.options.common import (
    check_outputs,
    open_console,
    positive,
    run_with_progress,
    write_json,
)
from sglang_sbs.simulator.options.common import seeds as seeds_of
from sglang_sbs.simulator.parallel import Row, Task
from sglang_sbs.simulator.workloads.scenario import WARM_UP_S

NEVER = 1e9
_LONG = "3-64K,64K,chunk 1024,sessions"
OFF: dict[str, tuple[float, str]] = {
    "ageing": (NEVER, ""),
    "slack": (1.0, ""),
    "arriving_share": (1.0, ""),
    "worth": (0.0, ""),
    "rate_passes": (1.0, ""),
    "chunk_weight": (1.0, _LONG),
    "left_out_batches": (0, ""),
    "most_divided": (0, ""),
    "most_joining": (0, ""),
    "split_share": (0.0, ""),
    "again_weight": (0.0, "sessions"),
    "least_hit_share": (0.0, "sessions"),
}
"""Each constant of the trigger and its rules, the value at which it does nothing, and the cells in
which it can do something (words in their names; none: all)."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A condition that at least one of the constants was made for."""

    name: str
    scenario: str
    load: float
    cost: str
    duration_s: float = 60.0
    spec: Mapping[str, Any] = field(default_factory=dict)


CELLS = (
    Cell("load 0.2", "paper-3k", 0.2, "mixed"),
    Cell("load 1.0", "paper-3k", 1.0, "table"),
    Cell("load 1.2", "paper-3k", 1.2, "mixed", 50.0),
    Cell("1 ms apart, 0.8", "paper-3k", 0.8, "table", spec={"dispatch_serial_s": 1e-3}),
    Cell(
        "jitter 0.3 of 20 ms, 0.6",
        "paper-3k",
        0.6,
        "mixed",
        spec={"dispatch_jitter": 0.3, "dispatch_latency_s": 0.02, "gang_gate_s": 0.0},
    ),
    Cell("passes vary by 0.3, 0.6", "paper-3k", 0.6, "table", spec={"pass_jitter": 0.3}),
    Cell("12 instances, 0.6", "paper-3k", 0.6, "table", 35.0, {"prefill_instances": 12}),
    Cell(
        "one half as fast, 1.0",
        "paper-3k",
        1.0,
        "mixed",
        spec={"instances": ({}, {}, {"dp_size": 4, "speed": 0.5})},
    ),
    Cell(
        "chunks 2K 3K 6K, 0.6",
        "paper-3k",
        0.6,
        "table",
        spec={"instances": ({}, {"chunk_tokens": 6144}, {"chunk_tokens": 2048})},
    ),
    Cell("half the reports lost, 0.6", "paper-3k", 0.6, "mixed", spec={"endforward_loss": 0.5}),
    Cell("all 1600 tokens, 0.8", "fixed:1600", 0.8, "mixed"),
    Cell("chunk 1024, 0.8", "paper-3k", 0.8, "table", spec={"chunk_tokens": 1024}),
    Cell("page 64, 1.0", "paper-3k", 1.0, "mixed", spec={"page_size": 64}),
    Cell("two ranks, 0.25", "paper-3k", 0.25, "mixed", 120.0, {"dp_size": 2}),
    Cell("one instance, load 1.2", "paper-3k", 1.2, "mixed", 140.0, {"prefill_instances": 1}),
    Cell("two instances, load 1.2", "paper-3k", 1.2, "mixed", 100.0, {"prefill_instances": 2}),
    Cell(
        "launch gap of 16 ms, 0.3",
        "paper-3k",
        0.3,
        "mixed",
        50.0,
        {"dp_size": 2, "dispatch_latency_s": 0.02, "launch_gap_s": 0.016},
    ),
    Cell("no overlap, 0.8", "paper-3k", 0.8, "mixed", spec={"overlap": False}),
    Cell("64K now and then, 0.6", "one-long", 0.6, "table"),
    Cell("on and off, 0.6", "onoff", 0.6, "mixed"),
    Cell("3-64K, 0.3", "paper-long", 0.3, "mixed", 160.0),
    Cell("3-64K, 0.6", "paper-long", 0.6, "table", 160.0),
    Cell("3-64K, 0.75", "paper-long", 0.75, "mixed", 160.0),
    Cell("sessions, 0.6", "sessions", 0.6, "mixed"),
    Cell("sessions, 0.8", "sessions", 0.8, "table"),
)

_EPILOG = """\
Each constant is set to the value at which it does nothing (or to another, --set), and the mean and
p99 TTFT in every cell are divided by those of the code as it is, on the same arrivals. Ratios above
1: the constant is worth that much there.

examples:
  scripts/ablate --json ablation.json
  scripts/ablate --only slack,worth --values off,half,twice
  scripts/ablate --set slack=1,worth=0.9 --cells load,3-64K
"""


class Variant(NamedTuple):
    """A name, the constants that differ from the code, and the cells in which that can matter."""

    name: str
    values: dict[str, float]
    cells: str = ""

    def matters_in(self, cell: Cell) -> bool:
        return any(word in cell.name for word in self.cells.split(","))


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "scripts/ablate",
        "What each constant of the default trigger is worth, in the simulator.",
        _EPILOG,
    )
    parser.add_argument("--only", metavar="NAMES", help="constants, comma-separated (all)")
    parser.add_argument(
        "--values", default="off", help="of off, half, twice, comma-separated (off)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="instead: one variant with these values together (repeatable)",
    )
    parser.add_argument(
        "--cells", metavar="WORDS", help="cells whose name has one of these words (all)"
    )
    parser.add_argument("--seeds", type=positive, default=1, help="seeds per cell (1)")
    parser.add_argument("--first-seed", type=int, default=1, help="the first of them (1)")
    parser.add_argument("--workers", type=positive, metavar="N", help="processes (default: cores)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; exit code 2 for bad arguments."""
    parser = build_parser()
    args = parser.parse_args(argv)
    check_outputs(args, parser)
    try:
        variants = _variants(args)
    except (KeyError, ValueError) as error:
        parser.error(f"no such constant or value: {error.args[0]}")
    words = args.cells.split(",") if args.cells else [""]
    cells = [cell for cell in CELLS if any(word in cell.name for word in words)]
    if not cells:
        parser.error(f"--cells {args.cells}: none of {', '.join(c.name for c in CELLS)}")
    base = Variant("as it is", {})
    tasks: list[Task] = [
        (run_variant, (variant, cell, seed))
        for variant in (base, *variants)
        for cell in cells
        if variant.matters_in(cell)
        for seed in seeds_of(args)
    ]
    console = open_console()
    rows = run_with_progress(tasks, console, args.workers)
    table_of(rows, [variant.name for variant in variants]).print(console)
    if args.json is not None:
        write_json(rows, args.json, console)
    return 0


def run_variant(variant: Variant, cell: Cell, seed: int) -> Row:
    spec = {"overlap": True, **cell.spec}
    duration_s = max(cell.duration_s, WARM_UP_S + 1)
    with changed(variant.values):
        row = run_job(Job(cell.scenario, "sbs", cell.load, seed, duration_s, cell.cost, spec))
    return {**row, "cell": cell.name, "variant": variant.name}


@contextmanager
def changed(values: Mapping[str, float]) -> Iterator[None]:
    """Change constants of :class:`Tuning`, in every module that reads them.

    Raises:
        KeyError: there is no constant of that name.
    """
    for name in values:
        _value_of(name)
    try:
        _tune(replace(TUNING, **values))  # type: ignore[arg-type]
        yield
    finally:
        _tune(TUNING)


def _tune(tuning: Tuning) -> None:
    package = sglang_sbs.scheduling
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module: Any = importlib.import_module(info.name)
        if hasattr(module, "TUNING"):
            module.TUNING = tuning


def _value_of(name: str) -> float:
    if not hasattr(TUNING, name):
        raise KeyError(name)
    return float(getattr(TUNING, name))


def _variants(args: argparse.Namespace) -> list[Variant]:
    if args.set:
        return [Variant(words, _settings(words)) for words in args.set]
    only = args.only.split(",") if args.only else list(OFF)
    found: list[Variant] = []
    for name in only:
        now = _value_of(name)
        off, cells = OFF[name]
        values = {"off": off, "half": now / 2, "twice": now * 2}
        found += [
            Variant(f"{name} {word}", {name: values[word]}, cells)
            for word in args.values.split(",")
        ]
    return found


def _settings(words: str) -> dict[str, float]:
    pairs = [word.partition("=") for word in words.split(",")]
    for name, _, _ in pairs:
        _value_of(name)
    return {name: float(json.loads(value)) for name, _, value in pairs}


def table_of(rows: Sequence[Row], variants: Sequence[str]) -> ResultTable:
    """One row per variant: geometric means of the ratios, and the cells that lose and gain most."""

    def mean(variant: str, cell: str, key: str) -> float:
        return mean_of([r for r in rows if (r["variant"], r["cell"]) == (variant, cell)], key)

    table = ResultTable(
        "TTFT without each constant, by that of the code as it is",
        ["without", "mean", "p99", "worst mean", "", "worst p99", "", "best mean", ""],
    )
    for variant in variants:
        cells = list(dict.fromkeys(r["cell"] for r in rows if r["variant"] == variant))
        ratios = {
            key: {c: mean(variant, c, key) / mean("as it is", c, key) for c in cells}
            for key in ("ttft_mean_s", "ttft_p99_s")
        }
        means, p99s = ratios["ttft_mean_s"], ratios["ttft_p99_s"]
        worst, tail = max(means, key=means.__getitem__), max(p99s, key=p99s.__getitem__)
        best = min(means, key=means.__getitem__)
        table.rows.append(
            [
                variant,
                f"{statistics.geometric_mean(means.values()):.3f}",
                f"{statistics.geometric_mean(p99s.values()):.3f}",
                f"{means[worst]:.3f}",
                worst,
                f"{p99s[tail]:.3f}",
                tail,
                f"{means[best]:.3f}",
                best,
            ]
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
