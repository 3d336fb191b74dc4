"""Starting one process: as a child of this one, or forked by the CPU engines' nursery.

Every process leads its own process group (pgid == pid) and is ended by the kernel if its parent
dies.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sglang_sbs.cluster.logs import last_log_lines
from sglang_sbs.cluster.plan import ProcessPlan
from sglang_sbs.testing.cpu_engine.nursery import die_with_parent

NURSERY_MODULE = "sglang_sbs.testing.cpu_engine.nursery"


class SpawnError(RuntimeError):
    """A process could not be started."""


@dataclass(frozen=True)
class SpawnedProcess:
    """A started process. `exited` resolves to its return code (negative: -signal)."""

    name: str
    pid: int
    log_path: Path
    exited: asyncio.Future[int]


class Spawner(Protocol):
    async def spawn(self, plan: ProcessPlan) -> SpawnedProcess:
        """Start `plan` and return once it has a pid.

        Raises:
            SpawnError: it could not be started.
        """


class ChildSpawner:
    def __init__(self) -> None:
        self._waiters: set[asyncio.Task[None]] = set()

    async def spawn(self, plan: ProcessPlan) -> SpawnedProcess:
        """Start `plan` as a child of this process, with its output in its log file."""
        try:
            with plan.log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *plan.argv,
                    env=dict(plan.environment),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
        except OSError as error:
            raise SpawnError(f"cannot start {plan.name} ({plan.argv[0]}): {error}") from error
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def wait() -> None:
            returncode = await process.wait()
            if not exited.done():
                exited.set_result(returncode)

        task = asyncio.create_task(wait(), name=f"wait for {plan.name}")
        self._waiters.add(task)
        task.add_done_callback(self._waiters.discard)
        return SpawnedProcess(plan.name, process.pid, plan.log_path, exited)


class NurserySpawner:
    """Has CPU engines forked from one process that has imported SGLang already."""

    def __init__(self, environment: Mapping[str, str], log_path: Path) -> None:
        self._environment = environment
        self._log_path = log_path
        self._nursery: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._starting: dict[str, asyncio.Future[int]] = {}
        self._exits: dict[str, asyncio.Future[int]] = {}

    async def open(self) -> SpawnedProcess:
        """Start the nursery and wait until it has imported SGLang; the nursery process.

        Raises:
            SpawnError: it ended before; the message has its last log lines.
        """
        with self._log_path.open("ab") as log:
            self._nursery = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                NURSERY_MODULE,
                env=dict(self._environment),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self._ready = asyncio.get_running_loop().create_future()
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read_events(ended), name="nursery events")
        await self._ready
        return SpawnedProcess("nursery", self._nursery.pid, self._log_path, ended)

    async def spawn(self, plan: ProcessPlan) -> SpawnedProcess:
        """Fork `plan`, whose command line is `python -m module …`, from the nursery."""
        if self._nursery is None or self._nursery.stdin is None:
            raise SpawnError(f"cannot start {plan.name}: the nursery is not open")
        _python, dash_m, *module_argv = plan.argv
        if dash_m != "-m":
            raise SpawnError(f"cannot fork {plan.name}: its command line is not `python -m module`")
        loop = asyncio.get_running_loop()
        started = self._starting[plan.name] = loop.create_future()
        exited = self._exits[plan.name] = loop.create_future()
        request = {
            "name": plan.name,
            "argv": module_argv,
            "environment": dict(plan.environment),
            "log_path": str(plan.log_path),
        }
        try:
            self._nursery.stdin.write(json.dumps(request).encode() + b"\n")
            await self._nursery.stdin.drain()
        except ConnectionError as error:
            raise SpawnError(f"cannot start {plan.name}: the nursery has ended") from error
        return SpawnedProcess(plan.name, await started, plan.log_path, exited)

    async def close(self) -> None:
        """End the nursery and with it every engine still running."""
        if self._nursery is None or self._nursery.stdin is None:
            return
        self._nursery.stdin.close()
        await self._nursery.wait()
        if self._reader is not None:
            await self._reader
        self._nursery = None

    async def _read_events(self, ended: asyncio.Future[int]) -> None:
        assert self._nursery is not None
        assert self._nursery.stdout is not None
        assert self._ready is not None
        async for line in self._nursery.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                self._ready.set_result(None)
            elif event["event"] == "started":
                self._starting.pop(event["name"]).set_result(event["pid"])
            else:
                exited = self._exits.pop(event["name"])
                if not exited.done():
                    exited.set_result(event["returncode"])
        returncode = await self._nursery.wait()
        error = SpawnError(
            f"the CPU engine nursery ended with exit code {returncode}. "
            f"Last lines of {self._log_path}:\n{last_log_lines(self._log_path)}"
        )
        if not self._ready.done():
            self._ready.set_exception(error)
        for started in self._starting.values():
            started.set_exception(error)
        ended.set_result(returncode)
        # Engines end with their nursery: it signals them, or the kernel does.
        for exited in self._exits.values():
            if not exited.done():
                exited.set_result(-signal.SIGTERM)


def _end_with_parent() -> None:
    die_with_parent(signal.SIGTERM)
