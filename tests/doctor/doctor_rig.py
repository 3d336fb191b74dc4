"""A cluster of mock engines with all that the doctor looks at, each piece of which can be broken.

Owns: 2P1D with bootstrap servers, EndForward of every rank, loads with a clock, and a stand-in for
a router's control plane.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson
import zmq
from aiohttp import web

from sglang_sbs import __version__
from sglang_sbs.doctor.examine import gather, judge
from sglang_sbs.doctor.facts import ClusterFacts
from sglang_sbs.doctor.findings import Finding
from sglang_sbs.doctor.options import parse_options
from sglang_sbs.wire.curve import CurveKeys
from tools.stand_ins.mock_engine import EngineRole, MockEngine, Rooms
from tools.stand_ins.ports import free_ports

DP = 2


class Engine(MockEngine):
    """``info`` is laid over ``/server_info`` at every request; all else can be changed too."""

    def __init__(self, role: EngineRole, rooms: Rooms, endpoint: str) -> None:
        super().__init__(role, dp_size=DP, rooms=rooms)
        self.info = self._server_info
        self.sbs: dict[str, Any] = {
            "wire_version": 1,
            "boot_id": self.boot_id,
            "instance_id": "",
            "routers": [endpoint],
            "bind": None,
            "encrypted": False,
            "sglang_sbs_version": __version__,
            "sgl_kernel_version": "0.4.9",
        }
        self.info |= {
            "sbs": self.sbs,
            "tp_size": DP,
            "model_path": "mock",
            "kv_cache_dtype": "auto",
            "disaggregation_transfer_backend": "mooncake",
            "disaggregation_decode_allocation_policy": "early",
            "schedule_policy": "fcfs",
        }
        self.endpoint = endpoint
        self.speaks = list(range(DP))
        """Ranks that send EndForward."""
        self.says: dict[str, Any] = {}
        """Fields of its messages."""
        self.api_key = ""
        self.loads = True
        self.clock_s = 0.0
        self.slow_s = 0.0
        """Delay of every answer of ``/ready``."""
        self.slow_every = 1
        self._answers = 0
        self._speaker: asyncio.Task[None] | None = None

    async def speak(self, keys: CurveKeys | None = None) -> None:
        """Send EndForward until stopped."""
        self._context = zmq.Context(io_threads=1)
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.connect(self._publisher)
        self._publisher.connect(self.endpoint)
        self._speaker = asyncio.create_task(self._speak())

    async def _speak(self) -> None:
        while True:
            for rank in self.speaks:
                fields = {"kind": "heartbeat", "hook_us": 50} | self.says
                self.publish(self.report(rank, **fields))
            await asyncio.sleep(0.02)

    def hush(self) -> None:
        """Send no more EndForward."""
        if self._speaker is not None and self._publisher is not None and self._context is not None:
            self._speaker.cancel()
            self._publisher.close(0)
            self._context.term()
        self._speaker = self._publisher = self._context = None

    async def stop(self) -> None:
        self.hush()
        await super().stop()

    @web.middleware
    async def _while_running(self, request: web.Request, handler: Any) -> web.StreamResponse:
        await self._running.wait()
        given = request.headers.get("authorization")
        if self.api_key and request.path != "/ready" and given != f"Bearer {self.api_key}":
            return web.Response(status=401)
        if request.path == "/ready" and self.slow_s:
            self._answers += 1
            if self._answers % self.slow_every == 0:
                await asyncio.sleep(self.slow_s)
        response: web.StreamResponse = await handler(request)
        return response

    async def _get_loads(self, request: web.Request) -> web.StreamResponse:
        if not self.loads:
            return web.Response(status=404)
        response = await super()._get_loads(request)
        assert isinstance(response, web.Response)
        stamp = datetime.fromtimestamp(time.time() + self.clock_s, UTC).isoformat()
        body = orjson.loads(response.body) | {"timestamp": stamp}
        return web.Response(body=orjson.dumps(body), content_type="application/json")


class Answers:
    """An HTTP server with fixed answers: ``path -> (status, JSON)``, 404 for others."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.keys: dict[str, str | None] = {}
        """The last authorization given, by path."""
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.Response:
        self.keys[request.path] = request.headers.get("authorization")
        status, body = self.answers.get(request.path, (404, "no such thing"))
        return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


