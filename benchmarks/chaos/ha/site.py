"""Engines, a store and the four places, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.chaos.etcd_process import running_etcd
from benchmarks.chaos.ha.places import Elect, Places
from benchmarks.chaos.run import DP_SIZE, environment_reporting_to
from benchmarks.demo.virtual_cluster import rig_options
from sglang_sbs.cluster.local import LocalCluster, Progress
from sglang_sbs.cluster.plan import (
    PORTS_PER_INSTANCE,
    pd_urls,
    plan_cluster,
    router_argv,
)
from sglang_sbs.cluster.ports import free_port_blocks
from tools.stand_ins.kubernetes_server import FakeKubernetes

AGREEMENTS = ("etcd", "lease", "order")
"""How the schedulers agree: a real etcd; a Lease, kept by a stand-in; the order in which they are
named."""


@dataclass(frozen=True, slots=True)
class Site:
    """Places that are still to be planned, and how their schedulers agree."""

    places: Places
    elect: Elect | None
    log_dir: Path

    def plan(self, workers: Sequence[str]) -> None:
        """``workers``: flags that name the engines."""
        self.places.plan(workers, self.elect, self.log_dir)


@asynccontextmanager
async def site_with(agreement: str, log_dir: Path) -> AsyncIterator[Site]:
    """Two schedulers and two front ends, and the store of :data:`AGREEMENTS`, which runs.

    Raises:
        RuntimeError, TimeoutError: etcd does not come up.
    """
    blocks = free_port_blocks(PORTS_PER_INSTANCE)
    ports = next(blocks), next(blocks)
    if agreement == "order":
        yield Site(Places(ports, None), None, log_dir)
    elif agreement == "etcd":
        async with running_etcd(log_dir) as etcd:
            yield Site(Places(ports, _address(etcd.url)), _etcd_url, log_dir)
    else:
        api = FakeKubernetes()
        await api.start()

        def lease(at: tuple[str, int]) -> tuple[str, dict[str, str]]:
            path = api.kubeconfig(log_dir, f"kubeconfig-{at[0]}", f"http://{at[0]}:{at[1]}")
            return "k8s://llm/sglang-sbs", {"KUBECONFIG": str(path)}

        try:
            yield Site(Places(ports, _address(api.url)), lease, log_dir)
        finally:
            await api.stop()


def _address(url: str) -> tuple[str, int]:
    at = urlsplit(url)
    assert at.hostname is not None and at.port is not None
    return at.hostname, at.port


def _etcd_url(at: tuple[str, int]) -> tuple[str, dict[str, str]]:
    return f"etcd://{at[0]}:{at[1]}/sglang-sbs", {}


@asynccontextmanager
async def running_site(
    prefill: int, log_dir: Path, on_progress: Callable[[Progress], None], agreement: str
) -> AsyncIterator[Places]:
    """All of it on real engines: so many prefill instances, one decode instance.

    Raises:
        ClusterStartError: an engine did not come up.
        NotReadyError, RuntimeError, TimeoutError: something else did not.
    """
    async with site_with(agreement, log_dir) as site:
        places = site.places
        environment = environment_reporting_to(*places.endforward)
        options = rig_options(prefill, 1, DP_SIZE, log_dir, environment)
        plan = plan_cluster(options, free_port_blocks(PORTS_PER_INSTANCE))
        async with LocalCluster(plan, on_progress=on_progress) as cluster:
            prefills, decodes = pd_urls(cluster.instances)
            site.plan(worker_flags(prefills, decodes))
            async with places.running():
                yield places


def worker_flags(prefill: Iterable[tuple[str, int | None]], decode: Iterable[str]) -> list[str]:
    words = router_argv(prefill, decode)
    return words[words.index("--pd-disaggregation") :]
