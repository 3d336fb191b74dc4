"""The port with TLS, before there is a connection."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

from router_harness import until

from sglang_sbs.router.client.intake import Doorman
from sglang_sbs.router.client.tls_port import TlsPort


async def test_a_burst_of_connections_is_let_in_a_few_per_turn_of_the_loop() -> None:
    """A full doorman closes the oldest, and a client in its handshake must not become that."""
    entered: list[Any] = []

    class Watching(Doorman):
        def enter(self, transport: Any, patience_s: float, *, spared: bool = False) -> None:
            entered.append(transport)
            super().enter(transport, patience_s, spared=spared)

    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    clients = [socket.create_connection(listening.getsockname()) for _ in range(40)]
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    port = TlsPort([listening], tls, Watching(), asyncio.Protocol)
    most, before = 0, 0
    while len(entered) < len(clients):
        await asyncio.sleep(0)
        most, before = max(most, len(entered) - before), len(entered)
    assert most <= 8
    for client in clients:
        client.close()
    await until(lambda: not port._under_way)
    port.close()
