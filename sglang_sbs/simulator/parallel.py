"""Independent runs on all cores; the result of each is a row."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import active_children
from typing import Any

Row = dict[str, Any]
Task = tuple[Callable[..., Row], tuple[Any, ...]]
"""A function that returns a row, and its arguments; may be called in any process."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during the runs. ``rows``: results of the completed runs, in order."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self.rows = rows


def processes(workers: int | None) -> int:
    """Return the number of processes; by default one per core available to this process."""
    return workers or len(os.sched_getaffinity(0))


def run_all(
    jobs: Iterable[Task],
    on_row: Callable[[Row], None] = lambda _row: None,
    workers: int | None = None,
) -> list[Row]:
    """Run independent jobs on all cores (or ``workers``), and return rows in the order of the jobs.
    The first error, or an interrupt, stops all jobs at once. Raises: Interrupted, with the rows of
    the completed jobs."""
    if workers == 1:
        rows: list[Row] = []
        try:
            for call, args in jobs:
                rows.append(call(*args))
                on_row(rows[-1])
        except KeyboardInterrupt as error:
            raise Interrupted(rows) from error
        return rows
    others = set(active_children())
    # A terminal interrupts the workers as well; they leave the message to this process.
    pool = ProcessPoolExecutor(
        processes(workers),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    futures: list[Future[Row]] = []
    try:
        futures += [pool.submit(call, *args) for call, args in jobs]
        for done in as_completed(futures):
            on_row(done.result())
    except BaseException as error:
        mine = set(active_children()) - others
        pool.shutdown(wait=False, cancel_futures=True)
        for process in mine:
            process.kill()  # a forked worker may have inherited the handler of SIGTERM
        if isinstance(error, KeyboardInterrupt):
            ended = [future for future in futures if future.done() and not future.cancelled()]
            raise Interrupted(
                [future.result() for future in ended if future.exception() is None]
            ) from error
        raise
    pool.shutdown()
    return [done.result() for done in futures]
