"""What a running router says of itself and of its engines, against what the engines say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_sbs.doctor.facts import ClusterFacts, EngineFacts, RouterFacts
from sglang_sbs.doctor.findings import ROUTER, Finding, finding
from sglang_sbs.router.engines.urls import alias_key
from sglang_sbs.router.workers.worker import SILENT_AFTER_S
from sglang_sbs.scheduling.policy_names import facts_of

_MAX_SHOWN = 8


def check_router(facts: ClusterFacts) -> Iterator[Finding]:
    """The router, and its view of every engine."""
    router = facts.router
    if router is None:
        return
    if router.failure is not None:
        kinds = {"refused": "router.key", "not-sglang": "router.not-ours"}
        yield finding(
            kinds.get(router.failure.kind, "router.unreachable"),
            ROUTER,
            f"{router.url}: {router.failure.text}",
        )
        return
    if not router.state or not all("endforward_messages" in w for w in router.workers):
        yield finding("router.not-ours", ROUTER, f"{router.url} says nothing of EndForward")
        return
    found = list(_router(facts, router))
    yield from found
    if not any(one.group == "router" for one in found):
        state = router.state
        yield finding(
            "router.ok",
            ROUTER,
            f"{router.url}: policy {state.get('policy')}, {len(router.workers)} workers, "
            f"{state.get('queue_requests')} requests waiting, L_net {_ms(state.get('latency_s'))}",
        )


def _router(facts: ClusterFacts, router: RouterFacts) -> Iterator[Finding]:
    if router.ready_status != 200:
        yield finding("router.not-ready", ROUTER, f"/readiness answers {router.ready_status}")
    if router.state.get("throttled") is True:
        waiting = router.state.get("queue_requests")
        yield finding("router.throttled", ROUTER, f"{waiting} requests wait")
    listed = {alias_key(str(entry.get("url"))): entry for entry in router.workers}
    given = {alias_key(engine.url): engine for engine in facts.engines}
    for key, engine in given.items():
        entry = listed.get(key)
        if entry is None:
            yield finding("router.worker-missing", engine.url, f"{router.url} does not have it")
        else:
            yield from _worker(router, engine, entry)
    for key, entry in listed.items():
        if key not in given:
            role = entry.get("worker_type")
            yield finding("router.worker-extra", ROUTER, f"{entry.get('url')} ({role})")


def _worker(router: RouterFacts, engine: EngineFacts, entry: dict[str, Any]) -> Iterator[Finding]:
    url = engine.url
    if entry.get("worker_type") != engine.target.role:
        seen = f"the router has it as {entry.get('worker_type')}"
        yield finding("router.problem", url, seen, "give it the same role to both")
    if entry.get("usable") is not True:
        breaker = entry.get("circuit_breaker")
        health = "healthy" if entry.get("is_healthy") else "unhealthy"
        yield finding("router.worker-down", url, f"{health}, circuit breaker {breaker}")
    problems = entry.get("problems")
    for kind, text in (problems if isinstance(problems, dict) else {}).items():
        yield finding("router.problem", url, f"{kind}: {text}")
    if entry.get("usable") is True:
        yield from _signal(router, engine, entry)


def _signal(router: RouterFacts, engine: EngineFacts, entry: dict[str, Any]) -> Iterator[Finding]:
    """EndForward as it arrives at the router."""
    url = engine.url
    if entry.get("signal") != "endforward":
        if not facts_of(router.state.get("policy")).reads_reports:
            return  # it has no use for reports
        age_s = entry.get("endforward_age_s")
        never = f"the last came {age_s} s ago" if age_s is not None else "none ever came"
        yield finding("router.polls", url, f"no EndForward lately: {never}")
        return
    ages = _ages(router, url)
    messages = entry.get("endforward_messages")
    missing = [rank for rank, age_s in ages.items() if age_s is None]
    old = {rank: age_s for rank, age_s in ages.items() if age_s and age_s >= SILENT_AFTER_S}
    if missing:
        shown = ", ".join(map(str, missing[:_MAX_SHOWN]))
        seen = f"the router has nothing of rank {shown}, {messages} messages in all"
        yield finding("endforward.rank-missing", url, seen)
    if old:
        rank, age_s = max(old.items(), key=lambda item: item[1])
        seen = f"{len(old)} ranks are silent, rank {rank} for {age_s:.0f} s, says the router"
        yield finding("endforward.stale", url, seen)
    if not missing and not old:
        age_s = max((age_s for age_s in ages.values() if age_s is not None), default=0.0)
        seen = f"{messages} messages at the router; the oldest rank's last is {age_s:.1f} s old"
        yield finding("endforward.ok", url, seen)


def _ms(value: object) -> str:
    return f"{value * 1e3:.0f} ms" if isinstance(value, int | float) else "?"


def _ages(router: RouterFacts, url: str) -> dict[int, float | None]:
    """Since the last report of each rank, as the scheduler has it."""
    for role in ("prefill", "decode"):
        for instance in router.state.get(role, ()):
            if instance.get("instance") == url:
                return {number: rank.get("age_s") for number, rank in enumerate(instance["ranks"])}
    return {}
