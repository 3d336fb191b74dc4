"""A publisher of KV events like SGLang's (``ZmqEventPublisher``), for tests without an engine.

Owns one DP rank's PUB and replay sockets on this machine, driven from the test's event loop. Must
not know the router.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq

_END = (-1).to_bytes(8, "big", signed=True)


class KvPublisher:
    """``publish`` events as SGLang's encoder makes them: maps, or arrays of older releases."""

    def __init__(
        self,
        port: int,
        replay_port: int | None = None,
        *,
        dp_rank: int = 0,
        topic: str = "",
        host: str = "127.0.0.1",
    ) -> None:
        self.host = host
        self.port = port
        self.replay_port = replay_port
        self.dp_rank = dp_rank
        self.replays = 0
        """Requests answered."""
        self.forgotten = 0
        """Batches before this one are no longer there to be replayed."""
        self.now_s = 1000.0
        """Time stamp of the next batch."""
        self._topic = topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sent: list[bytes] = []
        self._publisher = self._context.socket(zmq.XPUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._fd = -1

    @property
    def seq(self) -> int:
        """Number of the next batch."""
        return len(self._sent)

    async def start(self) -> None:
        """Listen, and answer replays from now on."""
        for sock, port in ((self._publisher, self.port), (self._replay, self.replay_port)):
            sock.setsockopt(zmq.LINGER, 0)
            if port is not None:
                sock.bind(f"tcp://{self.host}:{port}")
        self._fd = int(self._replay.getsockopt(zmq.FD))
        asyncio.get_running_loop().add_reader(self._fd, self._answer)
        self._answer()

    def stop(self) -> None:
        """Stop like a process that dies."""
        asyncio.get_running_loop().remove_reader(self._fd)
        self._publisher.close(0)
        self._replay.close(0)
        self._context.term()

    async def subscribed(self) -> None:
        """Until somebody has subscribed."""
        while not self._publisher.poll(0):  # noqa: ASYNC110 (its descriptor is edge-triggered)
            await asyncio.sleep(0.01)
        self._publisher.recv()

    def publish(self, *events: Any, lose: bool = False) -> None:
        """One batch. ``lose``: it never arrives."""
        payload = msgspec.msgpack.encode([self.now_s, list(events), self.dp_rank])
        self.now_s += 1.0
        seq = len(self._sent)
        self._sent.append(payload)
        if not lose:
            self.send([self._topic, seq.to_bytes(8, "big"), payload])

    def send(self, frames: list[bytes]) -> None:
        """Anything at all."""
        self._publisher.send_multipart(frames)

    def _answer(self) -> None:
        while True:
            try:
                identity, _, start = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.replays += 1
            for seq in range(max(self.forgotten, int.from_bytes(start, "big")), len(self._sent)):
                number = seq.to_bytes(8, "big")
                self._replay.send_multipart([identity, b"", self._topic, number, self._sent[seq]])
            self._replay.send_multipart([identity, b"", b"", _END, b""])


def stored(*blocks: int, medium: str = "GPU") -> dict[str, Any]:
    """``BlockStored`` as SGLang 0.5.23 encodes it."""
    return {
        "type": "BlockStored",
        "block_hashes": list(blocks),
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 4,
        "lora_id": None,
        "medium": medium,
    }


def removed(*blocks: int, medium: str = "GPU") -> dict[str, Any]:
    """``BlockRemoved``."""
    return {"type": "BlockRemoved", "block_hashes": list(blocks), "medium": medium}


def cleared() -> dict[str, Any]:
    """``AllBlocksCleared``."""
    return {"type": "AllBlocksCleared"}
