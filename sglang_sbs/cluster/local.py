"""`LocalCluster`: the planned processes as one async context manager."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from sglang_sbs.cluster import readiness
from sglang_sbs.cluster.plan import ClusterPlan, InstancePlan, ServerPlan
from sglang_sbs.cluster.spawn import Nursery, Spawn, last_words, spawn_child
from sglang_sbs.cluster.supervise import ProcessDiedError, Supervisor, unless_it_dies

ENGINE_STOP_GRACE_S = 20.0
DEFAULT_STARTUP_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Progress:
    """A step of the start: `name` (a process) reached `state` `elapsed_s` after the start."""

    name: str
    state: str
    elapsed_s: float


class ClusterStartError(RuntimeError):
    """The cluster did not come up; nothing of it is left running."""


class LocalCluster:
    """A running cluster.

    ```python
    async with LocalCluster(plan_cluster(options, free_port_blocks(PORTS_PER_INSTANCE))) as cluster:
        print(cluster.plan.router.url, [instance.url for instance in cluster.instances])
        await cluster.wait_for_death()
    ```

    Entering returns when every server is ready and raises `ClusterStartError` if one is not.
    Leaving stops everything that was started, and only that.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        startup_timeout_s: float = DEFAULT_STARTUP_TIMEOUT_S,
        on_progress: Callable[[Progress], None] = lambda _progress: None,
    ) -> None:
        self.plan = plan
        self._startup_timeout_s = startup_timeout_s
        self._on_progress = on_progress
        self._supervisor = Supervisor()
        self._nursery: Nursery | None = None
        self._spawn: Spawn = spawn_child
        """Of engines."""
        self._started_s = 0.0

    @property
    def instances(self) -> tuple[InstancePlan, ...]:
        """The SGLang instances, prefill ones first."""
        return self.plan.instances

    @property
    def router(self) -> ServerPlan | None:
        """The router, if one was planned."""
        return self.plan.router

    def pid(self, name: str) -> int:
        """Process id of the server process called `name` (`prefill-0`, `router`, …). Raises:
        KeyError."""
        return self._supervisor.called(name).pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send `number` to every process of the server called `name`. Raises: KeyError."""
        self._supervisor.signal(name, number)

    async def kill(self, name: str) -> None:
        """SIGKILL every process of the server called `name`, on all its nodes; returns when it is
        gone. Raises: KeyError."""
        await self._supervisor.kill(name)
        for instance in self.plan.instances:
            for follower in instance.followers if instance.name == name else ():
                await self._supervisor.kill(follower.name)

    async def start_instance(self, name: str, flags: Sequence[str] = ()) -> None:
        """Start the planned instance `name` again, with more flags; returns when it is ready.
        Raises: KeyError, none was planned; ClusterStartError, it did not come up."""
        plan = {instance.name: instance for instance in self.plan.instances}[name]
        self._started_s = time.monotonic()
        process, *_ = [
            await self._supervisor.start(
                dataclasses.replace(one, argv=(*one.argv, *flags)), self._spawn
            )
            for one in (plan, *plan.followers)
        ]
        self._report(name, "starting")
        async with aiohttp.ClientSession() as session:
            try:
                await unless_it_dies(self._wait_for_engine(session, plan), process)
            except ProcessDiedError as error:
                raise ClusterStartError(str(error)) from error

    async def __aenter__(self) -> Self:
        self._started_s = time.monotonic()
        self.plan.log_dir.mkdir(parents=True, exist_ok=True)
        try:
            await self._start_engines()
            if self.plan.router is not None:
                await self._start_router(self.plan.router)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self._stop()

    async def wait_for_death(self) -> ProcessDiedError:
        """Wait until a server ends by itself; what is known about its end."""
        return await self._supervisor.first_death()

    async def _start_engines(self) -> None:
        if self.plan.fork_engines:
            self._report("nursery", "importing SGLang")
            log_path = self.plan.log_dir / "nursery.log"
            nursery = self._nursery = await Nursery.start(self.plan.nursery_environment, log_path)
            await nursery.ready
            self._supervisor.watch(nursery.itself)
            self._report("nursery", "ready")
            self._spawn = nursery.spawn
        for instance in self.plan.instances:
            for process in (instance, *instance.followers):
                await self._supervisor.start(process, self._spawn)
                self._report(process.name, "starting")
        async with aiohttp.ClientSession() as session:
            await self._unless_one_dies(
                *(self._wait_for_engine(session, instance) for instance in self.plan.instances)
            )

    async def _wait_for_engine(self, session: aiohttp.ClientSession, plan: InstancePlan) -> None:
        for url in plan.server_urls:
            await self._wait_for(session, plan, readiness.ENGINE_READINESS_PATHS, url)
        # Where ranks serve HTTP themselves there is no Python server, and nothing to freeze.
        if self.plan.fork_engines and plan.rank_servers == 1:
            await readiness.freeze_gc(session, plan.url)
        self._report(plan.name, "ready")

    async def _start_router(self, plan: ServerPlan) -> None:
        await self._supervisor.start(plan)
        self._report(plan.name, "starting")
        async with aiohttp.ClientSession() as session:
            await self._unless_one_dies(
                self._wait_for(session, plan, readiness.ROUTER_READINESS_PATHS)
            )
        self._report(plan.name, "ready")

    async def _wait_for(
        self,
        session: aiohttp.ClientSession,
        plan: ServerPlan,
        paths: tuple[str, ...],
        url: str = "",
    ) -> None:
        left_s = self._startup_timeout_s - (time.monotonic() - self._started_s)
        try:
            await readiness.wait_until_ready(session, url or plan.url, paths, left_s)
        except readiness.NotReadyError as error:
            raise ClusterStartError(f"{plan.name}: {error}. {last_words(plan.log_path)}") from error

    async def _unless_one_dies(self, *waits: Coroutine[Any, Any, None]) -> None:
        """Run `waits` to their ends, or raise what failed first: one of them, or a process."""
        death = asyncio.create_task(self._supervisor.first_death())
        pending: set[asyncio.Task[Any]] = {asyncio.create_task(wait) for wait in waits}
        try:
            while pending:
                done, pending = await asyncio.wait(
                    {death, *pending}, return_when=asyncio.FIRST_COMPLETED
                )
                pending.discard(death)
                if death in done:
                    raise ClusterStartError(str(death.result()))
                for finished in done:
                    finished.result()
        finally:
            for task in (death, *pending):
                task.cancel()
            await asyncio.gather(death, *pending, return_exceptions=True)

    async def _stop(self) -> None:
        for process in self._supervisor.processes:
            self._report(process.name, "stopping")
        # A second Ctrl-C must not leave processes behind.
        await asyncio.shield(self._stop_all())

    async def _stop_all(self) -> None:
        killed = await self._supervisor.stop(ENGINE_STOP_GRACE_S)
        for name in killed:
            self._report(name, "killed")
        if self._nursery is not None:
            with contextlib.suppress(ProcessLookupError):
                await self._nursery.close()

    def _report(self, name: str, state: str) -> None:
        self._on_progress(Progress(name, state, time.monotonic() - self._started_s))
