"""A scripted SGLang engine: HTTP surface, EndForward, faults on command, no model and no sleeping.

Owns what a test needs to play a prefill or decode instance; the script and the record are those of
:mod:`.mock_script`, the JSON of its answers is :mod:`.mock_answers`'. It forms no passes: a test
says what it reports. Must not know the router. Everything listens at 127.0.0.1 on a free port.

    engine = MockEngine("prefill", dp_size=2)
    await engine.start()
    engine.gate.close()                  # requests wait from now on
    await engine.gate.arrived(1)         # ... until one is here
    engine.gate.open()                   # and all go on
    engine.requests[0].body["bootstrap_room"]
    await engine.stop()
"""

from __future__ import annotations

import asyncio
import ssl
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import zmq
from aiohttp import web

from sglang_sbs.wire import EndForward, encode_endforward
from tools.stand_ins import mock_http
from tools.stand_ins.mock_answers import (
    anthropic_error,
    frame,
    message_events,
    output,
    response_events,
    usage_of,
)
from tools.stand_ins.mock_script import (
    Behaviour,
    EngineRole,
    Fault,
    HoldGate,
    RecordedRequest,
    Rooms,
)

__all__ = ["Behaviour", "EngineRole", "Fault", "HoldGate", "MockEngine", "RecordedRequest", "Rooms"]


