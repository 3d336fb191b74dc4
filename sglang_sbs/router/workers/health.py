"""Watches workers: start-up, health and restarts, and polls loads where EndForward is missing.
Results go to the registry (health, limits) and to the scheduler (``LoadPolled``)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import orjson

from sglang_sbs.console.plain_words import plain_error
from sglang_sbs.router.engine_secrets import beginning_without_secrets
from sglang_sbs.router.engines.connection import UpstreamError
from sglang_sbs.router.engines.connection_pool import Pool, fetch, is_our_own
from sglang_sbs.router.engines.control_requests import ask
from sglang_sbs.router.limits import clamped_count
from sglang_sbs.router.options.config import MonitorConfig
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import (
    RankOutOfReach,
    UnusableWorker,
    WorkerInfo,
    check_rank_server,
    node_of_rank,
    not_a_rank,
    parse_server_info,
    server_url,
    unknown_address,
)
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import Event, LoadPolled

logger = logging.getLogger(__name__)

_PROBE_PATHS = ("/ready", "/ping")
"""Health checks without a forward pass. SGLang's /health runs one on DP rank 0."""
_RANK_PROBE_PATHS = ("/model_info",)
"""Health check where each DP rank has its own (Rust) HTTP server, which has neither path of
``_PROBE_PATHS``. It shows that the server answers, not that SGLang's scheduler does."""
_UNUSED_S = 1.0
"""While the policy does not use load polls, interval at which it is checked whether it does now."""
_LOADS = "/v1/loads?include=core,disagg,queues"
_NO_ANSWER = (UpstreamError, TimeoutError)
_ASKED_AT_ONCE = 32
"""DP ranks of one engine asked at a time, so that a claim of thousands does no harm."""


@dataclass(frozen=True)
class _Problem:
    text: str
    silent: bool
    """There was no response at all (stopped, cut off), instead of a negative one."""


