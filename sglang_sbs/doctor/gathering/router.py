"""Queries a running router about its engines."""

from __future__ import annotations

import asyncio
import time

from sglang_sbs.doctor.facts import EngineFacts, Failure, RouterFacts, number, objects
from sglang_sbs.doctor.gathering.engines import Asker
from sglang_sbs.doctor.options import DoctorOptions
from sglang_sbs.router.engines.control_requests import object_in
from sglang_sbs.router.engines.urls import normalise_worker_url
from sglang_sbs.scheduling.policy_registry import reads_reports

_ASK_AGAIN_S = 0.5


async def ask_router(asker: Asker, options: DoctorOptions, url: str) -> RouterFacts:
    """Query the router until it has reports of every rank, or ``options.wait_s`` is over. Never
    raises because of its responses."""
    until_s = time.monotonic() + options.wait_s
    facts = await _ask(asker, options, url)
    while _awaits_reports(facts) and time.monotonic() < until_s:
        await asyncio.sleep(_ASK_AGAIN_S)
        facts = await _ask(asker, options, url)
    return facts


def _awaits_reports(facts: RouterFacts) -> bool:
    """Return whether the router uses reports, and some rank of a responding engine has sent none
    yet."""
    if not reads_reports(facts.state.get("policy")):
        return False
    answering = [str(entry.get("url")) for entry in facts.workers if entry.get("usable") is True]
    return any(age_s is None for url in answering for age_s in facts.ages_s(url).values())


async def _ask(asker: Asker, options: DoctorOptions, url: str) -> RouterFacts:
    facts = RouterFacts(url)
    flags = options.router_flags
    admin = [key.key for key in flags.control_plane_keys if key.role == "admin"]
    try:
        facts.ready_status = (await asker.get(url, "/readiness")).status
        workers = await asker.get(url, "/workers", admin[0] if admin else flags.worker_key)
        if workers.status != 200:
            kind = "refused" if workers.status in (401, 403) else "not-sglang"
            raise Failure(kind, f"/workers answers {workers.status}")
        listed = object_in(workers.body)
        entries, link = listed.get("workers"), listed.get("scheduler")
        if not isinstance(entries, list):
            raise Failure("not-sglang", "/workers answers 200 and no list of workers")
        facts.workers = objects(entries)
        facts.scheduler = link if isinstance(link, dict) else {}
        state = object_in((await asker.get(url, "/server_info", flags.api_key)).body)
    except Failure as failure:
        facts.failure = failure
        return facts
    if isinstance(state.get("sbs"), dict) and state.get("router_manager"):
        facts.state = state["sbs"]
        shown = state.get("sbs_options")
        facts.options = shown if isinstance(shown, dict) else {}
    return facts


def engines_of(facts: RouterFacts) -> list[EngineFacts]:
    """Return the engines of a router as it describes them."""
    engines = []
    for entry in facts.workers:
        role = entry.get("worker_type")
        port = number(entry, "bootstrap_port")
        try:
            url = normalise_worker_url(str(entry.get("url")))
        except ValueError:
            continue
        if role == "prefill":
            engines.append(EngineFacts(url, "prefill", port if 1 <= port <= 65535 else None))
        elif role == "decode":
            engines.append(EngineFacts(url, "decode"))
    return engines
