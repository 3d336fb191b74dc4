"""Endpoints for health, models, workers, loads and aborts. Responses are shaped as in
sglang_router."""

from __future__ import annotations

import asyncio
import reprlib
import time
import uuid
from collections.abc import Iterable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from sglang_sbs.console.plain_words import counted, plain_error
from sglang_sbs.dashboard.pages import Handler
from sglang_sbs.router.api.bodies import json_answer, read_object
from sglang_sbs.router.api.engine_metrics import merge_pages
from sglang_sbs.router.api.scheduler_access import SchedulerAccess
from sglang_sbs.router.client.answer_stream import send
from sglang_sbs.router.client.intake import Bodies
from sglang_sbs.router.engine_secrets import beginning_without_secrets, without_secrets
from sglang_sbs.router.engines.control_requests import ask, object_in
from sglang_sbs.router.errors import ErrorStyle, RouterError
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.relay.in_flight import InFlight
from sglang_sbs.router.requests.body_fields import bad_request
from sglang_sbs.router.telemetry.metrics_port import page_of
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.router.workers.worker_view import describe_worker

_ASK_TIMEOUT_S = 30.0
_BODIES_BYTES = 64 << 20
"""Limit on the request bodies of these endpoints together. It is separate from that for prompts, so
that aborts always have room."""
_MOST_TOKENS = 1 << 31
_MAX_LABEL_CHARS = 4096
"""Limit on all labels of a worker together, because they go to every front end once a second."""


