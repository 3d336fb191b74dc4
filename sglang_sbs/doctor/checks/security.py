"""Keys and TLS.

No key is ever part of a finding.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator

from sglang_sbs.doctor.checks.fields import text
from sglang_sbs.doctor.checks.prefill import is_loopback
from sglang_sbs.doctor.facts import ClusterFacts, EngineFacts
from sglang_sbs.doctor.findings import CLUSTER, Finding, finding
from sglang_sbs.engine.config import split_tcp


def check_security(facts: ClusterFacts) -> Iterator[Finding]:
    """Every engine's keys, and the secret of EndForward."""
    found = [one for engine in facts.engines for one in _keys(facts, engine)]
    yield from found
    flags = facts.options.router_flags
    answering = facts.usable
    plain = [e.url for e in answering if e.url.startswith("http:") and not is_loopback(e.url)]
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
    flags = facts.options.router_flags
    if engine.failure is not None and engine.failure.kind == "refused":
        given = "the key given" if flags.api_key else "no key was given"
        yield finding("security.key-refused", engine.url, f"{engine.failure.text}; {given}")
        return
    if flags.api_key and engine.open_without_key:
        yield finding("security.key-unneeded", engine.url, "/model_info answers without a key")
    admin = text(engine.data, "admin_api_key")
    if not admin:
        return
    ours = flags.worker_key or ""
    if not hmac.compare_digest(admin.encode(), ours.encode()):
        given = "another one" if flags.admin_api_key else "none"
        yield finding(
            "security.admin-key", engine.url, f"it has an admin key, and {given} is given"
        )
    if engine.open_without_key:
        yield finding("security.admin-key-shown", engine.url, "/server_info shows it without a key")


def _endforward(facts: ClusterFacts) -> Iterator[Finding]:
    options = facts.options
    if options.key_file is not None:
        mode = options.key_file.stat().st_mode
        if mode & 0o077:
            seen = f"{options.key_file} has mode {mode & 0o777:o}"
            yield finding("security.key-file-mode", CLUSTER, seen, f"chmod 600 {options.key_file}")
        return
    named = {end for e in facts.usable if e.known.sbs is not None for end in e.known.sbs.routers}
    remote = sorted(
        endpoint
        for endpoint in named
        if endpoint.startswith("tcp://") and not is_loopback(f"http://{_host(endpoint)}:1")
    )
    if remote and not _keyed(facts):
        yield finding("security.endforward-open", CLUSTER, f"{remote[0]}, without a secret")


def _keyed(facts: ClusterFacts) -> bool:
    """Some engine's plugin says that it has a secret."""
    blocks = [e.data.get("sbs") for e in facts.engines]
    return any(isinstance(block, dict) and block.get("encrypted") is True for block in blocks)


def _host(endpoint: str) -> str:
    try:
        host = split_tcp(endpoint)[0]
    except ValueError:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
