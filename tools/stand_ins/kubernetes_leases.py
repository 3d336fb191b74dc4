"""Leases of a Kubernetes API server on loopback: versions, conflicts, and what is answered to both.

Beside :mod:`.kubernetes_server`, which serves them. Semantics as in the API's conventions: every
write gives a new ``resourceVersion``; an update that names another one than the current is refused
(409 Conflict), one that names none too (422); creating what exists is refused (409 AlreadyExists).
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Lease = dict[str, Any]
Status = Callable[[int, str, str], web.Response]


@dataclass
class FakeLeases:
    """``next_version``: shared with the other objects of the server, as in etcd."""

    next_version: Callable[[], int]
    status: Status
    kept: dict[tuple[str, str], Lease] = field(default_factory=dict)
    namespaces: set[str] = field(default_factory=lambda: {"llm", "deepseek"})
    refuse: int = 0
    """Status of every answer, when set."""
    late_s: float = 0.0
    """How long an answer takes; a write is done by then."""
    deaf: bool = False
    """Takes requests, does nothing, and never answers."""
    writes: list[str] = field(default_factory=list)
    """Method and outcome of each."""

    def routes(self, app: web.Application) -> None:
        path = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        app.router.add_post(path, self._handled)
        for method in ("GET", "PUT"):
            app.router.add_route(method, f"{path}/{{name}}", self._handled)

    def annotate(self, namespace: str, name: str, **annotations: str) -> None:
        """Annotate a lease like a person with kubectl: a new version, the same record."""
        lease = self.kept[namespace, name]
        lease["metadata"].setdefault("annotations", {}).update(annotations)
        lease["metadata"]["resourceVersion"] = str(self.next_version())

    async def _handled(self, request: web.Request) -> web.StreamResponse:
        while self.deaf:  # noqa: ASYNC110 - for ever, that is
            await asyncio.sleep(3600)
        answer = await self._answer(request)
        if request.method != "GET":
            self.writes.append(f"{request.method} {answer.status}")
        await asyncio.sleep(self.late_s)
        return answer

    async def _answer(self, request: web.Request) -> web.Response:
        if self.refuse:
            return self.status(self.refuse, "Forbidden", "leases is forbidden")
        namespace = request.match_info["namespace"]
        if request.method == "POST":
            return self._create(namespace, await _body(request))
        key = (namespace, request.match_info["name"])
        if key not in self.kept:
            return self.status(404, "NotFound", f'leases "{key[1]}" not found')
        if request.method == "PUT":
            return self._update(key, await _body(request))
        return web.json_response(self.kept[key])

    def _create(self, namespace: str, lease: Lease) -> web.Response:
        if namespace not in self.namespaces:
            return self.status(404, "NotFound", f'namespaces "{namespace}" not found')
        key = (namespace, lease["metadata"]["name"])
        if key in self.kept:
            return self.status(409, "AlreadyExists", f'leases "{key[1]}" already exists')
        return self._keep(key, lease, 201)

    def _update(self, key: tuple[str, str], lease: Lease) -> web.Response:
        named = lease["metadata"].get("resourceVersion")
        if not named:
            return self.status(422, "Invalid", "metadata.resourceVersion: must be specified")
        if named != self.kept[key]["metadata"]["resourceVersion"]:
            return self.status(
                409, "Conflict", "the object has been modified; please apply your changes"
            )
        return self._keep(key, lease, 200)

    def _keep(self, key: tuple[str, str], lease: Lease, status: int) -> web.Response:
        kept = copy.deepcopy(lease)
        kept["metadata"]["resourceVersion"] = str(self.next_version())
        self.kept[key] = kept
        return web.json_response(kept, status=status)


async def _body(request: web.Request) -> Lease:
    body = json.loads(await request.read())
    assert (body["apiVersion"], body["kind"]) == ("coordination.k8s.io/v1", "Lease")
    # int32 and MicroTime, as a real server would check them.
    spec = body["spec"]
    assert all(type(spec[name]) is int for name in ("leaseDurationSeconds", "leaseTransitions"))
    assert spec["leaseDurationSeconds"] > 0 and spec["renewTime"].endswith("Z")
    return dict(body)
