"""A prefill instance whose KV goes out slowly fills up and starts nothing. It must not attract the
requests that the other one could serve. 2P1D on the virtual GPU, with a KV pool for three prompts
per prefill rank.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from cluster_requests import cluster_options, generate, random_prompt, start

from benchmarks.demo.runs import RouterPorts, running_router
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE
from sglang_sbs.cluster.ports import free_port_blocks
from sglang_sbs.scheduling.eventlog import read_event_log
from sglang_sbs.scheduling.events import Dispatch
from tools.cpu_engine.engines import CpuEngines

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

SHIM = Path(__file__).parent / "slow_kv_site"
PROMPT_TOKENS = 1000
RANKS = 2
POOL_PROMPTS = 3
"""Number of prompts that a prefill rank has KV for."""
REQUESTS = 30
WELL_REQUESTS = 4
"""Before."""
INTERVAL_S = 0.25
NEW_TOKENS = 4


async def requests_to(url: str, http: aiohttp.ClientSession, first_seed: int, count: int) -> None:
    """Send so many prompts at even intervals, until all are answered."""

    async def ask(index: int) -> None:
        await asyncio.sleep(index * INTERVAL_S)
        prompt = random_prompt(first_seed + index, PROMPT_TOKENS)
        await generate(http, url, prompt, NEW_TOKENS)

    await asyncio.gather(*map(ask, range(count)))


def sent_to(log: Path, since_s: float = 0.0) -> Counter[str]:
    """Requests per prefill instance."""
    return Counter(
        command.prefill
        for record in read_event_log(log)
        if record.now_s >= since_s
        for command in record.commands
        if isinstance(command, Dispatch)
    )


async def test_slow_transfers_of_one_prefill_attract_no_requests(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("sick-prefill")
    sick = folder / "sick"
    ports = RouterPorts.from_block(next(free_port_blocks(PORTS_PER_INSTANCE)))
    paths = [str(SHIM), os.environ.get("PYTHONPATH", "")]
    options = cluster_options(
        tmp_path_factory,
        "sick-prefill",
        cpu=CpuEngines(),
        prefill_instances=2,
        # A prompt is one chunk of a rank.
        engine_flags=(
            *("--tp", str(RANKS), "--attn-dp-size", str(RANKS), "--chunked-prefill-size", "2048"),
            "--skip-server-warmup",
        ),
        prefill_flags=("--max-total-tokens", str(POOL_PROMPTS * PROMPT_TOKENS + 64)),
        environment={
            **ports.environment_of_engines(),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "SGLANG_SBS_TEST_SLOW_KV": str(sick),
        },
    )
    log = folder / "router.events"
    flags = ["--policy", "sbs", "--sbs-event-log", str(log), "--disable-retries"]
    timeout = aiohttp.ClientTimeout(total=240)
    async with (
        start(options) as cluster,
        running_router(cluster.instances, ports, flags, folder) as url,
        aiohttp.ClientSession(timeout=timeout) as http,
    ):
        await requests_to(url, http, 1000, WELL_REQUESTS)
        async with asyncio.timeout(30):
            while sent_to(log).total() < WELL_REQUESTS:  # noqa: ASYNC110 (another process writes)
                await asyncio.sleep(0.1)
        # Where requests go while both are idle, so that something has to turn them away.
        [(preferred, _)] = sent_to(log).most_common(1)
        port = next(
            instance.bootstrap_port for instance in cluster.instances if instance.url == preferred
        )
        since_s = time.monotonic()
        sick.write_text(str(port))
        await requests_to(url, http, 2000, REQUESTS)
    sent = sent_to(log, since_s)
    assert sent.total() == REQUESTS
    # What its pool holds, and what follows as its transfers end.
    assert sent[preferred] <= REQUESTS // 2, sent
