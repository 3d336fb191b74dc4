"""The engines that routers are compared on: ours on CPU with virtual GPU time, or a user's own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console

from benchmarks.compare_routers.workloads import WORKLOADS
from benchmarks.demo.runs import RouterPorts, instance_names
from benchmarks.demo.virtual_cluster import CHUNK_TOKENS, progress_printer, rig_options
from benchmarks.listener import ReportListener, boots
from sglang_sbs.cluster.local import LocalCluster
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, pd_urls, plan_cluster
from sglang_sbs.cluster.ports import free_port_blocks
from sglang_sbs.engine.config import DEFAULT_GATE_MS, GANG_GATE_MS, MOST_GATE_MS
from sglang_sbs.simulator.cluster.cost import CostError, PassCost
from tools.cpu_engine.virtual_gpu import VirtualGpuCost

H800_CHUNK_TOKENS = 3072
"""Per DP rank, of the deployment that the named costs are of (the paper's chunk of 3K)."""
PASS_S = 0.61
"""Time of a full chunk here: long enough that CPU work between passes is a few percent on two
cores."""
_DECODE_STEP_S = 0.02
_DECODE_REQUEST_S = 2e-4
"""A decode step and what each request of the fullest rank adds, beside passes of ``PASS_S``."""
_MIX_REQUESTS = 2000
"""Number of requests whose mean gives the attention pairs and requests per token."""
_TIMEOUT = aiohttp.ClientTimeout(total=10)


@dataclass(frozen=True, slots=True)
class Engines:
    prefill: Sequence[tuple[str, int | None]]
    decode: Sequence[str]
    names: Mapping[str, str]
    """``boot_id`` -> ``p0``, ``d0``."""
    dp_size: int
    chunk_tokens: int
    """Per DP rank."""
    capacity_tokens_per_s: float
    ports: RouterPorts
    listener: ReportListener

    @property
    def full_pass_s(self) -> float:
        tokens = len(self.prefill) * self.dp_size * self.chunk_tokens
        return tokens / self.capacity_tokens_per_s


def capacity_tokens_per_s(prefill: int, dp_size: int, cost: VirtualGpuCost) -> float:
    """Return the prompt tokens per second that this many instances compute with full chunks."""
    return prefill * dp_size * CHUNK_TOKENS / cost.prefill_s([CHUNK_TOKENS] * dp_size)


def scaled_cost(
    cost: PassCost, dp_size: int, chunk_tokens: int, pass_s: float = PASS_S
) -> VirtualGpuCost:
    """A cost of engines with this chunk, for engines with ours.

    One of our tokens stands for ``chunk_tokens / CHUNK_TOKENS`` of theirs, and time is stretched
    so that a full chunk takes ``pass_s``: fixed share and split between mean and slowest rank stay,
    and decode steps are as long beside a pass.
    A virtual pass knows only tokens: what attention pairs and requests cost is in their price, as
    with the prompts of the paper workload.

    Raises:
        CostError: tokens cost nothing.
    """
    lengths = [
        arrival.prompt_tokens for arrival in WORKLOADS["paper"](1, _MIX_REQUESTS, chunk_tokens)
    ]
    pairs = sum(length**2 / 2 for length in lengths)
    cost = cost.of_tokens_only(pairs / sum(lengths), len(lengths) / sum(lengths))
    if cost.mean_s + cost.max_s <= 0:
        raise CostError(
            "a cost with only fixed_s makes every pass equally long, so that no placement matters: "
            "it needs mean_s, max_s, pair_s or request_s"
        )
    tokens = chunk_tokens / CHUNK_TOKENS
    stretch = pass_s / cost.full_chunk_s(chunk_tokens)
    return VirtualGpuCost(
        prefill_base_s=cost.fixed_s * stretch,
        prefill_per_max_token_s=cost.max_s * tokens * stretch,
        prefill_per_total_token_s=cost.mean_s * tokens * stretch / dp_size,
        decode_base_s=_DECODE_STEP_S * pass_s / PASS_S,
        decode_per_max_request_s=_DECODE_REQUEST_S * pass_s / PASS_S,
    )


@asynccontextmanager
async def virtual_engines(
    prefill: int, decode: int, dp_size: int, cost: VirtualGpuCost, report: Path, console: Console
) -> AsyncIterator[Engines]:
    """Start this many instances with virtual GPUs, and stop them at the end.

    Raises:
        ClusterStartError: an engine did not come up.
        RuntimeError: an engine does not run the hook.
    """
    blocks = free_port_blocks(PORTS_PER_INSTANCE)
    first = next(blocks)
    ports = RouterPorts(http=first, endforward=first + 1, prometheus=first + 2)
    addresses = [f"tcp://127.0.0.1:{port}" for port in (first + 1, first + 3)]
    environment = os.environ | {"SGLANG_SBS_ROUTERS": ",".join(addresses)}
    options = rig_options(
        *(prefill, decode, dp_size, report / "engines"),
        environment | gate_environment(cost),
        cost=cost,
    )
    plan = plan_cluster(options, blocks)
    async with (
        ReportListener(addresses[1]) as listener,
        LocalCluster(plan, on_progress=progress_printer(console)) as running,
    ):
        prefill_urls, decode_urls = pd_urls(plan.instances)
        yield Engines(
            prefill=prefill_urls,
            decode=decode_urls,
            names=await boots(instance_names(running.instances)),
            dp_size=dp_size,
            chunk_tokens=CHUNK_TOKENS,
            capacity_tokens_per_s=capacity_tokens_per_s(prefill, dp_size, cost),
            ports=ports,
            listener=listener,
        )


def gate_environment(cost: VirtualGpuCost) -> dict[str, str]:
    """The gang gate waits for about a decode step: as much longer as that is here. What the user's
    environment says stays."""
    if GANG_GATE_MS in os.environ or cost.decode_base_s == _DECODE_STEP_S:
        return {}
    gate_ms = DEFAULT_GATE_MS * cost.decode_base_s / _DECODE_STEP_S
    return {GANG_GATE_MS: f"{min(gate_ms, MOST_GATE_MS):g}"}


@asynccontextmanager
async def given_engines(
    prefill: Sequence[tuple[str, int | None]],
    decode: Sequence[str],
    capacity: float,
    listen: str,
    endforward_port: int,
    key_file: Path | None,
) -> AsyncIterator[Engines]:
    """Listen to engines that run already, whose hook publishes to ``listen`` and to the router's
    address.

    Raises:
        RuntimeError: one does not answer, or does not run the hook.
    """
    names = {url: f"p{number}" for number, (url, _port) in enumerate(prefill)}
    names |= {url: f"d{number}" for number, url in enumerate(decode)}
    async with ReportListener(listen, key_file) as listener:
        chunk_tokens, dp_size = await _shape(prefill[0][0])
        first = next(free_port_blocks(PORTS_PER_INSTANCE))
        yield Engines(
            prefill=prefill,
            decode=decode,
            names=await boots(names),
            dp_size=dp_size,
            chunk_tokens=chunk_tokens,
            capacity_tokens_per_s=capacity,
            ports=RouterPorts(http=first, endforward=endforward_port, prometheus=first + 1),
            listener=listener,
        )


async def _shape(url: str) -> tuple[int, int]:
    """Chunk per DP rank and DP size of a prefill instance."""
    async with (
        aiohttp.ClientSession(timeout=_TIMEOUT) as session,
        session.get(f"{url}/server_info") as response,
    ):
        info = await response.json()
    chunk_tokens = int(info.get("chunked_prefill_size") or 0)
    if chunk_tokens <= 0:
        raise RuntimeError(f"{url} has no chunked prefill: start it with --chunked-prefill-size")
    # Under DP attention `dp_size` is 1 and this is the number of ranks; the chunk is per rank.
    return chunk_tokens, max(int(info.get("attn_dp_size") or 1), int(info.get("dp_size") or 1))
