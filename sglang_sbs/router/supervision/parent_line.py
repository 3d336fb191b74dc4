"""The line between a supervisor and a child: a socket pair, one message after another. Upwards
facts as JSON when the child is ready; downwards ``let go`` (leave ports to a successor), and
``ping``, which a child whose event loop turns answers."""

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


def tell_parent(
    fd: int,
    facts: dict[str, Any],
    *,
    gone: Callable[[], None],
    let_go: Callable[[], None] = lambda: None,
) -> None:
    """The child's end: it is ready. Calls ``let_go`` when asked to, and ``gone`` once when the
    supervisor has ended."""
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
            with contextlib.suppress(OSError):  # nobody reads there any more
                line.send(_PONG)

    loop.add_reader(line, readable)
    with contextlib.suppress(OSError):  # it ended meanwhile, which is read
        line.send(orjson.dumps(facts))


class ChildLine:
    """The supervisor's end."""

    def __init__(self) -> None:
        self._socket, self.child_socket = socket.socketpair(type=socket.SOCK_SEQPACKET)
        """``child_socket`` is to be inherited, and closed here once the child runs."""
        self._socket.setblocking(False)

    async def ready(self) -> dict[str, Any]:
        """Wait for the child's facts. Raises: EOFError, it ended before."""
        data = b""
        with contextlib.suppress(OSError):
            data = await asyncio.get_running_loop().sock_recv(self._socket, _MAX_BYTES)
        if not data:
            raise EOFError
        facts: dict[str, Any] = orjson.loads(data)
        return facts

    def ping(self) -> bool:
        """Ask for a sign of life; whether there was one since the last time."""
        heard = False
        with contextlib.suppress(OSError):
            while self._socket.recv(_MAX_BYTES):  # all: late ones would speak for it when it hangs
                heard = True
        self._say(_PING)
        return heard

    def let_go(self) -> None:
        self._say(_LET_GO)

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._socket.send(word)

    def close(self) -> None:
        self._socket.close()
        self.child_socket.close()
