"""Whether the router changes what the model says: greedy tokens through it and without it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console

from benchmarks.demo.passes import read_engines
from benchmarks.demo.runs import RouterPorts, instance_names, running_router
from benchmarks.demo.virtual_cluster import parallel_flags, progress_printer
from sglang_sbs.cluster.local import LocalCluster
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, ClusterOptions, Role, plan_cluster
from sglang_sbs.cluster.ports import free_port_blocks
from tools.cpu_engine.engines import CpuEngines
from tools.cpu_engine.tiny_model import cached_tiny_model

DP_SIZE = 2
MIN_PROMPTS = 24
MAX_PROMPTS = 240
BATCH = 8
NEW_TOKENS = 12
CHUNK_TOKENS = 256
MAX_PROMPT_TOKENS = 400
"""Longer than a chunk, so that chunked prefill is checked too."""
TIMEOUT = aiohttp.ClientTimeout(total=120)


@dataclass(frozen=True, slots=True)
class TokenReport:
    prompts: int
    pairs: int
    """Prefill x decode DP rank pairs that served at least one, and reported their passes."""
    difference: str
    """The first difference, empty if there is none."""

    @property
    def matches(self) -> bool:
        return not self.difference and self.pairs == DP_SIZE * DP_SIZE


async def match_tokens(
    log_dir: Path, console: Console, attention_tp: int = 1, prefill_flags: Sequence[str] = ()
) -> TokenReport:
    """1P1D with real compute and SBS, and one engine without PD, on the same prompts.

    Sends prompts in bursts until every pair of a prefill and a decode DP rank has served some, and
    each rank has reported a pass.
    ``prefill_flags`` are SGLang's.
    """
    blocks = free_port_blocks(PORTS_PER_INSTANCE)
    ports = RouterPorts.from_block(next(blocks))
    options = _cluster_options(ports, log_dir, attention_tp, prefill_flags)
    rng = random.Random(7)
    event_log = log_dir / "token-match.events"
    plan = plan_cluster(options, blocks)
    async with LocalCluster(plan, on_progress=progress_printer(console)) as cluster:
        engine = next(i for i in cluster.instances if i.role is Role.UNIFIED)
        names = instance_names(cluster.instances)
        flags = ["--policy", "sbs", "--sbs-event-log", str(event_log)]
        prompts: list[list[int]] = []
        rids: list[str] = []
        difference = ""

        def covered() -> set[tuple[str, str]]:
            if not event_log.exists():
                return set()
            read = read_engines(event_log, names)
            used = {read.pairs[rid] for rid in rids if rid in read.pairs}
            # Engines need a moment to find a router that was started after them.
            return {pair for pair in used if all(read.endforward[rank] for rank in pair)}

        async with (
            running_router(cluster.instances, ports, flags, log_dir, "router-token-match") as url,
            aiohttp.ClientSession(timeout=TIMEOUT) as session,
        ):
            while len(prompts) < MAX_PROMPTS and not difference:
                batch = [
                    [rng.randrange(10, 400) for _ in range(rng.randint(4, MAX_PROMPT_TOKENS))]
                    for _ in range(BATCH)
                ]
                routed = await asyncio.gather(*(_generate(session, url, p) for p in batch))
                direct = [await _generate(session, engine.url, p) for p in batch]
                for prompt, (tokens, rid), (expected, _) in zip(batch, routed, direct, strict=True):
                    rids.append(rid)
                    if tokens != expected and not difference:
                        asked = f"a prompt of {len(prompt)} tokens"
                        difference = f"{asked} gave {tokens}, directly {expected}"
                prompts += batch
                if len(prompts) >= MIN_PROMPTS and len(covered()) == DP_SIZE * DP_SIZE:
                    break
        pairs = len(covered())
    if not difference and pairs < DP_SIZE * DP_SIZE:
        difference = f"only {pairs} rank pairs were used and reported in {len(prompts)} prompts"
    return TokenReport(len(prompts), pairs, difference)


def _cluster_options(
    ports: RouterPorts, log_dir: Path, attention_tp: int, prefill_flags: Sequence[str]
) -> ClusterOptions:
    chunk = str(DP_SIZE * CHUNK_TOKENS)
    return ClusterOptions(
        model_path=str(cached_tiny_model()),
        unified_instances=1,
        engine_flags=[*parallel_flags(DP_SIZE, attention_tp), "--chunked-prefill-size", chunk],
        prefill_flags=prefill_flags,
        cpu=CpuEngines(),
        log_dir=log_dir / "token-match",
        environment=ports.environment_of_engines(),
        with_router=False,
    )


async def _generate(
    session: aiohttp.ClientSession, url: str, input_ids: list[int]
) -> tuple[list[int], str]:
    body = {
        "input_ids": input_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }
    async with session.post(f"{url}/generate", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {answer}")
    return list(answer["output_ids"]), str(answer["meta_info"]["id"])
