"""``scripts/compare-routers``: its command line, checked and made into a campaign."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.compare_routers.agents import AGENTIC, agents_at, expected_s
from benchmarks.compare_routers.campaign import Campaign, Scope
from benchmarks.compare_routers.contenders import BY_NAME, chosen
from benchmarks.compare_routers.prompts import Prompts, id_prompts, text_prompts
from benchmarks.compare_routers.results.ratios import is_sbs
from benchmarks.compare_routers.results.rows import Header, Row, RowFile
from benchmarks.compare_routers.runs.cell import Setting
from benchmarks.compare_routers.runs.engines import (
    PASS_S,
    capacity_tokens_per_s,
    given_engines,
    scaled_cost,
    virtual_engines,
)
from benchmarks.compare_routers.runs.revision import revision
from benchmarks.compare_routers.workloads import NAMES, WORKLOADS, duration_s
from benchmarks.demo.cli import parse_topology
from benchmarks.demo.virtual_cluster import CHUNK_TOKENS
from benchmarks.router_processes import Contender
from sglang_sbs.simulator.cluster.cost import COSTS, CostError, PassCost, find_cost
from sglang_sbs.wire.curve import keys_in
from tools.cpu_engine.tiny_model import cached_tiny_model

QUICK_PEERS = ("smg:round_robin", "mini_lb", "sglang_router:round_robin")
"""The best routers of other projects by mean TTFT on engines with default flags, best first
(docs/lab/compare-routers.md has the field); the first two that are installed are taken."""
QUICK_OWN = "eta"
"""The best of our own immediate policies."""
H800 = "h800"
_H800_COST = "mixed"
SLO_PASSES = 2.4
"""The paper's SLO of 0.8 s, in full passes of its deployment (0.33 s)."""
SLO_TPOT_S = 0.1
"""For goodput, beside passes of ``PASS_S``."""
MOST_HOST_LAG = 0.02
"""Largest host lag as a share of a full pass: with more, the host is measured."""
TIMEOUT_S = 60.0


DEFAULTS: dict[str, Any] = {
    "contenders": "all",
    "workload": "paper",
    "loads": "0.4,0.8,1.0",
    "seeds": 3,
}
"""Defaults of the flags that ``--quick`` sets; the parser has those of all others."""


