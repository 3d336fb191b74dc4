"""Listening sockets: made, shared by front ends, and handed to the next router on this machine.
They are handed over open: a connection that waits to be accepted is neither refused nor reset."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

BACKLOG = 4096
_DRAIN = b"drain\n"
_MAX_SOCKETS = 253
"""Linux takes so many descriptors in one message."""
_ANSWER_S = 5.0


def check_free(host: str, port: int) -> None:
    """Raises: OSError, it is not. (SO_REUSEPORT would let two routers share it unnoticed.)"""
    if port == 0:
        return
    for family, address in _addresses(host, port):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                how = (
                    "--sbs-take-over takes it over from a router that runs with --workers 2 or more"
                )
                text = f"--port {port}: {error.strerror}; {how}"
                raise OSError(error.errno, text) from error


def listen(host: str, port: int) -> list[socket.socket]:
    """One listening socket per address of ``host``, of many that share the port.
    Raises: OSError, the address cannot be used."""
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as unless_all:
        for family, address in _addresses(host, port):
            sock = unless_all.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sockets.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            same_port = sockets[0].getsockname()[1] if len(sockets) > 1 else port
            sock.bind((address[0], same_port, *address[2:]))
            sock.listen(BACKLOG)
        unless_all.pop_all()
    return sockets


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(item[0]), tuple(item[4])) for item in found))


def control_path(host: str, port: int) -> Path:
    """Where the router at that port takes its successor's call. Raises: OSError."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = base / f"sglang-sbs-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if status.st_uid != os.geteuid() or not private:
        raise OSError(f"{folder} must be a directory of this user with mode 0700: remove it")
    return folder / f"{host.replace('/', '_')}-{port}.sock"


class Predecessor:
    """The router that serves the port now, seen by the one that takes it over."""

    def __init__(self, line: socket.socket, sockets: list[socket.socket]) -> None:
        self.sockets = sockets
        self._line = line

    @classmethod
    def call(cls, host: str, port: int) -> Predecessor | None:
        """Get its listening sockets; ``None``: there is none. Raises: OSError."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.settimeout(_ANSWER_S)
        try:
            line.connect(str(control_path(host, port)))
        except (FileNotFoundError, ConnectionRefusedError):
            line.close()
            return None
        _, fds, _, _ = socket.recv_fds(line, 16, _MAX_SOCKETS)
        return cls(line, [socket.socket(fileno=fd) for fd in fds])

    def drain(self) -> None:
        with contextlib.suppress(OSError):
            self._line.sendall(_DRAIN)
        self._line.close()


class Successors:
    """Hands the sockets to whoever calls, and reports that it has taken over."""

    def __init__(
        self, path: Path, sockets: Callable[[], list[socket.socket]], drain: Callable[[], None]
    ) -> None:
        """Listen at ``path``, also if a router before this one does. Raises: OSError."""
        self._sockets = sockets
        self._drain = drain
        self._loop = asyncio.get_running_loop()
        self._lines: set[socket.socket] = set()
        path.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.setblocking(False)
        self._listening.bind(str(path))
        self._listening.listen(4)
        self._loop.add_reader(self._listening, self._called)

    def _called(self) -> None:
        try:
            line, _ = self._listening.accept()
        except OSError:
            return
        line.setblocking(False)
        sockets = self._sockets()[:_MAX_SOCKETS]
        try:
            socket.send_fds(line, [b"sockets\n"], [sock.fileno() for sock in sockets])
        except OSError as error:
            logger.warning("a successor called and is gone again: %s", error)
            line.close()
            return
        logger.info("a successor has the %d listening sockets", len(sockets))
        self._lines.add(line)
        self._loop.add_reader(line, self._said, line)

    def _said(self, line: socket.socket) -> None:
        try:
            data = line.recv(64)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._loop.remove_reader(line)
        self._lines.discard(line)
        line.close()
        if data == _DRAIN:
            self._drain()
        else:
            logger.warning("the successor went away without taking over")

    def close(self) -> None:
        """Take no calls any more. The path stays: it may be the successor's by now."""
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for line in self._lines:
            self._loop.remove_reader(line)
            line.close()
        self._lines.clear()
