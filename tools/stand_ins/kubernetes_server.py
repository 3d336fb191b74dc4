"""A Kubernetes API server on loopback, as far as pods are listed and watched (and leases kept).

It keeps a history of changes by resource version, filters by labels and namespace, pages lists,
sends bookmarks, and answers 410 Gone for versions that it has forgotten (``compact``).
"""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tools.stand_ins.kubernetes_leases import FakeLeases

Pod = dict[str, Any]


def pod(
    name: str,
    ip: str,
    *,
    uid: str = "",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    ready: bool = True,
    phase: str = "Running",
    created: str = "2026-01-01T00:00:00Z",
    namespace: str = "llm",
) -> Pod:
    """Return a pod in the API's form."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid or f"uid-{name}",
            "labels": labels or {},
            "annotations": annotations or {},
            "creationTimestamp": created,
        },
        "spec": {"containers": [{"name": "engine", "image": "sglang"}]},
        "status": {
            "phase": phase,
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


@dataclass
class FakeKubernetes:
    token: str = "service-account-token"
    page_size: int | None = None
    """Smaller pages than asked for."""
    refuse: int = 0
    """Status of every answer, when set."""
    fail_lists: int = 0
    """So many lists are answered 500."""
    frozen: bool = False
    """Watches are taken, and then nothing comes and nothing ends."""
    requests: list[dict[str, str]] = field(default_factory=list)
    """Query parameters, with the path as ``path``."""
    url: str = ""
    leases: FakeLeases = field(init=False)
    _pods: dict[tuple[str, str], Pod] = field(default_factory=dict)
    _version: int = 100
    _oldest: int = 0
    _history: list[tuple[int, str, Pod, Pod | None]] = field(default_factory=list)
    _watches: list[web.Request] = field(default_factory=list)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _runner: web.AppRunner | None = None
    _port: int = 0

    def __post_init__(self) -> None:
        self.leases = FakeLeases(self._next_version, _status)

    def _next_version(self) -> int:
        self._version += 1
        return self._version

    async def start(self) -> None:
        app = web.Application()
        self.leases.routes(app)
        app.router.add_get("/api/v1/pods", self._get)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._get)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = int(self._runner.addresses[0][1])
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """May be started again, at the same port."""
        self.cut_watches()
        if self._runner is not None:
            await self._runner.cleanup()

    def kubeconfig(self, folder: Path, name: str = "kubeconfig", url: str = "") -> Path:
        """A file that leads here, or to ``url``."""
        path = folder / name
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "router"}}],
            "clusters": [{"name": "test", "cluster": {"server": url or self.url}}],
            "users": [{"name": "router", "user": {"token": self.token}}],
        }
        # JSON is YAML, too.
        path.write_text(json.dumps(config))
        return path

    # What happens in the cluster ----------------------------------------------------------------

    async def put(self, new: Pod) -> None:
        """Create or change."""
        key = (new["metadata"]["namespace"], new["metadata"]["name"])
        old = self._pods.get(key)
        self._pods[key] = new
        await self._happened("MODIFIED" if old else "ADDED", new, old)

    async def delete(self, name: str, namespace: str = "llm") -> None:
        old = self._pods.pop((namespace, name))
        await self._happened("DELETED", old, old)

    async def change(self, name: str, namespace: str = "llm", **metadata: Any) -> None:
        """Set fields of the metadata."""
        changed = copy.deepcopy(self._pods[namespace, name])
        changed["metadata"] |= metadata
        await self.put(changed)

    async def set_ready(self, name: str, ready: bool, namespace: str = "llm") -> None:
        changed = copy.deepcopy(self._pods[namespace, name])
        changed["status"]["conditions"] = [{"type": "Ready", "status": str(ready)}]
        await self.put(changed)

    async def _happened(self, kind: str, new: Pod, old: Pod | None) -> None:
        new["metadata"]["resourceVersion"] = str(self._next_version())
        self._history.append((self._version, kind, copy.deepcopy(new), copy.deepcopy(old)))
        async with self._changed:
            self._changed.notify_all()

    def compact(self) -> None:
        """Forget the history: etcd does that every five minutes."""
        self._version += 10
        self._oldest = self._version
        self._history.clear()

    def cut_watches(self) -> None:
        """Break the connections, as a load balancer would."""
        for request in list(self._watches):
            if request.transport is not None:
                request.transport.abort()

    @property
    def watches(self) -> int:
        """Open now."""
        return len(self._watches)

    def lists(self) -> list[dict[str, str]]:
        return [query for query in self.requests if "watch" not in query]

    # The API ------------------------------------------------------------------------------------

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.requests.append({**request.query, "path": request.path})
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized", "Unauthorized")
        if self.refuse:
            return _status(self.refuse, "Forbidden", 'User "router" cannot list resource "pods"')
        namespace = request.match_info.get("namespace")
        wanted = dict(
            item.split("=", 1) for item in request.query.get("labelSelector", "").split(",") if item
        )

        def matches(candidate: Pod) -> bool:
            metadata = candidate["metadata"]
            return (
                namespace in (None, metadata["namespace"])
                and wanted.items() <= dict(metadata["labels"]).items()
            )

        if request.query.get("watch") in ("true", "True", "1"):
            return await self._watch(request, matches)
        return self._list(request, matches)

    def _list(self, request: web.Request, matches: Any) -> web.StreamResponse:
        if self.fail_lists:
            self.fail_lists -= 1
            return _status(500, "InternalError", "etcdserver: leader changed")
        pods = [p for _, p in sorted(self._pods.items()) if matches(p)]
        first = int(request.query.get("continue", "0"))
        size = self.page_size or int(request.query.get("limit", "500"))
        page, rest = pods[first : first + size], len(pods) - first - size
        metadata = {"resourceVersion": str(self._version)}
        if rest > 0:
            metadata |= {"continue": str(first + size), "remainingItemCount": str(rest)}
        return web.json_response(
            {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": page}
        )

    async def _watch(self, request: web.Request, matches: Any) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        if version < self._oldest:
            message = f"too old resource version: {version} ({self._oldest})"
            await response.write(_event("ERROR", _status_object(410, "Expired", message)))
            return response
        self._watches.append(request)
        try:
            while self.frozen:  # noqa: ASYNC110 - for ever, that is
                await asyncio.sleep(3600)
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while True:
                    for at, kind, new, old in list(self._history):
                        if at <= version:
                            continue
                        version = at
                        shown = _shown(kind, old is not None and matches(old), matches(new))
                        if shown:
                            await response.write(_event(shown, new))
                    async with self._changed:
                        if self._version == version or not self._history:
                            await self._changed.wait()
        except TimeoutError:
            bookmark = {"kind": "Pod", "metadata": {"resourceVersion": str(version)}}
            await response.write(_event("BOOKMARK", bookmark))
        finally:
            self._watches.remove(request)
        return response


def _shown(kind: str, matched: bool, matches: bool) -> str:
    """Return a filtered watch's form of a change: a pod that matches no more is a deleted one."""
    if kind == "DELETED":
        return "DELETED" if matched else ""
    if matches:
        return "MODIFIED" if matched else "ADDED"
    return "DELETED" if matched else ""


def _event(kind: str, value: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": value}).encode() + b"\n"


def _status_object(code: int, reason: str, message: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def _status(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(_status_object(code, reason, message), status=code)
