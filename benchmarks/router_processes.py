"""The routers that are compared, as processes: started, weighed, ended.

Owns their command lines and what the kernel says of their CPU time and memory. Must not know what
they are asked to do.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import CHECKOUT

_START_S = 60.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Contender:
    """``flags`` come after those that all PD routers understand."""

    name: str
    module: str
    flags: tuple[str, ...]
    ready_path: str = "/readiness"


_QUIET = ("--log-level", "warn", "--disable-retries", "--disable-circuit-breaker")


def contenders(workers: int) -> dict[str, Contender]:
    """By name; ``workers`` are the processes of ours."""
    ours = ("--sbs-endforward-bind", "none", "--workers", str(workers), *_QUIET)
    module = "sglang_sbs.launch_router"
    stock = "sglang_router.launch_router"
    every = (
        Contender("ours", module, ("--policy", "round_robin", *ours)),
        Contender("ours-sbs", module, ("--policy", "sbs", *ours)),
        Contender("rust", stock, ("--policy", "round_robin", *_QUIET)),
        Contender("mini_lb", stock, ("--mini-lb", "--policy", "random"), "/health"),
    )
    return {contender.name: contender for contender in every}


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except OSError:
        return []


class Processes:
    """A process and all its descendants."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def pids(self) -> list[int]:
        found = [self.pid]
        for pid in found:
            found += _children(pid)
        return found

    def cpu_s(self) -> float:
        """User and system time of all of them so far.

        From each process's CPU clock (``clock_getcpuclockid(3)``): the same as in
        ``/proc/PID/stat``, in nanoseconds instead of ticks of 10 ms.
        """
        total_s = 0.0
        for pid in self.pids():
            with suppress(OSError):
                total_s += time.clock_gettime(~pid << 3 | 2)
        return total_s

    def resident_bytes(self) -> int:
        total = 0
        for pid in self.pids():
            with suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        return total


@dataclass(frozen=True, slots=True)
class Running:
    """A router that is ready to serve."""

    contender: Contender
    port: int
    processes: Processes
    idle_bytes: int
    """Resident before its first request."""


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens at now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


@asynccontextmanager
async def running(contender: Contender, prefill: int, decode: int) -> AsyncIterator[Running]:
    """The router in front of engines at these ports.

    Raises:
        RuntimeError: it does not get ready; with the end of what it said.
    """
    port, metrics_port = free_ports(2)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", contender.module, "--pd-disaggregation"),
        *("--prefill", f"http://127.0.0.1:{prefill}", "8998"),
        *("--decode", f"http://127.0.0.1:{decode}"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--worker-startup-check-interval", "1", *contender.flags),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await until_ready(process, port, contender)
        processes = Processes(process.pid)
        yield Running(contender, port, processes, processes.resident_bytes())
    finally:
        await end_process(process)


async def until_ready(process: asyncio.subprocess.Process, port: int, contender: Contender) -> None:
    """Raises: RuntimeError, it does not get ready."""
    end_s = time.monotonic() + _START_S
    request = f"GET {contender.ready_path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    while time.monotonic() < end_s and process.returncode is None:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request.encode())
            line = await reader.readline()
            writer.close()
            if b" 200" in line:
                return
        await asyncio.sleep(0.1)
    what = "does not get ready" if process.returncode is None else "ended at its start"
    raise RuntimeError(f"{contender.name} ({contender.module}) {what}; run it by hand to see why")


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Its children go with it, or are killed by the ids they had."""
    descendants = Processes(process.pid).pids()[1:]
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(5.0):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for pid in descendants:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)


@asynccontextmanager
async def raw_engines(
    module: str = "benchmarks.raw_engine", folder: Path = CHECKOUT
) -> AsyncIterator[tuple[int, int]]:
    """A process with both engines of :mod:`.raw_engine`, or of a module like it in ``folder``.

    Yields: the ports of prefill and decode.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=folder,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        prefill, decode = map(int, (await process.stdout.readline()).split())
        yield prefill, decode
    finally:
        process.stdin.close()
        await end_process(process)


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
