"""One examination: gather everything, then judge it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import aiohttp

from sglang_sbs.doctor.checks import cluster, endforward, engine, prefill, router, security
from sglang_sbs.doctor.checks.cluster import check_cluster
from sglang_sbs.doctor.checks.endforward import Attribution, check_endforward
from sglang_sbs.doctor.checks.engine import check_engine
from sglang_sbs.doctor.checks.prefill import check_prefill
from sglang_sbs.doctor.checks.router import check_router
from sglang_sbs.doctor.checks.security import check_security
from sglang_sbs.doctor.facts import ClusterFacts, Heard, ProbeResult, Target
from sglang_sbs.doctor.findings import GROUPS, Finding, Severity, Wording
from sglang_sbs.doctor.gathering.endforward import Ear, endpoints_to_hear
from sglang_sbs.doctor.gathering.engines import Asker, examine_all
from sglang_sbs.doctor.gathering.pairs import probe_pairs
from sglang_sbs.doctor.gathering.router import ask_router, targets_of
from sglang_sbs.doctor.options import DoctorOptions
from sglang_sbs.router.options.tls import worker_session

Progress = Callable[[str], None]
"""Told what is being done, in a few words."""

CATALOGUE: Mapping[str, Wording] = {
    **engine.finding,
    **cluster.finding,
    **endforward.finding,
    **prefill.finding,
    **security.finding,
    **router.finding,
}
"""Every finding the doctor can make."""


async def gather(options: DoctorOptions, progress: Progress = lambda _doing: None) -> ClusterFacts:
    """Ask everybody everything. Never raises for what engines or a router do."""
    async with worker_session(options.router_flags) as session:
        asker = Asker(session, options)
        router = None
        if options.router is not None:
            progress(f"asking the router {options.router}")
            router = await ask_router(asker, options, options.router)
        targets = _targets(options)
        if not targets and router is not None:
            targets = targets_of(router)
        progress(f"asking {len(targets)} engines")
        facts = ClusterFacts(options, await examine_all(asker, targets), router=router)
        if _worth_listening(facts):
            progress(f"listening for EndForward, {options.wait_s:g} s at most")
            keys = options.router_flags.endforward_keys
            facts.heard = await asyncio.to_thread(Ear(options, facts.engines, keys).listen)
        whose = Attribution(facts.usable, facts.heard or Heard())
        await asyncio.gather(*(asker.kv_ports(e, whose.of(e)) for e in facts.engines))
        if options.probe:
            facts.probes = await _probe(session, facts, progress)
        return facts


def judge(facts: ClusterFacts) -> list[Finding]:
    """Every finding, by group and the worst first within it."""
    found = [*check_cluster(facts), *check_router(facts), *check_security(facts)]
    found += [one for engine in facts.engines for one in check_engine(engine)]
    found += [*check_prefill(facts), *check_endforward(facts)]
    groups, severities = list(GROUPS), list(Severity)
    found.sort(key=lambda one: (groups.index(one.group), -severities.index(one.severity)))
    return list(dict.fromkeys(found))


def _targets(options: DoctorOptions) -> list[Target]:
    flags = options.router_flags
    return [
        *(Target(url, "prefill", port) for url, port in flags.prefill),
        *(Target(url, "decode") for url in flags.decode),
    ]


def _worth_listening(facts: ClusterFacts) -> bool:
    """A router that answers knows better what arrives at it, and has the port."""
    options, router = facts.options, facts.router
    if router is not None and router.failure is None and options.given_bind is None:
        return False
    dials = any(e.known.sbs is not None and e.known.sbs.bind for e in facts.usable)
    return dials or bool(endpoints_to_hear(options, facts.engines))


async def _probe(
    session: aiohttp.ClientSession, facts: ClusterFacts, progress: Progress
) -> list[ProbeResult]:
    prefill, decode = facts.of_role("prefill"), facts.of_role("decode")
    progress(f"one request through each of {len(prefill) * len(decode)} pairs")
    return await probe_pairs(session, facts.options, prefill, decode)
