"""Processes of :mod:`sglang_sbs.cluster` that tests and benchmarks break: stopped, killed, started
again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from sglang_sbs.cluster.local import LocalCluster
from sglang_sbs.cluster.spawn import SpawnedProcess
from sglang_sbs.cluster.supervise import ClusterSupervisor


class BreakableProcesses(ClusterSupervisor):
    def pid(self, name: str) -> int:
        """Process id of the process called `name`. Raises: KeyError."""
        return self._called(name).pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send `number` to the process called `name` and to its children. Raises: KeyError."""
        os.killpg(self.pid(name), number)

    async def kill(self, name: str) -> None:
        """SIGKILL the process called `name` with its children, wait for its end and forget it.
        Raises: KeyError."""
        killed = self._called(name)
        self.processes = tuple(process for process in self.processes if process is not killed)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(killed.pid, signal.SIGKILL)
        await asyncio.shield(killed.exited)

    def _called(self, name: str) -> SpawnedProcess:
        for process in self.processes:
            if process.name == name:
                return process
        raise KeyError(name)


class BreakableCluster(BreakableProcesses, LocalCluster):
    async def kill(self, name: str) -> None:
        """SIGKILL every process of the server called `name`, on all its nodes; returns when it is
        gone. Raises: KeyError."""
        await super().kill(name)
        for instance in self.instances:
            for follower in instance.followers if instance.name == name else ():
                await super().kill(follower.name)

    async def start_instance(self, name: str, flags: Sequence[str] = ()) -> None:
        """Start the planned instance `name` again, with more flags; returns when it is ready.
        Raises: KeyError, none was planned; ClusterStartError, it did not come up, or any process of
        the cluster had died or died meanwhile."""
        plan = {instance.name: instance for instance in self.instances}[name]
        followers = tuple(
            replace(follower, argv=(*follower.argv, *flags)) for follower in plan.followers
        )
        self._started_s = time.monotonic()
        await self._start(replace(plan, argv=(*plan.argv, *flags), followers=followers))
