"""L_hit as the router predicts it and as real engines report it: two DP ranks, KV events.

One cluster on the virtual GPU, whose KV pools, radix caches and evictions are SGLang's own, behind
a router whose event log is the record: what a request was placed with (``Dispatch.cached_tokens``)
and what prefill found (``PrefillDone.cached_tokens``).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from cluster_hits import (
    NEW_TOKENS,
    PAGE_TOKENS,
    RANKS,
    SYSTEM_PROMPT_TOKENS,
    WAIT_S,
    Conversation,
    Site,
    environment,
    ranks_that_stored,
)
from cluster_requests import CHUNKED_PREFILL_SIZE, ENGINE_FLAGS, generate, start

from benchmarks.demo.runs import RouterPorts, running_router
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, ClusterOptions
from sglang_sbs.cluster.ports import free_port_blocks
from sglang_sbs.scheduling import Scheduler
from sglang_sbs.scheduling.eventlog import LogRecord
from sglang_sbs.scheduling.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Dispatch,
    ForwardEnded,
    InstanceUp,
)
from tools.cpu_engine.engines import CpuEngines
from tools.cpu_engine.tiny_model import VOCAB_SIZE, cached_tiny_model
from tools.cpu_engine.virtual_gpu import VirtualGpuCost

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session")]

POOL_TOKENS = 8192
"""KV cache of a rank: sixteen of the storm's prompts."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("cache-aware")
    log = folder / "router.events"
    prometheus_port = next(free_port_blocks(PORTS_PER_INSTANCE))
    options = ClusterOptions(
        model_path=str(cached_tiny_model()),
        engine_flags=[
            *ENGINE_FLAGS,
            *("--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(POOL_TOKENS)),
        ],
        decode_flags=["--disaggregation-decode-enable-radix-cache"],
        cpu=CpuEngines(VirtualGpuCost(prefill_base_s=0.03, prefill_per_max_token_s=2e-5)),
        log_dir=folder,
        environment=environment(),
        router_flags=[
            *("--policy", "sbs", "--sbs-event-log", str(log)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(prometheus_port)),
        ],
    )
    async with start(options) as cluster:
        assert cluster.router is not None
        yield Site(cluster, cluster.router.url, log)


async def test_predicted_hits_of_conversations_are_those_the_engine_reports(
    site: Site, http: aiohttp.ClientSession
) -> None:
    # Until both ranks have the system prompt. Of requests that bring a new prefix together some are
    # computed after another has left it there, which is more than there was when they were sent.
    used: set[int] = set()
    for warm_up in range(5):
        # The rank that has the system prompt may take all of a few, not all of many.
        since_s = time.monotonic()
        many = 16 * (warm_up + 1)
        seeds = range(200 + 100 * warm_up, 200 + 100 * warm_up + many)
        await asyncio.gather(*(Conversation(seed).turn(http, site.url) for seed in seeds))
        first = await site.outcomes(many, since_s)
        assert all(outcome.predicted <= outcome.reported for outcome in first), first
        used |= {outcome.rank for outcome in first}
        if used == set(range(RANKS)):
            break
    assert used == set(range(RANKS))

    since_s = time.monotonic()
    conversations = [Conversation(seed) for seed in range(20, 32)]
    await asyncio.gather(*(conversation.turns(http, site.url, 8) for conversation in conversations))
    outcomes = await site.outcomes(12 * 8, since_s)
    up = [r.event for r in site.records() if isinstance(r.event, InstanceUp)]
    assert {(e.role, e.prefix_source, e.page_size) for e in up} == {
        ("prefill", "events", PAGE_TOKENS),
        ("decode", "events", PAGE_TOKENS),
    }
    stored = [r.event for r in site.records(since_s) if isinstance(r.event, BlocksStored)]
    # On a slow host one rank may serve all of them: they come too slowly to fill a pass.
    assert {event.dp_rank for event in stored} >= {outcome.rank for outcome in outcomes}
    assert sum(outcome.exact for outcome in outcomes) >= 0.99 * len(outcomes), outcomes
    # Not of nothing: most of a conversation is its past.
    assert all(outcome.reported >= SYSTEM_PROMPT_TOKENS // PAGE_TOKENS for outcome in outcomes)
    assert sum(outcome.reported for outcome in outcomes) > 100 * len(outcomes)


async def test_a_flushed_cache_is_not_counted_on(site: Site, http: aiohttp.ClientSession) -> None:
    conversation = Conversation(100)
    await conversation.turns(http, site.url, 2)
    since_s = time.monotonic()
    async with asyncio.timeout(WAIT_S):
        # Engines refuse while anything is under way, also the end of a transfer.
        while (await flush(http, site.url)) != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    # The router's own word at once, and then the engine's.
    await site.until(
        lambda records: all(clears(records)[rank] == 2 for rank in range(RANKS)), since_s
    )
    since_s = time.monotonic()
    await conversation.turns(http, site.url, 3)
    outcomes = await site.outcomes(3, since_s)
    assert [outcome.exact for outcome in outcomes] == [True] * 3, outcomes
    assert outcomes[0].reported == 0
    assert outcomes[2].reported > 0


async def test_a_second_turn_is_decoded_where_the_first_is_and_only_the_rest_is_sent(
    site: Site, http: aiohttp.ClientSession
) -> None:
    """Decode counts as cached what it did not have to be sent, if that is more than prefill had: it
    has the answer of the turn before as well."""
    draw = random.Random(800)
    since_s = time.monotonic()
    turns = [[draw.randrange(3, VOCAB_SIZE) for _ in range(200)] for _ in range(4)]
    replies = [await generate(http, site.url, turn, 40) for turn in turns]
    whole = (200 + 40) // PAGE_TOKENS  # overlap scheduling computes the last token's KV, too
    await site.until(lambda records: len(stored_by_decode(records)) >= 4 * whole, since_s)
    for turn, reply in zip(turns, replies, strict=True):
        turn.extend(reply["output_ids"] + [draw.randrange(3, VOCAB_SIZE) for _ in range(60)])
    replies = [await generate(http, site.url, turn, 4) for turn in turns]
    await site.until(lambda records: len(dispatches(records)) == 8, since_s)
    sent = dispatches(site.records(since_s))
    first, second = sent[:4], sent[4:]
    assert {dispatch.decode_rank for dispatch in first} == {0, 1}
    assert [dispatch.decode_rank for dispatch in second] == [
        dispatch.decode_rank for dispatch in first
    ]
    found = [reply["meta_info"]["cached_tokens"] for reply in replies]
    assert (
        found == [dispatch.decode_cached_tokens for dispatch in second] == [whole * PAGE_TOKENS] * 4
    )
    assert {dispatch.cached_tokens for dispatch in second} == {200 // PAGE_TOKENS * PAGE_TOKENS}


def dispatches(records: list[LogRecord]) -> list[Dispatch]:
    return [c for record in records for c in record.commands if isinstance(c, Dispatch)]


def stored_by_decode(records: list[LogRecord]) -> list[int]:
    """Blocks that decode ranks published."""
    reports = [r.event for r in records if isinstance(r.event, ForwardEnded)]
    decode = {event.instance for event in reports if event.report.role == "decode"}
    events = [r.event for r in records if isinstance(r.event, BlocksStored)]
    return [block for event in events if event.instance in decode for block in event.blocks]


async def flush(http: aiohttp.ClientSession, url: str) -> int:
    async with http.post(f"{url}/flush_cache") as response:
        return response.status


def clears(records: list[LogRecord]) -> Counter[int]:
    """How often each prefill rank was cleared."""
    reports = [r.event for r in records if isinstance(r.event, ForwardEnded)]
    prefill = {event.instance for event in reports if event.report.role == "prefill"}
    return Counter(
        r.event.dp_rank
        for r in records
        if isinstance(r.event, BlocksCleared) and r.event.instance in prefill
    )


async def test_what_a_storm_evicted_is_not_counted_on(
    site: Site, http: aiohttp.ClientSession
) -> None:
    conversations = [Conversation(seed) for seed in range(200, 204)]
    for conversation in conversations:
        await conversation.turns(http, site.url, 2)
    since_s = time.monotonic()
    draw = random.Random(7)
    storm = [[draw.randrange(3, VOCAB_SIZE) for _ in range(500)] for _ in range(64)]
    limit = asyncio.Semaphore(16)

    async def gust(prompt: list[int]) -> None:
        async with limit:
            await generate(http, site.url, prompt, NEW_TOKENS)

    await asyncio.gather(*map(gust, storm))
    assert CHUNKED_PREFILL_SIZE < POOL_TOKENS < 64 * 500 / RANKS
    outcomes = await site.outcomes(64, since_s)
    assert sum(outcome.exact for outcome in outcomes) >= 0.99 * 64, outcomes
    removed = [r.event for r in site.records(since_s) if isinstance(r.event, BlocksRemoved)]
    assert {event.dp_rank for event in removed} == set(range(RANKS))
    since_s = time.monotonic()
    for conversation in conversations:
        await conversation.turn(http, site.url)
    after = await site.outcomes(4, since_s)
    assert [outcome.exact for outcome in after] == [True] * 4, after
    assert after[0].reported <= SYSTEM_PROMPT_TOKENS


async def test_a_router_that_starts_later_learns_what_is_cached(
    site: Site, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    since_s = time.monotonic()
    conversations = [Conversation(seed) for seed in range(300, 304)]
    for conversation in conversations:
        await conversation.turns(http, site.url, 2)
    # All on one rank, where nothing was cached before: they begin alike.
    await site.until(lambda records: bool(ranks_that_stored(records)), since_s)
    ranks = ranks_that_stored(site.records(since_s))
    first = next(free_port_blocks(PORTS_PER_INSTANCE))
    ports = RouterPorts(http=first, endforward=first + 1, prometheus=first + 2)
    log = tmp_path / "second.events"
    flags = ["--policy", "sbs", "--sbs-event-log", str(log)]
    flags += ["--tokenizer-path", str(cached_tiny_model())]
    async with running_router(site.cluster.instances, ports, flags, tmp_path) as url:
        second = Site(site.cluster, url, log)
        await second.until(lambda records: ranks_that_stored(records) >= ranks, 0.0)
        since_s = time.monotonic()
        for conversation in conversations:
            await conversation.turn(http, url)
        outcomes = await second.outcomes(4, since_s)
    assert [outcome.exact for outcome in outcomes] == [True] * 4, outcomes
    assert all(outcome.reported > SYSTEM_PROMPT_TOKENS for outcome in outcomes), outcomes


async def test_hits_of_text_and_chats_are_predicted_by_their_tokens(
    site: Site, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Chats with and without tools and salt, and completions: the router tokenizes them."""
    first = next(free_port_blocks(PORTS_PER_INSTANCE))
    ports = RouterPorts(http=first, endforward=first + 1, prometheus=first + 2)
    log = tmp_path / "text.events"
    flags = ["--policy", "sbs", "--sbs-event-log", str(log)]
    flags += ["--tokenizer-path", str(cached_tiny_model())]
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    async with running_router(site.cluster.instances, ports, flags, tmp_path) as url:
        second = Site(site.cluster, url, log)
        since_s = time.monotonic()
        for seed, extra in enumerate(({}, {"tools": tools}, {"cache_salt": "tenant"})):
            draw = random.Random(500 + seed)
            messages = [{"role": "system", "content": words(draw, 40)}]
            prompt = words(draw, 60)
            for _ in range(3):
                messages.append({"role": "user", "content": words(draw, 30)})
                chat = {"model": "m", "messages": messages, "max_tokens": NEW_TOKENS} | extra
                reply = await ask(http, f"{url}/v1/chat/completions", chat)
                answer = reply["choices"][0]["message"]["content"] or ""
                messages.append({"role": "assistant", "content": answer})
                body = {"model": "m", "prompt": prompt, "max_tokens": NEW_TOKENS}
                reply = await ask(http, f"{url}/v1/completions", body)
                prompt += reply["choices"][0]["text"] + words(draw, 20)
        outcomes = await second.outcomes(18, since_s)
    assert [outcome.exact for outcome in outcomes] == [True] * 18, outcomes
    assert sum(outcome.reported > 0 for outcome in outcomes) >= 12, outcomes


def words(draw: random.Random, count: int) -> str:
    return " ".join(
        draw.choices(("the", "model", "batch", "token", "K\u00f6ln", "\u6f22"), k=count)
    )


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(url, json=body) as response:
        reply = await response.json()
    assert response.status == 200, reply
    assert isinstance(reply, dict)
    return reply


async def test_a_restarted_engine_has_nothing(site: Site, http: aiohttp.ClientSession) -> None:
    conversation = Conversation(400)
    await conversation.turns(http, site.url, 2)
    restarted_s = time.monotonic()
    await site.cluster.kill("prefill-0")
    # Decode would go on to talk to an instance that was gone for so short that it did not notice.
    decode_log = site.cluster.plan.log_dir / "decode-0.log"
    async with asyncio.timeout(WAIT_S):
        while "Lost connection with prefill" not in decode_log.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    await site.cluster.start_instance("prefill-0")
    await site.until(
        lambda records: any(
            isinstance(r.event, InstanceUp) and r.event.role == "prefill" for r in records
        ),
        restarted_s,
    )
    since_s = time.monotonic()
    await conversation.turns(http, site.url, 3)
    outcomes = await site.outcomes(3, since_s)
    assert [outcome.exact for outcome in outcomes] == [True] * 3, outcomes
    assert outcomes[0].reported == 0
    assert outcomes[2].reported > 0
    stored = [r for r in site.records(since_s) if isinstance(r.event, BlocksStored)]
    assert stored


async def test_the_record_of_all_this_replays(site: Site) -> None:
    records = site.records()
    config = records[0].config
    assert config is not None
    scheduler = Scheduler(config)
    for record in records[1:]:
        assert record.event is not None
        assert scheduler.handle(record.event, record.now_s) == record.commands
