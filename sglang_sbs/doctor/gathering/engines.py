"""Queries engines over HTTP concurrently, each query with a time limit. Uses only GETs that run no
forward pass."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import aiohttp

from sglang_sbs.console.plain_words import plain_error, system_error
from sglang_sbs.doctor.facts import Bootstrap, EngineFacts, Failure, RankReports, text
from sglang_sbs.doctor.options import DoctorOptions
from sglang_sbs.engine.config import split_tcp
from sglang_sbs.router.engine_secrets import beginning_without_secrets, without_secrets
from sglang_sbs.router.engines.control_requests import AnswerTooLong, ask, object_in
from sglang_sbs.router.engines.urls import split_worker_url
from sglang_sbs.router.options.config import BreakerConfig
from sglang_sbs.router.workers import server_info
from sglang_sbs.router.workers.breaker import Breaker
from sglang_sbs.router.workers.health import parse_loads
from sglang_sbs.router.workers.kv_addresses import (
    RefusedAddress,
    default_endpoints,
    reported_endpoints,
)
from sglang_sbs.router.workers.server_info import RankOutOfReach, UnusableWorker, WorkerInfo
from sglang_sbs.router.workers.worker import Worker

ROUND_TRIPS = 8
_AT_ONCE = 64
"""Limit on engines queried concurrently."""
_ROUTE = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
"""Bootstrap server's path for the layout of the whole prefill engine, which a decode engine asks
first."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    took_s: float
    ended_s: float
    """Wall clock time when the response was complete, in seconds."""


