"""Attacks at the sockets, before there is a request."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from benchmarks.hostile.case import Target, case

_HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\n%bTransfer-Encoding: chunked\r\n\r\n"
_CHUNKS = b"1\r\nx\r\n" * 60_000 + b"0\r\n\r\n"
_CONNECTIONS = 700
_DESCRIPTORS = 512
"""Fewer than connections: the router has to choose whose it closes."""
_HOLD_S = 6.0


async def _tiny_chunks(target: Target, headers: bytes) -> None:
    async def send() -> None:
        reader, writer = await target.connect()
        status = "closed"
        with suppress(ConnectionError):
            await target.send(writer, _HEAD % headers + _CHUNKS)
            words = (await reader.readline()).split()
            status = words[1].decode() if len(words) > 1 else status
        target.statuses[status] += 1
        writer.close()

    await asyncio.gather(*(send() for _ in range(20)))


@case("tiny-chunks", "20 bodies of 60 KB in chunks of one byte, at once")
async def tiny_chunks(target: Target) -> None:
    await _tiny_chunks(target, b"")


@case(
    "silent-endforward",
    "700 connections to the EndForward port that say nothing",
    endforward=True,
    descriptors=_DESCRIPTORS,
    reconnects=True,
)
async def silent_endforward(target: Target) -> None:
    await _silent(target, target.endforward_port)


@case(
    "silent-clients",
    "700 connections to the serving port that say nothing",
    descriptors=_DESCRIPTORS,
    reconnects=True,
)
async def silent_clients(target: Target) -> None:
    await _silent(target, target.port)


@case(
    "silent-tls",
    "700 connections to a serving port with TLS that say nothing",
    descriptors=_DESCRIPTORS,
    reconnects=True,
    tls=True,
)
async def silent_tls(target: Target) -> None:
    await _silent(target, target.port)


async def _silent(target: Target, port: int) -> None:
    writers = []
    for _ in range(_CONNECTIONS):
        with suppress(OSError):
            writers.append((await asyncio.open_connection("127.0.0.1", port))[1])
    await asyncio.sleep(_HOLD_S)
    target.statuses["held"] += sum(not writer.is_closing() for writer in writers)
    for writer in writers:
        writer.close()
