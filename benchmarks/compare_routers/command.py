"""``scripts/compare-routers``: its command line, and what is done with the answer."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.burners import MOST, burners
from benchmarks.command_line import command_parser
from benchmarks.compare_routers.agents import AGENTS_PER_RANK
from benchmarks.compare_routers.campaign import Campaign
from benchmarks.compare_routers.contenders import BY_NAME
from benchmarks.compare_routers.plan import (
    MOST_HOST_LAG,
    SLO_PASSES,
    SLO_TPOT_S,
    TIMEOUT_S,
    Plan,
    check_outputs,
)
from benchmarks.compare_routers.results.ratios import errors, is_sbs
from benchmarks.compare_routers.results.report import summary, write_json, write_report
from benchmarks.compare_routers.results.rows import Header, Row, RowFile, figures
from benchmarks.compare_routers.results.verdict import sentences
from benchmarks.compare_routers.runs.engines import H800_CHUNK_TOKENS, PASS_S
from benchmarks.compare_routers.workloads import NAMES
from benchmarks.demo.virtual_cluster import CHUNK_TOKENS
from sglang_sbs.cluster.local import ClusterStartError
from sglang_sbs.simulator.cluster.cost import COSTS, CostError
from sglang_sbs.simulator.options.common import not_negative, positive, positive_number

_EXAMPLE = f"""\
examples:
  scripts/compare-routers --quick                                    about 7 minutes on two cores
  scripts/compare-routers --loads 0.4,0.8,1 --seeds 3 --report out/compare
  scripts/compare-routers --resume --loads 0.4,0.8,1 --seeds 3 --report out/compare
  scripts/compare-routers --workload long-tail,bursty --contenders sbs,smg,least_tokens
  scripts/compare-routers --pass-s 1.5 --loads 0.6,0.8          the host a smaller part of a pass
  scripts/compare-routers --report-only --report out/compare
  scripts/compare-routers --real --prefill http://p0:30000 8998 --prefill http://p1:30000 8998 \\
      --decode http://d0:30000 --capacity 180000 --slo-ttft 0.8 \\
      --tokenizer-path /models/DeepSeek-V3

contenders: {", ".join(BY_NAME)}
Peers are the routers of other projects; ours that are not called sbs* are its immediate policies,
and SBS is measured against the best of them too.

