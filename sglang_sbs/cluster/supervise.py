"""Supervises the processes of one cluster. Exactly those that were started are stopped, by the ids
recorded at their start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine
from typing import Any

from sglang_sbs.cluster.plan import ProcessPlan
from sglang_sbs.cluster.spawn import Spawn, SpawnedProcess, last_words, spawn_child


class ProcessDiedError(RuntimeError):
    def __init__(self, process: SpawnedProcess) -> None:
        self.name, self.returncode = process.name, process.exited.result()
        how = describe_exit(self.returncode)
        super().__init__(f"{self.name} ended by itself ({how}). {last_words(process.log_path)}")


def describe_exit(returncode: int) -> str:
    """Describe a return code: `exit code 3` or `killed by SIGKILL`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


class ClusterSupervisor:
    def __init__(self) -> None:
        self.processes: tuple[SpawnedProcess, ...] = ()
        """Processes that were started and not yet stopped."""
        self._watched: list[SpawnedProcess] = []

    async def start(self, plan: ProcessPlan, spawn: Spawn = spawn_child) -> SpawnedProcess:
        """Start and supervise `plan`. Raises: SpawnError, it could not be started."""
        process = await spawn(plan)
        self.processes += (process,)
        return process

    def watch(self, process: SpawnedProcess) -> None:
        """Detect the death of `process`, which is stopped by another object and not by
        :meth:`stop`."""
        self._watched.append(process)

    async def unless_one_dies(self, *waits: Coroutine[Any, Any, object]) -> None:
        """Run `waits` until all have ended. Raises: the first of their exceptions;
        ProcessDiedError, a process of the cluster has ended unexpectedly."""
        exits = {process.exited: process for process in (*self._watched, *self.processes)}
        pending: set[asyncio.Task[Any]] = {asyncio.create_task(wait) for wait in waits}
        try:
            while pending:
                done, _ = await asyncio.wait(
                    {*exits, *pending}, return_when=asyncio.FIRST_COMPLETED
                )
                for ended in done & exits.keys():
                    raise ProcessDiedError(exits[ended])
                pending -= done
                for finished in done:
                    finished.result()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def stop(self, grace_s: float) -> list[str]:
        """Stop what was started: SIGTERM to each, after `grace_s` SIGKILL to what is left of it and
        of its process group. Returns the names of those that had to be killed."""
        for process in reversed(self.processes):
            if not process.exited.done():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
        waiting = [process.exited for process in self.processes]
        if waiting:
            await asyncio.wait(waiting, timeout=grace_s)
        killed = []
        for process in self.processes:
            if not process.exited.done():
                killed.append(process.name)
            # Repeat it after the leader has ended: its children may be left in the group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if waiting:
            await asyncio.wait(waiting, timeout=grace_s)
        self.processes = ()
        return killed
