"""Compare the CPU that a request costs the router under two policies, on the same arrivals.

Both routers run from the start, each over engines of its own (:mod:`benchmarks.scale.fleet`), and
take turns per seed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import command_parser, interruptible, make_writable, raise_file_limit
from benchmarks.raw_client import Exchange, Tally, chat_request, connect
from benchmarks.router_processes import Contender, Processes, serving
from benchmarks.scale.fleet import CHUNK_TOKENS, FleetShape
from benchmarks.scale.router import running_fleet
from sglang_sbs.scheduling import policy_names
from sglang_sbs.simulator.options.common import positive, positive_number
from tools.stand_ins.ports import free_ports

_EPILOG = """\
Mock prefill engines whose full passes take --pass-s, EndForward of every DP rank, radix caches with
pages of one token (SGLang's default), streams of four tokens, prompts of 100 to 3,000 tokens that
share nothing, Poisson arrivals at --load of full chunks. Both policies play every seed, one after
the other, so that whatever else happens on the machine affects both. A play takes --seconds.

  CPU per request    user and system time of all processes of the router during a play, divided by
                     its requests
  ratio              CPU per request of the first policy to the second's, seed by seed
  TTFT               until the first token reached the client

Figures are medians over seeds with the least and the most.

examples:
  scripts/bench-policy-cost                                     about three minutes
  scripts/bench-policy-cost --rounds 8 --pass-s 1.5 --dp 4      few requests, long passes
  scripts/bench-policy-cost --flags=--tokenizer-path=/models/DeepSeek-V3
"""
Row = dict[str, Any]
"""A seed: its number, its requests, and by policy what was measured."""
Due = Sequence[tuple[float, bytes]]
"""Requests, each with the seconds from the begin at which it is sent."""
_QUANTITIES = {"cpu_us_per_request": "CPU us/request", "ttft_mean_ms": "TTFT mean, ms"}
_TOKENS = 4
_LEAST_TOKENS, _MOST_TOKENS = 100, 3000
_MEAN_TOKENS = 1000.0
_DECODE_RANKS = 4
_TOKEN_S = 0.1
_IDLE_REPORTS_PER_S = 2.0
_WARM_UP_S = 3.0
_WORDS = [f"{number:03d}," for number in range(1000)]
"""Prompts share nothing; each word is a token as the router estimates."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_parser("scripts/bench-policy-cost", (__doc__ or "").split("\n", 1)[0], _EPILOG)
    add = parser.add_argument
    add("--policies", default="sbs,eta", help="two, by a comma (sbs,eta)")
    add("--rounds", type=positive, default=6, help="seeds played (6)")
    add("--first-seed", type=int, default=1, help="they are N, N+1, ... (1)")
    add("--seconds", type=positive_number, default=12.0, help="of arrivals in each play (12)")
    add("--pass-s", type=positive_number, default=0.5, help="of a full prefill pass (0.5)")
    add("--prefill", type=positive, default=3, help="prefill instances (3)")
    add("--dp", type=positive, default=8, help="DP ranks of each (8)")
    add("--load", type=positive_number, default=0.634, help="share of full chunks (0.634)")
    add("--workers", type=positive, default=1, help="--workers of the routers (1)")
    add("--flags", default="", help="more flags for both routers, as one argument (none)")
    add(
        "--module",
        default="sglang_sbs.launch_router",
        help="what runs the router, to profile it (sglang_sbs.launch_router)",
    )
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    options.policies = options.policies.split(",")
    if len(options.policies) != 2 or not set(options.policies) <= set(policy_names()):
        parser.error(f"--policies: write two of {', '.join(policy_names())}, as in sbs,eta")
    return options


def arrivals(options: argparse.Namespace, seed: str, seconds: float) -> Due:
    rng = random.Random(seed)
    tokens_per_s = options.load * options.prefill * options.dp * CHUNK_TOKENS / options.pass_s
    at_s, found = 0.0, []
    while (at_s := at_s + rng.expovariate(tokens_per_s / _MEAN_TOKENS)) < seconds:
        tokens = min(_MOST_TOKENS, max(_LEAST_TOKENS, int(rng.lognormvariate(6.66, 0.7))))
        prompt = "".join(rng.choices(_WORDS, k=tokens))
        found.append((at_s, chat_request(_TOKENS, stream=True, prompt=prompt)))
    return found


class Player:
    def __init__(self, policy: str, port: int, processes: Processes) -> None:
        self.policy = policy
        self._port, self._processes = port, processes
        self._tally = Tally()
        self._idle: list[Exchange] = []
        self._first_s: list[float] = []

    async def play(self, due: Due, warm_up: Due) -> dict[str, float]:
        """Send each request at its time and wait for all answers. Returns a value for each of
        ``_QUANTITIES``. Raises: RuntimeError, a request failed."""
        # Connections that were idle while the other router had its turn are made anew: not counted.
        await self._send_all(warm_up)
        gc.collect()
        self._first_s.clear()
        complete, cpu_s = self._tally.complete, self._processes.cpu_s()
        await self._send_all(due)
        cpu_s = self._processes.cpu_s() - cpu_s
        if self._tally.failures:
            raise RuntimeError(f"{self.policy} failed requests: {dict(self._tally.failures)}")
        return {
            "cpu_us_per_request": 1e6 * cpu_s / (self._tally.complete - complete),
            "ttft_mean_ms": 1e3 * statistics.fmean(self._first_s),
        }

    async def _send_all(self, due: Due) -> None:
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for at_s, request in due:
                await asyncio.sleep(max(0.0, begin_s + at_s - loop.time()))
                tasks.create_task(self._send(request))

    async def _send(self, request: bytes) -> None:
        exchange = self._idle.pop() if self._idle else None
        if exchange is None or exchange.transport.is_closing():
            exchange = await connect(self._port, self._tally)
        sent_s = time.perf_counter()
        exchange.send(request)
        good = await exchange.done
        if good:
            self._first_s.append(exchange.first_s - sent_s)
            self._idle.append(exchange)


@asynccontextmanager
async def _player(policy: str, options: argparse.Namespace) -> AsyncIterator[Player]:
    """A router with that policy in front of engines of its own."""
    endforward = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    shape = FleetShape(
        prefill=[options.dp] * options.prefill,
        decode=[_DECODE_RANKS],
        endforward=endforward,
        reports_per_s=_IDLE_REPORTS_PER_S,
        token_s=_TOKEN_S,
        pass_s=options.pass_s,
        radix_cache=True,
    )
    own = ("--policy", policy, "--sbs-endforward-bind", endforward, "--log-level", "warn")
    flags = (*own, "--workers", str(options.workers), *options.flags.split())
    contender = Contender(policy, options.module, flags)
    async with running_fleet(shape) as fleet:
        urls = [f"http://127.0.0.1:{port}" for port in fleet.ports]
        port, metrics_port = free_ports(2)
        argv = contender.command([(url, 8998) for url in urls[:-1]], urls[-1:], port, metrics_port)
        async with serving(contender, argv, port) as process:
            yield Player(policy, port, Processes(process.pid))


async def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Raises: RuntimeError, a router does not start or fails requests."""
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        players = [
            await stack.enter_async_context(_player(policy, options)) for policy in options.policies
        ]
        for player in players:
            await player.play(arrivals(options, "first", _WARM_UP_S), [])
        for number in range(options.rounds):
            seed = options.first_seed + number
            due = arrivals(options, f"{seed}", options.seconds)
            # Others than those counted: nothing of these may be in a prefix cache.
            warm_up = arrivals(options, f"before {seed}", _WARM_UP_S)
            row: Row = {"seed": seed, "requests": len(due)}
            for player in players if number % 2 else players[::-1]:
                row[player.policy] = await player.play(due, warm_up)
            rows.append(row)
            console.print(f"seed {seed}: {len(due)} requests", style="dim", highlight=False)
    return summary(options.policies, rows)


def summary(policies: Sequence[str], rows: Sequence[Row]) -> dict[str, Any]:
    """Spreads of the quantities by policy, and of the ratio of their CPU per request."""
    first, second = policies
    key = "cpu_us_per_request"
    spreads: dict[str, Any] = {
        policy: {name: _spread([row[policy][name] for row in rows]) for name in _QUANTITIES}
        for policy in policies
    }
    return spreads | {
        "ratio": _spread([row[first][key] / row[second][key] for row in rows]),
        "rows": rows,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _cell(spread: dict[str, float], digits: int) -> str:
    low, middle, high = (f"{spread[name]:,.{digits}f}" for name in ("min", "median", "max"))
    return f"{middle} [dim]({low}..{high})[/dim]"


def print_table(policies: Sequence[str], result: dict[str, Any], console: Console) -> None:
    table = Table("policy", *_QUANTITIES.values(), title="median (least..most) over seeds")
    for policy in policies:
        table.add_row(policy, *(_cell(result[policy][name], 0) for name in _QUANTITIES))
    console.print(table)
    console.print(f"CPU per request, {' / '.join(policies)}: {_cell(result['ratio'], 3)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write. Returns 1 if a router does not start or fails requests."""
    options = parse_arguments(arguments)
    raise_file_limit()
    console = Console()

    def measured() -> int:
        if options.json:
            make_writable(options.json)
        result = uvloop.run(run(options, console))
        print_table(options.policies, result, console)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
        return 0

    try:
        return interruptible("bench-policy-cost", measured)
    except (OSError, RuntimeError) as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
