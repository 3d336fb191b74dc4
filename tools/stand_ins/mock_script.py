"""The script of a mock engine: what it does with a request, when, and what it remembers.

Owns :class:`Behaviour` (scripted faults), :class:`HoldGate` (when things happen), and the record of
what arrived. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

EngineRole = Literal["prefill", "decode"]
Fault = Literal[
    "unread", "hang_before_head", "reset_before_head", "hang_mid_body", "reset_mid_body"
]
"""``unread``: the request's head is taken, its body never read."""


@dataclass(frozen=True)
class Behaviour:
    """The way in which an engine handles one request."""

    status: int = 200
    message: str = ""
    """Message of the error body, for a status other than 200 or a ``stream_error``."""
    fault: Fault | None = None
    tokens: int = 3
    """Output tokens, one stream event each. Faults mid body strike after the first."""
    abort: bool = False
    """Finish with ``finish_reason`` abort, as SGLang does on an abort from elsewhere."""
    stream_error: bool = False
    """Status 200, then an error event as the first one: how SGLang reports errors in a stream."""
    garbage: bytes | None = None
    """Status 200, then these bytes instead of an answer."""
    garbage_tail: bytes | None = None
    """Bytes after the first token of a stream, then a clean end of the body."""
    kv_sent: bool = False
    """A failure strikes only after the KV cache went from prefill to decode."""
    prompt_tokens: int = 7
    cached_tokens: int = 0


@dataclass(eq=False)
class RecordedRequest:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes
    """The body's very bytes."""
    arrived_s: float
    port: int = 0
    """Where it came in."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    rid: str = ""
    """Request id as sent, else made up here, as SGLang does."""

    def __post_init__(self) -> None:
        given = self.body.get("rid")
        if self.path.startswith("/v1/messages"):  # it knows no such field
            given = self.headers.get("x-override-rid")
        elif self.path.startswith("/v1/responses"):
            given = self.body.get("request_id")
        self.rid = str(given or uuid.uuid4().hex)


class HoldGate:
    """Open at first. Closed, it holds whoever comes until released; arrivals can be awaited."""

    def __init__(self) -> None:
        self._open = True
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._arrivals = 0
        self._changed = asyncio.Condition()

    def close(self) -> None:
        self._open = False

    def open(self) -> None:
        self._open = True
        self.release(len(self._waiting))

    def release(self, count: int = 1) -> None:
        """Let the ``count`` longest waiting go on."""
        for _ in range(min(count, len(self._waiting))):
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)

    async def arrived(self, count: int) -> None:
        """Until ``count`` requests have come here in total, held or not."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._arrivals >= count)

    async def pass_through(self) -> None:
        async with self._changed:
            self._arrivals += 1
            self._changed.notify_all()
        if not self._open:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future


class Rooms:
    """Bootstrap rooms shared by the engines of a cluster: decode starts when prefill is through."""

    def __init__(self) -> None:
        self._done: dict[int, asyncio.Event] = {}

    def prefilled(self, room: int) -> None:
        self._event(room).set()

    async def wait(self, room: int) -> None:
        await self._event(room).wait()

    def _event(self, room: int) -> asyncio.Event:
        return self._done.setdefault(room, asyncio.Event())
