"""Engines that write the bytes they are given, and a client of the router's that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from sglang_sbs.router.engines.connection import UpstreamError
from sglang_sbs.router.engines.connection_pool import Pool, request_head


class Collector:
    """A receiver that keeps what it gets."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.error: UpstreamError | None = None
        self.over = asyncio.Event()

    def head_received(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers

    def body_received(self, data: bytes) -> None:
        self.body += data

    def message_complete(self) -> None:
        self.over.set()

    def failed(self, error: UpstreamError) -> None:
        self.error = error
        self.over.set()


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(serve: Serve) -> Any:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = Pool(asyncio.get_running_loop(), connect_timeout_s=5)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", pool
    finally:
        pool.close()
        server.close()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


async def ask(pool: Pool, origin: str, body: bytes = b"{}") -> Collector:
    collector = Collector()
    head = request_head("POST", origin, "/x", b"", len(body))
    pool.call(origin, (head, body), collector)
    async with asyncio.timeout(10):
        await collector.over.wait()
    return collector


def chunked(parts: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    framed = b"".join(b"%x%b\r\n%b\r\n" % (len(p), extension, p) for p in parts if p)
    return framed + b"0\r\n" + trailer + b"\r\n"