class MockEngine:
    """``behaviours`` are used up one per request, then ``behaviour`` holds for all."""

    def __init__(
        self,
        role: EngineRole,
        *,
        dp_size: int = 2,
        rooms: Rooms | None = None,
        server_info: dict[str, Any] | None = None,
        sbs_block: bool = False,
    ) -> None:
        self.role = role
        self.dp_size = dp_size
        self.boot_id = uuid.uuid4().hex
        self.booted_s = int(time.time())
        self.behaviour = Behaviour()
        self.behaviours: deque[Behaviour] = deque()
        self.gate = HoldGate()
        """Before anything is done with a request."""
        self.begin_gate = HoldGate()
        """Before a stream of ``/v1/responses`` begins, which is before :attr:`gate`."""
        self.reply_gate = HoldGate()
        """Prefill: with the KV cache sent, before the response head."""
        self.token_gate = HoldGate()
        """Before every output token but the first."""
        self.requests: list[RecordedRequest] = []
        self.unread = 0
        """Requests whose body was left unread."""
        self.aborts: list[str] = []
        self.ignores_aborts = False
        """Aborts are noted and end nothing, as while a rank is in a forward pass."""
        self.abort_headers: list[dict[str, str]] = []
        self.hits: dict[str, int] = {}
        """Control requests by path."""
        self.ready_status = 200
        self.has_ready = True
        self.metrics_page = ""
        """Text of ``GET /metrics``; 404 without, as an engine without ``--enable-metrics``."""
        self.raw_answers: dict[str, bytes] = {}
        """Bytes by path that are sent instead of an answer; then the connection ends."""
        self.tokenize: Callable[[dict[str, Any]], list[Any] | None] | None = None
        """Result of ``POST /tokenize`` for a body (``None``: 400); 404 without."""
        self.port = 0
        self._tls: ssl.SSLContext | None = None
        self._rooms = rooms
        self._changed = asyncio.Condition()
        self._running = asyncio.Event()
        self._running.set()
        self._server_info = server_info or {}
        self.max_model_len: Any = 32_774
        """Value in ``GET /v1/models``; ``None``: there is no such endpoint."""
        self._sbs_block = sbs_block
        self._runner: web.AppRunner | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._publisher: zmq.Socket[bytes] | None = None
        self._seq: dict[int, int] = {}

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        """Listen; ``port`` 0 picks a free one, and a restart may ask for the old one."""
        app = web.Application(client_max_size=1 << 30, middlewares=[self._while_running])
        converted = ("/v1/messages", "/v1/responses")
        for path in ("/generate", "/v1/completions", "/v1/chat/completions", *converted):
            app.router.add_post(path, self._serve)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/flush_cache", self._count(web.Response))
        app.router.add_get("/server_info", self._get_server_info)
        app.router.add_get("/model_info", self._get_model_info)
        app.router.add_get("/get_model_info", self._get_model_info)
        app.router.add_get("/v1/models", self._get_models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/loads", self._get_loads)
        app.router.add_get("/ready", self._get_ready)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/health", self._count(web.Response))
        app.router.add_get("/health_generate", self._count(web.Response))
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        self._tls = tls
        site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=tls)
        await site.start()
        self.port = int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening; open connections are closed, as when the process dies."""
        self.thaw()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._publisher is not None:
            self._publisher.close(0)
            self._publisher = None
        if self._context is not None:
            self._context.term()
            self._context = None

    async def restart(self, port: int = 0) -> None:
        """Come back at the same address as a new boot; ``port``: where it was, if it stopped."""
        port = port or self.port
        await self.stop()
        self.boot_id = uuid.uuid4().hex
        self.booted_s += 60  # no test has so much time
        self._seq.clear()
        await self.start(port)

    def freeze(self) -> None:
        """Behave like a process that was stopped (SIGSTOP): take connections and send nothing."""
        self._running.clear()

    def thaw(self) -> None:
        self._running.set()

    @web.middleware
    async def _while_running(self, request: web.Request, handler: Any) -> web.StreamResponse:
        await self._running.wait()
        raw = self.raw_answers.get(request.path)
        if raw is not None and request.transport is not None:
            await request.read()
            self.hits[request.path] = self.hits.get(request.path, 0) + 1
            request.transport.write(raw)
            request.transport.close()
            return web.Response()
        response: web.StreamResponse = await handler(request)
        await self._running.wait()
        return response

    # Looking at what happened -----------------------------------------------------------------

    async def received(self, count: int) -> list[RecordedRequest]:
        """Until ``count`` inference requests have arrived."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.requests) >= count)
        return self.requests

    async def aborted(self, rid: str) -> None:
        """Until ``POST /abort_request`` named ``rid``."""
        async with self._changed:
            await self._changed.wait_for(lambda: rid in self.aborts)

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # EndForward -------------------------------------------------------------------------------

    def connect_publisher(self, endpoint: str) -> None:
        """Send EndForward to a router's SUB socket."""
        self._context = zmq.Context(io_threads=1)
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.LINGER, 0)
        self._publisher.connect(endpoint)

    def bind_publisher(self) -> str:
        """Listen for routers instead; returns the endpoint (of rank 0, one rank only)."""
        self._context = zmq.Context(io_threads=1)
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.LINGER, 0)
        port = self._publisher.bind_to_random_port("tcp://127.0.0.1")
        return f"tcp://127.0.0.1:{port}"

    def report(self, rank: int = 0, **fields: Any) -> EndForward:
        """The next EndForward of a rank, not sent."""
        seq = self._seq.get(rank, 0)
        self._seq[rank] = seq + 1
        values: dict[str, Any] = {
            "instance_id": "",
            "boot_id": self.boot_id,
            "role": self.role,
            "dp_rank": rank,
            "dp_size": self.dp_size,
            "seq": seq,
            "kind": "forward",
        }
        return EndForward(**values | fields)

    def publish(self, report: EndForward) -> None:
        assert self._publisher is not None, "connect_publisher or bind_publisher first"
        self._publisher.send_multipart(encode_endforward(report))

    # Inference --------------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self.behaviours and self.behaviours[0].fault == "unread":
            self.behaviours.popleft()
            self.unread += 1
            await self._note()
            await asyncio.Event().wait()
        raw = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        body, now_s, port = orjson.loads(raw), time.monotonic(), port_of(request)
        record = RecordedRequest(request.path_qs, headers, body, raw, now_s, port)
        self.requests.append(record)
        behaviour = self.behaviours.popleft() if self.behaviours else self.behaviour
        try:
            await self._note()
            begun = await mock_http.begun(request, record, behaviour, self.begin_gate)
            held = asyncio.ensure_future(self._until_answer(record, behaviour))
            abort = asyncio.ensure_future(record.aborted.wait())
            try:
                await asyncio.wait({held, abort}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                held.cancel()
                abort.cancel()
            if record.aborted.is_set():
                if begun is None:
                    return mock_http.error(500, "Aborted by AbortReq.")
                behaviour = replace(behaviour, abort=True)
            return await self._answer(request, record, behaviour, begun)
        except asyncio.CancelledError:
            record.disconnected.set()
            raise

    async def _until_answer(self, record: RecordedRequest, behaviour: Behaviour) -> None:
        await self.gate.pass_through()
        if behaviour.fault == "hang_before_head":
            await asyncio.Event().wait()
        garbage = behaviour.garbage is not None
        fails = behaviour.status != 200 or behaviour.fault or behaviour.abort or garbage
        if self._rooms is not None:
            room = int(record.body["bootstrap_room"])
            if self.role == "prefill" and (behaviour.kv_sent or not fails):
                self._rooms.prefilled(room)
            elif self.role == "decode" and (behaviour.kv_sent or not fails):
                await self._rooms.wait(room)
        if self.role == "prefill":
            await self.reply_gate.pass_through()

    async def _answer(
        self,
        request: web.Request,
        record: RecordedRequest,
        behaviour: Behaviour,
        begun: web.StreamResponse | None,
    ) -> web.StreamResponse:
        if begun is not None:
            events = response_events(record, behaviour)
            return await mock_http.send_events(
                request, begun, record, behaviour, events, self.token_gate
            )
        if behaviour.fault == "reset_before_head":
            return mock_http.reset(request)
        if behaviour.status != 200:
            return mock_http.error(behaviour.status, behaviour.message or "scripted error")
        tail = record.body.get("stream") and behaviour.garbage_tail is not None
        if behaviour.garbage is not None and not tail:
            return web.Response(body=behaviour.garbage, content_type="text/event-stream")
        if not record.body.get("stream"):
            return await self._complete(request, record, behaviour)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if record.path.startswith("/v1/messages"):
            events = message_events(behaviour)
            return await mock_http.send_events(
                request, response, record, behaviour, events, self.token_gate
            )
        if behaviour.stream_error:
            error = {"error": {"message": behaviour.message or "scripted error", "code": 500}}
            await response.write(mock_http.as_event(error))
        else:
            for number in range(1, behaviour.tokens + 1):
                if number > 1:
                    await self.token_gate.pass_through()
                last = number == behaviour.tokens
                await response.write(
                    mock_http.as_event(
                        output(self.role, record, behaviour, number, last=last, stream=True)
                    )
                )
                if behaviour.garbage_tail is not None:
                    await response.write(behaviour.garbage_tail)
                    return response
                if behaviour.fault == "reset_mid_body":
                    return mock_http.reset(request)
                if behaviour.fault == "hang_mid_body":
                    await record.aborted.wait()
                    return mock_http.reset(request)
            options = record.body.get("stream_options")
            wants_usage = isinstance(options, dict) and options.get("include_usage")
            if record.path != "/generate" and wants_usage:
                usage = frame(record) | {
                    "choices": [],
                    "usage": usage_of(behaviour, behaviour.tokens),
                }
                await response.write(mock_http.as_event(usage))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _complete(
        self, request: web.Request, record: RecordedRequest, behaviour: Behaviour
    ) -> web.StreamResponse:
        data = orjson.dumps(
            output(self.role, record, behaviour, behaviour.tokens, last=True, stream=False)
        )
        if behaviour.fault in ("reset_mid_body", "hang_mid_body"):
            response = web.StreamResponse(
                headers={"Content-Type": "application/json", "Content-Length": str(len(data))}
            )
            await response.prepare(request)
            await response.write(data[:10])
            if behaviour.fault == "hang_mid_body":
                await record.aborted.wait()
            return mock_http.reset(request)
        return web.Response(body=data, content_type="application/json")

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        self.hits[request.path] = self.hits.get(request.path, 0) + 1
        if self.behaviour.status != 200:
            return mock_http.as_json(anthropic_error("scripted error"), self.behaviour.status)
        try:
            count = len(orjson.loads(await request.read())["messages"])
        except (ValueError, KeyError, TypeError) as error:
            return mock_http.as_json(anthropic_error(str(error)), 400)
        return mock_http.as_json({"input_tokens": count})

    async def _abort(self, request: web.Request) -> web.StreamResponse:
        rid = str(orjson.loads(await request.read())["rid"])
        self.aborts.append(rid)
        self.abort_headers.append({k.lower(): v for k, v in request.headers.items()})
        for record in self.requests:
            if self.ignores_aborts:
                continue
            if record.rid.startswith(rid) and record.port == port_of(request):
                record.aborted.set()
        await self._note()
        return web.Response()

    # Control ----------------------------------------------------------------------------------

    def _count(self, answer: Any) -> Any:
        async def handler(request: web.Request) -> web.StreamResponse:
            self.hits[request.path] = self.hits.get(request.path, 0) + 1
            response: web.StreamResponse = answer()
            return response

        return handler

    async def _get_server_info(self, request: web.Request) -> web.StreamResponse:
        self.hits[request.path] = self.hits.get(request.path, 0) + 1
        info: dict[str, Any] = {
            "version": "0.5.23",
            "disaggregation_mode": self.role,
            "dp_size": 1,
            "attn_dp_size": self.dp_size,
            "enable_dp_attention": True,
            "chunked_prefill_size": 1024,
            "max_prefill_tokens": 16384,
            "prefill_max_requests": None,
            "max_running_requests": 64 * self.dp_size,
            "max_total_num_tokens": 100_000,
            "max_req_input_len": 32_768,
            "page_size": 16,
            "served_model_name": "mock",
            "disaggregation_bootstrap_port": 8998,
            "load_balance_method": "auto",
            "internal_states": [{"effective_max_running_requests_per_dp": 64}] * self.dp_size,
        }
        if self._sbs_block:
            info["sbs"] = {
                "boot_id": self.boot_id,
                "booted_s": self.booted_s,
                "routers": [],
                "bind": None,
            }
        return mock_http.as_json(info | self.server_info_of(port_of(request)) | self._server_info)

    def server_info_of(self, _port: int) -> dict[str, Any]:
        """Return the fields that only the server at that port reports."""
        return {}

    async def _get_models(self, request: web.Request) -> web.StreamResponse:
        if self.max_model_len is None:
            return web.Response(status=404)
        card = {"id": "mock", "object": "model", "max_model_len": self.max_model_len}
        return mock_http.as_json({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.hits[request.path] = self.hits.get(request.path, 0) + 1
        if self.tokenize is None:
            return web.Response(status=404)
        tokens = self.tokenize(orjson.loads(await request.read()))
        return web.json_response({"tokens": tokens}, status=400 if tokens is None else 200)

    async def _get_model_info(self, _request: web.Request) -> web.StreamResponse:
        senses = {"has_image_understanding": False, "has_audio_understanding": False}
        return mock_http.as_json({"model_path": "mock", "is_generation": True} | senses)

    async def _get_ready(self, request: web.Request) -> web.StreamResponse:
        self.hits[request.path] = self.hits.get(request.path, 0) + 1
        return web.Response(status=self.ready_status if self.has_ready else 404)

    async def _get_metrics(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(text=self.metrics_page, status=200 if self.metrics_page else 404)

    async def _get_loads(self, request: web.Request) -> web.StreamResponse:
        self.hits[request.path] = self.hits.get(request.path, 0) + 1
        loads = self.loads_of(port_of(request))
        return mock_http.as_json({"loads": loads, "version": "0.5.23"})

    def loads_of(self, _port: int) -> list[dict[str, Any]]:
        """Return the report of the server at that port about its DP ranks."""
        return [
            {
                "dp_rank": rank,
                "num_running_reqs": rank,
                "num_waiting_reqs": 0,
                "num_used_tokens": 100 * rank,
                "num_total_tokens": 100 * rank + 10,
                "num_waiting_uncached_tokens": 5,
            }
            for rank in range(self.dp_size)
        ]


def port_of(request: web.Request) -> int:
    """Return the port of the socket that a request came in by; 0 if it is closed already.

    On node k, which is 127.0.0.(1 + k), it counts as k more: there is one rank on each.
    """
    name = request.get_extra_info("sockname")
    return int(name[1]) + int(name[0].rpartition(".")[2]) - 1 if name else 0
