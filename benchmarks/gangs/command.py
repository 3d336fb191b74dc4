"""``scripts/measure-gangs``: runs a load on real CPU engines, or reads event logs, and prints how
whole batches arrive."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.burners import add_busy_argument, burners, check_busy
from benchmarks.command_line import command_parser
from benchmarks.compare_routers.prompts import Prompts, id_prompts, text_prompts
from benchmarks.demo.cli import parse_topology
from benchmarks.demo.compare_policies import NO_FLOW_CONTROL
from benchmarks.demo.load import Arrival, Workload
from benchmarks.demo.runs import run_policy
from benchmarks.demo.virtual_cluster import (
    CHUNK_TOKENS,
    Rig,
    add_tp_argument,
    attention_tp_of,
    running_rig,
)
from benchmarks.gangs.gangs import AIM_S, Figures, figures, read_gangs
from sglang_sbs.cluster.local import ClusterStartError
from sglang_sbs.simulator.options.common import numbers
from tools.cpu_engine.tiny_model import cached_tiny_model

_WARM_UP_REQUESTS = 40
_WARM_UP_SEED = 10_000

_EPILOG = """\
What is printed
  spread    between the first and the last request of a batch becoming schedulable on its instance
            (the handshake with decode over), over all DP ranks
  arrival   the same for when the requests reached their scheduler processes
  way       from the router's decision until all of a batch was schedulable
  torn      passes that started part of a batch and left the rest, of all passes that started
            requests of batches. A batch that is cut because a rank's chunk is full is no torn one:
            the router sent more than a pass takes ("overflowed")
Only batches of two requests and more count.

