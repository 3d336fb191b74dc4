"""The lock as a key of etcd, through the JSON API that every etcd serves (gRPC gateway, ``/v3``).

The key is bound to an etcd lease, so etcd removes a holder that does not keep it alive.
``KEY/term`` keeps the last term without a lease, so that terms always rise. Renewals touch only the
lease and leave no history to compact."""

from __future__ import annotations

import json
import ssl
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import aiohttp

from sglang_sbs.router.election.candidate import MAX_TERM, Record
from sglang_sbs.router.election.election import LockStore, OutdatedWrite, StoreError, understood

_MAX_ANSWER_BYTES = 1 << 16
_ABSENT = "0"
"""Revision that etcd compares with for a key that does not exist."""


class EtcdLock(LockStore):
    def __init__(
        self, endpoints: Sequence[str], key: str, lasts_s: int, tls: ssl.SSLContext | None
    ) -> None:
        """Create the lock; ``endpoints`` are members of one etcd cluster, each
        ``http[s]://HOST:PORT``."""
        self._endpoints = list(endpoints)
        self._at = 0
        self._lock_key, self._term_key = _encode(key), _encode(f"{key}/term")
        self._lasts_s = lasts_s
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._lease = ""

    async def open(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self._tls if self._tls is not None else True)
        self._session = aiohttp.ClientSession(connector=connector)

    async def read(self) -> Record:
        return _record(*await self._values())

    async def take(self, seen: Record, holder: str, term: int) -> Record:
        # If another candidate is faster, this lease expires by itself.
        with understood("etcd"):
            lease = str((await self._ask("lease/grant", {"TTL": str(self._lasts_s)}))["ID"])
        lock_at, _, term_at = seen.version.partition("/")
        unchanged = [_is_at(self._lock_key, lock_at), _is_at(self._term_key, term_at)]
        writes = [_put(self._lock_key, holder, lease), _put(self._term_key, str(term))]
        answer = await self._ask("kv/txn", {"compare": unchanged, "success": writes})
        if not answer.get("succeeded"):
            raise OutdatedWrite
        self._lease = lease
        with understood("etcd"):
            revision = str(answer["header"]["revision"])
        return Record(holder, term, version=f"{revision}/{revision}")

    async def renew(self, mine: Record) -> Record:
        kept = await self._ask("lease/keepalive", {"ID": self._lease})
        with understood("etcd"):
            left_s = int(kept["result"].get("TTL", 0))
        if not left_s:
            raise OutdatedWrite
        # The key may have been deleted and written by another candidate.
        now = await self.read()
        if now.version != mine.version:
            raise OutdatedWrite
        return now

    async def release(self, mine: Record) -> None:
        await self._ask("lease/revoke", {"ID": self._lease})

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _values(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return etcd's entries for the lock and for the term, read together; empty if missing."""
        wanted = [{"request_range": {"key": key}} for key in (self._lock_key, self._term_key)]
        answer = await self._ask("kv/txn", {"success": wanted})
        with understood("etcd"):
            lock, term = [
                response["response_range"].get("kvs", [{}])[0] for response in answer["responses"]
            ]
        return lock, term

    async def _ask(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the response of one member of the cluster. After a failure the next call uses the
        next member. Raises: StoreError."""
        assert self._session is not None, "opened first"
        url = f"{self._endpoints[self._at]}/v3/{method}"
        answer: Any = None
        try:
            async with self._session.post(url, json=body) as response:
                raw = b""
                async for part in response.content.iter_any():
                    raw += part
                    if len(raw) > _MAX_ANSWER_BYTES:
                        raise StoreError(f"{url}: the response is too long")
                if response.status != 200:
                    raise StoreError(f"{url}: HTTP {response.status} {raw[:200]!r}")
                answer = json.loads(raw)
                if not isinstance(answer, dict):
                    raise StoreError(f"{url}: not a response of etcd: {raw[:200]!r}")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise StoreError(f"{url}: {error or type(error).__name__}") from error
        finally:
            # Runs also after a timeout, which cancels the call.
            if answer is None:
                self._at = (self._at + 1) % len(self._endpoints)
        return answer


def _record(lock: dict[str, Any], term: dict[str, Any]) -> Record:
    with understood("etcd"):
        number = int(_decode(term["value"])) if term else 0
        if not 0 <= number <= MAX_TERM:
            raise ValueError(f"term {number}")
        revisions = [str(entry["mod_revision"]) if entry else _ABSENT for entry in (lock, term)]
        return Record(_decode(lock["value"]) if lock else "", number, version="/".join(revisions))


def _is_at(key: str, revision: str) -> dict[str, Any]:
    return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision or _ABSENT}


def _put(key: str, value: str, lease: str = "0") -> dict[str, Any]:
    return {"request_put": {"key": key, "value": _encode(value), "lease": lease}}


def _encode(text: str) -> str:
    return b64encode(text.encode()).decode()


def _decode(text: str) -> str:
    return b64decode(text).decode()
