"""Publishers of KV events, described as an engine of two DP ranks would."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tools.stand_ins.kv_publisher import KvPublisher
from tools.stand_ins.ports import free_ports

RANKS = 2


@asynccontextmanager
async def publishing(engine_info: dict[str, Any]) -> AsyncIterator[list[KvPublisher]]:
    """Two publishers, described in ``engine_info`` as an engine would."""
    first = free_ports(2 * RANKS)[0]
    publishers = [KvPublisher(first + d, first + RANKS + d, dp_rank=d) for d in range(RANKS)]
    engine_info |= {
        "page_size": 4,
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": first,
            "replay_endpoint_port_base": first + RANKS,
            "topic": "",
            "block_size": 4,
            "dp_size": RANKS,
        },
    }
    for publisher in publishers:
        await publisher.start()
    try:
        yield publishers
    finally:
        for publisher in publishers:
            publisher.stop()
