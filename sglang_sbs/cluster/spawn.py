"""Starts a process. It leads its own process group (pgid == pid), and the kernel ends it if its
parent dies."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process, create_subprocess_exec
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from sglang_sbs.cluster.plan import ProcessPlan

LAST_LOG_LINES = 20
_LAST_LOG_BYTES = 16384
_PR_SET_PDEATHSIG = 1


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
        process = await execute(plan.argv, plan.environment, plan.log_path)
    except OSError as error:
        raise SpawnError(f"cannot start {plan.name} ({plan.argv[0]}): {error}") from error
    exited = asyncio.create_task(process.wait(), name=f"wait for {plan.name}")
    return SpawnedProcess(plan.name, process.pid, plan.log_path, exited)


def die_with_parent(signal_number: int) -> None:
    """Let the kernel send this process `signal_number` when its parent ends (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number)


async def execute(
    argv: Sequence[str], environment: Mapping[str, str], log_path: Path, *, piped: bool = False
) -> Process:
    """Start a process. Its output goes to the log. With ``piped``, only its errors do, and the
    caller gets pipes to its input and from its output."""
    with log_path.open("ab") as log:
        return await create_subprocess_exec(
            *argv,
            env=dict(environment),
            stdin=PIPE if piped else DEVNULL,
            stdout=PIPE if piped else log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )


class Forker(Protocol):
    """A process that has already imported SGLang and forks engines."""

    itself: SpawnedProcess
    ready: asyncio.Future[None]
    """Done once the process has imported SGLang. Raises: SpawnError, the process ended first."""

    async def spawn(self, plan: ProcessPlan) -> SpawnedProcess: ...

    async def close(self) -> None:
        """End the forking process, together with all engines that it forked."""


def last_log_lines(log_path: Path, count: int = LAST_LOG_LINES) -> str:
    """Return the last `count` lines of a log, indented, or a remark if there are none."""
    try:
        with log_path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LAST_LOG_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        lines = []
    return "\n".join(f"  {line}" for line in lines) or "  (empty)"


def last_words(log_path: Path) -> str:
    """Return the end of an error message about a process: its last log lines and their source."""
    return f"Last lines of {log_path}:\n{last_log_lines(log_path)}"
