"""Fits a pass-cost model to what engines reported."""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import command_parser, make_writable
from sglang_sbs import __version__
from sglang_sbs.evaluate.fitting.calibration import (
    LEAST_PASSES,
    FitErrors,
    fit_cost,
    slowest_rank,
    usable_passes,
)
from sglang_sbs.evaluate.fitting.recording import RecordedPass, read_recording
from sglang_sbs.simulator.cluster.cost import CostError, PassCost
from tools.cpu_engine.virtual_gpu import VirtualGpuCost

_EPILOG = """\
LOG is an event log of a router (--sbs-event-log FILE), which knows every prompt's length, or of
sglang-sbs observe, beside any router. The engines have the plugin.

The cost is T = fixed_s + mean_s * mean(tokens) + max over ranks of (max_s * tokens
+ pair_s * attention pairs + request_s * requests). The file goes to sglang-sbs simulate --cost
FILE.json, and to engines on CPU with --virtual-gpu "$(cat FILE.json)".

A fit that says little of passes it has not seen (off by more than 10 % in the median), or by which
tokens cost nothing, is shown but not written: exit code 1.

examples:
  scripts/calibrate out/router.events --out cost.json
"""
_LIMIT = 0.10
"""Largest accepted error in the median of passes that a fit has not seen."""
_BETTER = """\
What helps: passes of different sizes (different prompts, loads from light to full), more of them
(longer or more LOG files), and engines with the machine for themselves. --force takes the fit as it
is."""


class CalibrationFile(msgspec.Struct, kw_only=True):
    """The file that ``--out`` writes; the simulator reads ``cost``, CPU engines ``virtual_gpu``."""

    cost: PassCost
    virtual_gpu: VirtualGpuCost
    """The same for the virtual GPU, which knows neither pairs nor requests: what they cost is in
    its price per token, at the mix of these passes."""
    errors: FitErrors
    provenance: dict[str, Any]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_parser(
        "scripts/calibrate", "Fit the cost of a prefill pass, with errors.", _EPILOG
    )
    add = parser.add_argument
    add("logs", nargs="+", type=Path, metavar="LOG", help="event logs")
    add("--out", type=Path, metavar="FILE", help="write cost, errors and provenance there")
    add("--force", action="store_true", help="write --out even if the fit is poor; exit code 0")
    add("--note", default="", help="for the provenance: which cluster this is")
    return parser.parse_args(arguments)


def read_passes(paths: Sequence[Path]) -> list[RecordedPass]:
    """Raises: OSError, ValueError; a file cannot be read or has no prefill pass."""
    return [a_pass for path in paths for a_pass in read_recording(path).passes]


def calibrated(passes: Sequence[RecordedPass], provenance: dict[str, Any]) -> CalibrationFile:
    """Raises: CostError, too little in the passes."""
    usable = len(usable_passes(passes))
    if usable < LEAST_PASSES:
        raise CostError(
            f"{usable} prefill passes with launch and end: it takes {LEAST_PASSES} or more, of "
            "different sizes, to fit a cost and to try it on passes it has not seen. Send more "
            "requests, or give longer or more LOG files"
        )
    cost, errors = fit_cost(passes)
    shapes = sorted({len(a_pass.tokens) for a_pass in passes})
    return CalibrationFile(
        cost=cost,
        virtual_gpu=virtual_gpu_cost(cost, passes),
        errors=errors,
        provenance={
            "sglang_sbs": __version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "dp_size": shapes[0] if len(shapes) == 1 else shapes,
            **provenance,
        },
    )


def virtual_gpu_cost(cost: PassCost, passes: Sequence[RecordedPass]) -> VirtualGpuCost:
    """Return the virtual GPU's prefill cost for the simulator's cost; decode keeps its defaults.

    The virtual GPU counts tokens only. The cost of attention pairs and requests is spread over the
    tokens of the slowest rank, as in these passes. Raises: ValueError, there is no pass.
    """
    tokens, pairs, count = 0, 0.0, 0
    for a_pass in passes:
        slowest = slowest_rank(cost, a_pass)
        tokens += a_pass.tokens[slowest]
        pairs += a_pass.pairs[slowest]
        count += a_pass.requests[slowest]
    if not tokens:
        raise ValueError("no prefill pass to take the mix of requests from")
    known = cost.of_tokens_only(pairs / tokens, count / tokens)
    return VirtualGpuCost(
        prefill_base_s=known.fixed_s,
        prefill_per_max_token_s=known.max_s,
        prefill_per_total_token_s=known.mean_s / statistics.fmean(len(p.tokens) for p in passes),
    )


def print_fit(found: CalibrationFile, console: Console) -> None:
    errors = found.errors
    table = Table("term", "seconds", "standard error", title="cost of a prefill pass")
    for name in PassCost.__struct_fields__:
        error = errors.standard_errors[name]
        text = "not seen" if error is None else f"{error:.1e}"
        table.add_row(name, f"{getattr(found.cost, name):.4g}", text)
    console.print(table)
    held_out = ""
    if errors.held_out_median_share is not None and errors.held_out_p95_share is not None:
        held_out = (
            f"; held out {errors.held_out_median_share:.2%} and {errors.held_out_p95_share:.2%}"
        )
    console.print(
        f"{errors.passes} passes, {errors.outliers} outliers, R2 {errors.r2:.5f}; error: median "
        f"{errors.median_share:.2%}, p95 {errors.p95_share:.2%}{held_out}"
    )


def shortcomings(found: CalibrationFile) -> list[str]:
    """Why the fit is of no use; empty if it is."""
    out = []
    held_out = found.errors.held_out_median_share
    if held_out is not None and held_out > _LIMIT:
        out.append(
            f"passes that a fit has not seen are predicted {held_out:.0%} off in the median "
            f"(accepted: {_LIMIT:.0%})"
        )
    if found.cost.mean_s + found.cost.max_s <= 0:
        out.append("tokens cost nothing: mean_s and max_s are 0")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if the fit is poor, 2 if there is none."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse_arguments(words)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    facts: dict[str, Any] = {"command": shlex.join(["scripts/calibrate", *words])}
    if options.note:
        facts["note"] = options.note
    try:
        if options.out is not None:
            make_writable(options.out)
        found = calibrated(read_passes(options.logs), facts)
    except (RuntimeError, OSError, ValueError) as error:
        console.print(f"{error}", style="red", markup=False)
        return 2
    print_fit(found, console)
    poor = shortcomings(found)
    for reason in poor:
        console.print(f"a poor fit: {reason}", style="red", markup=False)
    if poor and not options.force:
        console.print(_BETTER)
        if options.out is not None:
            console.print(f"not written: {options.out}", markup=False)
        return 1
    if options.out is not None:
        if poor:
            found.provenance["forced"] = poor
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        console.print(f"written: {options.out}", markup=False)
    return 0
