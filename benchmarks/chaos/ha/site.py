"""Engines, a store and the four places, put together.

Owns the order of starting. Must not know faults.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.chaos.etcd_process import etcd_binary, running_etcd
from benchmarks.chaos.ha.places import Places
from benchmarks.chaos.run import BOOTSTRAP_TIMEOUT_S, DP_SIZE
from sglang_sbs.cluster.local import LocalCluster, Progress
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, ClusterOptions, pd_urls, plan_cluster
from sglang_sbs.cluster.ports import free_port_blocks
from sglang_sbs.cluster.router_command import router_argv
from sglang_sbs.demo.virtual_cluster import CHUNK_TOKENS, COST, parallel_flags
from sglang_sbs.testing.tiny_model import cached_tiny_model


def has_store() -> bool:
    """Whether etcd can be started here."""
    return etcd_binary() is not None


@asynccontextmanager
async def planned_places(log_dir: Path, *, etcd: bool) -> AsyncIterator[Places]:
    """Two schedulers and two front ends that are still to be planned, and their store.

    Raises:
        RuntimeError, TimeoutError: etcd does not come up.
    """
    blocks = free_port_blocks(PORTS_PER_INSTANCE)
    ports = next(blocks), next(blocks)
    if not etcd:
        yield Places(ports, None)
        return
    async with running_etcd(log_dir) as store:
        at = urlsplit(store.url)
        assert at.hostname is not None and at.port is not None
        yield Places(ports, (at.hostname, at.port))


def plan_places(places: Places, workers: list[str], log_dir: Path) -> None:
    """``workers``: flags that name the engines."""
    places.plan(workers, _etcd_url if places.stores else None, log_dir)


def _etcd_url(at: tuple[str, int]) -> str:
    return f"etcd://{at[0]}:{at[1]}/sglang-sbs"


@asynccontextmanager
async def running_site(
    prefill: int, log_dir: Path, on_progress: Callable[[Progress], None], *, etcd: bool
) -> AsyncIterator[Places]:
    """All of it on real engines: so many prefill instances, one decode instance.

    Raises:
        ClusterStartError: an engine did not come up.
        NotReadyError, RuntimeError, TimeoutError: something else did not.
    """
    async with planned_places(log_dir, etcd=etcd) as places:
        options = ClusterOptions(
            model_path=str(cached_tiny_model()),
            prefill_instances=prefill,
            engine_flags=parallel_flags(DP_SIZE, 1),
            prefill_flags=["--chunked-prefill-size", str(CHUNK_TOKENS * DP_SIZE)],
            virtual_gpu=COST,
            log_dir=log_dir,
            environment={
                **os.environ,
                "SGLANG_SBS_ROUTERS": ",".join(places.endforward),
                "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(BOOTSTRAP_TIMEOUT_S),
            },
            with_router=False,
        )
        plan = plan_cluster(options, free_port_blocks(PORTS_PER_INSTANCE))
        async with LocalCluster(plan, on_progress=on_progress) as cluster:
            prefills, decodes = pd_urls(cluster.instances)
            plan_places(places, worker_flags(prefills, decodes), log_dir)
            async with places.running():
                yield places


def worker_flags(prefill: Iterable[tuple[str, int | None]], decode: Iterable[str]) -> list[str]:
    """The schedulers' flags that name these engines."""
    words = router_argv(prefill, decode)
    return words[words.index("--pd-disaggregation") :]
