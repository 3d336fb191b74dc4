"""The parent of a router's processes: starts them, restarts dead ones and passes signals on. It
also owns the listening sockets, so that connections waiting at a dead front end reach its
successor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sglang_sbs import __version__
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.supervision import socket_handover as handover
from sglang_sbs.router.supervision.parent_line import ChildLine
from sglang_sbs.router.supervision.socket_handover import listen
from sglang_sbs.router.supervision.stop_signals import end_on_signals, one_of

logger = logging.getLogger(__name__)

_LONGEST_TMPDIR = 70
_MARGIN_S = 15.0
"""Time beyond --shutdown-grace-period-secs for a child to end after SIGTERM."""


@dataclass(frozen=True)
class ChildTimes:
    first_pause_s: float = 0.1
    longest_pause_s: float = 10.0
    stable_s: float = 30.0
    """A child that lived this long is restarted without a pause."""
    ping_every_s: float = 2.0
    hung_s: float = 30.0
    """A child silent for this long is killed and restarted, because clients are waiting."""


_TIMES = ChildTimes()


class StartError(RuntimeError):
    """A child ended before it first served; it has logged the reason."""


@dataclass(eq=False)
class Child:
    """Runs one process, and replaces it when it ends."""

    name: str
    command: Callable[[], Sequence[str]]
    sockets: list[socket.socket]
    renew: Callable[[], list[socket.socket]] | None = None
    """Creates new listening sockets after failed starts closed the old ones."""
    times: ChildTimes = _TIMES
    facts: dict[str, Any] = field(default_factory=dict)
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    _line: ChildLine | None = None
    _process: asyncio.subprocess.Process | None = None
    _stopping: bool = False
    _last_signal: signal.Signals = signal.SIGTERM
    """Signal of :meth:`end`, for a process that is just being started then."""

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def keep(self) -> None:
        """Run the process, and again whenever it ends or cannot be started, until :meth:`end`.
        Raises: StartError, it ended before it ever served."""
        pause_s = 0.0
        ever_served = False
        while not self._stopping:
            started_s = time.monotonic()
            served, how = await self._run()
            ever_served = ever_served or served
            if self._stopping:
                return
            if not ever_served:
                raise StartError(f"{self.name} did not start ({how})")
            lived_s = time.monotonic() - started_s
            longer_s = min(self.times.longest_pause_s, 2 * pause_s or self.times.first_pause_s)
            pause_s = 0.0 if lived_s > self.times.stable_s else longer_s
            logger.error(
                "%s ended (%s) after %.1f s; restarting in %g s",
                *(self.name, how, lived_s, pause_s),
            )
            if not served:
                # After two failed starts in a row, its waiting connections go to the others.
                self._close_sockets()
            await asyncio.sleep(pause_s)

    async def _run(self) -> tuple[bool, str]:
        """Run one process; return whether it served and how it ended."""
        served = False
        try:
            with contextlib.closing(ChildLine()) as self._line:
                self._process = process = await self._spawn(self._line.child_socket)
                if self._stopping:
                    self._signal(self._last_signal)
                ended = asyncio.create_task(process.wait())
                with contextlib.suppress(EOFError):
                    self.facts = await self._line.ready()
                    served = True
                    self.serving.set()
                    logger.info("%s serves (pid %d)", self.name, process.pid)
                    await self._until_hung(self._line, ended)
                return served, _describe(await ended)
        except OSError as error:
            return False, f"could not be started: {error}"
        finally:
            self.serving.clear()

    async def _spawn(self, line: socket.socket) -> asyncio.subprocess.Process:
        """Start the process. Raises: OSError, the system lacks a process, memory, descriptor or
        port."""
        if self.renew is not None and not self.sockets:
            self.sockets = self.renew()
        fds = [sock.fileno() for sock in self.sockets]
        arguments = [*self.command(), "--sbs-parent-fd", str(line.fileno())]
        if fds:
            arguments += ["--sbs-listen-fds", ",".join(map(str, fds))]
        with line:  # the child has a copy
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "sglang_sbs.launch_router", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[line.fileno(), *fds],
                start_new_session=True,
            )

    async def _until_hung(self, line: ChildLine, ended: asyncio.Task[int]) -> None:
        """Wait until the process has ended, and kill it if it hangs."""
        every_s, hung_s = self.times.ping_every_s, self.times.hung_s
        answered_s = last_s = time.monotonic()
        while not (await asyncio.wait({ended}, timeout=every_s))[0]:
            now_s = time.monotonic()
            late, last_s = now_s - last_s > 2 * every_s, now_s
            if line.ping() or late:  # or this process itself was stopped
                answered_s = now_s
            elif now_s - answered_s > hung_s:
                logger.error("%s has not responded for %.0f s: killing it", self.name, hung_s)
                self._signal(signal.SIGKILL)
                return

    def let_go(self) -> None:
        if self._line is not None:
            self._line.let_go()

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop restarting, and send ``number`` to a running process."""
        self._stopping, self._last_signal = True, number
        self._close_sockets()
        self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _close_sockets(self) -> None:
        """Close this process's copies of the listening sockets; the child has its own."""
        for sock in self.sockets:
            sock.close()
        self.sockets = []


