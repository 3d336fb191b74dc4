"""A scripted SGLang engine whose every DP rank serves HTTP itself (``SGLANG_RUST_SERVER=1``).

What it does is what a real 0.5.23 did (docs/lab/rust-server.md). A request that comes to another
rank than its fields name waits for ever, so a router that sends one there fails its test.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Collection
from typing import Any

from aiohttp import web

from sglang_sbs.cluster.ports import free_port_blocks
from tools.stand_ins.mock_engine import MockEngine, port_of
from tools.stand_ins.mock_script import Behaviour, RecordedRequest


class RustMockEngine(MockEngine):
    """DP rank d serves at ``port + d``; those in ``lost_ranks`` drop every connection."""

    nodes = 1
    """Or as many as it has DP ranks: rank d then serves at 127.0.0.(1 + d)."""

    def __init__(self, *args: Any, lost_ranks: Collection[int] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lost_ranks = set(lost_ranks)
        self.has_ready = False

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        """See :meth:`MockEngine.start`."""
        await super().start(port or next(free_port_blocks(self.dp_size)), tls)
        assert self._runner is not None
        for rank in range(1, self.dp_size):
            host, port = f"127.0.0.{1 + rank}", self.port
            if self.nodes == 1:
                host, port = "127.0.0.1", self.port + rank
            await web.TCPSite(self._runner, host, port, ssl_context=tls).start()

    def rank_of(self, record: RecordedRequest) -> int:
        """The DP rank whose server it came to."""
        return record.port - self.port

    def server_info_of(self, port: int) -> dict[str, Any]:
        """See :meth:`MockEngine.server_info_of`."""
        deployment = {"dp_rank": port - self.port, "dp_size": self.dp_size}
        return {
            "nnodes": self.nodes,
            "port": port,
            "disaggregation_bootstrap_port": self.port,
            "deployment_info": deployment,
            "internal_states": [{"rust_mm_transport": {}}],
        }

    def loads_of(self, port: int) -> list[dict[str, Any]]:
        """Every rank calls itself 0."""
        return [super().loads_of(port)[port - self.port] | {"dp_rank": 0}]

    @web.middleware
    async def _while_running(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if port_of(request) - self.port in self.lost_ranks and request.transport is not None:
            request.transport.abort()
            return web.Response()
        return await super()._while_running(request, handler)

    async def _until_answer(self, record: RecordedRequest, behaviour: Behaviour) -> None:
        wanted = "disagg_prefill_dp_rank" if self.role == "prefill" else "routed_dp_rank"
        if record.body[wanted] != self.rank_of(record):
            await asyncio.Event().wait()
        await super()._until_answer(record, behaviour)
