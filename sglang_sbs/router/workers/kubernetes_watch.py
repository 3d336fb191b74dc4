"""Lists and watches Kubernetes pods (:mod:`.kubernetes_pods`), with one stream per role that
resumes after it ends, breaks or expires (410 Gone). Needs the extra ``kubernetes``. While the API
server is unreachable the workers stay: only a complete list or a deletion event removes one."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client.core import Metric

from sglang_sbs.router.kubernetes_api import ApiError, open_api, read_answer
from sglang_sbs.router.metric_families import gauge, total
from sglang_sbs.router.options.config import DiscoveryConfig
from sglang_sbs.router.workers.kubernetes_pods import Found, Members, PodMembership, read_pod
from sglang_sbs.scheduling.events import InstanceRole

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

logger = logging.getLogger(__name__)

PAGE_SIZE = 500
"""Pods per page of a list."""


@dataclass(frozen=True, slots=True)
class WatchTiming:
    """Times of lists and watches, in seconds. A watch is requested for ``stream_s``, and given up
    after ``stream_s + silent_s`` without a byte."""

    stream_s: int = 60
    silent_s: float = 15.0
    list_s: float = 30.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0


class PodDiscovery:
    """Keeps the workers in ``members`` equal to the matching pods, from ``await start()`` to
    ``await close()``."""

    def __init__(
        self, config: DiscoveryConfig, members: Members, timing: WatchTiming | None = None
    ) -> None:
        self.config = config
        self.timing = timing or WatchTiming()
        self._membership = PodMembership(members)
        self._streams = [PodStream(self, role, selector) for role, selector in config.selectors()]
        self._tasks: list[asyncio.Task[None]] = []
        self._api: ApiClient | None = None

    async def start(self) -> None:
        """Start discovery in the background. Raises: ValueError, no API server is configured."""
        self._api = api = await open_api("--service-discovery")
        logger.info(
            "watching pods in %s at %s: %s",
            *(self.config.namespace or "all namespaces", api.configuration.host),
            "; ".join(f"{role} {selector}" for role, selector in self.config.selectors()),
        )
        self._tasks = [asyncio.create_task(stream.run(api)) for stream in self._streams]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._api is not None:
            await self._api.close()

    def changed(self) -> None:
        """Add and remove workers after the pods of a stream have changed."""
        # A pod matched by both selectors is prefill.
        prefill = {uid for s in self._streams if s.role == "prefill" for uid in s.pods}
        found = [
            pod
            for stream in self._streams
            for uid, pod in stream.pods.items()
            if pod is not None and (stream.role == "prefill" or uid not in prefill)
        ]
        self._membership.follow(found, complete=all(s.lists for s in self._streams))

    def families(self) -> Iterator[Metric]:
        """Yield the metrics for a scrape; the first three have ``sglang_router``'s names."""
        workers, by = self._membership, "kubernetes"
        about = "Workers that are pods"
        yield gauge("smg_discovery_workers_discovered", about, {by: workers.workers}, "source")
        added = {(by, result): count for result, count in workers.registrations.items()}
        about = "Pods added as workers"
        yield total("smg_discovery_registrations", about, added, "source", "result")
        gone = {by: workers.deregistrations}
        yield total(
            "smg_discovery_deregistrations", "Workers removed with their pod", gone, "source"
        )
        current = {stream.role: stream.current for stream in self._streams}
        about = "Pods of the role are listed and watched"
        yield gauge("sbs_discovery_current", about, current, "role")
        lists = {stream.role: stream.lists for stream in self._streams}
        yield total("sbs_discovery_lists", "Complete lists of a role's pods", lists, "role")
        errors = {stream.role: stream.errors for stream in self._streams}
        yield total("sbs_discovery_errors", "Lists and watches that failed", errors, "role")


