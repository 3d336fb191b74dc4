"""The terminal output while a cluster starts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from sglang_sbs.cluster.local import Progress
from sglang_sbs.cluster.plan import ClusterPlan


@contextmanager
def show_progress(plan: ClusterPlan) -> Iterator[Callable[[Progress], None]]:
    """Show a live table on a terminal, or one line per step elsewhere. Yields the function to call
    with each step."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda step: console.print(
            f"[{step.elapsed_s:5.1f}s] {step.name}: {step.state}", markup=False
        )
        return
    table = _LiveTable(plan)
    with Live(table, console=console, refresh_per_second=4):
        yield table.update


class _LiveTable:
    """One row per process: its state, and the seconds it took or has taken so far."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._rows = {server.name: server.url for server in plan.servers}
        self._steps: dict[str, Progress] = {}
        self._started_s = time.monotonic()

    def update(self, step: Progress) -> None:
        self._rows.setdefault(step.name, "")
        self._steps[step.name] = step

    def __rich__(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        elapsed_s = time.monotonic() - self._started_s
        for name, url in self._rows.items():
            step = self._steps.get(name)
            if step is None:
                table.add_row(name, "", "waiting", url, style="dim")
            elif step.state == "ready":
                table.add_row(name, f"{step.elapsed_s:.0f} s", "[green]ready[/green]", url)
            else:
                state = Spinner("dots", text=step.state)
                table.add_row(name, f"{elapsed_s:.0f} s", state, url)
        return table
