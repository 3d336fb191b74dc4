"""The relay that disturbs EndForward, between real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import zmq
import zmq.asyncio

from benchmarks.chaos.endforward_relay import Disturbance, EndForwardRelay
from sglang_sbs.wire import TOPIC


@dataclass
class Line:
    """An engine's socket, the relay, a router's socket."""

    engine: zmq.asyncio.Socket
    relay: EndForwardRelay
    router: zmq.asyncio.Socket

    async def pass_on(self, count: int) -> None:
        """Send numbered messages and wait until the relay has them all."""
        for number in range(count):
            await self.engine.send_multipart([TOPIC, str(number).encode()])
        before = self.relay.received
        async with asyncio.timeout(20):
            while self.relay.received < before + count:  # noqa: ASYNC110 (polls a count)
                await asyncio.sleep(0.01)

    async def arrived(self, count: int) -> list[int]:
        async with asyncio.timeout(20):
            return [int((await self.router.recv_multipart())[1]) for _ in range(count)]


@pytest.fixture
async def line(tmp_path) -> AsyncIterator[Line]:
    context = zmq.asyncio.Context()
    router = context.socket(zmq.SUB)
    router.setsockopt(zmq.SUBSCRIBE, b"")
    router.bind(f"ipc://{tmp_path}/router")
    relay = EndForwardRelay(f"ipc://{tmp_path}/relay", f"ipc://{tmp_path}/router")
    relay.start()
    engine = context.socket(zmq.PUB)
    engine.setsockopt(zmq.LINGER, 0)
    engine.connect(f"ipc://{tmp_path}/relay")
    made = Line(engine, relay, router)
    try:
        async with asyncio.timeout(20):
            # Until both subscriptions are through.
            while not await router.poll(10):
                await engine.send_multipart([TOPIC, b"-1"])
            await engine.send_multipart([TOPIC, b"-2"])
            while await made.arrived(1) != [-2]:
                pass
        yield made
    finally:
        await relay.close()
        engine.close(0)
        router.close(0)
        context.term()


async def test_passes_messages_on_untouched_and_in_order(line: Line) -> None:
    await line.pass_on(50)
    assert await line.arrived(50) == list(range(50))


async def test_loses_all_and_then_none(line: Line) -> None:
    line.relay.disturbance = Disturbance(lost=1.0)
    await line.pass_on(20)
    line.relay.disturbance = Disturbance()
    await line.engine.send_multipart([TOPIC, b"99"])
    assert await line.arrived(1) == [99]


async def test_loses_about_the_share_it_is_given(line: Line) -> None:
    line.relay.disturbance = Disturbance(lost=0.5)
    before = line.relay.sent
    await line.pass_on(400)
    assert 120 < line.relay.sent - before < 280


async def test_sends_twice(line: Line) -> None:
    line.relay.disturbance = Disturbance(duplicated=1.0)
    await line.pass_on(3)
    assert await line.arrived(6) == [0, 0, 1, 1, 2, 2]


async def test_delays_so_that_a_later_message_overtakes(line: Line) -> None:
    line.relay.disturbance = Disturbance(late_s=0.2)
    await line.pass_on(1)
    line.relay.disturbance = Disturbance()
    await line.engine.send_multipart([TOPIC, b"99"])
    assert await line.arrived(2) == [99, 0]
