"""The supervisor without real processes: starts that fail, and what becomes of the others."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from router_harness import until

from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.supervision import supervisor as supervisor_module
from sglang_sbs.router.supervision.parent_line import ChildLine, report_to_parent
from sglang_sbs.router.supervision.socket_handover import (
    Predecessor,
    await_successors,
    control_path,
    listen,
)
from sglang_sbs.router.supervision.supervisor import Child, ChildTimes, Supervisor

FLAGS = [
    *("--prefill", "http://p0:1", "8998", "--decode", "http://d0:1"),
    *("--host", "127.0.0.1", "--port", "0", "--workers", "2"),
]
FACTS = orjson.dumps({"prometheus_port": 1, "endforward": None}) + b"\n"


class FakeProcess:
    """Serves from the start until it is asked to end."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.signals: list[int] = []
        self._ended = asyncio.Event()
        self._line = socket.socket(fileno=os.dup(fd))
        self._line.send(FACTS)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.end(number)

    def end(self, number: int) -> None:
        if self.returncode is None:
            self.returncode = -number
            self._line.close()
            self._ended.set()


class System:
    """The system interface of the supervisor: processes, socket pairs and listening sockets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.no_process: list[Exception] = []
        """Failures of the next starts."""
        self.no_socket: list[Exception] = []
        """Failures of the next tries to listen."""
        self.started: list[FakeProcess] = []
        self.lines: list[ChildLine] = []
        self.listening: list[socket.socket] = []
        monkeypatch.setattr(asyncio, "create_subprocess_exec", self._start)
        monkeypatch.setattr(supervisor_module, "ChildLine", self._pair)
        monkeypatch.setattr(supervisor_module, "listen", self._listen)

    async def _start(self, *_command: str, pass_fds: list[int], **_: Any) -> FakeProcess:
        if self.no_process:
            raise self.no_process.pop(0)
        self.started.append(FakeProcess(1000 + len(self.started), pass_fds[0]))
        return self.started[-1]

    def _pair(self) -> ChildLine:
        self.lines.append(ChildLine())
        return self.lines[-1]

    def _listen(self, host: str, port: int) -> list[socket.socket]:
        if self.no_socket:
            raise self.no_socket.pop(0)
        sockets = listen(host, port)
        self.listening += sockets
        return sockets

    @property
    def open_sockets(self) -> int:
        """Here, of all that were ever made."""
        ends = [end for line in self.lines for end in (line._socket, line.child_socket)]
        return sum(sock.fileno() >= 0 for sock in ends + self.listening)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return System(monkeypatch)


def make_supervisor() -> Supervisor:
    return Supervisor(FLAGS, parse_flags(FLAGS), ChildTimes(first_pause_s=0.001))


async def start(system: System) -> tuple[Supervisor, asyncio.Task[int]]:
    """A scheduler and two front ends, in this order."""
    supervisor = make_supervisor()
    serving = asyncio.create_task(supervisor.run())
    await until(lambda: all_serve(supervisor) and supervisor._sockets())
    assert len(system.started) == 3
    return supervisor, serving


def all_serve(supervisor: Supervisor) -> bool:
    children = [supervisor._scheduler, *supervisor._front_ends]
    return len(children) == 3 and all(child and child.serving.is_set() for child in children)


@pytest.mark.parametrize("dies", [0, 2], ids=["the scheduler", "a front end"])
async def test_a_restart_that_fails_is_tried_again_and_the_others_go_on(
    system: System, caplog: pytest.LogCaptureFixture, dies: int
) -> None:
    supervisor, serving = await start(system)
    open_sockets = system.open_sockets
    system.no_process = [
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ]
    if dies:
        system.no_socket = [OSError(errno.EMFILE, "Too many open files")]
    failures = system.no_process + system.no_socket
    system.started[dies].end(signal.SIGKILL)
    await until(lambda: len(system.started) == 4 and all_serve(supervisor))
    assert not any(process.signals for process in system.started)
    ends = [line for line in caplog.messages if "; restarting in " in line]
    assert len(ends) == 1 + len(failures)
    assert "killed by SIGKILL" in ends[0]
    causes = "\n".join(ends)
    assert all(str(error) in causes for error in failures)
    pauses_s = [float(line.split()[-2]) for line in ends]
    assert pauses_s == pytest.approx([0.001 * 2**number for number in range(len(ends))])
    assert system.open_sockets == open_sockets
    supervisor._stopping.set()
    assert await serving == 0
    assert [process.signals for process in system.started[:3]].count([]) == 1
    assert system.open_sockets == 0


async def test_a_child_that_is_ended_while_it_starts_gets_the_signal(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child("front end 0", list, [])

    async def start(*command: str, **more: Any) -> FakeProcess:
        process = await system._start(*command, **more)
        child.end(signal.SIGINT)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    await asyncio.wait_for(child.keep(), 10)
    assert [process.signals for process in system.started] == [[signal.SIGINT]]


async def test_a_first_start_that_fails_ends_the_router_with_its_cause(
    system: System, caplog: pytest.LogCaptureFixture
) -> None:
    system.no_process = [OSError(errno.ENOMEM, "Cannot allocate memory")]
    assert await make_supervisor().run() == 1
    assert "scheduler did not start (could not be started: [Errno 12] Cannot" in caplog.text
    assert not system.started
    assert system.open_sockets == 0


@pytest.mark.parametrize("dies", [0, 2], ids=["the scheduler", "a front end"])
async def test_a_defect_ends_the_router_with_its_traceback_and_an_exit_code(
    system: System, caplog: pytest.LogCaptureFixture, dies: int
) -> None:
    _, serving = await start(system)
    system.no_process = [RuntimeError("nobody thought of this")]
    system.started[dies].end(signal.SIGKILL)
    assert await serving == 1
    (record,) = [record for record in caplog.records if record.exc_info]
    assert ("scheduler", "", "front end 1")[dies] in record.getMessage()
    assert "RuntimeError: nobody thought of this" in caplog.text
    others = [process for number, process in enumerate(system.started) if number != dies]
    assert all(process.signals[0] == signal.SIGTERM for process in others), "they may drain"
    assert system.open_sockets == 0


async def test_a_successor_cuts_off_no_router_that_ends_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second word of the kind ends what is in flight at once."""
    folder = tempfile.TemporaryDirectory()  # of a short name, as sockets need
    monkeypatch.setattr("tempfile.tempdir", folder.name)
    path = control_path("127.0.0.1", 1)
    drained: list[str] = []
    for ends_before in (False, True):
        successors = await await_successors(path, list, lambda: drained.append("drain"))
        successor = await asyncio.to_thread(Predecessor.call, "127.0.0.1", 1)
        assert successor is not None
        if ends_before:
            successors.close()
        successor.drain()
        await asyncio.sleep(0.1)
        assert drained == ["drain"]
        successors.close()
    folder.cleanup()


def test_answers_that_came_late_do_not_speak_for_a_child_that_hangs() -> None:
    line = ChildLine()
    child = line.child_socket
    for _ in range(3):  # it is busy for a while
        assert not line.ping()
    for _ in range(3):
        assert child.recv(64).startswith(b"ping")
        child.send(b"pong")
    assert line.ping()
    assert not line.ping()
    line.close()


async def test_a_child_notices_that_its_supervisor_ended_while_it_started() -> None:
    line = ChildLine()
    fd = line.child_socket.detach()
    line.close()
    gone = asyncio.Event()
    report_to_parent(fd, {}, gone=gone.set)
    async with asyncio.timeout(10):
        await gone.wait()
