"""CPU engines as a cluster plans and starts them (`sglang_sbs.cluster`)."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_sbs.cluster.plan import ProcessPlan, Role
from sglang_sbs.cluster.spawn import SpawnedProcess, SpawnError, execute, last_words
from tools.cpu_engine.environment import (
    CPU_DECODE_FLAGS,
    CPU_ENGINE_FLAGS,
    CPU_PD_FLAGS,
    cpu_engine_environment,
)
from tools.cpu_engine.virtual_gpu import VirtualGpuCost

CPU_MAX_TOTAL_TOKENS = 131072
CPU_MAX_RUNNING_REQUESTS_PER_RANK = 128


@dataclass(frozen=True)
class CpuEngines:
    """For `ClusterOptions.cpu`. Without a cost of passes the model is really computed."""

    virtual_gpu: VirtualGpuCost | None = None

    @classmethod
    def from_flag(cls, virtual_gpu: str | None) -> CpuEngines:
        """Return engines with the cost in ``--virtual-gpu JSON``; None: without it. Raises:
        ValueError."""
        return cls(None if virtual_gpu is None else VirtualGpuCost.from_json(virtual_gpu))

    def environment(self, processes: int, inherited: Mapping[str, str]) -> dict[str, str]:
        return cpu_engine_environment(processes, self.virtual_gpu, inherited)

    def flags(self, role: Role, ranks: int) -> list[str]:
        running = CPU_MAX_RUNNING_REQUESTS_PER_RANK * ranks
        flags = [*CPU_ENGINE_FLAGS, "--max-total-tokens", str(CPU_MAX_TOTAL_TOKENS)]
        flags += ["--max-running-requests", str(running)]
        if role is not Role.UNIFIED:
            flags += CPU_PD_FLAGS
        if role is Role.DECODE:
            flags += CPU_DECODE_FLAGS
        return flags

    async def forker(self, environment: Mapping[str, str], log_path: Path) -> Nursery:
        return await Nursery.start(environment, log_path)


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
        argv = (sys.executable, "-m", "tools.cpu_engine.nursery")
        return cls(await execute(argv, environment, log_path, piped=True), log_path)

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


def _settle(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)