@dataclass
class Rig:
    """``flags`` are added to the doctor's command line."""

    prefill: list[Engine]
    decode: Engine
    bootstraps: list[Answers]
    router: Answers
    endpoint: str
    flags: list[str] = field(default_factory=list)
    bootstrap_ports: list[int] = field(default_factory=list)
    with_router: bool = False
    urls: dict[str, str] = field(default_factory=dict)
    """Another URL to give for an engine."""
    cleanup: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefill, self.decode]

    def command_line(self) -> list[str]:
        words = ["--timeout", "5", "--wait", "2"]
        for engine, port in zip(self.prefill, self.bootstrap_ports, strict=True):
            words += ["--prefill", self.urls.get(engine.url, engine.url), str(port)]
        words += ["--decode", self.urls.get(self.decode.url, self.decode.url)]
        if self.with_router:
            words += ["--router", self.router.url]
        return words + self.flags

    async def facts(self) -> ClusterFacts:
        """Return the facts that the doctor gathers; round trips of engines that are not slow on
        purpose are set to a millisecond, for this machine may be busy."""
        facts = await gather(parse_options(self.command_line()))
        slow = {engine.url for engine in self.engines if engine.slow_s}
        for engine in facts.engines:
            if engine.url not in slow:
                engine.rtts_s = [0.001 for _ in engine.rtts_s]
        return facts

    async def examine(self) -> list[Finding]:
        return judge(await self.facts())

    def serve_router(self) -> list[dict[str, Any]]:
        """Let a healthy router be asked; its entries of ``/workers``, to be changed."""
        self.with_router = True
        workers = [
            {
                "url": engine.url,
                "worker_type": engine.role,
                "bootstrap_port": 9000,
                "is_healthy": True,
                "usable": True,
                "circuit_breaker": "closed",
                "signal": "endforward",
                "endforward_age_s": 0.1,
                "endforward_messages": 100,
                "problems": {},
            }
            for engine in self.engines
        ]
        ranks = [{"age_s": 0.2} for _ in range(DP)]
        state = {
            "policy": "sbs",
            "queue_requests": 0,
            "throttled": False,
            "prefill": [{"instance": e.url, "ranks": list(map(dict, ranks))} for e in self.prefill],
            "decode": [{"instance": self.decode.url, "ranks": list(map(dict, ranks))}],
        }
        self.router.answers = {
            "/readiness": (200, {"status": "ready"}),
            "/workers": (200, {"workers": workers}),
            "/server_info": (200, {"router_manager": True, "sbs": state}),
        }
        return workers

    def router_state(self) -> dict[str, Any]:
        state = self.router.answers["/server_info"][1]["sbs"]
        assert isinstance(state, dict)
        return state

    def listen_at(self, port: int) -> None:
        """Something that takes connections, and no more."""
        sock = socket.create_server(("127.0.0.1", port))
        self.cleanup.callback(sock.close)

    def publish_garbage(self) -> None:
        """A program that is no engine, at the port of EndForward."""
        self.prefill[1].speaks = []  # or listening may end before it is received
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sock = context.socket(zmq.PUB)
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(self.endpoint)

        async def speak() -> None:
            while True:
                sock.send_multipart([b"sbs1", b"\0" * 8, b"\xc1"])
                await asyncio.sleep(0.02)

        task = asyncio.create_task(speak())

        def stop() -> None:
            task.cancel()
            sock.close(0)
            context.term()

        self.cleanup.callback(stop)

    async def speak_as_stranger(self) -> None:
        """An engine that nobody gave to the doctor reports here."""
        self.prefill[1].speaks = []  # or listening may end before it is received
        stranger = Engine("decode", Rooms(), self.endpoint)
        stranger.says = {"boot_id": "f" * 32}
        await stranger.speak()
        self.cleanup.push_async_callback(stranger.stop)


def layout_of(engine: Engine) -> dict[str, Any]:
    """Return a bootstrap server's description of its engine."""
    return {
        "attn_tp_size": 1,
        "attn_cp_size": 1,
        "dp_size": DP,
        "pp_size": 1,
        "page_size": 16,
        "kv_cache_dtype": "auto",
        "follow_bootstrap_room": True,
        "prefill_http_port": engine.port,
    }


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    """A healthy cluster; everything is stopped at the end."""
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    rooms = Rooms()
    prefill = [Engine("prefill", rooms, endpoint) for _ in range(2)]
    decode = Engine("decode", rooms, endpoint)
    bootstraps, router = [Answers(), Answers()], Answers()
    for engine in (*prefill, decode):
        await engine.start()
        await engine.speak()
    for server in (*bootstraps, router):
        await server.start()
    for engine, server in zip(prefill, bootstraps, strict=True):
        engine.info |= {"disaggregation_bootstrap_port": server.port, "port": engine.port}
        server.answers["/route"] = (200, layout_of(engine))
    made = Rig(prefill, decode, bootstraps, router, endpoint)
    made.bootstrap_ports = [server.port for server in bootstraps]
    try:
        yield made
    finally:
        await made.cleanup.aclose()
        for engine in (*prefill, decode):
            await engine.stop()
        for server in (*bootstraps, router):
            await server.stop()
