"""``scripts/compare-routers``: its command line, and what is done with the answer.

Owns flags and defaults. Must not know how runs, figures or reports are made.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_sbs.bench.demo import parse_topology
from sglang_sbs.bench.rig import CHUNK_TOKENS
from sglang_sbs.bench.versus.campaign import Campaign, Scope
from sglang_sbs.bench.versus.cell import Setting
from sglang_sbs.bench.versus.clients import CLIENTS
from sglang_sbs.bench.versus.engines import (
    H800_CHUNK_TOKENS,
    PASS_S,
    Engines,
    GivenEngines,
    VirtualCluster,
    given_engines,
    scaled_cost,
    virtual_engines,
)
from sglang_sbs.bench.versus.field import BY_NAME, ENGINE_VARIANTS, STOCK, Contender, chosen
from sglang_sbs.bench.versus.prompts import Prompts, id_prompts, text_prompts
from sglang_sbs.bench.versus.ratios import is_sbs, ratio_cells
from sglang_sbs.bench.versus.report import summary, write_into_docs, write_json, write_report
from sglang_sbs.bench.versus.rows import Header, Row, RowFile
from sglang_sbs.bench.versus.workloads import WORKLOADS, duration_s
from sglang_sbs.cluster.local import ClusterStartError
from sglang_sbs.simulator.cost import COSTS, CostError, find_cost
from sglang_sbs.testing.tiny_model import cached_tiny_model

QUICK_PEERS = ("smg:round_robin", "mini_lb", "sglang_router:round_robin")
"""The best routers of other projects by mean TTFT on engines with default flags, best first
(docs/results.md has the field); the first two that are installed are taken."""
QUICK_OWN = "eta"
"""The best of our own immediate policies."""
_H800 = "mixed"
_SLO_PASSES = 2.4
"""The paper's SLO of 0.8 s, in full passes of its deployment (0.33 s)."""
_SLO_TPOT_S = 0.1

