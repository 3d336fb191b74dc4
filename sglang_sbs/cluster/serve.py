"""A local cluster in the foreground: up, something done with it until a signal, down again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable

from sglang_sbs.cluster.local import ENGINE_STOP_GRACE_S, ClusterStartError, LocalCluster
from sglang_sbs.cluster.plan import ClusterPlan
from sglang_sbs.cluster.progress import show_progress
from sglang_sbs.cluster.spawn import SpawnError


async def serve_until_stopped(
    plan: ClusterPlan,
    startup_timeout_s: float,
    meanwhile: Callable[[LocalCluster], Awaitable[None]],
) -> int:
    """Bring the cluster up, run ``meanwhile`` until SIGINT, SIGTERM or a death, stop it.

    ``meanwhile`` is cancelled at the end; when it returns by itself, the cluster serves on. What it
    raises is raised here once everything has stopped. Further signals while the cluster stops
    change nothing: stopping is bounded, and leaves no process behind.

    Returns:
        The exit code: 0 after a signal, 1 if the cluster did not start or a process of it died.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for handled in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(handled, stop.set)
    with show_progress(plan) as on_progress:
        cluster = LocalCluster(plan, startup_timeout_s, on_progress)
        stopped = asyncio.create_task(stop.wait())
        entering = asyncio.create_task(cluster.__aenter__())
        await asyncio.wait({stopped, entering}, return_when=asyncio.FIRST_COMPLETED)
        if not entering.done():
            entering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await entering
            return 0
        try:
            await entering
        except (ClusterStartError, SpawnError) as error:
            print(f"The cluster did not start. {error}", file=sys.stderr)
            return 1
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(cluster)
        death = asyncio.create_task(cluster.wait_for_death())
        use = asyncio.ensure_future(meanwhile(cluster))
        try:
            await asyncio.wait({stopped, death, use}, return_when=asyncio.FIRST_COMPLETED)
            if use.done():
                use.result()
                await asyncio.wait({stopped, death}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            use.cancel()
            await asyncio.gather(use, return_exceptions=True)
        if death.done():
            print(death.result(), file=sys.stderr)
            return 1
        death.cancel()
        print(f"Stopping; this takes up to {ENGINE_STOP_GRACE_S:.0f} s", flush=True)
        return 0
