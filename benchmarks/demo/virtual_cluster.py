"""The virtual-GPU cluster that policies are compared on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from benchmarks.demo.load import Sample, Workload, run_load
from benchmarks.demo.passes import read_engines
from benchmarks.demo.runs import RouterPorts, Run, instance_names, running_router
from sglang_sbs.cluster.local import LocalCluster, Progress
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, ClusterOptions, InstancePlan, plan_cluster
from sglang_sbs.cluster.ports import free_port_blocks
from tools.cpu_engine.engines import CpuEngines
from tools.cpu_engine.tiny_model import cached_tiny_model
from tools.cpu_engine.virtual_gpu import VirtualGpuCost

CHUNK_TOKENS = 1024
"""Per DP rank."""
COST = VirtualGpuCost(
    prefill_base_s=0.2,
    prefill_per_max_token_s=2.7e-4,
    prefill_per_total_token_s=1.3e-4 / 2,
    decode_base_s=0.02,
    decode_per_max_request_s=2e-4,
)
"""A full chunk takes 0.61 s, a third of its slope on the mean rank and two thirds on the slowest,
as measured kernels split it; long enough that CPU work between passes is a few percent on two
cores."""
MEAN_PROMPT_SHARE = 1 / 3
"""Mean of Beta(1, 2)."""
WARM_UP_REQUESTS = 30


@dataclass(frozen=True, slots=True)
class Rig:
    """A running cluster that policies can be run on, one after the other."""

    instances: Sequence[InstancePlan]
    ports: RouterPorts
    dp_size: int
    log_dir: Path
    capacity_qps: float
    """Requests per second when every pass has a full chunk on every rank."""

    def rank_names(self, letter: str) -> list[str]:
        """``p0/0`` and following of prefill instances, ``d0/0`` of decode instances."""
        names = [n for n in instance_names(self.instances).values() if n.startswith(letter)]
        return [f"{name}/{rank}" for name in names for rank in range(self.dp_size)]

    async def run(self, label: str, flags: Sequence[str], workload: Workload) -> Run:
        """Send a load (prompts up to a chunk) through a router with these flags, with a progress
        bar, and read its event log.

        A warm-up at half the rate goes first and is in no figure but the event counts: it fills
        connection pools and teaches the scheduler the forward time.
        """
        workload = msgspec.structs.replace(
            workload, max_prompt_tokens=CHUNK_TOKENS, content=f"{label}/{workload.qps}"
        )
        warm_up = msgspec.structs.replace(
            workload, qps=workload.qps / 2, requests=WARM_UP_REQUESTS, seed=workload.seed + 10_000
        )
        log = self.log_dir / f"{label}.events"
        flags = [*flags, "--sbs-event-log", str(log)]
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with ProgressBar(TextColumn("{task.description:<28}"), *columns, transient=True) as bar:
            task = bar.add_task(label, total=warm_up.requests + workload.requests)

            def done(_sample: Sample) -> None:
                bar.advance(task)

            async with running_router(
                self.instances, self.ports, flags, self.log_dir, f"router-{label}"
            ) as url:
                await run_load(url, warm_up.arrivals(), on_done=done)
                samples = await run_load(url, workload.arrivals(), on_done=done)
        return Run(label, samples, read_engines(log, instance_names(self.instances)))


def capacity_qps(prefill_instances: int, dp_size: int, *, barrier: bool = True) -> float:
    """Requests per second when every pass of this rig's engines has a full chunk on every rank."""
    pass_s = COST.prefill_s([CHUNK_TOKENS] * (dp_size if barrier else 1))
    tokens_per_s = prefill_instances * dp_size * CHUNK_TOKENS / pass_s
    return tokens_per_s / (MEAN_PROMPT_SHARE * CHUNK_TOKENS)


@asynccontextmanager
async def running_rig(
    prefill: int,
    decode: int,
    dp_size: int,
    log_dir: Path,
    console: Console,
    *,
    attention_tp: int = 1,
    dwdp: bool = False,
) -> AsyncIterator[Rig]:
    """Start the engines, say so on the console, stop them at the end.

    ``dwdp``: SGLang's DWDP on prefill, whose DP ranks do not wait for each other. Raises:
    ClusterStartError, an engine did not come up.
    """
    blocks = free_port_blocks(PORTS_PER_INSTANCE)
    ports = RouterPorts.from_block(next(blocks))
    options = rig_options(
        *(prefill, decode, dp_size, log_dir),
        ports.environment_of_engines(),
        attention_tp=attention_tp,
        dwdp=dwdp,
    )
    plan, qps = plan_cluster(options, blocks), capacity_qps(prefill, dp_size, barrier=not dwdp)
    async with LocalCluster(plan, on_progress=progress_printer(console)) as cluster:
        yield Rig(cluster.instances, ports, dp_size, log_dir, qps)


def rig_options(
    prefill: int,
    decode: int,
    dp_size: int,
    log_dir: Path,
    environment: Mapping[str, str],
    *,
    cost: VirtualGpuCost = COST,
    attention_tp: int = 1,
    dwdp: bool = False,
) -> ClusterOptions:
    """Engines on virtual GPUs, without a router."""
    chunk = ["--chunked-prefill-size", str(CHUNK_TOKENS * dp_size)]
    return ClusterOptions(
        model_path=str(cached_tiny_model()),
        prefill_instances=prefill,
        decode_instances=decode,
        engine_flags=parallel_flags(dp_size, attention_tp),
        prefill_flags=[*chunk, *dwdp_flags(dp_size)] if dwdp else chunk,
        cpu=CpuEngines(cost),
        log_dir=log_dir,
        environment=environment,
        with_router=False,
    )


def parallel_flags(dp_size: int, attention_tp: int = 1) -> list[str]:
    """DP attention over ``dp_size`` ranks of ``attention_tp`` processes each."""
    flags = ["--tp", str(dp_size * attention_tp)]
    return [*flags, "--attn-dp-size", str(dp_size)] if dp_size > 1 else flags


def dwdp_flags(dp_size: int) -> list[str]:
    return ["--dwdp-size", str(dp_size)]


def progress_printer(console: Console) -> Callable[[Progress], None]:
    """Prints each step of a cluster's start and none of its stop."""

    def show(progress: Progress) -> None:
        if progress.state == "ready":
            console.print(f"   {progress.elapsed_s:5.0f} s  {progress.name} ready", highlight=False)

    return show