def _quick(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that ``--quick`` stands for.

    Raises:
        ValueError: one of these flags is given beside it.
    """
    for name in DEFAULTS:
        if getattr(args, name) is not None:
            raise ValueError(f"--quick sets --{name.replace('_', '-')} itself: give one of the two")
    peers = [name for name in QUICK_PEERS if BY_NAME[name].installed][:2]
    return {
        "contenders": ",".join(("sbs", QUICK_OWN, *peers)),
        "workload": "paper",
        "loads": "0.8,1.0",
        "seeds": 1,
    }


class Plan:
    def __init__(self, args: argparse.Namespace) -> None:
        """Raises: ValueError: with the flag and what to write instead."""
        if args.most_host_lag is None:  # A host that is busy on purpose lags.
            args.most_host_lag = 0.0 if args.busy else MOST_HOST_LAG
        self._args = args
        for name, value in (_quick(args) if args.quick else DEFAULTS).items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        self._check()
        self.scope = self._scope()
        self.model = self._model()
        self.start_engines, self.capacity_tokens_per_s, self.chunk_tokens = self._engines()
        self._prompts = self._made_prompts()
        for workload in self.scope.workloads:
            if workload != AGENTIC:
                WORKLOADS[workload](1, args.requests, self.chunk_tokens)

    @property
    def _pass_s(self) -> float:
        return self._args.pass_s or PASS_S

    @property
    def _slo_ttft_s(self) -> float:
        return self._args.slo_ttft or round(SLO_PASSES * self._pass_s, 4)

    @property
    def _slo_tpot_s(self) -> float:
        return self._args.slo_tpot or round(SLO_TPOT_S * self._pass_s / PASS_S, 4)

    @property
    def _timeout_s(self) -> float:
        """Longer with passes, as a peer that is slow must not turn into one that fails."""
        return self._args.timeout or round(TIMEOUT_S * max(1.0, self._pass_s / PASS_S), 1)

    def _check(self) -> None:
        args = self._args
        given = [
            f"--{n}" for n in ("prefill", "decode", "capacity") if getattr(args, n) is not None
        ]
        if args.real and len(given) < 3:
            raise ValueError("--real needs --prefill URL PORT, --decode URL and --capacity")
        if given and not args.real:
            raise ValueError(f"{given[0]} is for engines that run already: add --real")
        if args.real and args.pass_s is not None:
            raise ValueError("--pass-s is for the virtual GPU: leave it out with --real")
        if args.key_file is not None:
            if not args.real:
                raise ValueError("--key-file is for engines that run already: add --real")
            keys_in(args.key_file)
        if args.real and args.slo_ttft is None:
            raise ValueError("--real needs --slo-ttft: its passes take a time we do not know")

    def _scope(self) -> Scope:
        args = self._args
        workloads = _words(args.workload, NAMES, "--workload")
        try:
            contenders = chosen(args.contenders)
        except ValueError as error:
            raise ValueError(f"--contenders: {error}") from None
        loads = _loads(args.loads, "--loads")
        field_loads = _loads(args.field_loads or args.loads, "--field-loads")
        if all(_sbs(contender) for contender in contenders) or not any(
            _sbs(contender) for contender in contenders
        ):
            raise ValueError("--contenders: a comparison needs sbs or sbs_paper, and a peer")
        return Scope(
            contenders=contenders,
            workloads=workloads,
            loads=loads,
            seeds=args.seeds,
            first_seed=args.first_seed,
            field_loads=field_loads,
            best_peers=args.best_peers,
            requests=args.requests,
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
            given = [_prefill(words) for words in args.prefill]
            ends = args.listen, args.endforward_port, args.key_file
            there = partial(given_engines, given, args.decode, args.capacity, *ends)
            return there, args.capacity, CHUNK_TOKENS
        counts = *parse_topology(args.topology), args.dp
        cost = scaled_cost(_cost(args.cost), args.dp, args.cost_chunk, self._pass_s)
        start = partial(virtual_engines, *counts, cost, args.report, Console())
        return start, capacity_tokens_per_s(counts[0], args.dp, cost), CHUNK_TOKENS

    def _made_prompts(self) -> Prompts:
        if self._args.prompts == "ids" or self.model is None:
            return id_prompts()
        return text_prompts(self.model)

    def settings(self) -> dict[str, Any]:
        """Return the settings that change a figure. Contenders, workloads, loads and seeds may be
        added later."""
        args = self._args
        engines: dict[str, Any] = (
            {"engines": f"given: {_urls(args)}"}
            if args.real
            else {
                "engines": f"{args.topology}, dp={args.dp}, virtual GPU",
                "cost": f"{args.cost}, chunk {args.cost_chunk}",
                "pass_s": self._pass_s,
                # Given engines are asked for theirs when they are needed.
                "chunk_tokens": self.chunk_tokens,
            }
        )
        if not args.real and args.cost.endswith(".json"):
            engines["cost_sha256"] = hashlib.sha256(Path(args.cost).read_bytes()).hexdigest()[:12]
        of_code = revision()
        return {
            **({"revision": of_code} if of_code else {}),
            **engines,
            "prompts": args.prompts,
            "timeout_s": self._timeout_s,
            "requests": args.requests,
            "slo_ttft_s": self._slo_ttft_s,
            "slo_tpot_s": self._slo_tpot_s,
            "capacity_tokens_per_s": round(self.capacity_tokens_per_s, 1),
            **({"busy_processes_beside": args.busy} if args.busy else {}),
        }

    def begin(self, file: RowFile, console: Console) -> tuple[Header, list[Row]]:
        """The header, and the rows there are already. Says where rows of an earlier run went."""
        if self._args.resume:
            header, rows = file.read()
            mine, theirs = self.settings() | machine(), header.settings | header.machine
            for name in (*mine, *(theirs.keys() - mine.keys())):
                there, here = theirs.get(name, "unknown"), mine.get(name, "unknown")
                if there != here:
                    raise ValueError(
                        f"--resume: {file.path} was measured with {name.replace('_', ' ')} "
                        f"{there!r}, not {here!r}; name another --report"
                    )
            file.mend()
            return header, rows
        header = Header(
            settings=self.settings(),
            machine=machine(),
            begun=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        moved = file.begin(header)
        if moved is not None:
            console.print(
                f"{file.path} is there already: moved to {moved} (--resume goes on with it)",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        return header, []

    def campaign(self, file: RowFile, rows: list[Row], console: Console) -> Campaign:
        args = self._args
        setting = Setting(
            prompts=self._prompts,
            model=self.model,
            slo_ttft_s=self._slo_ttft_s,
            slo_tpot_s=self._slo_tpot_s,
            timeout_s=self._timeout_s,
            log_dir=args.report,
            salt=datetime.now(UTC).isoformat(),
            endforward_host="0.0.0.0" if args.real else "127.0.0.1",
            key_file=args.key_file,
            most_host_lag=args.most_host_lag,
            event_logs=args.event_logs,
            stretch=self._pass_s / PASS_S,
        )
        return Campaign(
            self.scope, setting, file, self.start_engines, self._expected_s, console, rows
        )

    def _expected_s(self, workload: str, load: float, requests: int) -> float:
        if workload == AGENTIC:
            instances = len(self._args.prefill or "") or parse_topology(self._args.topology)[0]
            agents = agents_at(load, instances * self._args.dp)
            return expected_s(agents, requests, self._pass_s)
        drawn = WORKLOADS[workload](1, requests, self.chunk_tokens)
        return duration_s(drawn, load * self.capacity_tokens_per_s)


def check_outputs(args: argparse.Namespace) -> None:
    """Whether results can be written where they are wanted, before hours go into them.

    Raises:
        ValueError: with the flag and what is wrong.
    """
    folders = {"--report": args.report}
    if args.json is not None:
        if args.json.is_dir():
            raise ValueError(f"--json {args.json} is a folder: name a file")
        folders["--json"] = args.json.parent
    for flag, folder in folders.items():
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise ValueError(f"{flag}: {there} is not a folder")
        if not os.access(there, os.W_OK):
            raise ValueError(f"{flag}: {there} cannot be written to")


def _urls(args: argparse.Namespace) -> str:
    prefill = ", ".join(" ".join(words) for words in args.prefill)
    return f"prefill {prefill}; decode {', '.join(args.decode)}"


def _cost(word: str) -> PassCost:
    if word == H800:
        return COSTS[_H800_COST]
    if word not in COSTS and not word.endswith(".json"):
        known = ", ".join((H800, *COSTS))
        raise CostError(f"--cost {word!r} is not one of {known}, FILE.json")
    return find_cost(word)


def machine() -> dict[str, Any]:
    """Describe the machine and the packages that the figures are from."""
    return {
        "cpu_cores": os.cpu_count(),
        "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        **{
            name: _version(name)
            for name in ("sglang", "sglang-router", "smg", "ai-dynamo-runtime", "sglang-sbs")
        },
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
