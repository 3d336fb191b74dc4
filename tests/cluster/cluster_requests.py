"""The hand-made requests and cluster options of the cluster tests.

Owns: what a router would send for one PD request, written out by hand, and the options all test
clusters share.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.breakable import BreakableCluster
from sglang_sbs.cluster.plan import (
    PORTS_PER_INSTANCE,
    ClusterOptions,
    InstancePlan,
    plan_cluster,
)
from sglang_sbs.cluster.ports import free_port_blocks
from tools.cpu_engine.tiny_model import VOCAB_SIZE, cached_tiny_model

STARTUP_TIMEOUT_S = 600
# Divided by the DP size: prompts over 512 tokens take several passes.
CHUNKED_PREFILL_SIZE = 1024
# The spelling before SGLang 0.5.22, which later ones take until SGLang removes it; `parallel_flags`
# of `benchmarks/demo/virtual_cluster.py` has the new one.
ENGINE_FLAGS = (
    *("--tp", "2", "--dp", "2", "--enable-dp-attention"),
    *("--chunked-prefill-size", str(CHUNKED_PREFILL_SIZE)),
)


def cluster_options(
    tmp_path_factory: pytest.TempPathFactory, name: str, **options: Any
) -> ClusterOptions:
    """Options of a cluster of the tiny model with logs in a folder of the session."""
    if importlib.util.find_spec("sglang") is None:
        pytest.fail("SGLang is not installed: run scripts/install without --router-only")
    return ClusterOptions(
        model_path=str(cached_tiny_model()),
        log_dir=tmp_path_factory.mktemp(f"{name}-cluster"),
        **{
            "engine_flags": ENGINE_FLAGS,
            "with_router": False,
            "environment": dict(os.environ),
            **options,
        },
    )


def start(options: ClusterOptions) -> BreakableCluster:
    """The cluster, to be entered."""
    plan = plan_cluster(options, free_port_blocks(PORTS_PER_INSTANCE))
    return BreakableCluster(plan, STARTUP_TIMEOUT_S)


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    """Token ids without special tokens."""
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]


async def generate(
    http: aiohttp.ClientSession, url: str, prompt: Sequence[int], new_tokens: int, **fields: Any
) -> dict[str, Any]:
    """POST /generate, greedily and past any end token; the reply, which must be a success."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
        **fields,
    }
    async with http.post(f"{url}/generate", json=body) as response:
        reply = await response.json()
        assert response.status == 200, reply
        assert isinstance(reply, dict)
        return reply


async def send_legs(
    http: aiohttp.ClientSession,
    prefill: InstancePlan,
    decode: InstancePlan,
    prompt: Sequence[int],
    new_tokens: int,
    prefill_rank: int = 0,
    decode_rank: int = 0,
    **fields: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both legs of one PD request as a router sends them; the prefill and the decode reply.

    The room's number modulo the DP size is the prefill rank, as SGLang's prefill side requires.
    """
    pair = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": random.getrandbits(60) * prefill.ranks + prefill_rank,
        "disagg_prefill_dp_rank": prefill_rank,
        **fields,
    }
    return await asyncio.gather(
        generate(http, prefill.url, prompt, new_tokens, routed_dp_rank=prefill_rank, **pair),
        generate(http, decode.url, prompt, new_tokens, routed_dp_rank=decode_rank, **pair),
    )


def writers(log_dir: Path) -> dict[int, Path]:
    """Pids of the processes whose standard error is a file in `log_dir`, with that file."""
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            log = Path(os.readlink(process / "fd" / "2"))
        except OSError:
            continue
        if log.parent == log_dir:
            found[int(process.name)] = log
    return found
