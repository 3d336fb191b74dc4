"""Compares a running router's information with that of the engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_sbs.doctor.checks.endforward import finding as report_finding
from sglang_sbs.doctor.facts import (
    ClusterFacts,
    EngineFacts,
    RouterFacts,
    alias_of,
    in_ms,
    listed,
    number,
    text,
)
from sglang_sbs.doctor.findings import ROUTER, Finding, Findings
from sglang_sbs.router.workers.boot_identity import SILENT_AFTER_S
from sglang_sbs.scheduling.policy_registry import reads_reports

finding = Findings("""
ok router.ok
error router.unreachable -> check --router: the URL of the router's --host and --port, with its
    scheme
warning router.not-ours -> give the URL of python -m sglang_sbs.launch_router
error router.key -> give --admin-api-key (or a control plane key with the role admin, or --api-key)
error router.not-ready -> see the findings of its workers
warning router.worker-missing -> add it to the router's flags, or POST /workers
note router.worker-extra -> give it too, or give --router alone to examine all
error router.worker-down -> see its other findings; the router's log shows since when
warning router.problem -> follow the router's message; docs/router.md explains each
note router.rooms-left -> restart this prefill engine when it suits; see what it refuses in its log
warning router.polls -> see the findings on the plugin and EndForward
error router.alone -> see whether a scheduler process runs, its log, and the network between it and
    this front end (--sbs-scheduler)
warning router.not-holding -> give the hosts of router and engines more CPU; start prefill engines
    with the plugin's batch gate (SGLANG_SBS_GANG_GATE_MS)
warning router.throttled -> add prefill instances; sglang-sbs simulate plan computes how many
""")


def check(facts: ClusterFacts) -> Iterator[Finding]:
    router = facts.router
    if router is None:
        return
    if router.failure is not None:
        kinds = {"refused": "router.key", "not-sglang": "router.not-ours"}
        kind = kinds.get(router.failure.kind, "router.unreachable")
        yield finding(kind, ROUTER, f"{router.url}: {router.failure.text}")
        return
    state = router.state
    if not state or not all("endforward_messages" in w for w in router.workers):
        yield finding("router.not-ours", ROUTER, f"{router.url} reports nothing about EndForward")
        return
    found = list(_router(facts, router))
    yield from found
    if not any(finding.group == "router" for finding in found):
        seen = (
            f"{router.url}: policy {state.get('policy')}, {len(router.workers)} workers, "
            f"{state.get('queue_requests')} requests waiting, L_net {in_ms(state.get('latency_s'))}"
        )
        yield finding("router.ok", ROUTER, seen)


def _router(facts: ClusterFacts, router: RouterFacts) -> Iterator[Finding]:
    if router.ready_status != 200:
        yield finding("router.not-ready", ROUTER, f"/readiness answers {router.ready_status}")
    if router.scheduler.get("connected") is False:
        policy, address = router.state.get("policy"), router.scheduler.get("address")
        seen = f"it has lost the scheduler ({address}) and places requests itself, by {policy}"
        yield finding("router.alone", ROUTER, seen)
    if router.state.get("policy") == "sbs" and router.state.get("holding") is False:
        seen = "requests leave at once, as batches do not arrive whole at the engines"
        yield finding("router.not-holding", ROUTER, seen)
    if router.state.get("throttled") is True:
        waiting = router.state.get("queue_requests")
        yield finding("router.throttled", ROUTER, f"{waiting} requests wait")
    for engine in facts.engines:
        if entry := router.entry(engine.url):
            yield from _worker(router, engine, entry)
        else:
            yield finding("router.worker-missing", engine.url, f"{router.url} does not have it")
    given = {alias_of(engine.url) for engine in facts.engines}
    for entry in router.workers:
        if alias_of(text(entry, "url")) not in given:
            seen = f"{entry.get('url')} ({entry.get('worker_type')})"
            yield finding("router.worker-extra", ROUTER, seen)


def _worker(router: RouterFacts, engine: EngineFacts, entry: dict[str, Any]) -> Iterator[Finding]:
    url, usable = engine.url, entry.get("usable") is True
    if entry.get("worker_type") != engine.role:
        seen = f"the router has it as {entry.get('worker_type')}"
        yield finding("router.problem", url, seen, "give it the same role to both")
    if entry.get("draining") is True:
        again = f"POST /workers/{text(entry, 'id')}/undrain"
        yield finding("router.worker-down", url, "it was drained", again)
    elif not usable:
        health = "healthy" if entry.get("is_healthy") else "unhealthy"
        seen = f"{health}, circuit breaker {entry.get('circuit_breaker')}"
        yield finding("router.worker-down", url, seen)
    for kind, problem in router.problems(url).items():
        yield finding("router.problem", url, f"{kind}: {problem}")
    if rooms := number(entry, "rooms_left"):
        seen = f"it refused {rooms} requests about which decode may have contacted it"
        yield finding("router.rooms-left", url, seen)
    if usable:
        yield from _signal(router, url, entry)


def _signal(router: RouterFacts, url: str, entry: dict[str, Any]) -> Iterator[Finding]:
    if entry.get("signal") != "endforward":
        if not reads_reports(router.state.get("policy")):
            return  # this policy uses no reports
        age_s = entry.get("endforward_age_s")
        never = f"the last came {age_s} s ago" if age_s is not None else "none ever came"
        yield finding("router.polls", url, f"no EndForward lately: {never}")
        return
    ages_s = router.ages_s(url)
    messages = entry.get("endforward_messages")
    missing = [rank for rank, age_s in ages_s.items() if age_s is None]
    reported = {rank: age_s for rank, age_s in ages_s.items() if age_s is not None}
    old = {rank: age_s for rank, age_s in reported.items() if age_s >= SILENT_AFTER_S}
    if missing:
        seen = f"the router has nothing of rank {listed(missing)}, {messages} messages in all"
        yield report_finding("endforward.rank-missing", url, seen)
    if old:
        rank, age_s = max(old.items(), key=lambda item: item[1])
        seen = f"{len(old)} ranks send the router nothing, rank {rank} for {age_s:.0f} s"
        yield report_finding("endforward.stale", url, seen)
    if not missing and not old:
        oldest_s = max(reported.values(), default=0.0)
        seen = f"{messages} messages at the router; the oldest rank's last is {oldest_s:.1f} s old"
        yield report_finding("endforward.ok", url, seen)
