"""Parses input with many short lines in slices.

An HTTP parser calls Python for each chunk of a body. One read of 256 KB can hold 40,000 chunks of
one byte, which would block the event loop for tens of milliseconds before any key is checked."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

SLICE_BYTES = 4096
MOST_LINES = 512
"""Received data with more lines than this is parsed in slices."""


class Slices:
    """Lets one :class:`DenseInput` parse one slice in each turn of the event loop, in rotation."""

    def __init__(self) -> None:
        self._waiting: deque[DenseInput] = deque()
        self._scheduled = False

    def add(self, dense: DenseInput) -> None:
        self._waiting.append(dense)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._scheduled = False
        dense = self._waiting.popleft()
        try:
            if dense.feed_slice():
                self._waiting.append(dense)
        finally:
            self._schedule()


class DenseInput:
    """Passes a connection's received data to its parser, in slices if there are many short
    lines."""

    def __init__(self, transport: Any, protocol: Any, slices: Slices) -> None:
        self._transport, self._protocol, self._slices = transport, protocol, slices
        self._held = bytearray()

    def received(self, data: bytes) -> None:
        dense = len(data) > SLICE_BYTES and data.count(b"\n") > MOST_LINES
        if not dense and not self._held:
            self._protocol.data_received(data)
            return
        begins = not self._held
        self._held += data
        self._transport.pause_reading()
        if begins:
            self._slices.add(self)

    def feed_slice(self) -> bool:
        """Pass one slice to the parser and return whether more is waiting."""
        piece = bytes(self._held[:SLICE_BYTES])
        del self._held[:SLICE_BYTES]
        if self._transport is None or self._transport.is_closing():
            self._held.clear()
        else:
            self._protocol.data_received(piece)
        if not self._held and self._transport is not None:
            # aiohttp also pauses while the request is not read, and then resumes by itself.
            paused = self._protocol._reading_paused
            paused = paused or getattr(self._protocol, "_buffer_paused", False)
            if not paused and not self._transport.is_closing():
                self._transport.resume_reading()
        return bool(self._held)

    def lost(self) -> None:
        """Drop everything kept for a closed connection."""
        self._held.clear()
        self._transport = self._protocol = None
