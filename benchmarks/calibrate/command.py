"""A pass-cost model from what engines reported, or from layers timed on a GPU."""

from __future__ import annotations

import argparse
import math
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
Two sources:

  logs     event logs of a router (--sbs-event-log FILE), which knows every prompt's length, or of
           sglang-sbs observe, beside any router. The engines have the plugin.
  a GPU    --gpu: DeepSeek-V3-shaped layers in plain torch on one GPU, for the share of the work it
           has at --tp, --dp and --ep. Without communication, which one GPU cannot show.

The cost is T = fixed_s + mean_s * mean(tokens) + max over ranks of (max_s * tokens
+ pair_s * attention pairs + request_s * requests). The file goes to sglang-sbs simulate --cost
FILE.json, and to engines on CPU with --virtual-gpu "$(cat FILE.json)".

A fit that says little of passes it has not seen (off by more than 10 % in the median), or by which
tokens cost nothing, is shown but not written: exit code 1.

examples:
  scripts/calibrate out/router.events --out cost.json
  scripts/calibrate --gpu --tp 32 --dp 8 --ep 32 --out h800.json
"""
_LIMIT = 0.10
"""Largest accepted error in the median of passes that a fit has not seen."""
_BETTER = """\
What helps: passes of different sizes (different prompts, loads from light to full), more of them
(longer or more LOG files, --passes, --repeats), and engines with the machine for
themselves. --force takes the fit as it is."""


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
    add("logs", nargs="*", type=Path, metavar="LOG", help="event logs")
    add("--out", type=Path, metavar="FILE", help="write cost, errors and provenance there")
    add("--force", action="store_true", help="write --out even if the fit is poor; exit code 0")
    add("--note", default="", help="for the provenance: which cluster this is")
    gpu = parser.add_argument_group("a GPU").add_argument
    gpu("--gpu", action="store_true", help="time layers on this machine")
    gpu("--device", default="cuda", help="torch's name of it; cpu works, slowly (cuda)")
    gpu("--shape", choices=("deepseek-v3", "tiny"), default="deepseek-v3", help="(deepseek-v3)")
    gpu("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    gpu("--tp", type=int, help="GPUs per instance (32)")
    gpu("--dp", type=int, help="DP ranks per instance (8)")
    gpu("--ep", type=int, help="expert-parallel size (32)")
    gpu("--chunk", type=int, default=3072, help="tokens per rank and pass, at most (3072)")
    gpu("--passes", type=int, default=80, help="different passes (80)")
    gpu("--repeats", type=int, default=5, help="of each measurement; the median counts (5)")
    options = parser.parse_args(arguments)
    if bool(options.logs) == options.gpu:
        parser.error("give one source: LOG files or --gpu")
    for name in ("chunk", "passes", "repeats"):
        if not 0 < getattr(options, name) < math.inf:
            parser.error(f"--{name} must be more than 0")
    if options.gpu and options.passes < LEAST_PASSES:
        parser.error(f"--passes must be {LEAST_PASSES} or more: a fit is tried on unseen passes")
    return options


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


# Sources ----------------------------------------------------------------------------------------


def _gpu(
    options: argparse.Namespace, console: Console
) -> tuple[list[RecordedPass], dict[str, Any]]:
    try:
        import torch
    except ImportError:
        raise CostError("--gpu needs torch: pip install torch") from None
    from benchmarks.calibrate import gpu_layers

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise CostError("torch sees no GPU here; --device cpu --shape tiny shows how it works")
    base = gpu_layers.TINY if options.shape == "tiny" else gpu_layers.LayerShape()
    given = {n: getattr(options, n) for n in ("tp", "dp", "ep") if getattr(options, n) is not None}
    shape = msgspec.structs.replace(base, **given)
    dtype = getattr(torch, options.dtype)
    layers = gpu_layers.Layers(shape, options.device, dtype)

    def show(done: int) -> None:
        if done % 10 == 0:
            console.print(f"  {done} of {options.passes} passes timed", style="dim")

    passes = gpu_layers.measured_passes(
        layers, options.chunk, options.passes, options.repeats, show
    )
    facts = {
        **gpu_layers.about(options.device, dtype),
        "shape": msgspec.structs.asdict(shape),
        "chunk_tokens": options.chunk,
        "not_in_it": "communication between GPUs; kernels better than torch's",
    }
    return passes, facts


# Saying it --------------------------------------------------------------------------------------


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
        if options.gpu:
            passes, more = _gpu(options, console)
            facts |= {"source": "layers timed on one device", **more}
        else:
            passes = read_passes(options.logs)
            facts["source"] = "logs"
        found = calibrated(passes, facts)
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