_EXAMPLE = f"""\
examples:
  scripts/compare-routers --quick                                    about 6 minutes on two cores
  scripts/compare-routers --loads 0.4,0.8,1 --seeds 3 --report out/compare
  scripts/compare-routers --resume --loads 0.4,0.8,1 --seeds 3 --report out/compare
  scripts/compare-routers --workload long-tail,bursty,mooncake --contenders sbs,smg,least_tokens
  scripts/compare-routers --report-only --report out/compare --docs docs/results.md
  scripts/compare-routers --real --prefill http://p0:30000 8998 --prefill http://p1:30000 8998 \\
      --decode http://d0:30000 --capacity 180000 --tokenizer-path /models/DeepSeek-V3

contenders: {", ".join(BY_NAME)}
Peers are the routers of other projects; ours that are not called sbs* are its immediate policies,
and SBS is measured against the best of them too. A name with @ needs engines with other flags:
@total_tokens --load-balance-method total_tokens, @delayer --enable-prefill-delayer.

The engines are SGLang with a tiny MoE on CPU, DP attention and real KV transfer; a pass takes the
time a GPU would need (virtual GPU). So ratios can be read, milliseconds cannot. Every contender
runs once at --field-loads; SBS, the --best-peers and our best immediate policy
then run at all loads and seeds. Every run is
written to DIR/rows.jsonl at once.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="compare-routers",
        description="Compare routers on one real SGLang PD cluster: same engines, same arrivals.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is compared")
    what.add_argument("--contenders", default="all", metavar="NAMES", help="see below (all)")
    what.add_argument(
        "--workload",
        default="paper",
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(WORKLOADS)} (paper)",
    )
    what.add_argument(
        "--loads",
        default="0.4,0.8,1.0",
        help="shares of what full chunks on every rank compute (0.4,0.8,1.0)",
    )
    what.add_argument("--seeds", type=int, default=3, help="of arrivals and lengths (3)")
    what.add_argument(
        "--field-loads",
        metavar="LOADS",
        help="loads at which every contender runs, one seed (all of --loads)",
    )
    what.add_argument(
        "--best-peers",
        type=int,
        default=2,
        help="of those, by mean TTFT, that go on to all loads and seeds (2)",
    )
    what.add_argument("--requests", type=int, default=200, help="per run (200)")
    what.add_argument(
        "--search-steps",
        type=int,
        default=4,
        help="runs per contender to find the load at the SLO; 0: no search (4)",
    )
    what.add_argument("--search-requests", type=int, default=300, help="per such run (300)")
    what.add_argument("--search-seeds", type=int, default=1, help="seeds of the search (1)")
    what.add_argument(
        "--share-of-capacity",
        type=float,
        default=0.8,
        help="one more cell at this share of the best peer's load at the SLO; 0: none (0.8)",
    )
    what.add_argument(
        "--slo-ttft",
        type=float,
        metavar="S",
        help=f"mean TTFT of the search, TTFT of goodput ({_SLO_PASSES} full passes)",
    )
    what.add_argument(
        "--slo-tpot", type=float, default=_SLO_TPOT_S, metavar="S", help=f"({_SLO_TPOT_S})"
    )
    what.add_argument(
        "--quick",
        action="store_true",
        help="one seed of paper at two loads, sbs against the two best peers",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--topology", default="3P1D", help="instances (3P1D)")
    how.add_argument("--dp", type=int, default=2, help="DP ranks per instance (2)")
    how.add_argument(
        "--cost",
        default="h800",
        metavar="h800|NAME|FILE",
        help="how long a pass takes: h800 (DeepSeek-V3 on H800 after the paper), "
        f"{', '.join(COSTS)}, or a JSON file of scripts/calibrate (h800)",
    )
    how.add_argument(
        "--cost-chunk",
        type=int,
        default=H800_CHUNK_TOKENS,
        metavar="TOKENS",
        help="chunk per DP rank of the deployment the cost is of; one of the cluster's "
        f"{CHUNK_TOKENS} stands for the whole ({H800_CHUNK_TOKENS})",
    )
    how.add_argument("--client", choices=CLIENTS, default=CLIENTS[0], help=f"({CLIENTS[0]})")
    how.add_argument(
        "--prompts", choices=("text", "ids"), default="text", help="what requests carry (text)"
    )
    how.add_argument("--timeout", type=float, default=60.0, metavar="S", help="per request (60)")
    out = parser.add_argument_group("results")
    out.add_argument("--json", type=Path, metavar="FILE", help="ratios and figures")
    out.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        default=Path("out/compare-routers"),
        help="rows.jsonl, logs, report.html, report.md (out/compare-routers)",
    )
    out.add_argument("--resume", action="store_true", help="go on with DIR/rows.jsonl")
    out.add_argument(
        "--report-only", action="store_true", help="run nothing; report from DIR/rows.jsonl"
    )
    out.add_argument(
        "--docs", type=Path, metavar="FILE", help="put the tables between FILE's marks too"
    )
    out.add_argument(
        "--event-logs",
        action="store_true",
        help="one of the scheduler per run of ours, in DIR (sglang-sbs simulate --replay reads it)",
    )
    real = parser.add_argument_group("engines that run already")
    real.add_argument("--real", action="store_true", help="start routers only, no engines")
    real.add_argument(
        "--prefill", nargs="+", action="append", metavar="URL [PORT]", help="with bootstrap port"
    )
    real.add_argument("--decode", action="append", metavar="URL")
    real.add_argument(
        "--capacity",
        type=float,
        metavar="TOKENS_PER_S",
        help="prompt tokens per second of all prefill instances with full chunks",
    )
    real.add_argument("--tokenizer-path", type=Path, metavar="DIR", help="the engines' model")
    real.add_argument(
        "--engines",
        choices=tuple(ENGINE_VARIANTS),
        default=STOCK,
        help=f"how they were started; only contenders for such engines are run ({STOCK})",
    )
    real.add_argument(
        "--listen",
        default="tcp://0.0.0.0:7601",
        help="where the engines' EndForward comes; name it in their SGLANG_SBS_ROUTERS beside the "
        "router's address (tcp://0.0.0.0:7601)",
    )
    real.add_argument(
        "--endforward-port", type=int, default=7600, help="of the router under test (7600)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; exit code 1 if a request of SBS failed, 130 if interrupted."""
    parser = build_parser()
    args = parser.parse_args(argv)
    console = Console()
    file = RowFile(args.report / "rows.jsonl")
    campaign: Campaign | None = None
    try:
        if args.report_only:
            header, rows = file.read()
        else:
            plan = Plan(args)
            header, rows = plan.begin(file)
            campaign = plan.campaign(file, rows, console)
    except (ValueError, CostError) as error:
        parser.error(str(error))
    try:
        if campaign is not None:
            asyncio.run(campaign.run())
        _finish(args, header, rows, console)
    except KeyboardInterrupt:
        console.print(f"interrupted; go on with --resume ({file.path})")
        return 130
    except (ClusterStartError, RuntimeError, ValueError, OSError) as error:
        console.print(f"stopped: {error}", highlight=False, markup=False)
        console.print(f"what was measured is in {file.path}; go on with --resume")
        return 1
    return 1 if summary(header, rows)["failed_requests"] else 0


