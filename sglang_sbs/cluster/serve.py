"""Runs a local cluster in the foreground, together with a task, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from sglang_sbs.cluster.local import ENGINE_STOP_GRACE_S, ClusterStartError, LocalCluster
from sglang_sbs.cluster.plan import ClusterPlan
from sglang_sbs.cluster.progress import show_progress
from sglang_sbs.cluster.spawn import SpawnError
from sglang_sbs.cluster.supervise import ProcessDiedError

_Cluster = TypeVar("_Cluster", bound=LocalCluster)


async def serve_until_stopped(
    plan: ClusterPlan,
    startup_timeout_s: float,
    meanwhile: Callable[[_Cluster], Coroutine[Any, Any, None]],
    kind: Callable[..., _Cluster] = LocalCluster,  # type: ignore[assignment]
) -> int:
    """Start the cluster and run ``meanwhile`` until SIGINT, SIGTERM or the death of a process, then
    stop the cluster. Returns the exit code: 0 after a signal, 1 if the cluster did not start or a
    process of it died.

    ``kind``: class of the cluster; a subclass may survive deaths (:meth:`.LocalCluster.serve`).
    ``meanwhile`` is cancelled at the end. If it returns earlier, the cluster continues to serve.
    Its exceptions are raised here once everything has stopped. Further signals change nothing,
    because the time of stopping is bounded.
    """
    stop = asyncio.Event()
    for handled in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(handled, stop.set)
    # Otherwise these signals would end this process and leave the engines running.
    for ignored in (signal.SIGUSR1, signal.SIGUSR2):
        asyncio.get_running_loop().add_signal_handler(ignored, lambda: None)
    stopped = asyncio.create_task(stop.wait())
    with show_progress(plan) as on_progress:
        cluster = kind(plan, startup_timeout_s, on_progress)
        try:
            if not await _finished(cluster.__aenter__(), stopped):
                return 0
        except (ClusterStartError, SpawnError) as error:
            print(f"The cluster did not start. {error}", file=sys.stderr)
            return 1
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(cluster)
        try:
            await _finished(cluster.serve(meanwhile(cluster)), stopped)
        except ProcessDiedError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"Stopping; this takes up to {ENGINE_STOP_GRACE_S:.0f} s", flush=True)
        return 0


async def _finished(work: Coroutine[Any, Any, object], stopped: asyncio.Task[Any]) -> bool:
    """Wait for a task and return True at its end; False: ``stopped`` ended first and the task was
    cancelled. Raises: exceptions of the task."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({stopped, task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if task.cancelled():
        return False
    task.result()
    return True