class Asker:
    """Sends queries to engines and routers with their keys and certificates."""

    def __init__(self, session: aiohttp.ClientSession, options: DoctorOptions) -> None:
        self._session = session
        self._options = options
        self._api_key = options.router_flags.api_key

    async def get(self, url: str, path: str, key: str | None = None) -> Answer:
        """Send a ``GET`` and return the response; without ``key``, none is sent. Raises: Failure,
        no response."""
        limit_s = self._options.timeout_s
        get = partial(ask, self._session, "GET", timeout_s=limit_s, connect_s=min(5.0, limit_s))
        started_s = time.monotonic()
        try:
            status, body = await get(url + path, key=key)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise Failure(*await self._why(url, error, limit_s)) from error
        return Answer(status, body, time.monotonic() - started_s, time.time())

    async def _why(self, url: str, error: Exception, limit_s: float) -> tuple[str, str]:
        scheme, host, port = split_worker_url(url)
        text = plain_error(error)
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return "certificate", text
        if isinstance(error, aiohttp.ClientConnectorSSLError | ssl.SSLError):
            if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER" in text:
                return "wrong-scheme", f"{url} is given, and the engine serves http://"
            return "certificate", text
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return "unreachable", "no connection in time: a firewall, or a wrong host"
        if isinstance(error, AnswerTooLong):
            return "not-sglang", text
        if isinstance(error, TimeoutError):
            return "silent", f"connected, and no answer within {limit_s:g} s"
        if isinstance(error, aiohttp.ClientConnectorError):
            return "unreachable", f"{host}:{port}: {system_error(error.os_error)}"
        if scheme == "http" and await _connects(host, port, limit_s, _any_certificate()):
            return "wrong-scheme", f"{url} is given, and the engine serves https://"
        return "not-sglang", f"the server there is not an HTTP server: {text}"

    # An engine --------------------------------------------------------------------------------

    async def examine(self, facts: EngineFacts) -> None:
        """Query everything about one engine. Never raises because of its responses."""
        try:
            shown = await self._server_info(facts.url)
            facts.admin_api_key = text(shown, "admin_api_key")
            facts.data = without_secrets(shown)
            facts.info = server_info.parse_server_info(shown, facts.role)
            await self._rank_servers(facts.info, facts.url)
        except Failure as failure:
            facts.failure = failure
            return
        except UnusableWorker as error:
            facts.info, facts.unusable = None, error
        questions = [self._round_trips(facts), self._without_key(facts)]
        if facts.info is not None:
            questions.append(self._loads(facts, facts.info))
            if facts.role == "prefill":
                questions.append(self._bootstrap(facts, facts.info))
        await asyncio.gather(*questions)

    async def _rank_servers(self, info: WorkerInfo, url: str) -> None:
        """Check the servers of the first node's ranks; only EndForward shows where the others are.
        Raises: RankOutOfReach, a DP rank does not serve where requests for it would go."""
        boot_id = info.sbs.boot_id if info.sbs is not None else ""
        for rank in server_info.ranks_in_reach(info)[1:] if info.rust_server else ():
            place = server_info.server_url(url, info, rank)
            try:
                server_info.check_rank_server(await self._server_info(place), rank, boot_id)
            except (Failure, UnusableWorker) as error:
                raise RankOutOfReach(server_info.not_a_rank(place, rank, str(error))) from error

    async def _server_info(self, url: str) -> dict[str, Any]:
        answer = await self.get(url, "/server_info", self._api_key)
        if answer.status == 404:
            answer = await self.get(url, "/get_server_info", self._api_key)
        if answer.status in (401, 403):
            raise Failure("refused", f"/server_info answers {answer.status}")
        data = object_in(answer.body)
        if answer.status != 200 or not data:
            head = beginning_without_secrets(answer.body, 80)
            raise Failure("not-sglang", f"/server_info answers {answer.status}: {head!r}")
        if "router_manager" in data:
            raise Failure("is-a-router", "its /server_info is a router's")
        if "version" not in data or "disaggregation_mode" not in data:
            why = "its /server_info has neither version nor disaggregation_mode"
            raise Failure("not-sglang", why)
        return data

    async def _round_trips(self, facts: EngineFacts) -> None:
        with suppress(Failure):
            for number in range(ROUND_TRIPS):
                answer = await self.get(facts.url, "/ready", self._api_key)
                facts.ready_status = answer.status
                if number:  # the first one opens a connection
                    facts.rtts_s.append(answer.took_s)

    async def _without_key(self, facts: EngineFacts) -> None:
        """Test whether the engine can be used without a key, on a path that SGLang protects like
        inference."""
        with suppress(Failure):
            answer = await self.get(facts.url, "/model_info")
            facts.open_without_key = answer.status not in (401, 403)

    async def _loads(self, facts: EngineFacts, info: WorkerInfo) -> None:
        worker = worker_of(facts, info)
        path = "/v1/loads?include=core"
        with suppress(Failure, ValueError):
            answers = [await self.get(url, path, self._api_key) for url in worker.server_urls]
            if (answer := answers[0]).status == 200:
                facts.loads = parse_loads(worker, [answer.body for answer in answers])
                stamp = datetime.fromisoformat(str(object_in(answer.body).get("timestamp")))
                asked_s = answer.ended_s - answer.took_s / 2
                facts.clock_offset_s = stamp.timestamp() - asked_s

    async def kv_ports(self, facts: EngineFacts, reports: Mapping[int, RankReports]) -> None:
        """Find closed KV event ports. ``reports``: the engine's EndForward by DP rank."""
        info = facts.info
        if info is None or info.kv_events is None:
            return
        ports: list[tuple[str, str]] = []
        for rank in range(info.dp_size):
            node, report = server_info.node_of_rank(info, rank), reports.get(rank)
            endpoints = default_endpoints(facts.url, info.kv_events, rank)
            if node > 0 and report is None:
                continue  # reported by endforward.rank-missing, or not known
            if node > 0 and report is not None:
                address, has_key = report.last.kv_address, self._options.key_file is not None
                try:
                    if address is None:
                        raise RefusedAddress("it reports none")
                    endpoints = reported_endpoints(address, report.peer, has_key=has_key)
                except RefusedAddress:
                    facts.hidden_kv_ranks.append(rank)
                    continue
            whose = f"rank {rank} on node {node}" if node else f"rank {rank}"
            ports.append((endpoints.live, whose))
            if endpoints.replay:
                ports.append((endpoints.replay, f"{whose}, replays"))
        limit_s = self._options.timeout_s
        are_open = await asyncio.gather(
            *(_connects(*split_tcp(port), limit_s) for port, _ in ports)
        )
        facts.closed_kv_ports = [
            f"{port.removeprefix('tcp://')} ({whose})"
            for (port, whose), is_open in zip(ports, are_open, strict=True)
            if not is_open
        ]

    async def _bootstrap(self, facts: EngineFacts, info: WorkerInfo) -> None:
        worker = worker_of(facts, info)
        port = worker.bootstrap_port
        if port is None:
            return
        bootstrap = facts.bootstrap = Bootstrap(worker.bootstrap_host, port)
        # Decode engines use plain HTTP for it, regardless of the engine's own protocol.
        try:
            answer = await self.get(f"http://{bootstrap.host}:{port}", _ROUTE)
        except Failure as failure:
            bootstrap.failure = failure.text
            return
        bootstrap.status = answer.status
        bootstrap.text = beginning_without_secrets(answer.body, 120)
        bootstrap.layout = object_in(answer.body)


def worker_of(facts: EngineFacts, info: WorkerInfo) -> Worker:
    """Build the engine's worker as a router would."""
    return Worker(
        url=facts.url,
        role=facts.role,
        breaker=Breaker(BreakerConfig()),
        configured_bootstrap_port=facts.given_port,
        info=info,
    )


async def examine_all(asker: Asker, engines: Sequence[EngineFacts]) -> None:
    gate = asyncio.Semaphore(_AT_ONCE)

    async def examine(facts: EngineFacts) -> None:
        async with gate:
            await asker.examine(facts)

    await asyncio.gather(*map(examine, engines))


def _any_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _connects(
    host: str, port: int, limit_s: float, tls: ssl.SSLContext | None = None
) -> bool:
    try:
        async with asyncio.timeout(min(3.0, limit_s)):
            _reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return True
