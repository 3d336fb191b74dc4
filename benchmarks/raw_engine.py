"""Engines that cost next to nothing: raw HTTP on uvloop, the same bytes for every token.

Both engines run in one process (``python -m benchmarks.raw_engine``), which prints their two ports
and ends with its stdin. Streams get their tokens in groups that take turns, as the DP ranks of a
decode instance do.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable
from typing import Any

import orjson
import uvloop

from sglang_sbs.scheduling.events import InstanceRole

GROUPS = 8
"""Decode ranks, each with passes of its own."""
SHORT_TOKENS = 2
"""Streams of at most so many tokens do not wait for the pace: they are probes."""
_SHORT_GAP_S = 0.002
_LIMIT = 1_000_000
_LARGE_BYTES = 1 << 20
"""A body over that is dropped as it comes, and answered at its end: no engine is measured here."""
_FRAME: dict[str, Any] = {
    "id": "0123456789abcdef0123456789abcdef",
    "created": 1_700_000_000,
    "model": "raw",
}


def _event(finish: str | None) -> bytes:
    delta = {"role": None, "content": " token", "reasoning_content": None, "tool_calls": None}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    frame = _FRAME | {"object": "chat.completion.chunk", "choices": [choice], "usage": None}
    data = b"data: " + orjson.dumps(frame) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN = _event(None)
LAST_TOKEN = _event("length") + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_ANSWER = orjson.dumps(
    _FRAME
    | {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": " token"},
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9},
    }
)


def reply(body: bytes, status: bytes = b"200 OK") -> bytes:
    return (
        b"HTTP/1.1 %b\r\nserver: uvicorn\r\ncontent-length: %d\r\ncontent-type: application/json"
        b"\r\n\r\n%b" % (status, len(body), body)
    )


COMPLETE = reply(_ANSWER)


def server_info(role: InstanceRole, most_requests: int, **more: Any) -> dict[str, Any]:
    """Return an engine's description of itself; ``most_requests`` run on each DP rank at a time."""
    return {
        "version": "0.5.23",
        "disaggregation_mode": role,
        "dp_size": 1,
        "max_prefill_tokens": 16_384,
        "page_size": 1,
        "served_model_name": "raw",
        "model_path": "raw",
        "disaggregation_bootstrap_port": 8998,
        "load_balance_method": "auto",
        "internal_states": [{"effective_max_running_requests_per_dp": most_requests}],
    } | more


def control_answer(path: bytes, info: dict[str, Any]) -> bytes:
    """The answer to what every engine is asked; ``info`` is its :func:`server_info`."""
    if path in (b"/server_info", b"/get_server_info"):
        return reply(orjson.dumps(info))
    if path in (b"/model_info", b"/get_model_info"):
        return reply(b'{"model_path":"raw","is_generation":true}')
    known = (b"/ready", b"/ping", b"/health", b"/abort_request", b"/flush_cache")
    return reply(b"{}") if path in known else reply(b"{}", b"404 Not Found")


class RawEngine:
    """One engine; ``interval_s`` is the time between two tokens of a stream."""

    def __init__(self, role: InstanceRole, loop: asyncio.AbstractEventLoop) -> None:
        self.role = role
        self.loop = loop
        self.interval_s = 0.02
        self.groups: list[dict[Connection, None]] = [{} for _ in range(GROUPS)]
        self._turn = 0
        self._next_s = loop.time()
        self._timer = loop.call_later(0, self._tick)

    def join(self, connection: Connection) -> None:
        min(self.groups, key=len)[connection] = None

    def leave(self, connection: Connection) -> None:
        for group in self.groups:
            group.pop(connection, None)

    def _tick(self) -> None:
        group = self.groups[self._turn]
        self._turn = (self._turn + 1) % GROUPS
        over = [connection for connection in group if connection.token()]
        for connection in over:
            del group[connection]
        now_s = self.loop.time()
        self._next_s = max(now_s, self._next_s + self.interval_s / GROUPS)
        self._timer = self.loop.call_at(self._next_s, self._tick)

    def control(self, path: bytes, body: bytes) -> bytes:
        """The answer to everything that is no inference."""
        if path == b"/pace":
            self.interval_s = float(orjson.loads(body)["interval_s"])
            self._timer.cancel()
            self._next_s = self.loop.time()
            self._tick()
            return reply(b"{}")
        if path.startswith(b"/v1/loads"):
            running = sum(map(len, self.groups))
            load = {
                "dp_rank": 0,
                "num_running_reqs": running,
                "num_waiting_reqs": 0,
                "num_used_tokens": 8 * running,
                "num_total_tokens": 8 * running,
                "num_waiting_uncached_tokens": 0,
            }
            return reply(orjson.dumps({"loads": [load], "version": "0.5.23"}))
        info = server_info(
            self.role,
            _LIMIT,
            chunked_prefill_size=8192,
            max_running_requests=_LIMIT,
            max_total_num_tokens=1000 * _LIMIT,
            max_req_input_len=32_768,
        )
        return control_answer(path, info)


