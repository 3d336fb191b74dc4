"""SBS in front of real SGLang: the demo, a client that leaves, a lost engine, no plugin."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson
import pytest
import pytest_asyncio

from benchmarks.breakable import BreakableCluster
from benchmarks.demo import cli
from benchmarks.demo.load import Workload, run_load
from benchmarks.demo.passes import read_engines
from benchmarks.demo.runs import RouterPorts, instance_names, running_router
from benchmarks.demo.virtual_cluster import parallel_flags
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, ClusterOptions, plan_cluster
from sglang_sbs.cluster.ports import free_port_blocks
from tools.cpu_engine.engines import CpuEngines
from tools.cpu_engine.tiny_model import cached_tiny_model
from tools.cpu_engine.virtual_gpu import VirtualGpuCost

pytestmark = pytest.mark.cluster


def test_the_demo_serves_everything_on_every_rank_and_changes_no_token(tmp_path: Path) -> None:
    """3P1D on the virtual GPU, then 1P1D with real compute against one engine asked directly."""
    result_file = tmp_path / "out.json"
    code = cli.main(
        ["--requests", "60", "--json", str(result_file), "--out", str(tmp_path / "demo")]
    )
    result = orjson.loads(result_file.read_bytes())
    assert result["topology"] == "3P1D"
    assert result["sglang_version"] == "0.5.23"
    assert set(result["policies"]) == {"sbs", "round_robin"}
    for outcome in result["policies"].values():
        assert (outcome["completed"], outcome["failed"]) == (60, 0), outcome["errors"]
        assert list(outcome["prefill_ranks"]) == ["p0/0", "p0/1", "p1/0", "p1/1", "p2/0", "p2/1"]
        assert list(outcome["decode_ranks"]) == ["d0/0", "d0/1"]
        for counts in ("prefill_ranks", "decode_ranks", "endforward"):
            assert all(n > 0 for n in outcome[counts].values()), (counts, outcome[counts])
        assert 0 < outcome["ttft_ms"]["mean"] <= outcome["ttft_ms"]["p99"]
    assert result["token_match"] is True
    assert code == 0
    assert (tmp_path / "demo" / "timeline.png").stat().st_size > 10_000


@dataclass
class Served:
    """A small cluster behind a router."""

    cluster: BreakableCluster
    url: str
    event_log: Path

    def record(self):
        return read_engines(self.event_log, instance_names(self.cluster.instances))


@asynccontextmanager
async def served(
    tmp_path: Path, *, plugin: bool = True, prefill: int = 1, router_flags: tuple[str, ...] = ()
) -> AsyncIterator[Served]:
    """Virtual-GPU engines and a router with SBS; no flag says whether there is a plugin."""
    blocks = free_port_blocks(PORTS_PER_INSTANCE)
    first = next(blocks)
    ports = RouterPorts(http=first, endforward=first + 1, prometheus=first + 2)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_SBS")}
    if plugin:
        environment["SGLANG_SBS_ROUTERS"] = f"tcp://127.0.0.1:{ports.endforward}"
    options = ClusterOptions(
        model_path=str(cached_tiny_model()),
        prefill_instances=prefill,
        engine_flags=[*parallel_flags(2), "--chunked-prefill-size", "1024"],
        cpu=CpuEngines(VirtualGpuCost(prefill_base_s=0.1, prefill_per_max_token_s=2e-4)),
        log_dir=tmp_path,
        environment=environment,
        with_router=False,
    )
    event_log = tmp_path / "router.events"
    flags = ["--policy", "sbs", "--sbs-event-log", str(event_log), *router_flags]
    async with (
        BreakableCluster(plan_cluster(options, blocks)) as cluster,
        running_router(cluster.instances, ports, flags, tmp_path) as url,
    ):
        yield Served(cluster, url, event_log)


async def test_without_a_configured_plugin_sbs_serves_in_its_fallback_tier_and_says_so(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, plugin=False) as system:
        load = Workload(qps=6, requests=30, max_prompt_tokens=500).arrivals()
        samples = await run_load(system.url, load)
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{system.url}/get_server_info") as response,
        ):
            info = await response.json()
    assert [s.error for s in samples if s.error] == []
    assert system.record().endforward == {}
    tiers = {instance["tier"] for instance in info["sbs"]["prefill"]}
    assert tiers <= {"http", "load_poll"}, info["sbs"]
    log = (tmp_path / "router.log").read_text()
    assert "EndForward" in log
    assert "SGLANG_SBS_ROUTERS" in log


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_prefill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """The last test kills an engine of it."""
    async with served(tmp_path_factory.mktemp("two-prefill"), prefill=2) as system:
        yield system


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_leaves_frees_both_engines(two_prefill: Served) -> None:
    body = {
        "input_ids": list(range(10, 310)),
        "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True},
        "stream": True,
    }
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{two_prefill.url}/generate", json=body) as response:
            assert response.status == 200
            await response.content.readany()
        async with asyncio.timeout(30):
            while await _busy(session, two_prefill.url):  # noqa: ASYNC110 (nothing announces it)
                await asyncio.sleep(0.2)


async def _busy(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether a decode rank still reports a request or the router still counts one."""
    async with session.get(f"{url}/get_server_info") as response:
        state = (await response.json())["sbs"]
    running = [rank["running"] for decode in state["decode"] for rank in decode["ranks"]]
    return state["in_flight_requests"] > 0 or any(running)


@pytest.mark.asyncio(loop_scope="module")
async def test_requests_survive_a_prefill_engine_that_is_killed_under_load(
    two_prefill: Served,
) -> None:
    load = Workload(qps=12, requests=70, max_prompt_tokens=500).arrivals()
    task = asyncio.create_task(run_load(two_prefill.url, load, timeout_s=90))
    await asyncio.sleep(2.0)
    os.kill(two_prefill.cluster.pid("prefill-0"), signal.SIGKILL)
    async with asyncio.timeout(120):
        samples = await task
    unanswered = [s for s in samples if s.error and not s.error.startswith("HTTP")]
    assert unanswered == []
    assert [s.error for s in samples if s.error] == []
    assert two_prefill.record().prefill_ranks.keys() & {"p1/0", "p1/1"}
