"""`scripts/compare-routers` on a real cluster, as small as it gets."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import orjson
import pytest

from benchmarks.compare_routers import campaign, command
from benchmarks.compare_routers.results.rows import RowFile
from benchmarks.compare_routers.runs import cell
from benchmarks.demo.virtual_cluster import CHUNK_TOKENS, parallel_flags
from sglang_sbs.cluster.local import LocalCluster
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, ClusterOptions, Role, plan_cluster
from sglang_sbs.cluster.ports import free_port_blocks
from sglang_sbs.scheduling import RequestArrived
from sglang_sbs.scheduling.eventlog import read_event_log
from tools.cpu_engine.engines import CpuEngines
from tools.cpu_engine.tiny_model import cached_tiny_model
from tools.cpu_engine.virtual_gpu import VirtualGpuCost

pytestmark = pytest.mark.cluster

SMALL = ["--contenders", "sbs,sglang_router:round_robin", "--loads", "0.5", "--seeds", "1"]
SMALL += ["--requests", "20", "--best-peers", "1"]
SMALL += ["--most-host-lag", "0", "--event-logs"]


@pytest.fixture(autouse=True)
def few_requests_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "_PRIME_REQUESTS", 4)
    monkeypatch.setattr(cell, "WARM_UP_REQUESTS", 6)


def test_two_routers_on_the_same_engines(tmp_path: Path) -> None:
    out, report = tmp_path / "out.json", tmp_path / "report"
    words = [*SMALL, "--topology", "2P1D", "--report", str(report), "--json", str(out)]
    assert command.main(words) == 0

    result = orjson.loads(out.read_bytes())
    assert result["failed_requests"] == result["peer_failed_requests"] == 0
    (found,) = result["cells"]
    assert (found["policy"], found["peer"]) == ("sbs", "sglang_router:round_robin")
    assert found["mean_ratio"] > 0
    for row in result["rows"]:
        assert row["answers"]["completed"] == 20
        assert row["engines"]["passes"]["passes"] > 0
        assert row["engines"]["kv"]["mean_tokens"] > 0
    assert (report / "report.html").stat().st_size > 10_000
    assert _arrived(report / "paper-0.5-1-sbs.events") >= 20
    assert _arrived(report / "paper-0.5-1-sglang_router-round_robin.events") == 20

    # Nothing is left to run, so nothing is started.
    before = RowFile(report / "rows.jsonl").read()
    assert command.main([*words, "--resume"]) == 0
    assert RowFile(report / "rows.jsonl").read() == before


def _arrived(log: Path) -> int:
    return sum(isinstance(record.event, RequestArrived) for record in read_event_log(log))


def test_engines_that_run_already(tmp_path: Path) -> None:
    asyncio.run(_given(tmp_path))


async def _given(folder: Path) -> None:
    blocks = free_port_blocks(PORTS_PER_INSTANCE)
    first = next(blocks)
    listen = f"tcp://127.0.0.1:{first + 1}"
    options = ClusterOptions(
        model_path=str(cached_tiny_model()),
        engine_flags=parallel_flags(2),
        prefill_flags=["--chunked-prefill-size", str(2 * CHUNK_TOKENS)],
        cpu=CpuEngines(VirtualGpuCost()),
        log_dir=folder,
        environment={
            **os.environ,
            "SGLANG_SBS_ROUTERS": f"tcp://127.0.0.1:{first},{listen}",
        },
        with_router=False,
    )
    plan = plan_cluster(options, blocks)
    words = [*SMALL, "--real", "--capacity", "5000", "--slo-ttft", "1"]
    for instance in plan.of_role(Role.PREFILL):
        words += ["--prefill", instance.url, str(instance.bootstrap_port)]
    for instance in plan.of_role(Role.DECODE):
        words += ["--decode", instance.url]
    words += ["--listen", listen, "--endforward-port", str(first)]
    words += ["--tokenizer-path", str(cached_tiny_model())]
    async with LocalCluster(plan):
        more = ["--report", str(folder), "--json", str(folder / "out.json")]
        assert await asyncio.to_thread(command.main, [*words, *more]) == 0
    rows = orjson.loads((folder / "out.json").read_bytes())["rows"]
    assert [row["answers"]["completed"] for row in rows] == [20] * 2
    assert all(row["engines"]["passes"]["passes"] > 0 for row in rows)