class EngineConnection(asyncio.Protocol):
    """One of the router's to an engine: whole requests come in, a stream's tokens go out."""

    __slots__ = ("_buffer", "_dropped_bytes", "_transport", "_write", "left")
    _transport: asyncio.Transport
    _write: Callable[[bytes], None]

    def __init__(self) -> None:
        self._buffer = b""
        self._dropped_bytes = 0
        self.left = 0
        """Tokens of the stream that are still to come."""

    def request(self, path: bytes, body: bytes) -> None:
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._write = self._transport.write

    def data_received(self, data: bytes) -> None:
        if self._dropped_bytes:
            self._dropped_bytes -= len(data)
            if self._dropped_bytes <= 0:
                self._dropped_bytes = 0
                self._write(COMPLETE)
            return
        data = self._buffer + data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._buffer = data
            return
        head = data[:end]
        at = head.lower().find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        missing = end + 4 + length - len(data)
        if missing > 0:
            large = length > _LARGE_BYTES
            self._buffer = b"" if large else data
            self._dropped_bytes = missing if large else 0
            return
        self._buffer = b""
        self.request(head.split(b" ", 2)[1], data[end + 4 : end + 4 + length])

    def token(self) -> bool:
        """The next one; True when it was the last."""
        self.left -= 1
        last = self.left <= 0
        self._write(LAST_TOKEN if last else TOKEN)
        return last


def tokens_asked(body: dict[str, Any]) -> int:
    """The Rust router passes a chat request's ``max_tokens`` on under its newer name."""
    return int(body.get("max_completion_tokens") or body["max_tokens"])


class Connection(EngineConnection):
    """A router's connection to a :class:`RawEngine`."""

    __slots__ = ("_engine",)

    def __init__(self, engine: RawEngine) -> None:
        super().__init__()
        self._engine = engine

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.leave(self)

    def request(self, path: bytes, body: bytes) -> None:
        if path not in (b"/v1/chat/completions", b"/v1/completions", b"/generate"):
            self._write(self._engine.control(path, body))
            return
        if self._engine.role == "prefill":
            self._write(COMPLETE)
            return
        asked = orjson.loads(body)
        if not asked.get("stream"):
            self._write(COMPLETE)
            return
        self.left = tokens_asked(asked) - 1
        self._write(STREAM_HEAD + TOKEN)
        if self.left < SHORT_TOKENS:
            self._engine.loop.call_later(_SHORT_GAP_S, self.token)
        else:
            self._engine.join(self)


async def listen(
    loop: asyncio.AbstractEventLoop, connection: Callable[[], asyncio.Protocol]
) -> int:
    """Take connections on loopback; the port."""
    server = await loop.create_server(connection, "127.0.0.1", 0, backlog=4096)
    return int(server.sockets[0].getsockname()[1])


async def serve(connection: type[Connection] = Connection) -> None:
    loop = asyncio.get_running_loop()
    ports = []
    roles: tuple[InstanceRole, ...] = ("prefill", "decode")
    for role in roles:
        engine = RawEngine(role, loop)
        ports.append(await listen(loop, functools.partial(connection, engine)))
    print(*ports, flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(serve())
