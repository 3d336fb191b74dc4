"""Large bodies and answers in pieces: none keeps the event loop, or the interpreter, for long."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import HttpVersion11
from msgspec import Raw

from sglang_sbs.router.client.answer_stream import Downstream
from sglang_sbs.router.client.intake import Bodies
from sglang_sbs.router.options.config import ClientPace
from sglang_sbs.router.requests.raw_json import joined

MIB = 1 << 20


class Content:
    """A body that is always there, piece by piece."""

    content_length = None

    def __init__(self, pieces: int, piece: bytes, order: list[int]) -> None:
        self.content = self
        self._left, self._piece, self._order = pieces, piece, order

    def is_eof(self) -> bool:
        return False

    async def readany(self) -> bytes:
        self._left -= 1
        self._order.append(id(self))
        return self._piece if self._left >= 0 else b""


@pytest.mark.parametrize(("piece", "most"), [(256 << 10, 2), (1 << 10, 50)])
async def test_large_bodies_grow_in_turn(piece: int, most: int) -> None:
    """Ten senders have ten quarters of a megabyte ready at once. Small bodies are not held up."""
    bodies, order = Bodies(1 << 30), []
    reads: list[Any] = [Content(12, bytes(piece), order) for _ in range(10)]

    async def read(content: Any) -> int:
        with bodies.share() as share:
            return len(await share.read(content, 1 << 30))

    tasks = [asyncio.create_task(read(content)) for content in reads]
    await asyncio.sleep(0)  # each has its first piece, which is how it is known to be large
    seen = [len(order)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        seen.append(len(order))
    assert [task.result() for task in tasks] == [12 * piece] * 10
    assert max((b - a for a, b in pairwise(seen)), default=0) <= most
    if piece > 1 << 10:
        assert len(set(order[20:60])) == 10, "nobody waits for all of another"


async def test_who_dribbles_takes_no_turn_from_those_that_send() -> None:
    bodies = Bodies(1 << 30)
    first = Content(1, bytes(1 << 17), [])
    with bodies.share() as share:
        assert len(await share.read(first, 1 << 30)) == 1 << 17
    taken: list[Any] = []
    take = bodies.turns.take

    async def counted(sender: Any) -> None:
        taken.append(sender)
        await take(sender)

    bodies.turns.take = counted  # type: ignore[method-assign]
    with bodies.share() as share:
        await share.read(Content(1000, bytes(100), []), 1 << 30)
        assert taken == []
        await share.read(Content(4, bytes(1 << 17), []), 1 << 30)
        assert len(taken) == 4


async def test_waiting_for_a_turn_is_no_fault_of_the_client() -> None:
    bodies = Bodies(1 << 30, ClientPace(grace_s=0.05, min_bytes_per_s=1 << 40))

    async def late(_sender: Any) -> None:
        await asyncio.sleep(0.1)

    bodies.turns.take = late  # type: ignore[method-assign]
    with bodies.share() as share:
        assert len(await share.read(Content(3, bytes(1 << 17), []), 1 << 30)) == 3 << 17


class Transport:
    """Takes everything."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    def write(self, data: Any) -> None:
        self.written.append(data)

    def writelines(self, pieces: Any) -> None:
        self.written += pieces

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


def test_a_long_piece_of_a_stream_is_not_copied() -> None:
    client: Any = type("Client", (), {"version": HttpVersion11})
    stream, transport = Downstream(client, {}), Transport()
    stream._transport = transport  # type: ignore[assignment]
    long = memoryview(bytes(MIB))
    for piece in (b"data: 1\n\n", long):
        stream.push(piece)
    assert any(piece is long for piece in transport.written)
    wire = b"".join(transport.written)
    assert wire == b"9\r\ndata: 1\n\n\r\n100000\r\n" + bytes(MIB) + b"\r\n"


def test_a_long_member_is_copied_in_pieces() -> None:
    """A copy in one piece would keep the interpreter, and so the event loop, from everybody
    else."""
    raw = Raw(memoryview(bytearray(128 * MIB)))
    done = threading.Event()
    found: list[Any] = []

    def work() -> None:
        found.append(joined([("text", raw)]))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    turns = 0
    while not done.is_set():
        turns += 1
        time.sleep(0.0)  # lets go of the interpreter, as a look at sockets does
    thread.join()
    assert found[0].startswith(b'"text":\0') and len(found[0]) == 128 * MIB + 7
    assert turns > 10
