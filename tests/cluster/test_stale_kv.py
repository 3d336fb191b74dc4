"""A request that is cancelled while its KV is on its way must not write into another one's pages.

2P1D, a decode pool that holds one and a half prompts. The write of A's KV is held (``held_kv``),
A's client leaves, and B, which needs A's pages, comes by the other prefill instance. The write is
let go as soon as B has its first token, or waits for pages. B's tokens must be those of B alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from cluster_requests import cluster_options, random_prompt, start

from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE
from sglang_sbs.cluster.ports import free_port_blocks
from tools.cpu_engine.engines import CpuEngines

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

SHIM = Path(__file__).parent / "held_kv_site"
RELEASE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
PROMPT_TOKENS = 600
POOL_TOKENS = 900
NEW_TOKENS = 48
TRANSFER_TIMEOUT_S = 10
"""Until the router takes A's write, which the test lets go at once, for over."""
PATIENCE_S = 90.0
A, B = random_prompt(1, PROMPT_TOKENS), random_prompt(2, PROMPT_TOKENS)


@dataclass
class Site:
    url: str
    metrics_url: str
    folder: Path
    """Where the engines' shim and the test leave events."""
    http: aiohttp.ClientSession

    async def event(self, *names: str) -> str:
        """The first of these that is there."""
        async with asyncio.timeout(PATIENCE_S):
            while True:  # other processes leave them
                for name in names:
                    if (self.folder / name).exists():
                        return name
                await asyncio.sleep(0.01)

    async def metric(self, name: str) -> float:
        """The sum over its labels."""
        async with self.http.get(self.metrics_url) as response:
            page = await response.text()
        return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)))

    async def tokens(self, prompt: list[int], began: str = "") -> list[int]:
        """Return the tokens of a greedy stream; ``began``: the event to leave with its first
        token."""
        body = {
            "input_ids": prompt,
            "stream": True,
            "sampling_params": {
                "max_new_tokens": NEW_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        found: list[int] = []
        async with self.http.post(f"{self.url}/generate", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    found = json.loads(line[6:])["output_ids"]
                    if began:
                        (self.folder / began).touch()
        assert len(found) == NEW_TOKENS
        return found


@asynccontextmanager
async def site(
    tmp_path_factory: pytest.TempPathFactory, name: str, environment: Mapping[str, str]
) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp(f"{name}-events")
    prometheus_port = next(free_port_blocks(PORTS_PER_INSTANCE))
    paths = [str(SHIM), os.environ.get("PYTHONPATH", "")]
    options = cluster_options(
        tmp_path_factory,
        name,
        cpu=CpuEngines(),
        prefill_instances=2,
        with_router=True,
        # One pass, so one write, for each prompt.
        engine_flags=("--chunked-prefill-size", str(2 * PROMPT_TOKENS), "--skip-server-warmup"),
        decode_flags=(
            *("--max-total-tokens", str(POOL_TOKENS)),
            *("--num-reserved-decode-tokens", str(NEW_TOKENS)),
        ),
        environment={
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "SGLANG_SBS_TEST_HELD_KV": str(folder),
        },
        router_flags=[
            # In turns: A and B go to different prefill instances. Nothing waits in the router.
            *("--policy", "round_robin", "--disable-retries"),
            *("--kv-transfer-timeout-secs", str(TRANSFER_TIMEOUT_S)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(prometheus_port)),
        ],
    )
    metrics_url = f"http://127.0.0.1:{prometheus_port}/metrics"
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with start(options) as cluster, aiohttp.ClientSession(timeout=timeout) as http:
        assert cluster.router is not None
        yield Site(cluster.router.url, metrics_url, folder, http)


async def cancelled_during_its_transfer(site: Site) -> tuple[bool, str, list[int], list[int]]:
    """Whether decode's request of A was parked, the event that let its write go, and B's tokens
    alone and after A."""
    alone = await site.tokens(B)
    assert await site.tokens(B) == alone  # by the other prefill instance
    aborts = await site.metric("sbs_aborts_total")
    (site.folder / "hold").touch()
    a = asyncio.create_task(site.tokens(A))
    await site.event("held")
    a.cancel()
    await asyncio.gather(a, return_exceptions=True)
    async with asyncio.timeout(PATIENCE_S):
        while await site.metric("sbs_aborts_total") == aborts:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)
    parked = await site.metric("sbs_parked_requests") > 0
    b = asyncio.create_task(site.tokens(B, began="b-began"))
    waits = "waits-for-transfer" if parked else "waits-for-release"
    event = await site.event("b-began", waits)
    (site.folder / "go").touch()
    await site.event("written")
    return parked, event, alone, await b


async def test_engines_that_free_pages_at_once_get_no_abort_during_the_transfer(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with site(tmp_path_factory, "frees-at-once", {RELEASE: "0"}) as engines:
        parked, event, alone, after_a = await cancelled_during_its_transfer(engines)
    assert after_a == alone
    assert (parked, event) == (True, "waits-for-transfer")


async def test_engines_that_defer_the_release_are_aborted_at_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with site(tmp_path_factory, "defers", {}) as engines:
        parked, event, alone, after_a = await cancelled_during_its_transfer(engines)
    assert after_a == alone
    assert (parked, event) == (False, "waits-for-release")
