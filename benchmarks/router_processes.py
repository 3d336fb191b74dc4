"""The routers that are compared, as processes: started, weighed, ended."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import CHECKOUT
from benchmarks.demo.runs import router_process
from sglang_sbs.cluster.plan import ProcessPlan, router_argv
from sglang_sbs.cluster.spawn import SpawnedProcess
from tools.stand_ins.ports import free_ports

_END_S = 5.0
"""Longest time between the request to end and SIGKILL."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Contender:
    """A router; ``flags`` come after those that all PD routers understand."""

    name: str
    module: str
    flags: tuple[str, ...]
    ready_path: str = "/readiness"
    ours: bool = False
    """From this package; needs the tokenizer to count tokens, and takes EndForward."""
    library: str = ""
    """The package that decides, where that is not the one that is run."""
    tokenizes: bool = False
    tls: bool = False
    """Whether it serves over TLS."""
    wrapper: tuple[str, ...] = ()
    """A command that runs the one behind it, as ``prlimit`` does."""

    @property
    def package(self) -> str:
        return self.library or self.module.partition(".")[0]

    @property
    def installed(self) -> bool:
        return find_spec(self.package) is not None

    def command(
        self,
        prefill: Iterable[tuple[str, int | None]],
        decode: Iterable[str],
        port: int,
        prometheus_port: int,
    ) -> list[str]:
        """Argv in front of engines at these URLs (prefill with bootstrap port), on loopback."""
        argv = router_argv(prefill, decode, self.module)
        argv += ["--host", "127.0.0.1", "--port", str(port)]
        argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(prometheus_port)]
        return [*self.wrapper, *argv, *self.flags]


_QUIET = ("--log-level", "warn", "--disable-retries", "--disable-circuit-breaker")


def contenders(workers: int) -> dict[str, Contender]:
    """Return the routers by name; ``workers`` is the number of processes of ours."""
    ours = ("--sbs-endforward-bind", "none", "--frontends", str(workers), *_QUIET)
    module = "sglang_sbs.launch_router"
    stock = "sglang_router.launch_router"
    every = (
        Contender("ours", module, ("--policy", "round_robin", *ours)),
        Contender("ours-sbs", module, ("--policy", "sbs", *ours)),
        Contender("rust", stock, ("--policy", "round_robin", *_QUIET)),
        Contender("mini_lb", stock, ("--mini-lb", "--policy", "random"), ready_path="/health"),
    )
    return {contender.name: contender for contender in every}


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except OSError:
        return []


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of these processes so far; one that has ended counts for nothing.

    From each process's CPU clock (``clock_getcpuclockid(3)``): the same as in ``/proc/PID/stat``,
    in nanoseconds instead of ticks of 10 ms.
    """
    total_s = 0.0
    for pid in pids:
        with suppress(OSError):
            total_s += time.clock_gettime(~pid << 3 | 2)
    return total_s


class Processes:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def pids(self) -> list[int]:
        found = [self.pid]
        for pid in found:
            found += _children(pid)
        return found

    def cpu_s(self) -> float:
        return cpu_s(self.pids())

    def resident_bytes(self) -> int:
        total = 0
        for pid in self.pids():
            with suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        return total


@dataclass(frozen=True, slots=True)
class Running:
    contender: Contender
    port: int
    processes: Processes
    idle_bytes: int
    """Resident before its first request."""


@asynccontextmanager
async def running(contender: Contender, prefill: int, decode: int) -> AsyncIterator[Running]:
    """The router in front of engines at these ports.

    Raises:
        RouterStartError: it does not get ready; with the end of its log.
    """
    port, metrics_port = free_ports(2)
    argv = contender.command([(_url(prefill), 8998)], [_url(decode)], port, metrics_port)
    argv += ["--worker-startup-check-interval", "1"]
    with TemporaryDirectory() as folder:
        async with serving(contender, argv, port, Path(folder) / "log") as process:
            processes = Processes(process.pid)
            yield Running(contender, port, processes, processes.resident_bytes())


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@asynccontextmanager
async def serving(
    contender: Contender, argv: Sequence[str], port: int, log: Path = Path(os.devnull)
) -> AsyncIterator[SpawnedProcess]:
    """Run the router of this command line, and yield its process once it is ready at its port.

    Raises:
        RouterStartError: it does not get ready; with the end of its log.
    """
    url = f"{'https' if contender.tls else 'http'}://127.0.0.1:{port}"
    plan = ProcessPlan(contender.name, tuple(argv), dict(os.environ), log)
    async with router_process(plan, url, (contender.ready_path,), _END_S) as process:
        yield process


@dataclass(frozen=True, slots=True)
class Helper:
    """A process of this checkout, talked to by its pipes."""

    pid: int
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader


@asynccontextmanager
async def helper(module: str, *words: str) -> AsyncIterator[Helper]:
    """Run ``python -m MODULE WORDS``, which is to end when its stdin does."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=CHECKOUT,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield Helper(process.pid, process.stdin, process.stdout)
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@asynccontextmanager
async def raw_engines(module: str = "benchmarks.raw_engine") -> AsyncIterator[tuple[int, int]]:
    """Run both engines of :mod:`.raw_engine`, or of a module like it, and yield the ports of
    prefill and decode."""
    async with helper(module) as engines:
        prefill, decode = map(int, (await engines.stdout.readline()).split())
        yield prefill, decode


async def set_pace(port: int, interval_s: float) -> None:
    """Seconds between two tokens of a stream from now on."""
    body = f'{{"interval_s": {interval_s}}}'
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST /pace HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    await reader.readline()
    writer.close()


def select(names: Sequence[str], workers: int) -> list[Contender]:
    """Raises: ValueError, naming those there are."""
    every = contenders(workers)
    for name in names:
        if name not in every:
            raise ValueError(f"no contender {name!r}; there are {', '.join(every)}")
    return [every[name] for name in names]