The engines are SGLang with a tiny MoE on CPU, DP attention and real KV transfer; a pass takes the
time a GPU would need (virtual GPU). So ratios can be read, milliseconds cannot. Every contender
runs once at --field-loads; SBS, the --best-peers and our best immediate policy
then run at all loads and seeds. Every run is
written to DIR/rows.jsonl at once.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "compare-routers",
        "Compare routers on one real SGLang PD cluster: same engines, same arrivals.",
        _EXAMPLE,
    )
    add = parser.add_argument_group("what is compared").add_argument
    add("--contenders", metavar="NAMES", help="see below (all)")
    add("--workload", metavar="NAMES", help=f"comma-separated, of {', '.join(NAMES)} (paper)")
    says = (
        "shares of what full chunks on every rank compute (0.4,0.8,1.0); agentic: of "
        f"{AGENTS_PER_RANK} agents per prefill rank"
    )
    add("--loads", help=says)
    add("--seeds", type=positive, help="of arrivals and lengths (3)")
    add("--first-seed", type=positive, default=1, metavar="N", help="they are N, N+1, ... (1)")
    says = "loads at which every contender runs, one seed (all of --loads)"
    add("--field-loads", metavar="LOADS", help=says)
    says = "of those, by mean TTFT, that go on to all loads and seeds (2)"
    add("--best-peers", type=positive, default=2, help=says)
    add("--requests", type=positive, default=200, help="per run (200)")
    seconds = partial(add, type=positive_number, metavar="S")
    seconds("--slo-ttft", help=f"of goodput ({SLO_PASSES} full passes)")
    seconds("--slo-tpot", help=f"of goodput ({SLO_TPOT_S}, longer as --pass-s is)")
    says = "one seed of paper at two loads, sbs against the two best peers"
    add("--quick", action="store_true", help=says)
    add = parser.add_argument_group("how").add_argument
    add("--topology", default="3P1D", help="instances (3P1D)")
    add("--dp", type=positive, default=2, help="DP ranks per instance (2)")
    says = (
        "how long a pass takes: h800 (DeepSeek-V3 on H800 after the paper), "
        f"{', '.join(COSTS)}, or a JSON file of scripts/calibrate (h800)"
    )
    add("--cost", default="h800", metavar="h800|NAME|FILE", help=says)
    says = (
        "chunk per DP rank of the deployment the cost is of; one of the cluster's "
        f"{CHUNK_TOKENS} stands for the whole ({H800_CHUNK_TOKENS})"
    )
    chunk = H800_CHUNK_TOKENS
    add("--cost-chunk", type=positive, default=chunk, metavar="TOKENS", help=says)
    seconds = partial(add, type=positive_number, metavar="S")
    says = (
        f"how long a full chunk takes on the virtual GPU ({PASS_S}); everything else of the "
        "cost is stretched with it, so that a slow host (engines, clients and router share these "
        "cores) is a smaller part of a pass, and runs take longer"
    )
    seconds("--pass-s", help=says)
    says = (
        "of a full pass: where the host lag of a run was larger, or the loop of a router of "
        "ours stood still, its cell has no ratios, and --resume makes the run again; 0: no limit, "
        f"whatever stood still ({MOST_HOST_LAG:g}; with --busy 0)"
    )
    add("--most-host-lag", type=not_negative, metavar="SHARE", help=says)
    says = (
        f"processes that burn CPU beside it, {MOST} at most, the same for every contender; a ratio "
        "is then of a busy host (0)"
    )
    add("--busy", type=int, choices=range(MOST + 1), default=0, metavar="N", help=says)
    add("--prompts", choices=("text", "ids"), default="text", help="what requests carry (text)")
    seconds("--timeout", help=f"per request ({TIMEOUT_S:g}, longer as --pass-s is)")
    add = parser.add_argument_group("results").add_argument
    add("--json", type=Path, metavar="FILE", help="ratios and figures")
    folder = Path("out/compare-routers")
    says = f"rows.jsonl, logs, report.html, report.md ({folder})"
    add("--report", type=Path, metavar="DIR", default=folder, help=says)
    add("--resume", action="store_true", help="go on with DIR/rows.jsonl")
    says = "run nothing; report from DIR/rows.jsonl"
    add("--report-only", action="store_true", help=says)
    says = (
        "one per run, in DIR, for sglang-sbs evaluate: the scheduler's of ours, what "
        "sglang-sbs observe would write of the others"
    )
    add("--event-logs", action="store_true", help=says)
    add = parser.add_argument_group("engines that run already").add_argument
    add("--real", action="store_true", help="start routers only, no engines")
    port = "URL [PORT]"
    add("--prefill", nargs="+", action="append", metavar=port, help="with bootstrap port")
    add("--decode", action="append", metavar="URL")
    says = "prompt tokens per second of all prefill instances with full chunks"
    add("--capacity", type=positive_number, metavar="TOKENS_PER_S", help=says)
    add("--tokenizer-path", type=Path, metavar="DIR", help="the engines' model")
    says = (
        "where the engines' EndForward comes; name it in their SGLANG_SBS_ROUTERS beside the "
        "router's address (tcp://0.0.0.0:7601)"
    )
    add("--listen", default="tcp://0.0.0.0:7601", help=says)
    says = "of the router under test, on all addresses of this machine (7600)"
    add("--endforward-port", type=int, default=7600, help=says)
    says = "the engines' SGLANG_SBS_ENDFORWARD_KEY_FILE"
    add("--key-file", type=Path, metavar="FILE", help=says)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; exit code 1 if a request or run of SBS failed, 130 if interrupted."""
    parser = build_parser()
    args = parser.parse_args(argv)
    console = Console()
    file = RowFile(args.report / "rows.jsonl")
    campaign: Campaign | None = None
    try:
        check_outputs(args)
        if args.report_only:
            header, rows = file.read()
        else:
            plan = Plan(args)
            header, rows = plan.begin(file, console)
            campaign = plan.campaign(file, rows, console)
    except (ValueError, CostError) as error:
        parser.error(str(error))
    try:
        if campaign is not None:
            with burners(args.busy):
                asyncio.run(campaign.run())
        _finish(args, header, rows, console)
    except KeyboardInterrupt:
        console.print(f"interrupted; go on with --resume ({file.path})")
        return 130
    except (ClusterStartError, RuntimeError, ValueError, OSError) as error:
        console.print(f"stopped: {error}", highlight=False, markup=False)
        console.print(f"what was measured is in {file.path}; go on with --resume")
        return 1
    asked = [] if campaign is None else [contender.name for contender in campaign.scope.contenders]
    unmeasured = _unmeasured(rows, asked)
    for line in unmeasured:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 1 if unmeasured or summary(header, rows)["failed_requests"] else 0


def _unmeasured(rows: Sequence[Row], asked: Sequence[str]) -> list[str]:
    """Return a line for each contender of SBS that is missing, with the reason."""
    why = {name: text for name, text in errors(rows).items() if is_sbs(name)}
    have = {row.key.policy for row in figures(rows)}
    why |= {
        name: "no run has figures" for name in asked if is_sbs(name) and name not in have | {*why}
    }
    return [f"{name} was not measured: {' '.join(text.split())}" for name, text in why.items()]


def _finish(args: argparse.Namespace, header: Header, rows: list[Row], console: Console) -> None:
    write_report(header, rows, args.report)
    for sentence in sentences(rows):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    if args.json is not None:
        write_json(header, rows, args.json)
        console.print(f"written: {args.json}")
    console.print(f"report: {args.report / 'report.html'}")


if __name__ == "__main__":
    sys.exit(main())
