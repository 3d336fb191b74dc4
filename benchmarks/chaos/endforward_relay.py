"""A relay between the engines' EndForward sockets and a router's that loses, repeats or delays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

import zmq
import zmq.asyncio

from sglang_sbs.wire import TOPIC


@dataclass(frozen=True, slots=True)
class Disturbance:
    lost: float = 0.0
    """Share of the messages that never arrive."""
    duplicated: float = 0.0
    """Share of the messages that arrive twice."""
    late_s: float = 0.0
    scatter_s: float = 0.0
    """More delay, drawn evenly from 0 to this: later messages overtake."""


class EndForwardRelay:
    """Forwards messages from ``listen`` to ``router``; engines connect here instead of there."""

    def __init__(self, listen: str, router: str, *, seed: int = 1) -> None:
        """Open both sockets; nothing is forwarded before :meth:`start`.

        Raises:
            zmq.ZMQError: ``listen`` cannot be bound.
        """
        self.disturbance = Disturbance()
        self.received = 0
        self.sent = 0
        self._random = random.Random(seed)
        self._context = zmq.asyncio.Context(io_threads=1)
        self._engines = self._context.socket(zmq.SUB)
        self._engines.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self._router = self._context.socket(zmq.PUB)
        for sock in (self._engines, self._router):
            sock.setsockopt(zmq.LINGER, 0)
        # As the engines' own socket: nothing is kept for a router that is away.
        self._router.setsockopt(zmq.IMMEDIATE, 1)
        self._router.setsockopt(zmq.RECONNECT_IVL, 100)
        self._engines.bind(listen)
        self._router.connect(router)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._forward(), name="EndForward relay")

    async def close(self) -> None:
        """Stop forwarding; messages that are being delayed are lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._engines.close()
        self._router.close()
        self._context.term()

    async def _forward(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frames = await self._engines.recv_multipart()
            self.received += 1
            now = self.disturbance
            if self._random.random() < now.lost:
                continue
            for _ in range(2 if self._random.random() < now.duplicated else 1):
                delay_s = now.late_s + self._random.uniform(0.0, now.scatter_s)
                if delay_s:
                    loop.call_later(delay_s, self._send, frames)
                else:
                    self._send(frames)

    def _send(self, frames: Sequence[bytes]) -> None:
        if not self._router.closed:
            self.sent += 1
            # PUB never blocks: the future is done at once.
            self._router.send_multipart(frames)
