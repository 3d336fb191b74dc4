"""Real SGLang clusters on CPU, each started at most once in a test session.

Owns: the fixtures. Two clusters: `real_cluster` computes the model and has, besides a prefill and a
decode instance, one ordinary engine to compare with; `virtual_cluster` is 3P1D on the virtual GPU.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from cluster_requests import cluster_options, start

from sglang_sbs.cluster.local import LocalCluster
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE
from sglang_sbs.cluster.ports import free_port_blocks
from tools.cpu_engine.engines import CpuEngines
from tools.cpu_engine.virtual_gpu import VirtualGpuCost


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def real_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """1P1D and a unified engine, all computing the tiny model."""
    options = cluster_options(tmp_path_factory, "real", cpu=CpuEngines(), unified_instances=1)
    async with start(options) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def endforward_endpoint() -> str:
    """Where the engines of `virtual_cluster` connect to; whoever wants to hear them binds it."""
    return f"tcp://127.0.0.1:{next(free_port_blocks(PORTS_PER_INSTANCE))}"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def virtual_cluster(
    tmp_path_factory: pytest.TempPathFactory, endforward_endpoint: str
) -> AsyncIterator[LocalCluster]:
    """3P1D on the virtual GPU, whose EndForward goes to `endforward_endpoint`."""
    options = cluster_options(
        tmp_path_factory,
        "virtual",
        cpu=CpuEngines(VirtualGpuCost()),
        prefill_instances=3,
        environment={**os.environ, "SGLANG_SBS_ROUTERS": endforward_endpoint},
    )
    async with start(options) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that gives up on a request after a minute."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session
