"""Whether everyone who needs EndForward hears it, before anything is measured.

An engine that speaks to the listener need not reach the router under test: both are asked.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.listener import ReceivedMessage
from sglang_sbs.router.engines.urls import alias_key, normalise_worker_url

WAIT_S = 10.0
"""Idle engines report once a second, and look every 2 s at most for a router that was away."""
_STEP_S = 0.25
_MESSAGES = "sbs_endforward_messages_total"
_STALLED = "sbs_loop_stalled_seconds_total"
_TIMEOUT = aiohttp.ClientTimeout(total=10)


class MissingReportsError(RuntimeError):
    """Ranks whose messages do not arrive; the message says where, and what to do."""


def names_of(
    received: Iterable[ReceivedMessage], reported: Mapping[str, str], urls: Mapping[str, str]
) -> dict[str, str]:
    """``boot_id`` -> short name: those that engines reported, and those of their other nodes,
    whose messages carry the engine's URL (``SGLANG_SBS_INSTANCE_ID``).

    ``urls``: short name -> URL.
    """
    names = dict(reported)
    by_address = {_address(url): name for name, url in urls.items()}
    for message in received:
        name = by_address.get(_address(message.report.instance_id))
        if name is not None:
            names.setdefault(message.report.boot_id, name)
    return names


def _address(url: str) -> tuple[str, int] | None:
    """``None`` for what is no URL."""
    try:
        return alias_key(normalise_worker_url(url))
    except ValueError:
        return None


def silent(received: Iterable[ReceivedMessage], names: Mapping[str, str]) -> list[str]:
    """Return the engines that sent nothing: ``p1`` for a whole instance, ``p1/0`` for a rank.

    ``names``: ``boot_id`` -> ``p0``, ``d0``.
    """
    ranks: dict[str, set[int]] = {name: set() for name in names.values()}
    sizes: dict[str, int] = {}
    for message in received:
        name = names.get(message.report.boot_id)
        if name is not None:
            ranks[name].add(message.report.dp_rank)
            sizes[name] = message.report.dp_size
    out = []
    for name, said in sorted(ranks.items()):
        if said:
            out += [f"{name}/{rank}" for rank in range(sizes[name]) if rank not in said]
        else:
            out.append(name)
    return out


def silent_prefill(received: Iterable[ReceivedMessage], names: Mapping[str, str]) -> list[str]:
    """Return the silent prefill instances and ranks, whose passes are measured and scheduled."""
    return [name for name in silent(received, names) if name.startswith("p")]


async def router_misses(
    metrics_url: str,
    prefill: Mapping[str, str],
    received: Iterable[ReceivedMessage],
    names: Mapping[str, str],
    wait_s: float,
) -> list[str]:
    """Ranks (``p1/0``) whose messages arrived here, but not at a router of ours within ``wait_s``.

    ``prefill``: short name -> URL, as the router has it.
    """
    wanted = {}
    for message in received:
        name, rank = names.get(message.report.boot_id, ""), message.report.dp_rank
        if name in prefill:
            wanted[_address(prefill[name]), str(rank)] = f"{name}/{rank}"
    until_s = time.monotonic() + wait_s
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        while True:
            there = await _received_by(session, metrics_url)
            missing = sorted(name for key, name in wanted.items() if key not in there)
            if not missing or time.monotonic() > until_s:
                return missing
            await asyncio.sleep(_STEP_S)


async def stalled_s(metrics_url: str) -> float:
    """Seconds in which the event loops of a router of ours have stood still so far, as it counts
    them; 0 when it does not answer."""
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        samples = await _samples(session, metrics_url)
    return math.fsum(sample.value for sample in samples if sample.name == _STALLED)


async def _received_by(
    session: aiohttp.ClientSession, url: str
) -> set[tuple[tuple[str, int] | None, str]]:
    """Worker and rank of every message a router counts; nothing when it does not answer."""
    return {
        (_address(sample.labels["worker"]), sample.labels["dp_rank"])
        for sample in await _samples(session, url)
        if sample.name == _MESSAGES and sample.value > 0
    }


async def _samples(session: aiohttp.ClientSession, url: str) -> list[Sample]:
    try:
        async with session.get(url) as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError):
        return []
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
