"""The lock as a Kubernetes Lease (``coordination.k8s.io/v1``), written as client-go does, with
``leaseTransitions`` as the term. Its timestamps are informative and never compared with a clock."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sglang_sbs.router.election.candidate import LONGEST_LEASE_S, MAX_TERM, Record
from sglang_sbs.router.election.election import LockStore, OutdatedWrite, StoreError, understood
from sglang_sbs.router.kubernetes_api import ApiError, open_api, read_answer

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

_CONFLICT = 409
"""HTTP status of a write if the Lease has another version, or exists already."""
_NOT_FOUND = 404
"""HTTP status of an update if the Lease was deleted; of a creation if there is no such
namespace."""


class KubernetesLease(LockStore):
    def __init__(self, namespace: str, name: str, lasts_s: int) -> None:
        self._namespace = namespace
        self._name = name
        self._lasts_s = lasts_s
        self._api: ApiClient | None = None
        self._seen: dict[str, Any] = {}
        """The Lease as last read. Writes keep its fields that belong to other writers."""

    async def open(self) -> None:
        """Connect. Raises: ValueError, no API server is configured."""
        self._api = await open_api("--sbs-election")

    async def read(self) -> Record:
        lease = await self._call("read", self._name, self._namespace)
        if lease is None:
            self._seen = {}
            return Record()
        return self._take_in(lease)

    async def take(self, seen: Record, holder: str, term: int) -> Record:
        now = _now()
        spec = {"holderIdentity": holder, "acquireTime": now, "leaseTransitions": term}
        return await self._write(seen.version, spec, now)

    async def renew(self, mine: Record) -> Record:
        return await self._write_mine(mine, {})

    async def release(self, mine: Record) -> None:
        # As in client-go: no holder, and one second for clients that ignore the holder.
        await self._write_mine(mine, {"holderIdentity": "", "leaseDurationSeconds": 1})

    async def close(self) -> None:
        if self._api is not None:
            await self._api.close()

    async def _write_mine(self, mine: Record, changes: dict[str, Any]) -> Record:
        """Change the Lease that this candidate holds, also if it has another version by now: an
        abandoned renewal may have succeeded, or a person has annotated it. Raises: as ``renew``."""
        try:
            return await self._write(mine.version, changes, _now())
        except OutdatedWrite:
            now = await self.read()
            if (now.holder, now.term) != (mine.holder, mine.term):
                raise
            return await self._write(now.version, changes, _now())

    async def _write(self, version: str, changes: dict[str, Any], now: str) -> Record:
        seen = self._seen
        # With the version named, the API server rejects a write that comes second.
        metadata = {"name": self._name, "namespace": self._namespace, **seen.get("metadata", {})}
        if version:
            metadata["resourceVersion"] = version
        lasts = {"leaseDurationSeconds": self._lasts_s, "renewTime": now}
        spec = {**seen.get("spec", {}), **lasts, **changes}
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        body = {**kind, **seen, "metadata": metadata, "spec": spec}
        if version:
            written = await self._call("replace", self._name, self._namespace, body)
        else:
            written = await self._call("create", self._namespace, body)
        if written is None:
            raise OutdatedWrite
        return self._take_in(written)

    async def _call(self, verb: str, *arguments: Any) -> dict[str, Any] | None:
        """Call the API and return the Lease; ``None`` if it does not exist, or has another version
        than the one to replace. Raises: StoreError."""
        import aiohttp
        from kubernetes_asyncio.client import ApiException, CoordinationV1Api

        method = getattr(CoordinationV1Api(self._api), f"{verb}_namespaced_lease")
        try:
            return await read_answer(await method(*arguments, _preload_content=False))
        except ApiError as error:
            if error.status == _CONFLICT or (error.status == _NOT_FOUND and verb != "create"):
                return None
            hint = ""
            if error.status in (401, 403):
                role = f"the service account needs a Role in namespace {self._namespace}"
                verbs = "get" if verb == "read" else "create and update"
                hint = f"; {role} to {verbs} leases of coordination.k8s.io"
            elif error.status == _NOT_FOUND:
                hint = f"; is there a namespace {self._namespace}?"
            raise StoreError(f"{error}{hint}") from error
        except (aiohttp.ClientError, OSError, ApiException, ValueError) as error:
            raise StoreError(str(error) or type(error).__name__) from error

    def _take_in(self, lease: dict[str, Any]) -> Record:
        """Remember a Lease and return it as a record. Raises: StoreError, its content is
        unexpected."""
        with understood("the Lease"):
            metadata, spec = lease["metadata"], lease.get("spec") or {}
            term = int(spec.get("leaseTransitions") or 0)
            lasts_s = float(spec.get("leaseDurationSeconds") or 0)
            if not 0 <= term <= MAX_TERM or not math.isfinite(lasts_s):
                raise ValueError(f"leaseTransitions {term}, leaseDurationSeconds {lasts_s:g}")
            holder, sign = (str(spec.get(name) or "") for name in ("holderIdentity", "renewTime"))
            lasts_s = min(max(lasts_s, 1.0), LONGEST_LEASE_S)
            record = Record(holder, term, sign, lasts_s, str(metadata["resourceVersion"]))
        self._seen = lease
        return record


def _now() -> str:
    """Return the current time as a Kubernetes MicroTime."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
