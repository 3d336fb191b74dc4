"""Binds EndForward messages to the router's workers.

A message is bound by its configured instance id, by a boot id that is already bound, or by the
request ids that it echoes. Values that no engine could mean are rejected, and no message alone can
take a worker down."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable

from sglang_sbs.router.engines.urls import bracketed, is_loopback, split_worker_url
from sglang_sbs.router.signals.endforward_socket import EndForwardSocket
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import WorkerInfo
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import Event, ForwardEnded
from sglang_sbs.wire import EndForward

logger = logging.getLogger(__name__)

_MAX_BOOTS = 10_000
_LOG_BOUND_S = 10.0
_MAX_STRANGERS = 64
"""Unknown senders named in the log; further ones are only counted."""
_BIND = re.compile(r"tcp://[^/\s]+:([0-9]{1,5})")

FindOwner = Callable[[str, str], str | None]
"""``(rid, role) -> worker URL``: where the router sent that leg; ``None`` if the request is
unknown."""


class EndForwardListener(EndForwardSocket):
    def __init__(
        self,
        registry: Registry,
        submit: Callable[[Event], None],
        find_owner: FindOwner,
        on_report: Callable[[Worker, EndForward], None] | None = None,
    ) -> None:
        super().__init__(self._handle)
        self._registry = registry
        self._submit = submit
        self._find_owner = find_owner
        self._on_report = on_report
        self._boots: OrderedDict[str, str] = OrderedDict()
        """Worker URL by boot id, most recent last."""
        self._bound_s: dict[str, float] = {}
        """Time of the last log line about the boot id found for a worker, by worker URL; there is
        at most one per ``_LOG_BOUND_S``."""
        self._unbound_warned: set[str] = set()
        self._binding: dict[str, list[str]] = {}
        """EndForward endpoints that engines bind and the router connects to, by worker URL."""

    def described(self, worker: Worker, info: WorkerInfo) -> None:
        """Handle a worker's ``/server_info``: remember its boot id, and connect to the EndForward
        publishers that it binds, instead of former ones."""
        if self._registry.get(worker.url) is not worker:
            return  # removed meanwhile
        if info.nodes > 1 and self._registry.kv_events_of(worker) is not None:
            self._registry.asks_peers = True
        bind = info.sbs.bind if info.sbs is not None else ""
        if info.boot_id:
            self._boots[info.boot_id] = worker.url
        endpoints = publisher_endpoints(worker.url, bind, info.dp_size)
        problem = ""
        if bind and not endpoints:
            problem = (
                f"it binds {bind[:100]!r}, which no router can connect to: set "
                f"SGLANG_SBS_BIND=tcp://*:PORT there, with {info.dp_size} ports from PORT on"
            )
        self._registry.report_problem(worker, "bind", problem)
        if endpoints != self._binding.get(worker.url, []):
            self._binding[worker.url] = endpoints
            self._dial_all()

    def removed(self, worker_url: str) -> None:
        for boot_id in [boot_id for boot_id, url in self._boots.items() if url == worker_url]:
            del self._boots[boot_id]
        if self._binding.pop(worker_url, None):
            self._dial_all()

    def _dial_all(self) -> None:
        self.dial(set().union(*self._binding.values()))

    def asks_peer(self) -> bool:
        return self._registry.asks_peers

    def _handle(self, report: EndForward, peer: str) -> None:
        worker = self._bind(report)
        if worker is None:
            self.counts["unbound"] += 1
            return
        if not self._registry.reported(worker, report):
            self.counts["dropped"] += 1
            return
        self.counts["bound"] += 1
        has_key = self.has_key
        if has_key and peer:
            address = peer.removeprefix("::ffff:")
            if not is_loopback(address) or is_loopback(split_worker_url(worker.url)[1]):
                # A loopback address would mean a different machine to front ends elsewhere.
                worker.reports_from[report.dp_rank] = address
        if report.kv_address is not None:
            self._registry.on_kv_address(worker, report, peer, has_key=has_key)
        if worker.announced:
            self._submit(ForwardEnded(instance=worker.url, report=report))
        if self._on_report is not None:
            self._on_report(worker, report)

    def _bind(self, report: EndForward) -> Worker | None:
        url = self._boots.get(report.boot_id)
        if url is not None and (worker := self._registry.get(url)) is not None:
            self._boots.move_to_end(report.boot_id)
            return worker
        worker, warned = self._identify(report), self._unbound_warned
        if worker is not None:
            if len(self._boots) >= _MAX_BOOTS:
                self._boots.popitem(last=False)
            self._boots[report.boot_id] = worker.url
            # Without a key, any host can send invented boot ids.
            now_s = time.monotonic()
            if now_s - self._bound_s.get(worker.url, -math.inf) >= _LOG_BOUND_S:
                self._bound_s[worker.url] = now_s
                how = "by instance id" if report.instance_id else "by echoed request ids"
                boot = report.boot_id[:8]
                logger.info("EndForward of boot %s is worker %s (%s)", boot, worker.url, how)
        elif report.instance_id and len(warned) < _MAX_STRANGERS and report.boot_id not in warned:
            warned.add(report.boot_id)
            logger.warning(
                "EndForward from instance %r, which is not a worker of this router; waiting for "
                "request ids it echoes. Set SGLANG_SBS_INSTANCE_ID to the worker URL given here",
                report.instance_id,
            )
        return worker

    def _identify(self, report: EndForward) -> Worker | None:
        if report.instance_id and (worker := self._registry.by_alias(report.instance_id)):
            return worker
        owners = (self._find_owner(rid, report.role) for rid in report.rids)
        url = next((url for url in owners if url is not None), "")
        return self._registry.get(url)


def publisher_endpoints(worker_url: str, bind: str, dp_size: int) -> list[str]:
    """Return the endpoints of an engine that binds ``tcp://HOST:PORT`` (rank d at ``PORT + d``).
    The host is always the worker's own, because a response must not make the router connect
    elsewhere. Empty if the form is wrong or some rank has no port."""
    match = _BIND.fullmatch(bind)
    first = int(match[1]) if match is not None else 0
    if not 1 <= first <= 65536 - dp_size:
        return []
    host = bracketed(split_worker_url(worker_url)[1])
    return [f"tcp://{host}:{port}" for port in range(first, first + dp_size)]
