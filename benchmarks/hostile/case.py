"""Defines a case, and the tools that it attacks with.

    @case("gzip-bomb", "gzip of 0.5 MB that unfolds to 512 MB")
    async def gzip_bomb(target: Target) -> None:
        await target.post(BOMB, headers=b"Content-Encoding: gzip\\r\\n")

A case sends what it likes and returns when it has been answered or has given up. What it sends by
``target`` is counted; a case that sends by other ways adds to ``target.sent_bytes`` itself.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

ANSWER_S = 60.0
"""A case that is not answered by then goes on."""


def tls_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@dataclass
class Target:
    port: int
    prefill_port: int
    decode_port: int
    endforward_port: int
    """0: it listens to none."""
    tls: bool = False
    sent_bytes: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    """Number of answers by status, or ``closed``, ``timeout``."""

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = tls_context() if self.tls else None
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=context)

    async def send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        self.sent_bytes += len(data)
        writer.write(data)
        await writer.drain()

    async def get(self, path: str) -> None:
        await self.post(b"", path, method=b"GET")

    async def post(
        self,
        body: bytes,
        path: str = "/generate",
        *,
        headers: bytes = b"",
        length: int | None = None,
        leave_after_s: float | None = None,
        method: bytes = b"POST",
    ) -> None:
        """One request on a connection of its own, to the end of the answer.

        ``length``: a ``Content-Length`` that is not the body's. ``leave_after_s``: close then,
        answered or not.
        """
        size = len(body) if length is None else length
        head = b"%b %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n%b\r\n"
        status = "closed"
        try:
            reader, writer = await self.connect()
        except OSError:
            self.statuses["refused"] += 1
            return
        try:
            async with asyncio.timeout(leave_after_s or ANSWER_S):
                reading = asyncio.create_task(reader.readline())
                with suppress(ConnectionError):
                    await self.send(writer, head % (method, path.encode(), size, headers) + body)
                with suppress(ConnectionError):
                    words = (await reading).split()
                    status = words[1].decode() if len(words) > 1 else "closed"
                    while await reader.read(1 << 20):
                        pass
        except TimeoutError:
            status = "left" if leave_after_s else "timeout"
        finally:
            writer.close()
            self.statuses[status] += 1


Attack = Callable[[Target], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    name: str
    about: str
    attack: Attack
    policy: str = "sbs"
    flags: tuple[str, ...] = ()
    tokenizer: bool = False
    """The router has a tokenizer and a chat template (``--tokenizer-path``)."""
    endforward: bool = False
    tls: bool = False
    descriptors: int = 0
    """Most files and sockets that the router may have open; 0: as many as this process."""
    reconnects: bool = False
    """The probe opens a connection for each request."""
    module: str = "sglang_sbs.launch_router"
    """The Python module that is run as the router."""


CASES: dict[str, Case] = {}


def case(name: str, about: str, **options: Any) -> Callable[[Attack], Attack]:
    """Make a function a case of that name; ``options`` are further fields of :class:`Case`."""

    def add(attack: Attack) -> Attack:
        assert name not in CASES, name
        CASES[name] = Case(name, about, attack, **options)
        return attack

    return add
