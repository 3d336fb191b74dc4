"""Clients that do not take what they asked for."""

from __future__ import annotations

import asyncio
import socket

import orjson

from benchmarks.hostile.case import Target, case
from benchmarks.raw_engine import TOKEN

_TOKEN_S = 0.02
"""Between two tokens of a stream; they count as sent."""
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"


@case("not-reading", "200 streams of 5,000 tokens whose clients stop reading")
async def not_reading(target: Target) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 5000}
    body = orjson.dumps(asked)
    writers = []
    for _ in range(200):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", target.port))
        _, writer = await asyncio.open_connection(sock=sock, limit=1)
        writers.append(writer)
        await target.send(writer, _HEAD % (len(body), body))
    await asyncio.sleep(5.0)
    target.sent_bytes += 200 * round(5.0 / _TOKEN_S) * len(TOKEN)
    for writer in writers:
        writer.close()
