"""A body of tiny chunks is parsed a slice in each turn of the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
import uvloop
from router_harness import cluster

from sglang_sbs.router.client import dense_input
from sglang_sbs.router.client.dense_input import SLICE_BYTES, DenseInput, Slices

HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\n%bTransfer-Encoding: chunked\r\n\r\n"
TEXT = "word " * 12_000


def one_byte_chunks(body: bytes) -> bytes:
    return b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"


class Connection:
    """A transport and its protocol."""

    def __init__(self) -> None:
        self.fed: list[bytes] = []
        self.reads = True
        self.closing = False
        self._reading_paused = False

    def data_received(self, data: bytes) -> None:
        self.fed.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


async def test_one_slice_of_one_connection_is_fed_in_a_turn() -> None:
    slices, data = Slices(), b"1\r\nx\r\n" * 10_000
    first, other = Connection(), Connection()
    inputs = [DenseInput(connection, connection, slices) for connection in (first, other)]
    for dense in inputs:
        dense.received(data)
    assert not first.fed and not first.reads
    turns = 0
    while not (first.reads and other.reads):
        before = len(first.fed) + len(other.fed)
        await asyncio.sleep(0)
        turns += 1
        assert len(first.fed) + len(other.fed) <= before + 1
    for connection in (first, other):
        assert b"".join(connection.fed) == data
        assert max(map(len, connection.fed)) <= SLICE_BYTES
    assert turns >= 2 * len(data) // SLICE_BYTES


async def test_order_is_kept_and_aiohttp_stays_paused() -> None:
    slices, dense_data = Slices(), b"\n" * 10_000
    connection = Connection()
    dense = DenseInput(connection, connection, slices)
    dense.received(dense_data)
    dense.received(b"what comes after it")
    connection._reading_paused = True
    for _ in range(2 * len(dense_data) // SLICE_BYTES + 2):
        await asyncio.sleep(0)
    assert b"".join(connection.fed) == dense_data + b"what comes after it"
    assert not connection.reads, "aiohttp goes on by itself"
    large = b"x" * 300_000
    dense.received(large)
    assert connection.fed[-1] == large, "few lines are not cut"


async def test_a_connection_that_is_gone_gets_nothing_more() -> None:
    slices = Slices()
    connection = Connection()
    dense = DenseInput(connection, connection, slices)
    dense.received(b"\n" * 10_000)
    dense.lost()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not connection.fed


@pytest.mark.parametrize("factory", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_such_a_body_is_read_whole(factory: Any, monkeypatch: Any) -> None:
    slices: list[int] = []
    feed = DenseInput.feed_slice

    def counted(self: DenseInput) -> bool:
        slices.append(len(self._held))
        return feed(self)

    monkeypatch.setattr(dense_input.DenseInput, "feed_slice", counted)

    async def main() -> None:
        async with cluster() as c:
            body = orjson.dumps({"text": TEXT, "max_new_tokens": 1})
            reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
            for _ in range(2):  # the connection goes on after it
                writer.write(HEAD % b"" + one_byte_chunks(body))
                assert b" 200 " in await reader.readline()
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(size)
            writer.close()
            assert c.prefill[0].requests[0].body["text"] == TEXT
            assert len(slices) > 100

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


async def test_without_a_key_the_answer_comes_first(monkeypatch: Any) -> None:
    async with cluster("--api-key", "right") as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
        writer.write(HEAD % b"Authorization: Bearer wrong\r\n" + one_byte_chunks(b"x" * 60_000))
        assert b" 401 " in await reader.readline()
        writer.close()
