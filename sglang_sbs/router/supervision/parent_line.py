"""The line between supervisor and child, a socket pair with separate messages. The child sends
facts as JSON when it is ready. The supervisor sends ``let go`` (free ports for a successor) and
``ping``, which a child with a running event loop answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import orjson

_LET_GO = b"let go"
_PING = b"ping"
_PONG = b"pong"
_MAX_BYTES = 4096


def report_to_parent(
    fd: int,
    facts: dict[str, Any],
    *,
    gone: Callable[[], None],
    let_go: Callable[[], None] = lambda: None,
) -> None:
    """Send ``facts`` to the supervisor through its socket ``fd``: this child is ready. From then on
    answer pings, call ``let_go`` on request, and ``gone`` once if the supervisor ends."""
    loop, line = asyncio.get_running_loop(), socket.socket(fileno=fd)
    line.setblocking(False)

    def readable() -> None:
        try:
            data = line.recv(_MAX_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            loop.remove_reader(line)
            gone()
        elif data == _LET_GO:
            let_go()
        else:
            with contextlib.suppress(OSError):  # the parent no longer reads
                line.send(_PONG)

    loop.add_reader(line, readable)
    with contextlib.suppress(OSError):  # it ended meanwhile, which readable() notices
        line.send(orjson.dumps(facts))


class ChildLine:
    """The supervisor's end of the socket pair to one child."""

    def __init__(self) -> None:
        self._socket, self.child_socket = socket.socketpair(type=socket.SOCK_SEQPACKET)
        """``child_socket`` is inherited by the child; close it here once the child runs."""
        self._socket.setblocking(False)

    async def ready(self) -> dict[str, Any]:
        """Wait until the child is ready, and return its facts. Raises: EOFError, it ended first."""
        data = b""
        with contextlib.suppress(OSError):
            data = await asyncio.get_running_loop().sock_recv(self._socket, _MAX_BYTES)
        if not data:
            raise EOFError
        facts: dict[str, Any] = orjson.loads(data)
        return facts

    def ping(self) -> bool:
        """Send a ping, and return whether the child has answered since the last one."""
        answered = False
        with contextlib.suppress(OSError):
            while self._socket.recv(_MAX_BYTES):  # read all: late answers would hide a hang
                answered = True
        self._send(_PING)
        return answered

    def let_go(self) -> None:
        self._send(_LET_GO)

    def _send(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._socket.send(word)

    def close(self) -> None:
        self._socket.close()
        self.child_socket.close()
