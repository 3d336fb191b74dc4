"""Decides which Kubernetes pods are workers, and applies changes.

The rules are those of ``sglang_router`` 0.3.2 (``service_discovery.rs``): label selectors per role,
one port for all, the bootstrap port in an annotation. Where those would keep an unusable worker,
the rules here are stricter:

* a pod counts while it is Running, Ready and not being deleted; otherwise its worker is removed as
  by ``DELETE /workers/{id}`` (its requests end normally), and returns with the pod;
* of a LeaderWorkerSet group only the leader counts, because the other pods serve no HTTP;
* an address belongs to a pod, not to its name: a new pod with an old pod's address is a new worker;
* workers from flags and ``POST /workers`` are never touched, and a discovered worker that was
  removed manually stays away until its pod changes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_sbs.router.engines.urls import bracketed, normalise_worker_url
from sglang_sbs.router.options.config import BOOTSTRAP_PORT_ANNOTATION, LWS_WORKER_INDEX
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import InstanceRole

logger = logging.getLogger(__name__)

DISCOVERED = "discovered-by"
"""Label of workers added by discovery, in ``GET /workers``."""
_BY = "kubernetes"
_POD, _UID = "pod", "pod-uid"


@dataclass(frozen=True, slots=True)
class Found:
    """A pod that can serve. ``pod`` is ``namespace/name``."""

    url: str
    role: InstanceRole
    bootstrap_port: int | None
    pod: str
    uid: str
    created: str = field(default="", compare=False)
    """Kubernetes' creation timestamp; sorting it as text sorts by time."""


def read_pod(pod: Mapping[str, Any], role: InstanceRole, port: int) -> Found | None:
    """Return the worker in a pod object of the API; ``None`` if it is not usable."""
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    address = status.get("podIP")
    if not address or metadata.get("deletionTimestamp") or status.get("phase") != "Running":
        return None
    if (metadata.get("labels") or {}).get(LWS_WORKER_INDEX, "0") != "0":
        return None
    conditions = status.get("conditions") or ()
    if not any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions):
        return None
    name = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
    return Found(
        url=normalise_worker_url(f"http://{bracketed(address)}:{port}"),
        role=role,
        bootstrap_port=_bootstrap_port(metadata, name) if role == "prefill" else None,
        pod=name,
        uid=str(metadata.get("uid") or name),
        created=str(metadata.get("creationTimestamp") or ""),
    )


def _bootstrap_port(metadata: Mapping[str, Any], name: str) -> int | None:
    text = (metadata.get("annotations") or {}).get(BOOTSTRAP_PORT_ANNOTATION)
    if text is None:
        return None
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 65535:
        return int(text)
    logger.warning(
        "pod %s: annotation %s is %r, not a port in 1..65535; asking the engine instead",
        *(name, BOOTSTRAP_PORT_ANNOTATION, text),
    )
    return None


def is_discovered(worker: Worker) -> bool:
    return worker.labels.get(DISCOVERED) == _BY


class Members(Protocol):
    """The set of workers, as pod discovery changes it."""

    registry: Registry

    def add_worker(self, url: str, role: InstanceRole, bootstrap_port: int | None) -> Worker:
        """Register a worker. Raises: ValueError, the URL is invalid or already registered."""

    def remove_worker(self, worker: Worker) -> None: ...


class PodMembership:
    """Keeps workers equal to the pods; call :meth:`follow` whenever pods may have changed."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._followed: dict[str, Found] = {}
        self.registrations = {"success": 0, "failed": 0}
        self.deregistrations = 0

    @property
    def workers(self) -> int:
        return sum(map(is_discovered, self._members.registry))

    def follow(self, found: Iterable[Found], *, complete: bool) -> None:
        """Apply the serving pods. ``complete``: none is missing, so workers without a pod (left by
        an earlier router process) are removed."""
        # The youngest pod wins an address, because the other is about to end.
        wanted = {pod.url: pod for pod in sorted(found, key=lambda pod: pod.created)}
        for url, pod in list(self._followed.items()):
            if wanted.get(url) != pod:
                del self._followed[url]
                self._remove(url)
        for url, pod in wanted.items():
            if url not in self._followed:
                self._add(pod)
        if complete:
            for worker in self._members.registry:
                if is_discovered(worker) and worker.url not in self._followed:
                    self._remove(worker.url)

    def _add(self, pod: Found) -> None:
        registry = self._members.registry
        known = registry.get(pod.url) or registry.by_alias(pod.url)
        if known is not None and is_discovered(known):
            is_it = (known.labels.get(_UID), known.role, known.configured_bootstrap_port)
            if is_it == (pod.uid, pod.role, pod.bootstrap_port):
                self._followed[pod.url] = pod  # added by an earlier router process
                return
            self._remove(known.url)
        elif known is not None:
            self._followed[pod.url] = pod
            logger.info("pod %s: %s is already a worker and stays one", pod.pod, known.url)
            return
        self._followed[pod.url] = pod
        try:
            worker = self._members.add_worker(pod.url, pod.role, pod.bootstrap_port)
        except ValueError as error:
            self.registrations["failed"] += 1
            logger.error("pod %s cannot be a worker: %s", pod.pod, error)
            return
        worker.labels |= {DISCOVERED: _BY, _POD: pod.pod, _UID: pod.uid}
        self.registrations["success"] += 1
        logger.info("pod %s: worker %s (%s) added", pod.pod, pod.url, pod.role)

    def _remove(self, url: str) -> None:
        worker = self._members.registry.get(url)
        if worker is None or not is_discovered(worker):
            return
        self.deregistrations += 1
        logger.info("pod %s is gone or not ready", worker.labels.get(_POD))
        self._members.remove_worker(worker)