class Supervisor:
    """Runs a router of several processes: ``await run()``."""

    def __init__(
        self, argv: Sequence[str], options: RouterOptions, times: ChildTimes = _TIMES
    ) -> None:
        self._argv = list(argv)
        self._options = options
        self._times = times
        self._port = options.port
        self._stopping = asyncio.Event()
        self._scheduler: Child | None = None
        self._schedulers = 0
        self._front_ends: list[Child] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Serve until a signal or a successor ends it; return the exit code.
        Raises: OSError, the port is in use."""
        os.environ.setdefault("PYTHONUNBUFFERED", "1")
        end_on_signals(self._stopping)
        place = self._options.host, self._options.port
        predecessor = handover.Predecessor.call(*place) if self._options.take_over else None
        if predecessor is None:
            if self._options.take_over:
                logger.warning(
                    "no router to take port %d over from: starting without one", place[1]
                )
            handover.check_free(*place)
        # Unix socket paths are short, so avoid a deep TMPDIR.
        base = "/tmp" if len(tempfile.gettempdir()) > _LONGEST_TMPDIR else None
        with tempfile.TemporaryDirectory(prefix="sglang-sbs-", dir=base) as folder:  # mode 0700
            try:
                return await self._serve(Path(folder), predecessor)
            finally:
                await self._kill()

    async def _serve(self, folder: Path, predecessor: handover.Predecessor | None) -> int:
        options = self._options
        successors: asyncio.Server | None = None
        try:
            if options.role == "router":
                endpoint = f"ipc://{folder}/scheduler"
                command = partial(self._scheduler_command, endpoint)
                self._scheduler = Child("scheduler", command, [], times=self._times)
                await self._start([self._scheduler])
            else:
                endpoint = ",".join(options.several.schedulers)
            self._make_front_ends(endpoint, predecessor)
            await self._start(self._front_ends)
            if self._stopping.is_set():
                return 0
            self._log_start()
            try:
                path = handover.control_path(options.host, self._port)
                call = self._sockets, self._stopping.set
                successors = await handover.await_successors(path, *call)
            except OSError as error:
                logger.warning("a rolling restart is not possible: %s", error)
            if predecessor is not None:
                logger.info("taking over: the previous router may stop")
                predecessor.drain()
            await one_of(*self._tasks, unless=self._stopping)
            lost = [task for task in self._tasks if task.done()]
            for task in lost:
                text = "lost %s through a defect: the router stops"
                logger.error(text, task.get_name(), exc_info=task.exception())
        except StartError as error:
            logger.error("%s", error)
            return 1
        finally:
            if successors is not None:
                successors.close()
        code = await self._stop()
        return 1 if lost else code

    # Children ---------------------------------------------------------------------------------

    def _make_front_ends(self, endpoint: str, predecessor: handover.Predecessor | None) -> None:
        host, workers = self._options.host, self._options.workers
        inherited = predecessor.sockets if predecessor is not None else []
        if inherited:
            self._port = int(inherited[0].getsockname()[1])
        for number in range(workers):
            sockets = inherited[number::workers] or listen(host, self._port)
            self._port = int(sockets[0].getsockname()[1])
            command = partial(self._front_end_command, endpoint, number)
            renew = partial(listen, host, self._port)
            name, times = f"front end {number}", self._times
            self._front_ends.append(Child(name, command, sockets, renew, times))

    def _scheduler_command(self, endpoint: str) -> list[str]:
        """Return the scheduler's command line. A restarted scheduler gets a new event log, so that
        the former one is kept."""
        words = ["--sbs-role", "scheduler", "--sbs-scheduler", endpoint, "--frontends", "1"]
        if self._options.event_log and self._schedulers:
            words += ["--sbs-event-log", f"{self._options.event_log}.{self._schedulers}"]
        self._schedulers += 1
        return [*self._argv, *words]

    def _front_end_command(self, endpoint: str, number: int) -> list[str]:
        """Return a front end's command line, with its share of the router's limits, which are
        divided evenly. So admission needs no messages between processes."""
        options = self._options

        def share(whole: int) -> int:
            return whole // options.workers + (number < whole % options.workers)

        words = ["--sbs-role", "front-end", "--sbs-scheduler", endpoint, "--frontends", "1"]
        bodies_bytes = max(share(options.relay.max_bodies_bytes), options.max_payload_bytes)
        words += ["--port", str(self._port), "--sbs-max-bodies-size", str(bodies_bytes)]
        if options.max_concurrent_requests > 0:
            words += ["--max-concurrent-requests", str(share(options.max_concurrent_requests))]
            words += ["--queue-size", str(share(options.queue_size))]
            if options.rate_limit_per_s > 0:
                per_s = options.rate_limit_per_s / options.workers
                words += ["--rate-limit-tokens-per-second", repr(per_s)]
        if options.several.apart and options.prometheus_port:
            words += ["--prometheus-port", str(min(options.prometheus_port + number, 65535))]
        return [*self._argv, *words]

    async def _start(self, children: list[Child]) -> None:
        """Start children and wait until all serve, or a signal arrives. Raises: StartError, one
        ended before it served."""
        tasks = [asyncio.create_task(child.keep(), name=child.name) for child in children]
        self._tasks += tasks

        async def all_serve() -> None:
            for child in children:
                await child.serving.wait()

        serving = asyncio.create_task(all_serve())
        await one_of(serving, *tasks, unless=self._stopping)
        serving.cancel()
        for task in tasks:
            if task.done():
                task.result()

    def _sockets(self) -> list[socket.socket]:
        return [sock for child in self._front_ends for sock in child.sockets]

    def _log_start(self) -> None:
        options = self._options
        scheduler = f"schedulers at {','.join(options.several.schedulers)}"
        if (own := self._scheduler) is not None:
            endforward, metrics = own.facts["endforward"] or "nothing", own.facts["prometheus_port"]
            scheduler = f"metrics at :{metrics}, EndForward at {endforward}; scheduler {own.pid}"
        logger.info(
            "sglang-sbs %s: policy %s at %s:%d, %s, front ends %s",
            *(__version__, options.scheduler.policy, options.host, self._port, scheduler),
            " ".join(str(child.pid) for child in self._front_ends),
        )

    # The end ----------------------------------------------------------------------------------

    async def _stop(self) -> int:
        """Stop front ends, then the scheduler, which they need until their end. Return the exit
        code: 1 if front ends did not end in time, or at a second signal."""
        self._stopping.clear()
        logger.info(
            "stopping: front ends finish what they have, for at most %g s "
            "(--shutdown-grace-period-secs); a second Ctrl-C or SIGTERM ends them at once",
            self._options.shutdown_grace_s,
        )
        if self._scheduler is not None:
            self._scheduler.let_go()
        for child in self._front_ends:
            child.end()
        count = len(self._front_ends)
        draining = asyncio.create_task(asyncio.wait(self._tasks[-count:]))
        # Front ends wait for parked requests after the grace period (relay/parking.py).
        parked_s = self._options.relay.transfer_timeout_s
        limit_s = self._options.shutdown_grace_s + parked_s + _MARGIN_S
        await one_of(draining, unless=self._stopping, limit_s=limit_s)
        if not draining.done():
            logger.warning("front ends did not end in time, or a second signal came")
            return 1
        if self._scheduler is not None:
            self._scheduler.end()
            await asyncio.wait({self._tasks[0]}, timeout=_MARGIN_S)
        return 0

    async def _kill(self) -> None:
        for child in [*self._front_ends, *([self._scheduler] if self._scheduler else [])]:
            child.end(signal.SIGKILL)
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