class PodStream:
    """Lists and watches the pods of one role."""

    def __init__(self, discovery: PodDiscovery, role: InstanceRole, selector: str) -> None:
        self.role = role
        self.pods: dict[str, Found | None] = {}
        """Pods that match the role's selector, by uid; ``None``: the pod does not serve now."""
        self.current = False
        self.lists = 0
        self.errors = 0
        self._discovery = discovery
        self._selector = selector
        self._version = ""
        """Resource version of the collection seen so far; empty forces a new list."""
        self._complaint = ""

    async def run(self, api: ApiClient) -> None:
        timing = self._discovery.timing
        pause_s = 0.0
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                if not self._version:
                    await self._list(api)
                await self._watch(api)
                pause_s = 0.0
                # Workers may have been changed manually in the meantime.
                self._discovery.changed()
            except Exception as error:
                lived = loop.time() - began_s > 10 * timing.first_pause_s
                pause_s = self._failed(error, 0.0 if lived else pause_s)
            if loop.time() - began_s < timing.first_pause_s:
                # Avoid a busy loop, whatever the API server or a proxy returns.
                pause_s = max(pause_s, timing.first_pause_s)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    def _failed(self, error: Exception, last_pause_s: float) -> float:
        """Record a failure and return the pause before the next list, which finds missed
        changes."""
        timing = self._discovery.timing
        self._version = ""
        self.current = False
        self.errors += 1
        if isinstance(error, ApiError) and error.status == 410 and not last_pause_s:
            logger.info("%s pods: the watch is too old, listing them again", self.role)
            return timing.first_pause_s
        text = _describe(error, self._selector, self._discovery.config.namespace)
        if text != self._complaint:
            self._complaint = text
            logger.warning(
                "%s pods cannot be watched, workers stay as they are: %s", self.role, text
            )
        return min(timing.longest_pause_s, 2 * last_pause_s or timing.first_pause_s)

    async def _list(self, api: ApiClient) -> None:
        pods: dict[str, Found | None] = {}
        query: dict[str, Any] = {"limit": PAGE_SIZE}
        timeout_s = self._discovery.timing.list_s
        while True:
            page = await read_answer(
                await self._call(api)(_request_timeout=timeout_s, _preload_content=False, **query)
            )
            metadata = page.get("metadata") or {}
            pods.update(map(self._read, page.get("items") or ()))
            if not (token := metadata.get("continue")):
                break
            query["_continue"] = token
        self.pods = pods
        self._version = str(metadata.get("resourceVersion") or "")
        self.lists += 1
        self._is_current()
        self._discovery.changed()

    async def _watch(self, api: ApiClient) -> None:
        from kubernetes_asyncio.client import ApiException
        from kubernetes_asyncio.watch import Watch

        timing = self._discovery.timing
        async with Watch(return_type="object") as watch:
            events = watch.stream(
                self._call(api),
                resource_version=self._version,
                allow_watch_bookmarks=True,
                timeout_seconds=timing.stream_s,
                # Limits on connecting and on the time without a byte.
                _request_timeout=(timing.silent_s, timing.stream_s + timing.silent_s),
            )
            try:
                async for event in events:
                    self._seen(event)
            except ApiException as error:
                raise ApiError(error.status or 0, str(error.reason)) from error

    def _seen(self, event: Any) -> None:
        """Apply one watch event. Raises: ValueError, it is not a watch event."""
        if not isinstance(event, dict):
            raise ValueError(f"not a watch event: {str(event)[:100]!r}")
        kind, pod = event["type"], event["raw_object"]
        self._version = str(pod["metadata"]["resourceVersion"])
        self._is_current()
        if kind == "BOOKMARK":
            return
        uid, found = self._read(pod)
        if kind == "DELETED":
            self.pods.pop(uid, None)
        else:
            self.pods[uid] = found
        self._discovery.changed()

    def _call(self, api: ApiClient) -> Callable[..., Any]:
        """Return the API call that lists or watches pods, with namespace and selector set."""
        from kubernetes_asyncio.client import CoreV1Api

        core, namespace = CoreV1Api(api), self._discovery.config.namespace
        call = core.list_pod_for_all_namespaces
        if namespace is not None:
            call = partial(core.list_namespaced_pod, namespace)
        return partial(call, label_selector=self._selector)

    def _read(self, pod: dict[str, Any]) -> tuple[str, Found | None]:
        metadata = pod.get("metadata") or {}
        uid = str(metadata.get("uid") or f"{metadata.get('namespace')}/{metadata.get('name')}")
        return uid, read_pod(pod, self.role, self._discovery.config.port)

    def _is_current(self) -> None:
        if self._complaint:
            self._complaint = ""
            logger.info("%s pods are watched again", self.role)
        self.current = True


def _describe(error: Exception, selector: str, namespace: str | None) -> str:
    text = str(error) or type(error).__name__
    if not isinstance(error, ApiError) or error.status not in (401, 403):
        return f"{text} (selector {selector})"
    wanted = f"a Role in namespace {namespace}" if namespace else "a ClusterRole"
    text = f"{text}; the router's service account needs {wanted} to get, list and watch pods"
    return text if namespace else f"{text}, or set --service-discovery-namespace"
