"""A real PD cluster behind a router, and one ordinary engine that is the measure.

All compute the tiny model on CPU. Owns: the fixtures.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from client_sides import Sides

from benchmarks.breakable import BreakableCluster
from benchmarks.demo.runs import RouterPorts, running_router
from benchmarks.demo.virtual_cluster import parallel_flags
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, ClusterOptions, Role, plan_cluster
from sglang_sbs.cluster.ports import free_port_blocks
from tools.cpu_engine.engines import CpuEngines
from tools.cpu_engine.tiny_model import cached_tiny_model

STARTUP_TIMEOUT_S = 600
PARSERS = ("--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25")
COMPACT = "--constrained-json-disable-any-whitespace"
"""The model has learned nothing: it would write white space for ever."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sides(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sides]:
    if importlib.util.find_spec("sglang") is None:
        pytest.fail("SGLang is not installed: run scripts/install without --router-only")
    folder = tmp_path_factory.mktemp("clients")
    blocks = free_port_blocks(PORTS_PER_INSTANCE)
    first = next(blocks)
    ports = RouterPorts(http=first, endforward=first + 1, prometheus=first + 2)
    options = ClusterOptions(
        model_path=str(cached_tiny_model()),
        log_dir=folder,
        engine_flags=[*parallel_flags(2), "--chunked-prefill-size", "1024", *PARSERS, COMPACT],
        with_router=False,
        unified_instances=1,
        cpu=CpuEngines(),
        environment=os.environ | {"SGLANG_SBS_ROUTERS": f"tcp://127.0.0.1:{ports.endforward}"},
    )
    plan = plan_cluster(options, blocks)
    log = folder / "router.events"
    flags = ["--policy", "sbs", "--sbs-event-log", str(log)]
    flags += ["--tokenizer-path", str(cached_tiny_model())]
    async with (
        BreakableCluster(plan, STARTUP_TIMEOUT_S) as cluster,
        running_router(cluster.instances, ports, flags, folder) as url,
    ):
        (unified,) = plan.of_role(Role.UNIFIED)
        engines = [
            instance.url for role in (Role.PREFILL, Role.DECODE) for instance in plan.of_role(role)
        ]
        yield Sides(url, unified.url, engines, log)
