"""Starting one process: as a child of this one, or forked by the CPU engines' nursery.

Every process leads its own process group (pgid == pid) and is ended by the kernel if its parent
dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process, create_subprocess_exec
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sglang_sbs.cluster.plan import ProcessPlan
from sglang_sbs.testing.cpu_engine.nursery import die_with_parent

LAST_LOG_LINES = 20
_LAST_LOG_BYTES = 16384
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


Spawn = Callable[[ProcessPlan], Awaitable[SpawnedProcess]]
"""Starts a process and returns once it has a pid. Raises: SpawnError, it could not be started."""


async def spawn_child(plan: ProcessPlan) -> SpawnedProcess:
    """Start `plan` as a child of this process, with its output in its log file."""
    try:
        process = await _execute(plan.argv, plan.environment, plan.log_path)
    except OSError as error:
        raise SpawnError(f"cannot start {plan.name} ({plan.argv[0]}): {error}") from error
    exited = asyncio.create_task(process.wait(), name=f"wait for {plan.name}")
    return SpawnedProcess(plan.name, process.pid, plan.log_path, exited)


async def _execute(
    argv: Sequence[str], environment: Mapping[str, str], log_path: Path, *, speaks: bool = False
) -> Process:
    """Its output goes to the log; of one that ``speaks``, only its errors."""
    with log_path.open("ab") as log:
        return await create_subprocess_exec(
            *argv,
            env=dict(environment),
            stdin=PIPE if speaks else DEVNULL,
            stdout=PIPE if speaks else log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )


class Nursery:
    """Has CPU engines forked from one process that has imported SGLang already."""

    def __init__(self, process: Process, log_path: Path) -> None:
        self._process = process
        self._log_path = log_path
        self._starting: dict[str, asyncio.Future[int]] = {}
        self._exits: dict[str, asyncio.Future[int]] = {}
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """It has imported SGLang. Raises: SpawnError, it ended before."""
        self._events = asyncio.create_task(self._read_events(), name="nursery events")
        self.itself = SpawnedProcess("nursery", process.pid, log_path, self._events)

    @classmethod
    async def start(cls, environment: Mapping[str, str], log_path: Path) -> Nursery:
        argv = (sys.executable, "-m", NURSERY_MODULE)
        return cls(await _execute(argv, environment, log_path, speaks=True), log_path)

    async def spawn(self, plan: ProcessPlan) -> SpawnedProcess:
        """Fork `plan`, whose command line is `python -m module …`, from the nursery."""
        assert self._process.stdin is not None
        loop = asyncio.get_running_loop()
        started = self._starting[plan.name] = loop.create_future()
        exited = self._exits[plan.name] = loop.create_future()
        request = {
            "name": plan.name,
            "argv": plan.argv[2:],
            "environment": dict(plan.environment),
            "log_path": str(plan.log_path),
        }
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise SpawnError(f"cannot start {plan.name}: the nursery has ended") from error
        return SpawnedProcess(plan.name, await started, plan.log_path, exited)

    async def close(self) -> None:
        """End the nursery and with it every engine still running."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._events

    async def _read_events(self) -> int:
        """Until the nursery ends; its return code."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                _settle(self.ready, None)
            elif event["event"] == "started":
                _settle(self._starting.pop(event["name"]), event["pid"])
            else:
                _settle(self._exits.pop(event["name"]), event["returncode"])
        returncode = await self._process.wait()
        why = f"the CPU engine nursery ended with exit code {returncode}"
        error = SpawnError(f"{why}. {last_words(self._log_path)}")
        pending: list[asyncio.Future[Any]] = [self.ready, *self._starting.values()]
        for waiting in pending:
            if not waiting.done():
                waiting.set_exception(error)
        # Engines end with their nursery: it signals them, or the kernel does.
        for exited in self._exits.values():
            _settle(exited, -signal.SIGTERM)
        return returncode


def last_log_lines(log_path: Path, count: int = LAST_LOG_LINES) -> str:
    """The last `count` lines of a log, indented; says so when there are none."""
    try:
        with log_path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LAST_LOG_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        lines = []
    return "\n".join(f"  {line}" for line in lines) or "  (empty)"


def last_words(log_path: Path) -> str:
    """The end of an error message about a process: its last lines, and where they are from."""
    return f"Last lines of {log_path}:\n{last_log_lines(log_path)}"


def _settle(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)
