"""KV events of an engine that publishes more than any pass stores."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import msgspec
import orjson

from benchmarks.hostile.case import Target, case
from benchmarks.raw_engine import reply
from tools.stand_ins.kv_publisher import KvPublisher, stored
from tools.stand_ins.ports import free_ports

_BLOCKS = 1 << 17


def _messages() -> list[list[object]]:
    """Events by message: an honest one of 16,384 tokens in pages of one, and such as none makes."""
    draw = random.Random(1)
    pages = [stored(draw.getrandbits(63)) for _ in range(16_384)]
    wide = stored(*(draw.getrandbits(63) for _ in range(_BLOCKS)))
    small = {"type": "BlockStored", "block_hashes": [1] * _BLOCKS}
    long: dict[str, object] = {"type": "BlockStored", "block_hashes": [2]}
    return [
        list(pages),
        [wide] * 12,
        [small] * 100,
        [["X"]] * 5_000_000,
        [{"type": "AllBlocksCleared"}] * 500_000,
        [long | {"token_ids": [1] * 15_000_000}],
        list(pages),
    ]


@case("kv-events", "an engine that publishes KV messages of up to 15 MB, of every odd shape")
async def kv_events(target: Target) -> None:
    messages = await asyncio.to_thread(_messages)
    first = free_ports(2)[0]
    publisher = KvPublisher(first, first + 1)
    block = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": first,
        "replay_endpoint_port_base": first + 1,
        "topic": "",
        "block_size": 1,
        "dp_size": 1,
    }
    info = {"version": "0.5.23", "disaggregation_mode": "prefill", "dp_size": 1, "kv_events": block}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(reply(orjson.dumps(info)))

    await publisher.start()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        worker = {"url": url, "worker_type": "prefill", "bootstrap_port": 8998}
        kind = b"Content-Type: application/json\r\n"
        await target.post(orjson.dumps(worker), "/workers", headers=kind)
        await publisher.subscribed()
        await asyncio.sleep(1)
        for events in messages:
            target.sent_bytes += len(msgspec.msgpack.encode(events))
            publisher.publish(*events)
            await asyncio.sleep(1)
    finally:
        server.close()
        publisher.stop()
