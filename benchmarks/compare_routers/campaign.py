"""Which runs make a comparison, in which order, and doing them one after the other.

Owns the order, going on after an interruption, and the progress bar. Must not know how a run is
made or what its figures mean.

All contenders share engines; only those that need other engine flags make them start again. Their
order within a cell is drawn anew for every cell, the same in every comparison: neither a drift of
the machine nor what the contender before left behind favours anybody.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Self

from msgspec.structs import replace
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks.compare_routers.contenders import BY_NAME
from benchmarks.compare_routers.results.ratios import is_immediate, is_peer, is_sbs, ranking
from benchmarks.compare_routers.results.rows import NOT_RUN, Key, Row, RowFile
from benchmarks.compare_routers.results.search import next_load
from benchmarks.compare_routers.runs.cell import Setting, run_cell
from benchmarks.compare_routers.runs.engines import Engines
from benchmarks.compare_routers.runs.revision import revision
from benchmarks.router_processes import STOCK, Contender
from sglang_sbs.cluster.local import ClusterStartError

StartEngines = Callable[[str], AbstractAsyncContextManager[Engines]]
"""Name of an engine variant -> engines, up while the context is open."""

SEARCH_WORKLOAD = "paper"
_OVERHEAD_S = 9.0
"""A router's start and the warm-up, roughly: for the remaining time only."""
_SEARCH_LOAD = 0.8
_PRIME_LOAD, _PRIME_REQUESTS = 0.5, 40


@dataclass(frozen=True, slots=True)
class Scope:
    """What is to be compared."""

    contenders: Sequence[Contender]
    workloads: Sequence[str]
    loads: Sequence[float]
    seeds: int
    first_seed: int
    """Seeds are this one and the following."""
    field_loads: Sequence[float]
    """Loads at which every contender runs, with the first seed."""
    best_peers: int
    """Everything else is of SBS, of this many peers and of one immediate policy of ours: the best
    there, by mean TTFT."""
    requests: int
    search_requests: int
    search_steps: int
    """Loads per contender in search of the one at the SLO; 0: no search."""
    search_seeds: int
    """Each of these loads is run with so many."""
    slo_ttft_s: float

    @property
    def all_seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def all_search_seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.search_seeds)

    @property
    def field_cells(self) -> list[tuple[str, float]]:
        return [(workload, load) for workload in self.workloads for load in self.field_loads]

    @property
    def cells(self) -> list[tuple[str, float]]:
        return [(workload, load) for workload in self.workloads for load in self.loads]


def focus_of(scope: Scope, rows: Sequence[Row]) -> list[Contender]:
    """SBS, and the best peers and immediate policy of what all contenders ran."""
    keys = set(cell_keys(scope.contenders, scope.field_cells, scope.first_seed))
    field_rows = [row for row in rows if row.key in keys]
    best = ranking(field_rows)[: scope.best_peers] + ranking(field_rows, is_immediate)[:1]
    return [one for one in scope.contenders if is_sbs(one.name) or one.name in best]


def cell_keys(
    contenders: Sequence[Contender], cells: Sequence[tuple[str, float]], seed: int
) -> list[Key]:
    """Cells (workload, load) of a seed in the order they are run: by engines, shuffled within a
    cell. Every other seed begins with the engines that the one before ended with."""
    keys = []
    for mine in by_engines(contenders)[:: 1 if seed % 2 else -1]:
        for workload, load in cells:
            keys += [
                Key("cell", workload, load, seed, one.name)
                for one in _shuffled(mine, f"{workload} {load:g} {seed}")
            ]
    return keys


def _shuffled(contenders: Sequence[Contender], seed: str) -> list[Contender]:
    return random.Random(seed).sample(list(contenders), len(contenders))


def by_engines(contenders: Sequence[Contender]) -> list[list[Contender]]:
    """Contenders that can share running engines."""
    variants = dict.fromkeys(one.engines for one in contenders)
    return [[one for one in contenders if one.engines == variant] for variant in variants]