class Control:
    def __init__(
        self,
        options: RouterOptions,
        scheduler: SchedulerAccess,
        in_flight: InFlight,
        session: aiohttp.ClientSession,
    ) -> None:
        self._options = options
        self._scheduler = scheduler
        self._registry = scheduler.registry
        self._in_flight = in_flight
        self._session = session
        """Session for control requests to engines."""
        self._started_at = int(time.time())
        self._bodies = Bodies(_BODIES_BYTES, options.relay.pace)
        self._generating: asyncio.Task[str] | None = None
        self._metrics: asyncio.Task[bytes] | None = None

    def routes(self) -> list[tuple[str, str, Handler]]:
        return [
            ("GET", "/health", self.health),
            ("GET", "/liveness", self.health),
            ("GET", "/readiness", self.readiness),
            ("GET", "/health_generate", self.health_generate),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:.+}", self.model),
            ("GET", "/model_info", self.model_info),
            ("GET", "/get_model_info", self.model_info),
            ("GET", "/server_info", self.server_info),
            ("GET", "/get_server_info", self.server_info),
            ("GET", "/workers", self.list_workers),
            ("POST", "/workers", self.add_worker),
            ("GET", "/workers/{worker_id}", self.get_worker),
            ("PUT", "/workers/{worker_id}", self.update_worker),
            ("DELETE", "/workers/{worker_id}", self.remove_worker),
            ("DELETE", "/workers", self.remove_worker),
            ("POST", "/workers/{worker_id}/drain", self.drain_worker),
            ("POST", "/workers/{worker_id}/undrain", self.undrain_worker),
            ("POST", "/flush_cache", self.flush_cache),
            ("GET", "/get_loads", self.loads),
            ("GET", "/v1/loads", self.loads),
            ("GET", "/engine_metrics", self.engine_metrics),
            ("POST", "/abort_request", self.abort_request),
        ]

    # Health -----------------------------------------------------------------------------------

    async def health(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(text="OK")

    async def readiness(self, _request: web.Request) -> web.StreamResponse:
        """Respond 200 if a healthy prefill and decode pair can take a request now, else 503."""
        if self._in_flight.draining or not self._registry.ready:
            reason = "draining" if self._in_flight.draining else "insufficient healthy workers"
            return json_answer({"status": "not ready", "reason": reason}, 503)
        healthy = sum(worker.usable for worker in self._registry)
        total = len(self._registry)
        return json_answer({"status": "ready", "healthy_workers": healthy, "total_workers": total})

    async def health_generate(self, _request: web.Request) -> web.StreamResponse:
        """Run ``/health_generate`` of one prefill and one decode instance. The endpoint needs no
        key, as in sglang_router, so concurrent requests share one run."""
        if self._generating is None or self._generating.done():
            self._generating = asyncio.create_task(self._generate())
        bad = await asyncio.shield(self._generating)
        if bad:
            raise RouterError(503, "unhealthy_workers", bad)
        return web.Response(text="OK")

    async def _generate(self) -> str:
        """Run ``/health_generate`` on the first usable prefill and decode instance. Return their
        errors as text, empty without any. Raises: RouterError (503), no pair is usable."""
        pair = [self._first("prefill"), self._first("decode")]
        answers = await self._ask_all(pair, "GET", "/health_generate", every_rank=True)
        return "; ".join(
            f"{worker.url}: {status}" for worker, status, _ in answers if status != 200
        )

    # Model and server -------------------------------------------------------------------------

    async def models(self, _request: web.Request) -> web.StreamResponse:
        cards = await self._model_cards()
        if not cards:
            return web.Response(status=503, text="No models available")
        return json_answer({"object": "list", "data": list(cards.values())})

    async def model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["model"]
        card = (await self._model_cards()).get(name)
        if card is None:
            raise RouterError(404, "model_not_found", f"The model {name!r} does not exist")
        return json_answer(card)

    async def _model_cards(self) -> dict[str, dict[str, Any]]:
        """Return the cards for ``/v1/models`` by model name, with the fields that SGLang
        returns."""
        named = [(w, w.info) for w in self._registry if w.info and w.info.model_id]
        # Ask one engine per model for its context length; its longest prompt is a close substitute.
        asked = {info.model_id: worker for worker, info in named if worker.usable}
        answers = await self._ask_all(asked.values(), "GET", "/v1/models")
        reported = {
            card.get("id"): card.get("max_model_len")
            for _, status, body in answers
            if status == 200 and isinstance(cards := object_in(body).get("data"), list)
            for card in cards
            if isinstance(card, dict) and isinstance(card.get("id"), str)
        }
        return {
            info.model_id: {
                "id": info.model_id,
                "object": "model",
                "created": self._started_at,
                "owned_by": "local",
                "root": info.model_id,
                "max_model_len": _length(reported.get(info.model_id))
                or info.max_request_tokens
                or None,
            }
            for _, info in named
        }

    async def model_info(self, _request: web.Request) -> web.StreamResponse:
        worker = self._first("prefill")
        ((_, status, body),) = await self._ask_all([worker], "GET", "/model_info")
        if status != 200 or not object_in(body):
            what = status if status != 200 else "no JSON object"
            raise RouterError(502, "proxy_request_failed", f"{worker.url}/model_info: {what}")
        return json_answer(without_secrets(object_in(body)))

    async def server_info(self, _request: web.Request) -> web.StreamResponse:
        """Return the first prefill instance's fields, every worker's response and the scheduler's
        state."""
        workers = [worker for worker in self._registry if worker.usable]
        answers = await self._ask_all(workers, "GET", "/server_info")
        infos: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": []}
        states: list[Any] = []
        for worker, status, body in answers:
            value: dict[str, Any] = {"url": worker.url, "error": status}
            if status == 200:
                value = without_secrets(object_in(body))
            infos[worker.role].append(value)
            if worker.role == "decode" and isinstance(value.get("internal_states"), list):
                states += value["internal_states"]
        first = infos["prefill"][0] if infos["prefill"] else {}
        snapshot = msgspec.to_builtins(self._scheduler.dispatcher.snapshot())
        count = len(self._registry)
        stock = {"router_manager": True, "routers_count": 1, "workers_count": count}
        ours = {
            "sbs": snapshot,
            "sbs_options": self._options.shown(self._scheduler.policy.policy),
        }
        return json_answer(first | stock | {"internal_states": states} | infos | ours)

    # Workers ----------------------------------------------------------------------------------

    async def list_workers(self, _request: web.Request) -> web.StreamResponse:
        now_s = time.monotonic()
        workers = [describe_worker(worker, now_s) for worker in self._registry]
        stats = {
            "prefill_count": len(self._registry.of_role("prefill")),
            "decode_count": len(self._registry.of_role("decode")),
            "regular_count": 0,
        }
        answer = {"workers": workers, "total": len(workers)}
        return json_answer(answer | self._scheduler.scheduled_by() | {"stats": stats})

    async def add_worker(self, request: web.Request) -> web.StreamResponse:
        body = await read_object(request, self._bodies)
        url, role, port = (body.get(name) for name in ("url", "worker_type", "bootstrap_port"))
        if not isinstance(url, str):
            raise bad_request('url is required, e.g. {"url": "http://10.0.0.1:30000"}')
        if role not in ("prefill", "decode"):
            raise bad_request(f"worker_type must be prefill or decode, not {reprlib.repr(role)}")
        if port is not None and (not isinstance(port, int) or not 1 <= port <= 65535):
            raise bad_request(f"bootstrap_port must be in 1..65535, not {reprlib.repr(port)}")
        worker = self._registry.by_alias(url)
        # Repeated requests are accepted, because deployment tools retry.
        if worker is None or worker.role != role:
            try:
                worker = await self._scheduler.add_worker(url, role, port)
            except ValueError as error:
                raise bad_request(str(error), "invalid_worker") from error
        location = f"/workers/{worker.id}"
        return _accepted(worker, "addition", {"url": worker.url, "location": location})

    async def get_worker(self, request: web.Request) -> web.StreamResponse:
        return json_answer(describe_worker(self._worker(request), time.monotonic()))

    async def update_worker(self, request: web.Request) -> web.StreamResponse:
        """Set ``priority``, ``cost`` and ``labels``; other fields are accepted and ignored."""
        worker = self._worker(request)
        body = await read_object(request, self._bodies)
        priority, cost, labels = (body.get(name) for name in ("priority", "cost", "labels"))
        if priority is not None and (type(priority) is not int or not 0 <= priority < 1 << 32):
            raise bad_request(f"priority must be a whole number >= 0, not {reprlib.repr(priority)}")
        if cost is not None and (not isinstance(cost, int | float) or isinstance(cost, bool)):
            raise bad_request(f"cost must be a number, not {reprlib.repr(cost)}")
        if labels is not None and not (
            isinstance(labels, dict) and all(isinstance(value, str) for value in labels.values())
        ):
            raise bad_request("labels must be an object of strings")
        labels = worker.labels | (labels or {})
        if sum(len(name) + len(value) for name, value in labels.items()) > _MAX_LABEL_CHARS:
            most = _MAX_LABEL_CHARS
            raise bad_request(f"all labels together must have at most {most} characters")
        if priority is not None:
            worker.priority = priority
        if cost is not None:
            worker.cost = float(cost)
        worker.labels = labels
        await self._scheduler.update_worker(worker)
        return _accepted(worker, "update")

    async def remove_worker(self, request: web.Request) -> web.StreamResponse:
        """Remove a worker by id, or by URL (``DELETE /workers?url=...``), and report what
        remains."""
        worker = self._worker(request)
        await self._scheduler.remove_worker(worker)
        message = f"{worker.url} ({worker.role}) is removed and gets no new requests"
        if worker.load:
            message += f"; {counted(worker.load, 'request')} in flight there may run to their end"
        if not self._registry.usable(worker.role):
            hold_s = self._options.scheduler.outage_hold_s
            message += f"; no other {worker.role} worker is usable: new requests wait {hold_s:g} s"
            message += " for one and are then refused"
        more = {"url": worker.url, "worker_type": worker.role, "load": worker.load}
        return _accepted(worker, "removal", more | {"message": message})

    async def drain_worker(self, request: web.Request) -> web.StreamResponse:
        """Stop sending new requests to a worker. Respond as ``GET /workers/{id}``, whose ``load``
        counts requests still running there."""
        await self._scheduler.drain_worker(self._worker(request), True)
        return await self.get_worker(request)

    async def undrain_worker(self, request: web.Request) -> web.StreamResponse:
        await self._scheduler.drain_worker(self._worker(request), False)
        return await self.get_worker(request)

    def _worker(self, request: web.Request) -> Worker:
        """Find the worker named by id or URL in the path, or by ``?url=``. Raises: WorkerError, 400
        for an invalid name, 404 for an unknown worker."""
        name = request.match_info.get("worker_id", request.query.get("url", ""))
        if "worker_id" not in request.match_info and "://" not in name:
            raise WorkerError(
                400, "BAD_REQUEST", "name the worker: /workers/ID or /workers?url=URL"
            )
        try:
            if "://" in name:
                worker = self._registry.by_alias(name)
            else:
                worker = self._registry.by_id(str(uuid.UUID(name)))
        except ValueError as error:
            why = f"Invalid worker_id '{name}' (expected UUID). Error: {error}"
            raise WorkerError(400, "BAD_REQUEST", why) from error
        if worker is None:
            raise WorkerError(404, "WORKER_NOT_FOUND", f"Worker {name} not found")
        return worker

    # Fan-out ----------------------------------------------------------------------------------

    async def flush_cache(self, _request: web.Request) -> web.StreamResponse:
        workers = list(self._registry)
        answers = await self._ask_all(workers, "POST", "/flush_cache", every_rank=True)
        failed = [
            {"url": worker.url, "error": beginning_without_secrets(body, 200) or str(status)}
            for worker, status, body in answers
            if status != 200
        ]
        failing = {failure["url"] for failure in failed}
        flushed = [worker for worker in workers if worker.url not in failing]
        for worker in flushed:
            self._scheduler.dispatcher.cache_flushed(worker.url, worker.dp_size)
        message = f"Successfully flushed cache on all {len(flushed)} HTTP workers"
        if failed:
            message = f"Cache flush: {len(flushed)} succeeded, {len(failed)} failed"
        answer = {
            "status": "partial_success" if failed else "success",
            "message": message,
            "workers_flushed": len(flushed),
            "total_http_workers": len(workers),
            "total_workers": len(workers),
            "successful": [worker.url for worker in flushed],
            "failed": failed,
        }
        return json_answer(answer, 206 if failed else 200)

    async def loads(self, _request: web.Request) -> web.StreamResponse:
        workers = [worker for worker in self._registry if worker.info is not None]
        path = "/v1/loads?include=core,disagg,queues"
        answers = await self._ask_all(workers, "GET", path, every_rank=True)
        details: dict[str, Any] = {}
        for worker, status, body in answers:
            reported = object_in(body).get("loads") if status == 200 else None
            if isinstance(reported, list) and isinstance(before := details.get(worker.url), list):
                reported = before + reported
            details[worker.url] = reported
        # sglang_router 0.3.2 calls the list "workers", later releases "loads".
        short = [{"worker": worker.url, "load": worker.load} for worker in workers]
        loads = [
            {"worker": w.url, "worker_type": w.role, "load": w.load, "details": details[w.url]}
            for w in workers
        ]
        return json_answer({"loads": loads, "workers": short})

    async def engine_metrics(self, request: web.Request) -> web.StreamResponse:
        """Return the Prometheus pages of all engines (they need ``--enable-metrics``) as one page.
        The endpoint needs no key, so concurrent requests share one run."""
        if self._metrics is None or self._metrics.done():
            self._metrics = asyncio.create_task(self._merged_metrics())
        page = await asyncio.shield(self._metrics)
        if not page:
            why = "no worker serves /metrics: start engines with --enable-metrics"
            raise RouterError(503, "no_engine_metrics", why)
        return await send(request, page_of(page))

    async def _merged_metrics(self) -> bytes:
        answers = await self._ask_all(list(self._registry), "GET", "/metrics")
        pages = [(worker.url, page) for worker, status, page in answers if status == 200]
        return await asyncio.to_thread(lambda: b"".join(merge_pages(pages)))

    async def abort_request(self, request: web.Request) -> web.StreamResponse:
        """Abort requests by the client's request id (prefix match, as on an engine), or all.
        Respond with their number."""
        body = await read_object(request, self._bodies)
        rid = "" if body.get("abort_all") else body.get("rid")
        if not isinstance(rid, str) or not (rid or body.get("abort_all")):
            raise bad_request("rid is required (or abort_all: true)")
        here = self._in_flight.abort(rid)
        return json_answer({"aborted": here + await self._scheduler.abort_elsewhere(rid)})

    def _first(self, role: str) -> Worker:
        for worker in self._registry:
            if worker.role == role and worker.usable:
                return worker
        raise RouterError(503, f"no_{role}_servers", f"no usable {role} worker", retry_after_s=1.0)

    async def _ask_all(
        self, workers: Iterable[Worker], method: str, path: str, *, every_rank: bool = False
    ) -> list[tuple[Worker, int, bytes]]:
        """Ask several workers at once. Returns worker, status and body of each response; status 0
        and the reason if there was none. ``every_rank``: one response per DP rank where each rank
        serves HTTP itself."""
        session, key = self._session, self._options.worker_key

        async def of(worker: Worker, url: str) -> tuple[Worker, int, bytes]:
            try:
                asked = ask(session, method, url + path, key=key, timeout_s=_ASK_TIMEOUT_S)
                return worker, *await asked
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                return worker, 0, plain_error(error).encode()

        asked = (
            of(worker, url)
            for worker in workers
            for url in (worker.server_urls if every_rank else [worker.url])
        )
        return list(await asyncio.gather(*asked))


def _accepted(worker: Worker, what: str, more: dict[str, Any] | None = None) -> web.StreamResponse:
    more = {"message": f"Worker {what} queued for background processing"} | (more or {})
    headers = {"Location": more["location"]} if "location" in more else None
    return json_answer({"status": "accepted", "worker_id": worker.id} | more, 202, headers)


class WorkerError(RouterError):
    """An error with sglang_router's format for worker endpoints, which differs from its others."""

    def response(self, style: ErrorStyle = "openai") -> web.Response:
        return json_answer({"error": self.message, "code": self.code}, self.status)


def _length(value: Any) -> int | None:
    """Return a token count from an engine's response; ``None`` if invalid."""
    return value if isinstance(value, int) and 0 < value <= _MOST_TOKENS else None