def _finish(args: argparse.Namespace, header: Header, rows: list[Row], console: Console) -> None:
    write_report(header, rows, args.report)
    if args.json is not None:
        write_json(header, rows, args.json)
        console.print(f"written: {args.json}")
    if args.docs is not None:
        write_into_docs(header, rows, args.docs)
        console.print(f"written: {args.docs}")
    for cell in ratio_cells(rows):
        for kind in ("", "own_"):
            if cell[f"{kind}p99_ratio"] is not None:
                console.print(
                    f"{cell['workload']} {cell['load']:g} {cell['policy']}: "
                    f"mean {cell[f'{kind}mean_ratio']:.2f} of {cell[f'{kind}mean_peer']}, "
                    f"p99 {cell[f'{kind}p99_ratio']:.2f} of {cell[f'{kind}p99_peer']}",
                    highlight=False,
                )
    console.print(f"report: {args.report / 'report.html'}")


class Plan:
    """The command line, checked."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises: ValueError: with the flag and what to write instead."""
        self._args = args
        if args.quick:
            peers = [name for name in QUICK_PEERS if BY_NAME[name].installed][:2]
            args.contenders = ",".join(("sbs", QUICK_OWN, *peers))
            args.workload, args.loads, args.seeds = "paper", "0.8,1.0", 1
            args.search_steps, args.share_of_capacity = 3, 0.0
        self._check()
        self.scope = self._scope()
        self.model = self._model()
        self.start_engines, self.capacity_tokens_per_s, self.chunk_tokens = self._engines()

    def _check(self) -> None:
        args = self._args
        for name in ("seeds", "best_peers", "requests", "search_requests", "search_seeds", "dp"):
            if getattr(args, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        for name in ("search_steps", "share_of_capacity"):
            if getattr(args, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must not be negative")
        for name in ("slo_ttft", "slo_tpot", "timeout", "cost_chunk"):
            if getattr(args, name) is not None and not getattr(args, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be greater than 0")
        given = [f"--{n}" for n in ("prefill", "decode", "capacity") if getattr(args, n)]
        if args.real and len(given) < 3:
            raise ValueError("--real needs --prefill URL PORT, --decode URL and --capacity")
        if given and not args.real:
            raise ValueError(f"{given[0]} is for engines that run already: add --real")
        if args.real and args.slo_ttft is None:
            raise ValueError("--real needs --slo-ttft: its passes take a time we do not know")

    def _scope(self) -> Scope:
        args = self._args
        workloads = _words(args.workload, WORKLOADS, "--workload")
        try:
            contenders = chosen(args.contenders)
        except ValueError as error:
            raise ValueError(f"--contenders: {error}") from None
        loads = _loads(args.loads, "--loads")
        field_loads = _loads(args.field_loads or args.loads, "--field-loads")
        if args.real:
            contenders = [one for one in contenders if one.engines == args.engines or _sbs(one)]
        if all(_sbs(one) for one in contenders) or not any(_sbs(one) for one in contenders):
            raise ValueError("--contenders: a comparison needs sbs or sbs_paper, and a peer")
        return Scope(
            contenders=contenders,
            workloads=workloads,
            loads=loads,
            seeds=args.seeds,
            field_loads=field_loads,
            best_peers=args.best_peers,
            requests=args.requests,
            search_requests=args.search_requests,
            search_steps=args.search_steps,
            search_seeds=args.search_seeds,
            share_of_capacity=args.share_of_capacity,
            slo_ttft_s=args.slo_ttft or _SLO_PASSES * PASS_S,
        )

    def _model(self) -> Path | None:
        args = self._args
        if args.real:
            tokenizer: Path | None = args.tokenizer_path
            if tokenizer is None and args.prompts == "text":
                raise ValueError("--prompts text needs --tokenizer-path; or use --prompts ids")
            return tokenizer
        if args.tokenizer_path is not None:
            raise ValueError("--tokenizer-path is for engines that run already: add --real")
        return cached_tiny_model()

    def _engines(self) -> tuple[Any, float, int]:
        args = self._args
        if args.real:
            given = GivenEngines(
                prefill=[_prefill(words) for words in args.prefill],
                decode=args.decode,
                capacity_tokens_per_s=args.capacity,
                listen=args.listen,
                endforward_port=args.endforward_port,
            )
            return (lambda _variant: given_engines(given)), args.capacity, CHUNK_TOKENS
        prefill, decode = parse_topology(args.topology)
        cost = find_cost(_H800 if args.cost == "h800" else args.cost)
        cluster = VirtualCluster(
            prefill, decode, args.dp, scaled_cost(cost, args.dp, args.cost_chunk), args.report
        )

        def start(variant: str) -> AbstractAsyncContextManager[Engines]:
            return virtual_engines(cluster, ENGINE_VARIANTS[variant], Console())

        return start, cluster.capacity_tokens_per_s, CHUNK_TOKENS

    def _prompts(self) -> Prompts:
        if self._args.prompts == "ids" or self.model is None:
            return id_prompts()
        return text_prompts(self.model)

    def settings(self) -> dict[str, Any]:
        """What changes a figure. Contenders, workloads, loads and seeds may be added later."""
        args = self._args
        return {
            "engines": "given" if args.real else f"{args.topology}, dp={args.dp}, virtual GPU",
            "cost": f"{args.cost}, chunk {args.cost_chunk}",
            "client": args.client,
            "prompts": args.prompts,
            "requests": args.requests,
            "search_requests": args.search_requests,
            "slo_ttft_s": self.scope.slo_ttft_s,
            "slo_tpot_s": args.slo_tpot,
            # Given engines are asked for theirs when they are needed.
            "chunk_tokens": 0 if args.real else self.chunk_tokens,
            "capacity_tokens_per_s": round(self.capacity_tokens_per_s, 1),
        }

    def begin(self, file: RowFile) -> tuple[Header, list[Row]]:
        """The header, and the rows there are already."""
        if self._args.resume:
            header, rows = file.read()
            file.mend()
            for name, value in self.settings().items():
                if header.settings.get(name) != value:
                    raise ValueError(
                        f"--resume: {file.path} was measured with {name.replace('_', ' ')} "
                        f"{header.settings.get(name)!r}, not {value!r}; name another --report"
                    )
            return header, rows
        header = Header(
            settings=self.settings(),
            machine=machine(),
            begun=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        file.begin(header)
        return header, []

    def campaign(self, file: RowFile, rows: list[Row], console: Console) -> Campaign:
        args = self._args
        setting = Setting(
            client=args.client,
            prompts=self._prompts(),
            model=self.model,
            slo_ttft_s=self.scope.slo_ttft_s,
            slo_tpot_s=args.slo_tpot,
            timeout_s=args.timeout,
            log_dir=args.report,
            salt=datetime.now(UTC).isoformat(),
            event_logs=args.event_logs,
        )
        return Campaign(
            self.scope, setting, file, self.start_engines, self._expected_s, console, rows
        )

    def _expected_s(self, workload: str, load: float, requests: int) -> float:
        drawn = WORKLOADS[workload](1, requests, self.chunk_tokens)
        return duration_s(drawn, load * self.capacity_tokens_per_s)


def machine() -> dict[str, Any]:
    """What the reader must know of where the figures are from."""
    return {
        "cpu_cores": os.cpu_count(),
        "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("sglang", "sglang-router", "smg", "sglang-sbs")},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _sbs(contender: Contender) -> bool:
    return is_sbs(contender.name)


def _words(text: str, known: Sequence[str] | dict[str, Any], flag: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        what = repr(unknown[0]) if unknown else "nothing"
        raise ValueError(f"{flag}: {what} is not one of {', '.join(known)}")
    return words


def _loads(text: str, flag: str) -> list[float]:
    try:
        loads = [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} {text!r}: write e.g. 0.4,0.8,1.0") from None
    if not all(0 < load < 10 for load in loads):
        raise ValueError(f"{flag} must be shares of capacity, greater than 0, e.g. 0.4,0.8,1.0")
    return loads


def _prefill(words: Sequence[str]) -> tuple[str, int | None]:
    url, *port = words
    if len(port) > 1 or (port and port[0] != "none" and not port[0].isdigit()):
        raise ValueError(f"--prefill {' '.join(words)}: write a URL and its bootstrap port")
    return url.rstrip("/"), int(port[0]) if port and port[0] != "none" else None


if __name__ == "__main__":
    sys.exit(main())
