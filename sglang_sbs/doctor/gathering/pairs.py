"""``--probe``: one request for one token through every pair of prefill and decode.

Owns the two legs of such a request, as the router sends them (``docs/router.md``, "What happens to
a request"). Must not judge the outcome. Over all pairs every DP rank gets its turn.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress

import aiohttp
import orjson

from sglang_sbs.doctor.facts import EngineFacts, ProbeResult
from sglang_sbs.doctor.gathering.engines import worker_of
from sglang_sbs.doctor.options import DoctorOptions
from sglang_sbs.router.engines.urls import split_worker_url
from sglang_sbs.router.workers.host_spelling import spelling_for
from sglang_sbs.router.workers.rank_contract import (
    decode_members,
    pick_bootstrap_room,
    prefill_members,
)
from sglang_sbs.router.workers.server_info import ranks_in_reach
from sglang_sbs.scheduling.events import InstanceRole

PROBE_TIMEOUT_S = 30.0
"""The first request between two engines sets up their connection."""
_AT_ONCE = 8
_PROMPT = [5, 6, 7, 8]
"""Token ids: also engines without a tokenizer take them."""
_MAX_REPLY_CHARS = 300


async def probe_pairs(
    session: aiohttp.ClientSession,
    options: DoctorOptions,
    prefill: Sequence[EngineFacts],
    decode: Sequence[EngineFacts],
) -> list[ProbeResult]:
    """Requests through all pairs, a few at a time."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def probe(number: int, p: EngineFacts, d: EngineFacts) -> ProbeResult:
        async with gate:
            return await _probe(session, options, number, p, d)

    pairs = [(p, d) for p in prefill for d in decode]
    return list(await asyncio.gather(*(probe(number, p, d) for number, (p, d) in enumerate(pairs))))


async def _probe(
    session: aiohttp.ClientSession,
    options: DoctorOptions,
    number: int,
    prefill: EngineFacts,
    decode: EngineFacts,
) -> ProbeResult:
    assert prefill.info is not None and decode.info is not None, "only usable engines are probed"
    prefill_rank = number % len(ranks_in_reach(prefill.info))
    decode_rank = number % len(ranks_in_reach(decode.info))
    rid = uuid.uuid4().hex
    worker = worker_of(prefill, prefill.info)
    worker.spelling = _spelling(prefill, decode)
    by_room = decode.info.rank_choice == "by_room"
    room = pick_bootstrap_room(
        *(prefill_rank, prefill.info.dp_size),
        *((decode_rank, decode.info.dp_size) if by_room else ()),
    )
    body: dict[str, object] = {
        "rid": rid,
        "input_ids": _PROMPT,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "bootstrap_host": worker.bootstrap_host,
        "bootstrap_port": worker.bootstrap_port,
        "bootstrap_room": room,
    }
    headers = _bearer(options.router_flags.api_key)
    started_s = time.monotonic()
    prefill_ranks = prefill_members(prefill_rank, coupled=prefill.info.coupled)
    decode_ranks = decode_members(prefill_rank, decode_rank, coupled=decode.info.coupled)
    urls = (
        worker.url_of(prefill_rank),
        worker_of(decode, decode.info).url_of(decode_rank),
    )
    legs = [
        asyncio.create_task(_leg(session, headers, url, facts.target.role, body | ranks))
        for url, facts, ranks in zip(
            urls, (prefill, decode), (prefill_ranks, decode_ranks), strict=True
        )
    ]
    # The first failure is the cause; the other leg would wait for its partner in vain.
    await asyncio.wait(legs, return_when=asyncio.FIRST_EXCEPTION, timeout=PROBE_TIMEOUT_S)
    failure = _failure_of(legs)
    took_s = time.monotonic() - started_s
    for leg in legs:
        leg.cancel()
    await asyncio.gather(*legs, return_exceptions=True)
    if failure:
        key = _bearer(options.router_flags.worker_key)
        await asyncio.gather(*(_abort(session, key, url, rid) for url in urls))
    return ProbeResult(
        *(prefill.url, decode.url, prefill_rank, decode_rank), failure=failure, took_s=took_s
    )


def _spelling(prefill: EngineFacts, decode: EngineFacts) -> int:
    """As a router would call its host, so that decode asks this boot for its ports."""
    assert prefill.info is not None and decode.info is not None
    sbs = prefill.info.sbs
    if sbs is None or not sbs.boot_id:
        return 0
    host = split_worker_url(prefill.url)[1]
    return spelling_for(host, sbs, [decode.info.sbs], {})


def _failure_of(legs: Sequence[asyncio.Task[None]]) -> str:
    """Of prefill's and decode's, in that order; empty: both have answered."""
    failure = "; ".join(
        str(leg.exception()) for leg in legs if leg.done() and leg.exception() is not None
    )
    if not failure and not all(leg.done() for leg in legs):
        silent = [
            name for name, leg in zip(("prefill", "decode"), legs, strict=True) if not leg.done()
        ]
        failure = f"no answer of {' and '.join(silent)} within {PROBE_TIMEOUT_S:g} s"
    return failure


class _LegFailed(Exception):
    pass


async def _leg(
    session: aiohttp.ClientSession,
    headers: dict[str, str],
    url: str,
    side: InstanceRole,
    body: dict[str, object],
) -> None:
    """Raises: _LegFailed, naming the side."""
    try:
        async with session.post(
            f"{url}/generate",
            json=body,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
        ) as response:
            status, raw = response.status, await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise _LegFailed(f"{side}: {error or type(error).__name__}") from error
    text = raw[:_MAX_REPLY_CHARS].decode("utf-8", "replace").strip()
    if status != 200:
        raise _LegFailed(f"{side} answers {status}: {text}")
    try:
        reason = orjson.loads(raw)["meta_info"]["finish_reason"]["type"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise _LegFailed(f"{side} gives no generation: {text}") from error
    if reason == "abort":
        raise _LegFailed(f"{side} aborted it: {text}")


async def _abort(
    session: aiohttp.ClientSession, headers: dict[str, str], url: str, rid: str
) -> None:
    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        timeout = aiohttp.ClientTimeout(total=5.0)
        async with session.post(
            f"{url}/abort_request", json={"rid": rid}, headers=headers, timeout=timeout
        ):
            pass


def _bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
