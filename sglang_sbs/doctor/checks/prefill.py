"""What hangs on each prefill engine: its bootstrap server, and what is known of its cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import ip_address

from sglang_sbs.cluster.plan import MIN_KV_EVENTS_PAGE_SIZE
from sglang_sbs.doctor.checks.fields import number
from sglang_sbs.doctor.facts import Bootstrap, ClusterFacts, EngineFacts
from sglang_sbs.doctor.findings import CLUSTER, Finding, finding
from sglang_sbs.router.engines.urls import split_worker_url
from sglang_sbs.router.workers.server_info import WorkerInfo, node_of_rank


def check_prefill(facts: ClusterFacts) -> Iterator[Finding]:
    """Every prefill engine, and how they differ."""
    prefill, decode = facts.of_role("prefill"), facts.of_role("decode")
    for engine in prefill:
        yield from _bootstrap(engine, engine.known, decode)
        yield from _cache(engine, engine.known)
    with_cache = [e for e in prefill if e.known.radix_cache]
    without = [e.url for e in with_cache if e.known.kv_events is None]
    if without and len(without) < len(with_cache):
        yield finding("cache.mixed", CLUSTER, f"no KV events of {', '.join(without)}")


# Bootstrap ------------------------------------------------------------------------------------


def _bootstrap(
    engine: EngineFacts, info: WorkerInfo, decode: Sequence[EngineFacts]
) -> Iterator[Finding]:
    found = list(_bootstrap_problems(engine, info, engine.bootstrap))
    if engine.bootstrap is not None and is_loopback(engine.url):
        others = [d.url for d in decode if not is_loopback(d.url)]
        if others:
            seen = f"decode is told {engine.bootstrap.host}, and {others[0]} is another host"
            found.append(finding("bootstrap.loopback", engine.url, seen))
    yield from found
    if engine.bootstrap is not None and not found:
        ranks = number(engine.bootstrap.layout or {}, "dp_size")
        seen = f"{engine.bootstrap.address} answers from here, with all {ranks} DP ranks"
        yield finding("bootstrap.ok", engine.url, seen)


def _bootstrap_problems(
    engine: EngineFacts, info: WorkerInfo, bootstrap: Bootstrap | None
) -> Iterator[Finding]:
    url, given = engine.url, engine.target.bootstrap_port
    if bootstrap is None:
        seen = "no bootstrap port is given, and the engine does not say one"
        yield finding("bootstrap.unreachable", url, seen)
    elif given is not None and info.bootstrap_port not in (None, given):
        seen = f"{given} is given, and the engine's is {info.bootstrap_port}"
        seen += f" ({bootstrap.failure})" if bootstrap.failure else ""
        yield finding("bootstrap.wrong-port", url, seen, f"--prefill {url} {info.bootstrap_port}")
    elif bootstrap.failure:
        yield finding("bootstrap.unreachable", url, bootstrap.failure)
    elif bootstrap.status == 503:
        yield finding("bootstrap.registering", url, f"{bootstrap.address}: {bootstrap.text}")
    elif bootstrap.status != 200 or number(bootstrap.layout or {}, "dp_size") < 1:
        seen = f"{bootstrap.address} answers {bootstrap.status}"
        yield finding("bootstrap.not-one", url, seen)
    else:
        yield from _other_engine(engine, info, bootstrap.layout or {}, bootstrap.address)


def _other_engine(
    engine: EngineFacts, info: WorkerInfo, layout: dict[str, object], where: str
) -> Iterator[Finding]:
    """What the bootstrap server says of its engine, against what this engine says."""
    for what, theirs, ours in (
        ("HTTP port", number(layout, "prefill_http_port"), number(engine.data, "port")),
        ("DP size", number(layout, "dp_size"), info.dp_size),
        ("page size", number(layout, "page_size"), number(engine.data, "page_size")),
    ):
        if theirs and ours and theirs != ours:
            yield finding(
                "bootstrap.other-engine",
                engine.url,
                f"the engine behind {where} has {what} {theirs}, this one {ours}",
            )
            return


def is_loopback(url: str) -> bool:
    """Whether an address means the machine that uses it."""
    host = split_worker_url(url)[1]
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# Cache ----------------------------------------------------------------------------------------


def _cache(engine: EngineFacts, info: WorkerInfo) -> Iterator[Finding]:
    url, events = engine.url, info.kv_events
    if not info.radix_cache:
        yield finding("cache.off", url, "--disable-radix-cache is set")
        return
    unusable = [text for text in info.warnings if "KV events" in text]
    for text in unusable:
        yield finding("cache.unusable", url, text)
    if events is None:
        if not unusable:
            yield finding("cache.approximate", url, "no --kv-events-config")
        return
    if events.block_tokens < MIN_KV_EVENTS_PAGE_SIZE:
        yield finding("cache.small-pages", url, f"pages of {events.block_tokens} tokens")
    if events.replay_port is None and not unusable:
        yield finding("cache.no-replay", url, f"KV events from port {events.port} on, no replay")
    if engine.closed_kv_ports:
        closed = engine.closed_kv_ports
        shown = ", ".join(map(str, closed[:8])) + (" …" if len(closed) > 8 else "")
        yield finding("cache.unreachable", url, f"no connection to {shown}")
    hidden = engine.hidden_kv_ranks
    if hidden:
        nodes = ", ".join(map(str, sorted({node_of_rank(info, rank) for rank in hidden})))
        yield finding("cache.other-nodes", url, f"{len(hidden)} ranks, on node {nodes}")
    if not engine.closed_kv_ports and not hidden and not unusable:
        last = events.port + info.dp_size - 1
        seen = f"KV events at ports {events.port}..{last}, blocks of {events.block_tokens} tokens"
        yield finding("cache.exact", url, seen)
