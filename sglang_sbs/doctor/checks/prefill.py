"""Checks each prefill engine's bootstrap server and the source of its cache contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_sbs.cluster.plan import MIN_KV_EVENTS_PAGE_SIZE
from sglang_sbs.doctor.facts import Bootstrap, ClusterFacts, EngineFacts, listed, number
from sglang_sbs.doctor.findings import CLUSTER, Finding, Findings
from sglang_sbs.router.engines.urls import is_loopback, split_worker_url
from sglang_sbs.router.workers.server_info import WorkerInfo, node_of_rank

finding = Findings("""
ok bootstrap.ok
error bootstrap.unreachable -> give the port of --disaggregation-bootstrap-port behind the URL of
    --prefill, and open it for the decode engines
error bootstrap.wrong-port -> write the engine's own port behind --prefill URL, or leave it out
error bootstrap.not-one -> give the port of --disaggregation-bootstrap-port, not of HTTP, behind
    --prefill URL
error bootstrap.other-engine -> give each --prefill its own bootstrap port; engines on one host need
    different ones
error bootstrap.registering -> look for the missing ranks in the engine's log; do all nodes run?
error bootstrap.loopback -> write prefill URLs with the address by which decode engines reach them,
    not localhost
ok cache.exact
note cache.approximate -> start prefill engines with --page-size 64 --kv-events-config
    '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'
note cache.off -> leave --disable-radix-cache out
warning cache.unusable -> correct --kv-events-config: an endpoint tcp://*:PORT, and a
    replay_endpoint whose port is higher by the DP size at least
warning cache.unreachable -> open them for the router on the node that is named: from the endpoint's
    port on and from the replay endpoint's on, one per DP rank; let the endpoint listen
    (tcp://*:PORT)
warning cache.other-nodes -> the same release of the plugin on every node; SGLANG_SBS_NODE_HOST
    there if its messages come from another address than routers reach it by (then with a key)
note cache.no-replay -> add "replay_endpoint": "tcp://*:5657" to --kv-events-config
note cache.small-pages -> start prefill and decode with --page-size 16 or more
warning cache.mixed -> the same --kv-events-config on all prefill engines
""")


def check(facts: ClusterFacts) -> Iterator[Finding]:
    prefill, decode = facts.of_role("prefill"), facts.of_role("decode")
    for engine in prefill:
        yield from _bootstrap(engine, decode)
        yield from _cache(engine.url, engine.known, engine)
    with_cache = [e for e in prefill if e.known.radix_cache]
    without = [e.url for e in with_cache if e.known.kv_events is None]
    if without and len(without) < len(with_cache):
        yield finding("cache.mixed", CLUSTER, f"no KV events of {', '.join(without)}")


def _bootstrap(engine: EngineFacts, decode: Sequence[EngineFacts]) -> Iterator[Finding]:
    url, bootstrap = engine.url, engine.bootstrap
    if bootstrap is None:
        seen = "no bootstrap port is given, and the engine does not report one"
        yield finding("bootstrap.unreachable", url, seen)
        return
    found = list(_bootstrap_problems(engine, bootstrap))
    others = [d.url for d in decode if not is_loopback(split_worker_url(d.url)[1])]
    if others and is_loopback(split_worker_url(url)[1]):
        seen = f"decode engines get the host {bootstrap.host}, and {others[0]} is on another host"
        found.append(finding("bootstrap.loopback", url, seen))
    yield from found
    if not found:
        ranks = number(bootstrap.layout, "dp_size")
        seen = f"{bootstrap.address} answers from here, with all {ranks} DP ranks"
        yield finding("bootstrap.ok", url, seen)


def _bootstrap_problems(engine: EngineFacts, bootstrap: Bootstrap) -> Iterator[Finding]:
    url, own = engine.url, engine.known.bootstrap_port
    if own not in (None, bootstrap.port):
        why = f" ({bootstrap.failure})" if bootstrap.failure else ""
        seen = f"{bootstrap.port} is given, and the engine's is {own}{why}"
        yield finding("bootstrap.wrong-port", url, seen, f"--prefill {url} {own}")
    elif bootstrap.failure:
        yield finding("bootstrap.unreachable", url, bootstrap.failure)
    elif bootstrap.status == 503:
        yield finding("bootstrap.registering", url, f"{bootstrap.address}: {bootstrap.text}")
    elif bootstrap.status != 200 or number(bootstrap.layout, "dp_size") < 1:
        yield finding("bootstrap.not-one", url, f"{bootstrap.address} answers {bootstrap.status}")
    else:
        # Compare the bootstrap server's information with the engine's.
        for what, field, ours in (
            ("HTTP port", "prefill_http_port", number(engine.data, "port")),
            ("DP size", "dp_size", engine.known.dp_size),
            ("page size", "page_size", number(engine.data, "page_size")),
        ):
            theirs = number(bootstrap.layout, field)
            if theirs and ours and theirs != ours:
                seen = f"the engine behind {bootstrap.address} has {what} {theirs}, this one {ours}"
                yield finding("bootstrap.other-engine", url, seen)
                return


def _cache(url: str, info: WorkerInfo, engine: EngineFacts) -> Iterator[Finding]:
    events, closed, hidden = info.kv_events, engine.closed_kv_ports, engine.hidden_kv_ranks
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
    if closed:
        yield finding("cache.unreachable", url, f"no connection to {listed(closed)}")
    if hidden:
        nodes = ", ".join(map(str, sorted({node_of_rank(info, rank) for rank in hidden})))
        yield finding("cache.other-nodes", url, f"{len(hidden)} ranks, on node {nodes}")
    if not closed and not hidden and not unusable:
        last = events.port + info.dp_size - 1
        seen = f"KV events at ports {events.port}..{last}, blocks of {events.block_tokens} tokens"
        yield finding("cache.exact", url, seen)
