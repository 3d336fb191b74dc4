"""The set of processes of one cluster: started, watched, stopped.

Notices the first that ends by itself, and stops exactly those that were started, by the ids
recorded at their start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from sglang_sbs.cluster.logs import last_log_lines
from sglang_sbs.cluster.plan import ProcessPlan
from sglang_sbs.cluster.spawn import SpawnedProcess, Spawner

__all__ = ["ProcessDiedError", "Supervisor", "describe_exit", "last_log_lines"]


class ProcessDiedError(RuntimeError):
    """A process of the cluster ended by itself."""

    def __init__(self, name: str, returncode: int, log_path: Path) -> None:
        self.name = name
        self.returncode = returncode
        self.log_path = log_path
        super().__init__(
            f"{name} ended by itself ({describe_exit(returncode)}). "
            f"Last lines of {log_path}:\n{last_log_lines(log_path)}"
        )


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

    async def start(self, plan: ProcessPlan, spawner: Spawner) -> SpawnedProcess:
        """Start `plan` through `spawner` and take charge of it.

        Raises:
            SpawnError: it could not be started.
        """
        process = await spawner.spawn(plan)
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
        dead = next(process for process in watched if process.exited.done())
        return ProcessDiedError(dead.name, dead.exited.result(), dead.log_path)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send `number` to the process called `name` and to its children.

        Raises:
            KeyError: no such process was started.
        """
        os.killpg(self.called(name).pid, number)

    async def kill(self, name: str) -> None:
        """SIGKILL the process called `name` with its children, wait for its end and forget it.

        Raises:
            KeyError: no such process was started.
        """
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
