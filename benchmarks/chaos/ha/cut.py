"""A TCP forwarder that can stop passing anything on: a network that is cut, and heals.

While it is cut nothing passes and nothing ends: connections stay open, new ones are accepted by
the kernel and never served, as where a switch drops packets. What was sent meanwhile arrives later.
"""

from __future__ import annotations

import asyncio
import contextlib

_PIECE_BYTES = 1 << 16


class Cut:
    """``await start()``, connect to ``listen``, ``await close()``."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self.listen, self.target = listen, target
        self._passing = asyncio.Event()
        self._passing.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises: OSError, the port is taken."""
        self._server = await asyncio.start_server(self._connected, *self.listen)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._passing.clear()

    def heal(self) -> None:
        self._passing.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await self._passing.wait()
        try:
            there, onward = await asyncio.open_connection(*self.target)
        except OSError:
            # Nobody listens: the client learns of it as directly as it can.
            writer.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(reader, onward))
                both.create_task(self._pass_on(there, writer))
        except* OSError:
            pass
        finally:
            for end in (writer, onward):
                end.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, to its end. Raises: OSError, a connection broke."""
        while data := await reader.read(_PIECE_BYTES):
            await self._passing.wait()
            writer.write(data)
            await writer.drain()
        await self._passing.wait()
        with contextlib.suppress(OSError):
            writer.write_eof()