examples:
  scripts/measure-gangs                                         about 8 minutes on two cores
  scripts/measure-gangs --busy 2 --json out/gangs-busy.json     a host that has other things to do
  scripts/measure-gangs --router-flags "--sbs-gang-gate off"    without the gang gate
  scripts/measure-gangs --tp 4 --dp 2                           DP ranks of two processes each
  scripts/measure-gangs --nodes 2                               prefill instances over two nodes
  scripts/measure-gangs out/gangs/*.events --skip 40            logs of an earlier run
  scripts/measure-gangs /var/log/sbs.events                     of a cluster: --sbs-event-log

The engines are SGLang on CPU with virtual GPU time. Milliseconds of this machine's cores are no
milliseconds of a GPU host; compare runs on the same machine.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command_parser(
        "measure-gangs", "How whole the batches of SBS arrive at prefill engines.", _EPILOG
    )
    parser.add_argument(
        "logs",
        nargs="*",
        type=Path,
        metavar="LOG",
        help="event logs to read (router flag --sbs-event-log); none: runs are made",
    )
    parser.add_argument(
        "--skip", type=int, default=0, metavar="N", help="first requests of each LOG left out (0)"
    )
    parser.add_argument("--topology", default="3P1D", help="instances (3P1D)")
    parser.add_argument("--dp", type=int, default=2, help="DP ranks per instance (2)")
    add_tp_argument(parser)
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        help="of each prefill instance: this machine at 127.0.0.1, 127.0.0.2, ... (1)",
    )
    parser.add_argument(
        "--loads",
        type=numbers,
        default=[0.4, 0.8],
        help="shares of what full chunks on every rank serve (0.4,0.8)",
    )
    parser.add_argument("--seeds", type=int, default=1, help="arrival seeds per load (1)")
    parser.add_argument("--requests", type=int, default=200, help="per run (200)")
    parser.add_argument(
        "--prompts",
        choices=("text", "ids"),
        default="text",
        help="what requests carry; with text the router has the engines' tokenizer (text)",
    )
    add_busy_argument(parser)
    parser.add_argument(
        "--router-flags", default="", metavar="FLAGS", help="more flags for the router, in quotes"
    )
    parser.add_argument("--out", type=Path, default=Path("out/gangs"), help="logs (out/gangs)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures, a row per load")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a run could not be made or read."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        topology = parse_topology(args.topology)
        if min(args.seeds, args.requests, args.dp) < 1 or args.skip < 0:
            raise ValueError("--seeds, --requests and --dp must be greater than 0")
        check_busy(args.busy)
        args.attention_tp = attention_tp_of(args)
        if args.nodes < 1 or args.dp * args.attention_tp % args.nodes:
            raise ValueError("--nodes must divide the processes of an instance (--tp, else --dp)")
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    try:
        if args.logs:
            rows = [_row(str(path), [path], args.skip) for path in args.logs]
        else:
            with burners(args.busy):
                rows = asyncio.run(_runs(args, topology, args.loads, console))
    except (ClusterStartError, RuntimeError, OSError, ValueError) as error:
        console.print(f"stopped: {error}", highlight=False, markup=False)
        return 1
    _print(rows, console)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
        console.print(f"written: {args.json}")
    return 0


def _row(name: str, logs: Sequence[Path], skip: int, **more: Any) -> dict[str, Any]:
    gangs = [gang for log in logs for gang in read_gangs(log, skip)]
    return {"run": name, **more, **msgspec.structs.asdict(figures(gangs))}


async def _runs(
    args: argparse.Namespace, topology: tuple[int, int], loads: Sequence[float], console: Console
) -> list[dict[str, Any]]:
    args.out.mkdir(parents=True, exist_ok=True)
    model = cached_tiny_model()
    flags = ["--policy", "sbs", *NO_FLOW_CONTROL, *args.router_flags.split()]
    prompts = id_prompts()
    if args.prompts == "text":
        prompts = text_prompts(model)
        flags += ["--tokenizer-path", str(model)]
    rows = []
    async with running_rig(
        *topology,
        args.dp,
        args.out,
        console,
        attention_tp=args.attention_tp,
        prefill_nodes=args.nodes,
    ) as rig:
        for load in loads:
            logs, busy = [], []
            for seed in range(1, args.seeds + 1):
                label = f"gangs-load{load:g}-seed{seed}-busy{args.busy}"
                await _run(rig, label, flags, load, seed, args.requests, prompts)
                logs.append(args.out / f"{label}.events")
                busy.append(os.getloadavg()[0])
            name = f"load {load:g}"
            rows.append(
                _row(
                    name,
                    logs,
                    _WARM_UP_REQUESTS,
                    busy=args.busy,
                    host_load=max(busy),
                    cores=os.cpu_count(),
                )
            )
            if len(loads) > 1:
                _print(rows[-1:], console)
    return rows


async def _run(
    rig: Rig,
    label: str,
    flags: Sequence[str],
    load: float,
    seed: int,
    requests: int,
    prompts: Prompts,
) -> None:
    """Raises: RuntimeError: a request failed."""
    arrivals = _arrivals(load * rig.capacity_qps, requests, seed, prompts, label)
    warm_up = _arrivals(
        load * rig.capacity_qps / 2, _WARM_UP_REQUESTS, seed + _WARM_UP_SEED, prompts, label
    )
    run = await run_policy(
        label, rig.instances, rig.ports, flags, arrivals, rig.log_dir, warm_up=warm_up
    )
    failed = [sample.error for sample in run.samples if sample.error]
    if failed:
        raise RuntimeError(f"{label}: {len(failed)} requests failed, the first: {failed[0]}")


def _arrivals(
    qps: float, requests: int, seed: int, prompts: Prompts, content: str
) -> list[Arrival]:
    """Prompts no other run has: what an engine finds in its cache is no pass. ``content`` alone
    would repeat in a second command on the same engines, of which there are none here."""
    workload = Workload(qps=qps, requests=requests, max_prompt_tokens=CHUNK_TOKENS, seed=seed)
    salt = random.Random(f"{content}/{seed}").getrandbits(64)
    out = []
    for number, one in enumerate(workload.arrivals()):
        indices = prompts.draw(len(one.input_ids), f"{salt}/{number}")
        out.append(
            Arrival(one.at_s, prompts.token_ids(indices), one.max_new_tokens, prompts.text(indices))
        )
    return out


def _print(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"batches at the engines (aim: spread under {1e3 * AIM_S:g} ms)")
    columns = ("batches", "spread p50/p90/p99 ms", "under aim", "arrival p50/p90 ms")
    for column in ("run", *columns, "way p50/p90 ms", "torn", "overflowed"):
        table.add_column(column, justify="right")
    for row in rows:
        one = msgspec.convert(row, Figures, strict=False)
        table.add_row(
            str(row["run"]),
            str(one.gangs),
            f"{one.spread_p50_ms:.1f}/{one.spread_p90_ms:.1f}/{one.spread_p99_ms:.1f}",
            f"{one.within_aim_share:.0%}",
            f"{one.arrival_spread_p50_ms:.1f}/{one.arrival_spread_p90_ms:.1f}",
            f"{one.way_p50_ms:.0f}/{one.way_p90_ms:.0f}",
            f"{one.torn}/{one.passes} ({one.torn_share:.1%})",
            str(one.overflowed),
        )
    Console(width=max(console.width, 110)).print(table)


if __name__ == "__main__":
    sys.exit(main())