class Monitor:
    """Runs one task per worker: ``start`` each, and ``close`` at the end."""

    def __init__(
        self,
        registry: Registry,
        session: aiohttp.ClientSession,
        config: MonitorConfig,
        submit: Callable[[Event], None],
        described: Callable[[Worker, WorkerInfo], None] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Create the monitor; ``tls`` checks engines' certificates, ``None`` uses the system's
        defaults."""
        # Load polls use this pool, because aiohttp's client makes each several times as expensive.
        self._pool = Pool(asyncio.get_running_loop(), ssl_context=tls)
        self._poll_headers = (
            f"authorization: Bearer {config.api_key}\r\n".encode() if config.api_key else b""
        )
        self._registry = registry
        self._session = session
        self._config = config
        self._submit = submit
        self._described = described
        self.polls_loads = True
        """Whether the policy uses load polls."""
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._doubts: dict[str, asyncio.Event] = {}
        self.checks: Counter[tuple[str, str]] = Counter()
        """Number of health checks by role and result."""
        self._ticker = asyncio.create_task(self._tick())

    def start(self, worker: Worker) -> None:
        """Wait in the background for the worker to start, then check its health and load."""
        self._doubts[worker.url] = asyncio.Event()
        self._tasks[worker.url] = [_in_background(self._keep(worker, self._watch))]
        if self._config.load_poll_interval_s is not None:
            self._tasks[worker.url].append(_in_background(self._keep(worker, self._poll_loads)))

    def stop(self, worker: Worker) -> None:
        for task in self._tasks.pop(worker.url, []):
            task.cancel()
        self._doubts.pop(worker.url, None)

    def stop_all(self) -> list[asyncio.Task[None]]:
        """Stop watching and return the tasks that are ending."""
        tasks = [task for group in self._tasks.values() for task in group] + [self._ticker]
        for task in tasks:
            task.cancel()
        self._pool.close()
        self._tasks.clear()
        self._doubts.clear()
        return tasks

    async def close(self) -> None:
        await asyncio.gather(*self.stop_all(), return_exceptions=True)

    def doubt(self, worker: Worker) -> None:
        if worker.url in self._doubts:
            self._doubts[worker.url].set()

    async def _tick(self, every_s: float = 1.0) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                self._registry.tick()
            except Exception:  # for example, no descriptors are left for an engine's KV events
                logger.exception("the state of the workers was not updated; trying again")

    async def _keep(self, worker: Worker, run: Callable[[Worker], Awaitable[None]]) -> None:
        """Restart ``run`` after an unexpected error, so that no worker stays unwatched."""
        while True:
            try:
                await run(worker)
            except Exception:
                logger.exception("watching worker %s failed; restarting", worker.url)
                await asyncio.sleep(self._config.fast_s)

    # Start-up and health ----------------------------------------------------------------------

    async def _watch(self, worker: Worker) -> None:
        started_s = time.monotonic()
        while not await self._describe(worker):
            self._go_on(worker)
            waited_s = time.monotonic() - started_s
            if waited_s > self._config.startup_timeout_s:
                text = f"not up after {self._config.startup_timeout_s:g} s"
                text += " (--worker-startup-timeout-secs); still trying"
                self._registry.report_problem(worker, "startup", text)
            # Retry soon at first, later after a twentieth of the time waited so far.
            pause_s = max(self._config.fast_s, waited_s / 20)
            await asyncio.sleep(min(pause_s, self._config.startup_check_interval_s))
        worker.problems.pop("startup", None)
        self._registry.set_healthy(worker, True)
        self._registry.refresh(worker)
        while True:
            await self._pause(worker)
            await self._check(worker)

    def _go_on(self, worker: Worker) -> None:
        """Raise CancelledError if the watch was stopped. A probe that times out at that moment
        reports only the timeout, and the task would continue."""
        if worker.url not in self._tasks:
            raise asyncio.CancelledError

    async def _pause(self, worker: Worker) -> None:
        """Wait until the next regular check or until the worker is in doubt."""
        self._go_on(worker)
        doubt = self._doubts[worker.url]
        doubt.clear()
        regular = self._config.health_enabled
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.health_interval_s if regular else None):
                await doubt.wait()

    async def _check(self, worker: Worker) -> None:
        """Probe until the result is clear; return once the worker is healthy and described."""
        failures = successes = 0
        while True:
            asked_s = time.monotonic()
            problem = await self._probe(worker)
            self._go_on(worker)
            self.checks[worker.role, "failure" if problem else "success"] += 1
            if problem is None:
                successes += 1
                needed = 1 if worker.healthy else self._config.success_threshold
                if successes >= needed:
                    if await self._recover(worker):
                        return
                    if unusable := worker.problems.get("unusable"):
                        problem = _Problem(unusable, silent=False)
            else:
                successes = 0
            if problem is None:
                failures = 0
            else:
                failures += 1
                if failures >= self._config.failure_threshold:
                    self._registry.set_healthy(worker, False, problem.text)
                    if problem.silent:
                        self._registry.silenced(worker)
            # A probe that timed out has waited long enough.
            await asyncio.sleep(max(0.0, asked_s + self._config.fast_s - time.monotonic()))

    async def _recover(self, worker: Worker) -> bool:
        """Mark a worker healthy whose checks succeed. After downtime or a doubt read
        ``/server_info`` first, as another engine may have started; return False if that failed."""
        doubtful = not worker.healthy or worker.info is None or worker.boot.recheck
        doubtful = doubtful or (worker.known.elastic and self._registry.may_ask_again(worker))
        if doubtful and not await self._describe(worker):
            return False
        self._registry.set_healthy(worker, True)
        self._registry.refresh(worker)
        return True

    async def _probe(self, worker: Worker) -> _Problem | None:
        """Check all HTTP servers of a worker; return the problem of one that fails, if any."""
        problems = await asyncio.gather(
            *(self._probe_server(worker, url) for url in worker.server_urls)
        )
        return next(filter(None, problems), None)

    async def _probe_server(self, worker: Worker, url: str) -> _Problem | None:
        configured = self._config.health_endpoint
        usual = _RANK_PROBE_PATHS if worker.known.rust_server else _PROBE_PATHS
        paths = (configured,) if configured else usual
        # Allow more time for a check that may run a forward pass, and for an engine whose ranks
        # report: its HTTP server may be busy with a large prompt.
        limit_s = self._config.health_timeout_s
        age_s = worker.report_age_s(time.monotonic())
        doubt_s = self._config.doubt_timeout_s
        patient = configured is not None or (age_s is not None and age_s < doubt_s)
        timeout_s = limit_s if patient else min(limit_s, doubt_s)
        place = "" if url == worker.url else f" at {url}"
        known = worker.probe_path if worker.probe_path in paths else ""
        for path in (known, *(path for path in paths if path != known)) if known else paths:
            try:
                status, _ = await self._get(url, path, timeout_s=timeout_s)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                if is_our_own(error):
                    logger.error("cannot check %s: %s", url, error)
                    return None
                return _Problem(f"GET {path}{place}: {plain_error(error)}", silent=True)
            worker.last_response_s = time.monotonic()
            if status == 404 and not configured:
                continue
            if status == 200:
                worker.probe_path = path
                return None
            return _Problem(f"GET {path}{place}: {status}", silent=False)
        # An engine without the cheap checks has at least responded. If it had one before, another
        # server may have its address, and /server_info decides.
        worker.boot.recheck = worker.boot.recheck or bool(known)
        worker.probe_path = ""
        return None

    async def _describe(self, worker: Worker) -> bool:
        """Read ``/server_info`` into the registry. If that fails, report why and return False."""
        try:
            info = parse_server_info(await self._server_info(worker.url), worker.role)
            if info.rust_server and info.nodes > 1:
                info = await self._with_node_hosts(worker, info)
            await self._check_rank_servers(worker, info)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            text = f"not reachable yet: /server_info: {plain_error(error)}"
            self._registry.report_problem(worker, "unreachable", text)
            return False
        except (UnusableWorker, orjson.JSONDecodeError) as error:
            self._registry.report_problem(worker, "unusable", str(error))
            return False
        first = worker.info is None
        self._registry.described(worker, info)
        if first:
            plugin, version = "yes" if info.sbs is not None else "no", info.version or "?"
            logger.info(
                "worker %s (%s): SGLang %s, dp_size %d, chunk %d tokens/rank, plugin %s",
                *(worker.url, worker.role, version, info.dp_size, info.chunk_tokens, plugin),
            )
        if self._described is not None:
            self._described(worker, info)
        return True

    async def _server_info(self, url: str) -> dict[str, Any]:
        """Return ``/server_info`` of the HTTP server at ``url``. Raises: UnusableWorker or
        orjson.JSONDecodeError, it is not a JSON object; or as :func:`.ask`."""
        # The schedulers respond between two passes, and a pass may be long.
        status, data = await self._get(url, "/server_info", timeout_s=30.0)
        if status == 404:
            status, data = await self._get(url, "/get_server_info", timeout_s=30.0)
        if status != 200:
            shown = beginning_without_secrets(data, 200)
            raise UnusableWorker(f"/server_info answers {status}: {shown!r}")
        value: Any = orjson.loads(data)
        if not isinstance(value, dict):
            raise UnusableWorker("/server_info is not a JSON object")
        return value

    async def _with_node_hosts(self, worker: Worker, info: WorkerInfo) -> WorkerInfo:
        """Add the addresses of the other nodes if their DP ranks serve HTTP themselves. After a
        start, wait for their EndForward, which comes every second.
        Raises: RankOutOfReach, a node's address is unknown."""
        self._registry.check_boot(worker, info)  # a restart may change the addresses
        self._registry.asks_peers = True
        known = worker.info.node_hosts if worker.info is not None else ()
        if (
            len(known) == info.nodes - 1 and not worker.reports_from
        ):  # a front end receives no reports
            return msgspec.structs.replace(info, node_hosts=known)
        far = {rank: node for rank in range(info.dp_size) if (node := node_of_rank(info, rank))}
        for _ in range(0 if worker.info else 50):
            if far.keys() <= worker.reports_from.keys():
                break
            await asyncio.sleep(self._config.nodes_report_s / 50)
        hosts: dict[int, str] = {}
        for rank, node in far.items():
            if rank not in worker.reports_from:
                raise RankOutOfReach(unknown_address(rank, node, worker.url))
            hosts.setdefault(node, worker.reports_from[rank])
        # A DP rank may span several nodes; only the first one serves HTTP.
        others = tuple(hosts.get(node, "") for node in range(1, info.nodes))
        return msgspec.structs.replace(info, node_hosts=others)

    async def _check_rank_servers(self, worker: Worker, info: WorkerInfo) -> None:
        """Check that each DP rank with its own HTTP server is where its requests will be sent.
        Raises: RankOutOfReach, a rank is elsewhere."""

        async def check(rank: int) -> None:
            url = server_url(worker.url, info, rank)
            boot_id = (
                worker.boot.by_rank.get(rank, "") if node_of_rank(info, rank) else info.boot_id
            )
            try:
                check_rank_server(await self._server_info(url), rank, boot_id)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise RankOutOfReach(not_a_rank(url, rank, plain_error(error))) from error
            except (UnusableWorker, ValueError) as error:  # invalid JSON, or an impossible port
                raise RankOutOfReach(not_a_rank(url, rank, str(error))) from error

        ranks = range(1, info.dp_size if info.rust_server else 1)
        for first in ranks[::_ASKED_AT_ONCE]:
            await asyncio.gather(*map(check, ranks[first - 1 : first - 1 + _ASKED_AT_ONCE]))

    async def _get(self, url: str, path: str, timeout_s: float | None = None) -> tuple[int, bytes]:
        limit_s, key = timeout_s or self._config.health_timeout_s, self._config.api_key
        return await ask(self._session, "GET", url + path, key=key, timeout_s=limit_s)

    # Fallback signal --------------------------------------------------------------------------

    async def _poll_loads(self, worker: Worker) -> None:
        """Poll ``/v1/loads`` while the instance has work and sends no EndForward."""
        interval_s = self._config.load_poll_interval_s
        assert interval_s is not None
        backoff_s, limit_s = interval_s, self._config.health_timeout_s
        while True:
            await asyncio.sleep(backoff_s)
            wanted = self.polls_loads and worker.active > 0 and worker.usable
            if not wanted or worker.reporting(time.monotonic()):
                backoff_s = interval_s if self.polls_loads else max(interval_s, _UNUSED_S)
                continue
            backoff_s = min(2 * backoff_s, 5.0)
            asked = [
                fetch(self._pool, url, _LOADS, self._poll_headers, limit_s)
                for url in worker.server_urls
            ]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException) and not isinstance(answer, _NO_ANSWER):
                    raise answer
            found = [answer for answer in answers if not isinstance(answer, BaseException)]
            if not found:
                continue
            pages = [
                b"" if isinstance(answer, BaseException) or answer[0] != 200 else answer[1]
                for answer in answers
            ]
            event = parse_loads(worker, pages)
            if event is None:
                status = max(status for status, _ in found)
                text = f"/v1/loads is not usable (status {status}): using timers only"
                self._registry.report_problem(worker, "loads", text)
                continue
            backoff_s = interval_s
            worker.last_response_s = time.monotonic()
            worker.problems.pop("loads", None)
            missing = [rank for rank, kv in enumerate(event.kv_tokens) if kv < 0]
            if missing:
                text = f"/v1/loads has no usable entry for DP rank {', '.join(map(str, missing))}"
                self._registry.report_problem(worker, "loads_of_ranks", text)
            else:
                worker.problems.pop("loads_of_ranks", None)
            self._submit(event)


