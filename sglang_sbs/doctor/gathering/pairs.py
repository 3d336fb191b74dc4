"""``--probe``: sends a request for one token through every pair of prefill and decode, as the
router would. Together the probes use every DP rank."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import aiohttp
import orjson

from sglang_sbs.doctor.facts import EngineFacts, ProbeResult
from sglang_sbs.doctor.gathering.engines import worker_of
from sglang_sbs.doctor.options import DoctorOptions
from sglang_sbs.router.engine_secrets import beginning_without_secrets
from sglang_sbs.router.engines.control_requests import ask
from sglang_sbs.router.workers import rank_contract
from sglang_sbs.router.workers.host_spelling import respell_all
from sglang_sbs.router.workers.server_info import ranks_in_reach
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import InstanceRole

PROBE_TIMEOUT_S = 30.0
"""Time limit of a probe, in seconds: the first request between two engines sets up their
connection."""
_AT_ONCE = 8
_PROMPT = [5, 6, 7, 8]
"""Token ids, which engines without a tokenizer accept as well."""
_MAX_REPLY_BYTES = 300
_SIDES: tuple[InstanceRole, InstanceRole] = ("prefill", "decode")
_Post = Callable[..., Awaitable[tuple[int, bytes]]]
"""Posts to a URL with the key it needs."""


async def probe_pairs(
    session: aiohttp.ClientSession,
    options: DoctorOptions,
    prefill: Sequence[EngineFacts],
    decode: Sequence[EngineFacts],
) -> list[ProbeResult]:
    gate = asyncio.Semaphore(_AT_ONCE)
    keys = options.router_flags.api_key, options.router_flags.worker_key
    post, abort = (partial(ask, session, "POST", key=key) for key in keys)
    sides = [[worker_of(engine, engine.known) for engine in side] for side in (prefill, decode)]
    respell_all(*sides)

    async def probe(number: int, p: Worker, d: Worker) -> ProbeResult:
        async with gate:
            return await _probe(post, abort, number, p, d)

    pairs = enumerate(itertools.product(*sides))
    return list(await asyncio.gather(*(probe(number, p, d) for number, (p, d) in pairs)))


async def _probe(
    post: _Post, abort: _Post, number: int, prefill: Worker, decode: Worker
) -> ProbeResult:
    p, d = prefill.info, decode.info
    assert p is not None and d is not None
    prefill_rank = number % len(ranks_in_reach(p))
    decode_rank = number % len(ranks_in_reach(d))
    rid = uuid.uuid4().hex
    body: dict[str, object] = {
        "rid": rid,
        "input_ids": _PROMPT,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "bootstrap_host": prefill.bootstrap_host,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": rank_contract.pick_bootstrap_room(prefill_rank, p.dp_size),
    }
    started_s = time.monotonic()
    urls = (prefill.url_of(prefill_rank), decode.url_of(decode_rank))
    bodies = (
        body | rank_contract.prefill_members(prefill_rank, coupled=p.coupled),
        body | rank_contract.decode_members(prefill_rank, decode_rank, coupled=d.coupled),
    )
    legs: list[asyncio.Task[None]] = []
    failure = ""
    try:
        # The first failure is the cause; the other leg would only wait for its partner.
        async with asyncio.timeout(PROBE_TIMEOUT_S), asyncio.TaskGroup() as group:
            for url, side, body in zip(urls, _SIDES, bodies, strict=True):
                legs.append(group.create_task(_leg(post, url, side, body)))
    except* _LegFailed as failed:
        failure = "; ".join(map(str, failed.exceptions))
    except* TimeoutError:
        silent = [side for side, leg in zip(_SIDES, legs, strict=True) if leg.cancelled()]
        failure = f"no answer of {' and '.join(silent)} within {PROBE_TIMEOUT_S:g} s"
    took_s = time.monotonic() - started_s
    if failure:
        await asyncio.gather(*(_abort(abort, url, rid) for url in urls))
    ranks = f"prefill rank {prefill_rank}, decode rank {decode_rank}"
    return ProbeResult(f"{prefill.url} -> {decode.url}", ranks, failure, took_s)


class _LegFailed(Exception):
    pass


async def _leg(post: _Post, url: str, side: InstanceRole, body: dict[str, object]) -> None:
    """Send the prefill or the decode request of a probe. Raises: _LegFailed, naming the side."""
    limit_s = 2 * PROBE_TIMEOUT_S  # the pair's own limit ends it first
    try:
        status, raw = await post(f"{url}/generate", json=body, timeout_s=limit_s, connect_s=5.0)
    except (aiohttp.ClientError, OSError) as error:
        raise _LegFailed(f"{side}: {error or type(error).__name__}") from error
    text = beginning_without_secrets(raw, _MAX_REPLY_BYTES)
    if status != 200:
        raise _LegFailed(f"{side} answers {status}: {text}")
    try:
        reason = orjson.loads(raw)["meta_info"]["finish_reason"]["type"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise _LegFailed(f"{side} gives no generation: {text}") from error
    if reason == "abort":
        raise _LegFailed(f"{side} aborted it: {text}")


async def _abort(post: _Post, url: str, rid: str) -> None:
    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        await post(f"{url}/abort_request", json={"rid": rid}, timeout_s=5.0)
