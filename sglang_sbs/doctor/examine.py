"""One examination: gathers all facts, then judges them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from sglang_sbs.doctor.checks import cluster, endforward, engine, prefill, router, security
from sglang_sbs.doctor.facts import ClusterFacts, EngineFacts, ReceivedReports
from sglang_sbs.doctor.findings import GROUPS, Finding, Severity, Wording
from sglang_sbs.doctor.gathering.endforward import DoctorListener, endpoints_to_hear
from sglang_sbs.doctor.gathering.engines import Asker, examine_all
from sglang_sbs.doctor.gathering.pairs import probe_pairs
from sglang_sbs.doctor.gathering.router import ask_router, engines_of
from sglang_sbs.doctor.options import DoctorOptions
from sglang_sbs.router.options.tls import worker_session

Progress = Callable[[str], None]
"""Called with short descriptions of the current step."""

_CHECKS = engine, cluster, endforward, prefill, security, router
CATALOGUE: Mapping[str, Wording] = {
    name: wording for module in _CHECKS for name, wording in module.finding.items()
}
"""Severity and advice of every possible finding, by id."""


async def gather(options: DoctorOptions, progress: Progress = lambda _doing: None) -> ClusterFacts:
    """Ask all engines and the router. Never raises because of their responses."""
    async with worker_session(options.router_flags) as session:
        asker = Asker(session, options)
        given = options.router_flags
        engines = [EngineFacts(url, "prefill", port) for url, port in given.prefill]
        engines += [EngineFacts(url, "decode") for url in given.decode]
        router_facts = None
        if options.router is not None:
            progress(f"asking the router {options.router}")
            router_facts = await ask_router(asker, options, options.router)
            engines = engines or engines_of(router_facts)
        progress(f"asking {len(engines)} engines")
        await examine_all(asker, engines)
        facts = ClusterFacts(options, engines, router=router_facts)
        if _worth_listening(facts):
            progress(f"listening for EndForward, {options.wait_s:g} s at most")
            facts.received = await asyncio.to_thread(DoctorListener(options, engines).listen)
        whose = endforward.Attribution(facts.usable, facts.received or ReceivedReports())
        await asyncio.gather(*(asker.kv_ports(e, whose.of(e)) for e in facts.engines))
        if options.probe:
            prefills, decodes = facts.of_role("prefill"), facts.of_role("decode")
            progress(f"one request through each of {len(prefills) * len(decodes)} pairs")
            facts.probes = await probe_pairs(session, options, prefills, decodes)
        return facts


def judge(facts: ClusterFacts) -> list[Finding]:
    """Return all findings by group, the most severe first within each."""
    severities = list(Severity)
    found = dict.fromkeys(finding for module in _CHECKS for finding in module.check(facts))
    return sorted(
        found,
        key=lambda finding: (GROUPS.index(finding.group), -severities.index(finding.severity)),
    )


def _worth_listening(facts: ClusterFacts) -> bool:
    """Return whether the doctor should listen for EndForward itself. A responding router knows
    better which reports arrive, and occupies the port."""
    options, router_facts = facts.options, facts.router
    if router_facts is not None and router_facts.failure is None and options.given_bind is None:
        return False
    dials = any(e.sbs is not None and e.sbs.bind for e in facts.usable)
    return dials or bool(endpoints_to_hear(options, facts.engines))
