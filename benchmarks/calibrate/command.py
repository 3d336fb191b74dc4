"""A pass-cost model from what engines reported, or from layers timed on a GPU."""

from __future__ import annotations

import argparse
import asyncio
import math
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.calibrate.virtual_gpu import virtual_gpu_cost, virtual_gpu_pass_cost
from benchmarks.command_line import command_parser, make_writable
from benchmarks.demo.load import Workload
from benchmarks.demo.runs import policy_flags
from benchmarks.demo.virtual_cluster import COST as RIG_COST
from benchmarks.demo.virtual_cluster import running_rig
from sglang_sbs import __version__
from sglang_sbs.cluster.local import ClusterStartError
from sglang_sbs.evaluate.fitting.calibration import LEAST_PASSES, FitErrors, fit_cost, usable_passes
from sglang_sbs.evaluate.fitting.recording import RecordedPass, read_recording
from sglang_sbs.simulator.cluster.cost import CostError, PassCost, find_cost
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
  scripts/calibrate --virtual-cluster       # real SGLang on CPU with a known cost: is it found?
"""
_LIMIT = 0.10
"""Largest accepted error of predicted passes: the mean against ``--expect``, the median of those
that a fit has not seen."""
_POLICIES, _LOAD, _PRIME_REQUESTS = ("round_robin", "sbs"), 0.7, 60
"""Runs of ``--virtual-cluster``, and requests before them."""
_BETTER = """\
What helps: passes of different sizes (different prompts, loads from light to full), more of them
(longer or more LOG files, --passes, --repeats), and engines with the machine for
themselves. --force takes the fit as it is."""


class CalibrationFile(msgspec.Struct, kw_only=True):
    """What ``--out`` has; the simulator reads ``cost``, CPU engines ``virtual_gpu``."""

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
    add(
        "--expect",
        metavar="COST",
        help="a cost that is known (a name or FILE.json of sglang-sbs simulate --cost, or rig: the "
        "virtual GPU of scripts/demo): say how far off the fit is; exit code 1 above 10 %%",
    )
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
    check = parser.add_argument_group("the check").add_argument
    check("--virtual-cluster", action="store_true", help="record real SGLang on CPU, known cost")
    check("--requests", type=int, default=120, help="per run of it (120)")
    check("--logs-to", type=Path, default=Path("out/calibrate"), help="its logs (out/calibrate)")
    options = parser.parse_args(arguments)
    if sum([bool(options.logs), options.gpu, options.virtual_cluster]) != 1:
        parser.error("give one source: LOG files, --gpu or --virtual-cluster")
    for name in ("chunk", "passes", "repeats", "requests"):
        if not 0 < getattr(options, name) < math.inf:
            parser.error(f"--{name} must be more than 0")
    if options.gpu and options.passes < LEAST_PASSES:
        parser.error(f"--passes must be {LEAST_PASSES} or more: a fit is tried on unseen passes")
    if options.virtual_cluster:
        options.expect = options.expect or "rig"
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
            "requests (--requests with --virtual-cluster), or give longer or more LOG files"
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


async def _virtual_cluster(folder: Path, requests: int, console: Console) -> list[RecordedPass]:
    """Raises: ClusterStartError; RuntimeError, a request failed, so a log is incomplete."""
    folder.mkdir(parents=True, exist_ok=True)
    async with running_rig(1, 1, 2, folder, console) as rig:
        # The first requests pay for connections and handshakes between every pair of ranks.
        prime = Workload(qps=rig.capacity_qps / 2, requests=_PRIME_REQUESTS, seed=0)
        await rig.run("prime", policy_flags("round_robin"), prime)
        workload = Workload(qps=_LOAD * rig.capacity_qps, requests=requests)
        for policy in _POLICIES:
            run = await rig.run(policy, policy_flags(policy), workload)
            if run.failed:
                raise RuntimeError(f"{policy}: {run.failed} failed, first: {run.errors[0]}")
            console.print(f"recorded {policy}", highlight=False)
    return read_passes([folder / f"{policy}.events" for policy in _POLICIES])


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


def difference(
    found: PassCost, expected: PassCost, passes: Sequence[RecordedPass]
) -> tuple[dict[str, float], float]:
    """Found by expected less 1 of each coefficient that is expected, and the mean size of that of
    the predicted passes."""
    terms = {
        name: getattr(found, name) / getattr(expected, name) - 1
        for name in PassCost.__struct_fields__
        if getattr(expected, name) > 0
    }
    shares = [
        abs(
            found.pass_s(a_pass.tokens, a_pass.pairs, a_pass.requests)
            / expected.pass_s(a_pass.tokens, a_pass.pairs, a_pass.requests)
            - 1
        )
        for a_pass in passes
    ]
    return terms, sum(shares) / len(shares)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if the fit is poor or not what was expected, 2 if there is none."""
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
        elif options.virtual_cluster:
            recording = _virtual_cluster(options.logs_to, options.requests, console)
            passes = asyncio.run(recording)
            facts["source"] = "SGLang on CPU with virtual GPU time"
        else:
            passes = read_passes(options.logs)
            facts["source"] = "logs"
        found = calibrated(passes, facts)
        expected = None
        if options.expect == "rig":
            expected = virtual_gpu_pass_cost(RIG_COST, len(passes[0].tokens))
        elif options.expect is not None:
            expected = find_cost(options.expect)
    except (ClusterStartError, RuntimeError, OSError, ValueError) as error:
        console.print(f"{error}", style="red", markup=False)
        return 2
    print_fit(found, console)
    poor = shortcomings(found)
    for reason in poor:
        console.print(f"a poor fit: {reason}", style="red", markup=False)
    off = 0.0
    if expected is not None:
        terms, off = difference(
            found.cost, expected, [a_pass for a_pass in passes if a_pass.complete]
        )
        text = ", ".join(f"{name} {share:+.2%}" for name, share in terms.items())
        console.print(f"against {options.expect}: {text}; passes are off by {off:.2%} in the mean")
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
    return 0 if off <= _LIMIT else 1
