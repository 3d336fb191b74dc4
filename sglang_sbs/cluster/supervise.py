"""The set of processes of one cluster: started, watched, stopped.

Exactly those that were started are stopped, by the ids recorded at their start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Sequence
from typing import Any

from sglang_sbs.cluster.plan import ProcessPlan
from sglang_sbs.cluster.spawn import Spawn, SpawnedProcess, last_words, spawn_child


class ProcessDiedError(RuntimeError):
    """A process of the cluster ended by itself."""

    def __init__(self, process: SpawnedProcess) -> None:
        self.name, self.returncode = process.name, process.exited.result()
        how = describe_exit(self.returncode)
        super().__init__(f"{self.name} ended by itself ({how}). {last_words(process.log_path)}")


async def unless_it_dies(waiting: Coroutine[Any, Any, object], process: SpawnedProcess) -> None:
    """Wait. Raises: ProcessDiedError, the process ended meanwhile."""
    task = asyncio.create_task(waiting)
    either: list[asyncio.Future[Any]] = [task, process.exited]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ProcessDiedError(process)
        task.result()
    finally:
        task.cancel()


def describe_exit(returncode: int) -> str:
    """A return code in words: `exit code 3` or `killed by SIGKILL`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


class Supervisor:
    def __init__(self) -> None:
        self._processes: list[SpawnedProcess] = []
        self._watched: list[SpawnedProcess] = []

    @property
    def processes(self) -> Sequence[SpawnedProcess]:
        """Everything started and not yet stopped."""
        return tuple(self._processes)

    async def start(self, plan: ProcessPlan, spawn: Spawn = spawn_child) -> SpawnedProcess:
        """Start `plan` and take charge of it. Raises: SpawnError, it could not be started."""
        process = await spawn(plan)
        self._processes.append(process)
        return process

    def watch(self, process: SpawnedProcess) -> None:
        """Notice the death of `process`, which someone else stops."""
        self._watched.append(process)

    async def first_death(self) -> ProcessDiedError:
        """Wait until a process ends by itself; the error that tells which, how and its last words.

        Sees only processes started before the call.
        """
        watched = [*self._watched, *self._processes]
        if not watched:
            await asyncio.Event().wait()
        await asyncio.wait(
            [process.exited for process in watched], return_when=asyncio.FIRST_COMPLETED
        )
        return ProcessDiedError(next(process for process in watched if process.exited.done()))

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send `number` to the process called `name` and to its children. Raises: KeyError."""
        os.killpg(self.called(name).pid, number)

    async def kill(self, name: str) -> None:
        """SIGKILL the process called `name` with its children, wait for its end and forget it.
        Raises: KeyError."""
        process = self.called(name)
        self._processes.remove(process)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.exited)

    def called(self, name: str) -> SpawnedProcess:
        """Raises: KeyError, no such process was started."""
        for process in self._processes:
            if process.name == name:
                return process
        raise KeyError(name)

    async def stop(self, grace_s: float) -> list[str]:
        """Stop what was started: SIGTERM to each, after `grace_s` SIGKILL to what is left of it.

        What is left are processes that did not end, and members of their process groups that
        outlived them. Returns the names of those that had to be killed.
        """
        for process in reversed(self._processes):
            if not process.exited.done():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
        waiting = [process.exited for process in self._processes]
        if waiting:
            await asyncio.wait(waiting, timeout=grace_s)
        killed = []
        for process in self._processes:
            if not process.exited.done():
                killed.append(process.name)
            # Also when the leader has ended: its children may be left, in the group it led.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if waiting:
            await asyncio.wait(waiting, timeout=grace_s)
        self._processes.clear()
        return killed