def _in_background(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task outside the context of the request that caused it, whose id would appear in its
    logs."""
    return asyncio.create_task(work, context=contextvars.Context())


def _loads_by_rank(worker: Worker, pages: Sequence[bytes]) -> dict[int, Any]:
    """Return the entries of ``/v1/loads`` pages by DP rank, unchecked."""
    rows: dict[int, Any] = {}
    for number, page in enumerate(pages):
        try:
            loads = orjson.loads(page)["loads"]
        except (LookupError, TypeError, ValueError):
            continue
        for row in loads if isinstance(loads, list) else ():
            if worker.known.rust_server:
                # Each rank's server reports only itself, possibly as rank 0.
                rows.setdefault(number, row)
                continue
            with contextlib.suppress(LookupError, TypeError, ValueError, ArithmeticError):
                rows[int(row["dp_rank"])] = row
    return rows


def _figures(row: Any) -> tuple[int, int, int]:
    """Return queued tokens, running requests and KV tokens in a rank's ``/v1/loads`` entry; all
    three are -1 if it is missing or invalid."""
    names = ("total_tokens", "used_tokens", "waiting_uncached_tokens", "running_reqs")
    try:
        total, used, waiting, running = (int(row.get(f"num_{name}", 0)) for name in names)
    except (AttributeError, TypeError, ValueError, ArithmeticError):
        return -1, -1, -1
    # total - used counts tokens that wait or bootstrap; older engines report waiting ones only.
    queued = max(total - used, waiting)
    return clamped_count(queued), clamped_count(running), clamped_count(used)


def parse_loads(worker: Worker, pages: Sequence[bytes]) -> LoadPolled | None:
    """Turn ``/v1/loads`` pages (SGLang >= 0.5.14) into an event with -1 for ranks without a usable
    entry; ``None`` if no rank has one."""
    rows = _loads_by_rank(worker, pages)
    ranks = [_figures(rows.get(rank)) for rank in range(worker.dp_size)]
    queued, running, used = map(list, zip(*ranks, strict=True))
    if max(used) < 0:
        return None
    return LoadPolled(
        instance=worker.url, queued_tokens=queued, running_requests=running, kv_tokens=used
    )
