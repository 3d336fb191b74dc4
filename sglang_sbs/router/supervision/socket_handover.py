"""Creates listening sockets, shares them among front ends, and hands them to the next router on
this machine. They stay open during the handover, so waiting connections are neither refused nor
reset."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_sbs.console.plain_words import naming_port

logger = logging.getLogger(__name__)

BACKLOG = 4096
_DRAIN = b"drain\n"
_MAX_SOCKETS = 253
"""Limit of Linux on descriptors in one message."""
_ANSWER_S = 5.0


def check_free(host: str, port: int) -> None:
    """Check that the port is free, because SO_REUSEPORT would let two routers share it unnoticed.
    Raises: OSError, it is in use."""
    try:
        with naming_port("--port", host, port):
            for family, address in _addresses(host, port):
                socket.create_server(address, family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            how = "--sbs-take-over takes it over from a router that runs with --frontends 2 or more"
            raise OSError(error.errno, f"{error.strerror}; {how}") from error
        raise


def listen(host: str, port: int) -> list[socket.socket]:
    """Return one listening socket per address of ``host``, able to share the port.
    Raises: OSError, the address cannot be used."""
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as unless_all:
        for family, (name, number, *scope) in _addresses(host, port):
            address = (name, sockets[0].getsockname()[1] if sockets else number, *scope)
            sock = socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=True)
            sockets.append(unless_all.enter_context(sock))
        unless_all.pop_all()
    return sockets


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(item[0]), tuple(item[4])) for item in found))


def control_path(host: str, port: int) -> Path:
    """Return the Unix socket path at which the router on that port expects its successor. Raises:
    OSError, its folder is not private to this user."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = base / f"sglang-sbs-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if status.st_uid != os.geteuid() or not private:
        raise OSError(f"{folder} must be a directory of this user with mode 0700: remove it")
    return folder / f"{host.replace('/', '_')}-{port}.sock"


@dataclass(frozen=True)
class Predecessor:
    """The router that serves the port now, as seen by its successor."""

    sockets: list[socket.socket]
    _line: socket.socket

    @classmethod
    def call(cls, host: str, port: int) -> Predecessor | None:
        """Return the router that serves this port, with its listening sockets; ``None`` if there is
        none. Raises: OSError, it does not send them."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.settimeout(_ANSWER_S)
        try:
            line.connect(str(control_path(host, port)))
        except (FileNotFoundError, ConnectionRefusedError):
            line.close()
            return None
        _, fds, _, _ = socket.recv_fds(line, 16, _MAX_SOCKETS)
        return cls([socket.socket(fileno=fd) for fd in fds], line)

    def drain(self) -> None:
        with contextlib.suppress(OSError):
            self._line.sendall(_DRAIN)
        self._line.close()


async def await_successors(
    path: Path, sockets: Callable[[], list[socket.socket]], drain: Callable[[], None]
) -> asyncio.Server:
    """Return a server that hands the sockets to a successor that connects to ``path``, and calls
    ``drain`` when it has taken over, unless closed meanwhile. Replaces a router already listening
    there. Raises: OSError, ``path`` cannot be listened at."""

    async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data, offered = b"", sockets()[:_MAX_SOCKETS]
        try:
            with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as line:
                socket.send_fds(line, [b"sockets\n"], [sock.fileno() for sock in offered])
            logger.info("a successor has the %d listening sockets", len(offered))
            data = await reader.read(64)
        except OSError as error:
            logger.warning("a successor called and disconnected: %s", error)
        writer.close()
        if data != _DRAIN:
            logger.warning("the successor disconnected without taking over")
        elif server.is_serving():  # otherwise this router is already stopping
            drain()

    server = await asyncio.start_unix_server(called, path)
    return server
