"""Which runs make a comparison, in which order, and doing them one after the other.

All contenders share engines. Their order within a cell is drawn anew for every cell, the same in
every comparison: neither a drift of the machine nor what the contender before left behind favours
anybody.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
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
from benchmarks.compare_routers.runs.cell import Setting, run_cell
from benchmarks.compare_routers.runs.engines import Engines
from benchmarks.compare_routers.runs.revision import revision
from benchmarks.router_processes import Contender

StartEngines = Callable[[], AbstractAsyncContextManager[Engines]]
"""Engines, up while the context is open."""

_OVERHEAD_S = 9.0
"""A router's start and the warm-up, roughly: for the remaining time only."""
_PRIME_WORKLOAD, _PRIME_LOAD, _PRIME_REQUESTS = "paper", 0.5, 40


@dataclass(frozen=True, slots=True)
class Scope:
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

    @property
    def all_seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

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
    return [
        contender
        for contender in scope.contenders
        if is_sbs(contender.name) or contender.name in best
    ]


def cell_keys(
    contenders: Sequence[Contender], cells: Sequence[tuple[str, float]], seed: int
) -> list[Key]:
    """Cells (workload, load) of a seed in the order they are run, shuffled within a cell."""
    return [
        Key(workload, load, seed, contender.name)
        for workload, load in cells
        for contender in random.Random(f"{workload} {load:g} {seed}").sample(
            list(contenders), len(contenders)
        )
    ]


@dataclass(slots=True)
class Campaign:
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
            MissingReportsError: their EndForward messages do not arrive.
        """
        scope = self.scope
        async with _Runner(self) as runner:
            await runner.run(cell_keys(scope.contenders, scope.field_cells, scope.first_seed))
            focus = focus_of(scope, self.rows)
            for seed in scope.all_seeds:
                await runner.run(cell_keys(focus, scope.cells, seed))

    def row_of(self, key: Key, error: str) -> Row:
        """Return a row without figures."""
        return Row(key=key, requests=self.scope.requests, error=error)

    def expected_key_s(self, key: Key) -> float:
        return _OVERHEAD_S + self.expected_s(key.workload, key.load, self.scope.requests)

    def expected_total_s(self) -> float:
        """Seconds of everything, before it is known who goes on after the first seed."""
        scope = self.scope
        peers = [contender for contender in scope.contenders if is_peer(contender.name)]
        immediate = [contender for contender in scope.contenders if is_immediate(contender.name)]
        sbs = [contender for contender in scope.contenders if is_sbs(contender.name)]
        later = [*sbs, *peers[: scope.best_peers], *immediate[:1]]
        keys = set(cell_keys(scope.contenders, scope.field_cells, scope.first_seed))
        for seed in scope.all_seeds:
            keys |= set(cell_keys(later, scope.cells, seed))
        return sum(map(self.expected_key_s, keys))


class _Runner:
    """Runs keys with a progress bar; starts the engines when the first one is to be run."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self._engines: Engines | None = None
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
        """Run the keys that were not run before, of contenders that work."""
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
        engines = await self._engines_for(contender)
        row = await run_cell(contender, key, campaign.scope.requests, engines, campaign.setting)
        row = replace(row, begun=begun, revision=of_code)
        self._add(row)
        if row.answers is None:
            self._broken.add(key.policy)
            reason = row.error.strip().splitlines()
            self._say(f"{key.policy} does not work here: {reason[0] if reason else ''}")
            return
        latency = row.answers.ttft_ms
        self._say(
            f"{_words(key)}: TTFT mean {latency.mean:.0f}, p99 {latency.p99:.0f} ms, "
            f"{row.answers.failed} failed"
        )
        if row.silent:
            self._say(
                f"warning: no EndForward of {', '.join(row.silent)} came during it; its passes and "
                "KV band lack them"
            )

    def _say(self, text: str) -> None:
        self._campaign.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _add(self, row: Row) -> None:
        self._campaign.rows.append(row)
        self._campaign.file.add(row)

    async def _engines_for(self, contender: Contender) -> Engines:
        if self._engines is None:
            self._progress.update(self._task, description="starting engines")
            self._engines = await self._stack.enter_async_context(self._campaign.start_engines())
        if not self._primed:
            # The first requests pay for connections and handshakes between every pair of ranks. A
            # contender that does not work leaves that to the next.
            prime = Key(_PRIME_WORKLOAD, _PRIME_LOAD, 0, contender.name)
            row = await run_cell(
                contender, prime, _PRIME_REQUESTS, self._engines, self._campaign.setting
            )
            self._primed = not row.error
        return self._engines


def _words(key: Key) -> str:
    return f"{key.workload} {key.load:g} seed {key.seed} {key.policy}"
