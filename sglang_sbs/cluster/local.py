"""`LocalCluster`: the planned processes as an async context manager."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from sglang_sbs.cluster.plan import ClusterPlan, CpuEngines, InstancePlan, ProcessPlan, ServerPlan
from sglang_sbs.cluster.readiness import (
    ENGINE_READINESS_PATHS,
    ROUTER_READINESS_PATHS,
    NotReadyError,
    freeze_gc,
    wait_until_ready,
)
from sglang_sbs.cluster.spawn import Forker, Spawn, last_words, spawn_child
from sglang_sbs.cluster.supervise import ClusterSupervisor, ProcessDiedError

ENGINE_STOP_GRACE_S = 20.0
DEFAULT_STARTUP_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Progress:
    """A step of the start: process `name` reached `state`, `elapsed_s` seconds after the start."""

    name: str
    state: str
    elapsed_s: float


class ClusterStartError(RuntimeError):
    """The cluster did not start; all its processes have been stopped."""


class LocalCluster(ClusterSupervisor):
    """A running cluster. Entering returns when every server is ready and raises `ClusterStartError`
    if one is not. Leaving stops everything that was started, and only that."""

    def __init__(
        self,
        plan: ClusterPlan,
        startup_timeout_s: float = DEFAULT_STARTUP_TIMEOUT_S,
        on_progress: Callable[[Progress], None] = lambda _progress: None,
    ) -> None:
        super().__init__()
        self.plan, self.instances, self.router = plan, plan.instances, plan.router
        self._startup_timeout_s = startup_timeout_s
        self._on_progress = on_progress
        self._nursery: Forker | None = None
        self._started_s = 0.0

    async def __aenter__(self) -> Self:
        self._started_s = time.monotonic()
        self.plan.log_dir.mkdir(parents=True, exist_ok=True)
        try:
            if self.plan.cpu is not None:
                await self._open_nursery(self.plan.cpu)
            await self._start(*self.instances)
            if self.router is not None:
                await self._start(self.router)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self._stop()

    async def serve(self, meanwhile: Coroutine[Any, Any, object]) -> None:
        """Run ``meanwhile``, and keep serving after its end. Raises: its exceptions;
        ProcessDiedError."""
        await self.unless_one_dies(meanwhile, asyncio.Event().wait())

    async def _open_nursery(self, cpu: CpuEngines) -> None:
        self._report("nursery", "importing SGLang")
        log_path = self.plan.log_dir / "nursery.log"
        self._nursery = await cpu.forker(self.plan.environment, log_path)
        await self._nursery.ready
        self.watch(self._nursery.itself)
        self._report("nursery", "ready")

    async def _start(self, *servers: ServerPlan) -> None:
        """Start servers, and instances on all their nodes; returns when they are ready. Raises:
        ClusterStartError, one is not ready, or a process of the cluster died."""
        for server in servers:
            spawn: Spawn = spawn_child
            nodes: list[ProcessPlan] = [server]
            if isinstance(server, InstancePlan):
                spawn = self._nursery.spawn if self._nursery is not None else spawn_child
                nodes += server.followers
            for process in nodes:
                await self.start(process, spawn)
                self._report(process.name, "starting")
        async with aiohttp.ClientSession() as session:
            try:
                await self.unless_one_dies(
                    *(self._until_ready(session, server) for server in servers)
                )
            except ProcessDiedError as error:
                raise ClusterStartError(str(error)) from error

    async def _until_ready(self, session: aiohttp.ClientSession, server: ServerPlan) -> None:
        engine = server if isinstance(server, InstancePlan) else None
        paths = ENGINE_READINESS_PATHS if engine else ROUTER_READINESS_PATHS
        for url in engine.server_urls if engine else (server.url,):
            left_s = self._startup_timeout_s - (time.monotonic() - self._started_s)
            try:
                await wait_until_ready(
                    session, url, paths, left_s, engine.keys.api if engine else ""
                )
            except NotReadyError as error:
                text = f"{server.name}: {error}. {last_words(server.log_path)}"
                raise ClusterStartError(text) from error
        # If ranks serve HTTP themselves, there is no Python server to freeze.
        if engine and self.plan.cpu is not None and engine.rank_servers == 1:
            await freeze_gc(session, server.url, engine.keys.operator)
        self._report(server.name, "ready")

    async def _stop(self) -> None:
        for process in self.processes:
            self._report(process.name, "stopping")
        # A second Ctrl-C must not leave processes behind.
        await asyncio.shield(self._stop_all())

    async def _stop_all(self) -> None:
        for name in await self.stop(ENGINE_STOP_GRACE_S):
            self._report(name, "killed")
        if self._nursery is not None:
            with contextlib.suppress(ProcessLookupError):
                await self._nursery.close()

    def _report(self, name: str, state: str) -> None:
        self._on_progress(Progress(name, state, time.monotonic() - self._started_s))
