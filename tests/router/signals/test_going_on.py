"""Work that goes on in the next turn of the loop goes on once, however often a socket asks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from sglang_sbs.router.signals import kv_rank_sockets


async def test_a_socket_that_calls_in_every_turn_does_not_multiply_what_goes_on() -> None:
    """Its descriptor stays readable while the scheduler is behind and nothing is received."""
    sockets: Any = object.__new__(kv_rank_sockets.RankSockets)
    sockets._loop = asyncio.get_running_loop()
    sockets._going_on = set()
    sockets._owner = SimpleNamespace(behind=True)
    sockets._live = Mock(closed=False)
    turns = 0
    drain = sockets._drain

    def counted(sock: object) -> None:
        nonlocal turns
        turns += 1
        drain(sock)

    sockets._drain, sockets._replay = counted, None
    for _ in range(20):
        counted(sockets._live)  # as the descriptor does, beside what goes on by itself
        await asyncio.sleep(0)
    sockets._live.closed = True
    assert turns <= 2 * 20 + 1
