"""Checks keys and TLS. Findings never contain a key."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import suppress

from sglang_sbs.doctor.facts import ClusterFacts, EngineFacts
from sglang_sbs.doctor.findings import CLUSTER, Finding, Findings
from sglang_sbs.engine.config import split_tcp
from sglang_sbs.router.engines.urls import is_loopback, split_worker_url

finding = Findings("""
ok security.ok
error security.key-refused -> give the engine's --api-key as --api-key to the router (and to this
    doctor)
warning security.key-unneeded -> start the engine with --api-key
note security.no-key -> keep the ports inside the cluster, or start engines and router with
    --api-key
error security.admin-key -> give the engine's --admin-api-key as --admin-api-key to the router
warning security.admin-key-shown -> start the engine with --api-key too
warning security.plain-key -> start engines with --ssl-certfile and --ssl-keyfile and give https://
    URLs
note security.endforward-open -> share a secret: --sbs-endforward-key-file FILE here,
    SGLANG_SBS_ENDFORWARD_KEY_FILE=FILE on engines
warning security.key-file-mode -> chmod 600 the file
""")


def check(facts: ClusterFacts) -> Iterator[Finding]:
    found = [finding for engine in facts.engines for finding in _keys(facts, engine)]
    yield from found
    flags = facts.options.router_flags
    answering = facts.usable
    elsewhere = [e.url for e in answering if not is_loopback(split_worker_url(e.url)[1])]
    plain = [url for url in elsewhere if url.startswith("http:")]
    if (flags.api_key or flags.admin_api_key) and plain:
        yield finding("security.plain-key", CLUSTER, f"http:// to {plain[0]} and a key")
    open_engines = [e.url for e in answering if e.open_without_key]
    if open_engines and not flags.api_key:
        seen = f"{len(open_engines)} of {len(answering)} engines ask for no key"
        yield finding("security.no-key", CLUSTER, seen)
    yield from _endforward(facts)
    if answering and not open_engines and not found:
        yield finding("security.ok", CLUSTER, "every engine wants the key and takes it")


def _keys(facts: ClusterFacts, engine: EngineFacts) -> Iterator[Finding]:
    flags, url = facts.options.router_flags, engine.url
    if engine.failure is not None and engine.failure.kind == "refused":
        given = "the key given" if flags.api_key else "no key was given"
        yield finding("security.key-refused", url, f"{engine.failure.text}; {given}")
        return
    if flags.api_key and engine.open_without_key:
        yield finding("security.key-unneeded", url, "/model_info answers without a key")
    admin = engine.admin_api_key
    if not admin:
        return
    if not hmac.compare_digest(admin.encode(), (flags.worker_key or "").encode()):
        given = "another one" if flags.admin_api_key else "none"
        yield finding("security.admin-key", url, f"it has an admin key, and {given} is given")
    if engine.open_without_key:
        yield finding("security.admin-key-shown", url, "/server_info shows it without a key")


def _endforward(facts: ClusterFacts) -> Iterator[Finding]:
    key_file = facts.options.key_file
    if key_file is not None:
        mode = key_file.stat().st_mode & 0o777
        if mode & 0o077:
            seen = f"{key_file} has mode {mode:o}"
            yield finding("security.key-file-mode", CLUSTER, seen, f"chmod 600 {key_file}")
        return
    named = {end for e in facts.usable if e.sbs is not None for end in e.sbs.routers}
    remote = []
    for endpoint in sorted(named):
        with suppress(ValueError):
            remote += [] if is_loopback(split_tcp(endpoint)[0]) else [endpoint]
    if remote and not any(e.plugin.get("encrypted") is True for e in facts.engines):
        yield finding("security.endforward-open", CLUSTER, f"{remote[0]}, without a secret")