@dataclass(slots=True)
class Campaign:
    """Rows so far, and how to get the others."""

    scope: Scope
    setting: Setting
    file: RowFile
    start_engines: StartEngines
    expected_s: Callable[[str, float, int], float]
    """Workload, load, requests -> seconds the load lasts, roughly."""
    console: Console
    rows: list[Row] = field(default_factory=list)

    async def run(self) -> None:
        """Everything that is not in ``rows`` yet.

        Raises:
            ClusterStartError: engines did not come up.
            UnheardError: their EndForward messages do not arrive.
        """
        scope = self.scope
        async with _Runner(self) as runner:
            await runner.run(cell_keys(scope.contenders, scope.field_cells, scope.first_seed))
            focus = focus_of(scope, self.rows)
            for mine in by_engines(focus):
                for step in range(scope.search_steps):
                    await runner.run(self._search_keys(mine, step))
            for seed in scope.all_seeds:
                await runner.run(cell_keys(focus, scope.cells, seed))

    def _search_keys(self, contenders: Sequence[Contender], step: int) -> Iterator[Key]:
        scope, seeds = self.scope, self.scope.all_search_seeds
        loads = {
            one.name: next_load(self.rows, one.name, seeds, scope.slo_ttft_s, scope.search_steps)
            for one in contenders
        }
        for seed in seeds:
            for one in _shuffled(contenders, f"search {step} {seed}"):
                load = loads[one.name]
                if load is not None:
                    yield Key("search", SEARCH_WORKLOAD, load, seed, one.name)

    def requests(self, key: Key) -> int:
        return self.scope.search_requests if key.kind == "search" else self.scope.requests

    def row_of(self, key: Key, error: str) -> Row:
        """Of a run that has no figures."""
        return Row(key=key, requests=self.requests(key), error=error)

    def expected_key_s(self, key: Key) -> float:
        return _OVERHEAD_S + self.expected_s(key.workload, key.load, self.requests(key))

    def expected_total_s(self) -> float:
        """Seconds of everything, before it is known who goes on after the first seed."""
        scope = self.scope
        peers = [one for one in scope.contenders if is_peer(one.name)]
        immediate = [one for one in scope.contenders if is_immediate(one.name)]
        sbs = [one for one in scope.contenders if is_sbs(one.name)]
        later = [*sbs, *peers[: scope.best_peers], *immediate[:1]]
        keys = set(cell_keys(scope.contenders, scope.field_cells, scope.first_seed))
        for seed in scope.all_seeds:
            keys |= set(cell_keys(later, scope.cells, seed))
        searches = len(later) * scope.search_steps * scope.search_seeds
        search = Key("search", SEARCH_WORKLOAD, _SEARCH_LOAD, 1, "")
        return sum(map(self.expected_key_s, keys)) + searches * self.expected_key_s(search)


class _Runner:
    """Runs keys with a progress bar; keeps the engines up while they have the right flags."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self._engines: Engines | None = None
        self._variant = ""
        self._primed = False
        self._stack = AsyncExitStack()
        self._done = {row.key for row in campaign.rows if not row.error and not row.to_repeat}
        self._counted: set[Key] = set()
        self._broken: set[str] = set()
        self._progress = Progress(
            TextColumn("{task.description:<52}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=campaign.console,
            transient=True,
        )
        self._task = TaskID(0)

    async def __aenter__(self) -> Self:
        self._progress.start()
        self._task = self._progress.add_task("", total=self._campaign.expected_total_s())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()
        self._progress.stop()

    async def run(self, keys: Iterable[Key]) -> None:
        """Those that were not run before, of contenders that work."""
        for key in keys:
            if key in self._counted:
                continue
            self._counted.add(key)
            if key not in self._done:
                if key.policy in self._broken:
                    self._add(self._campaign.row_of(key, NOT_RUN))
                else:
                    await self._run_one(key)
            self._progress.advance(self._task, self._campaign.expected_key_s(key))

    async def _run_one(self, key: Key) -> None:
        campaign = self._campaign
        contender = BY_NAME[key.policy]
        self._progress.update(self._task, description=_words(key))
        begun, of_code = datetime.now(UTC).isoformat(timespec="seconds"), revision()
        try:
            engines = await self._engines_of(contender)
            row = await run_cell(contender, key, campaign.requests(key), engines, campaign.setting)
        except ClusterStartError as error:
            if contender.engines == STOCK:
                raise
            row = campaign.row_of(key, f"engines with its flags do not start: {error}")
        row = replace(row, begun=begun, revision=of_code)
        self._add(row)
        if row.answers is None:
            self._broken.add(key.policy)
            reason = row.error.strip().splitlines()
            self._campaign.console.print(
                f"{key.policy} does not work here: {reason[0] if reason else ''}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
            return
        latency = row.answers.ttft_ms
        campaign.console.print(
            f"{_words(key)}: TTFT mean {latency.mean:.0f}, p99 {latency.p99:.0f} ms, "
            f"{row.answers.failed} failed",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        if row.silent:
            campaign.console.print(
                f"warning: no EndForward of {', '.join(row.silent)} came during it; its passes and "
                "KV band lack them",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def _add(self, row: Row) -> None:
        self._campaign.rows.append(row)
        self._campaign.file.add(row)

    async def _engines_of(self, contender: Contender) -> Engines:
        variant = contender.engines
        if self._engines is None or self._variant != variant:
            self._progress.update(self._task, description=f"starting engines ({variant})")
            self._engines = None
            await self._stack.aclose()
            self._engines = await self._stack.enter_async_context(
                self._campaign.start_engines(variant)
            )
            self._variant = variant
            self._primed = False
        if not self._primed:
            # The first requests pay for connections and handshakes between every pair of ranks. A
            # contender that does not work leaves that to the next.
            prime = Key("cell", SEARCH_WORKLOAD, _PRIME_LOAD, 0, contender.name)
            row = await run_cell(
                contender, prime, _PRIME_REQUESTS, self._engines, self._campaign.setting
            )
            self._primed = not row.error
        return self._engines


def _words(key: Key) -> str:
    kind = "search " if key.kind == "search" else ""
    return f"{kind}{key.workload} {key.load:g} seed {key.seed} {key.policy}"
