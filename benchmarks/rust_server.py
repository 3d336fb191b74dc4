"""``scripts/bench-rust-server``: SGLang's Rust server beside its Python server, on one machine.

Two 1P1D clusters of CPU engines stand side by side, one of each mode. Part 1 computes the model:
legs sent by hand to each pair of DP ranks must give the tokens of one engine asked directly. Part 2
has a virtual GPU: the same requests go through a router of each mode in turns, so that what else
the machine does meets both. Reported are their times and the routers' ``L_net``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.demo.load import Arrival, send_one
from benchmarks.demo.runs import RouterPorts, running_router
from benchmarks.demo.virtual_cluster import parallel_flags
from sglang_sbs.cluster.local import LocalCluster
from sglang_sbs.cluster.plan import (
    PORTS_PER_INSTANCE,
    RUST_SERVER_ENV,
    ClusterOptions,
    InstancePlan,
    Role,
    plan_cluster,
)
from sglang_sbs.cluster.ports import free_port_blocks
from sglang_sbs.router.engines.urls import rank_url
from sglang_sbs.router.workers.rank_contract import (
    decode_members,
    pick_bootstrap_room,
    prefill_members,
)
from tools.cpu_engine.engines import CpuEngines
from tools.cpu_engine.tiny_model import cached_tiny_model
from tools.cpu_engine.virtual_gpu import VirtualGpuCost

DP = 2
PAIRS = [(p, d) for p in range(DP) for d in range(DP)]
COST = VirtualGpuCost(prefill_base_s=0.05, prefill_per_max_token_s=2e-5, decode_base_s=0.01)
NEW_TOKENS = 8
MODES = ("python", "rust")


@dataclass(frozen=True)
class Mode:
    """One of the two clusters. ``ports`` are its router's."""

    name: str
    prefill: InstancePlan
    decode: InstancePlan
    ports: RouterPorts


@contextlib.asynccontextmanager
async def both_modes(
    log_dir: Path, cost: VirtualGpuCost | None
) -> AsyncIterator[tuple[list[Mode], InstancePlan | None]]:
    """A 1P1D cluster of each mode and, where the model is computed, an engine to ask directly."""
    blocks = free_port_blocks(PORTS_PER_INSTANCE)
    modes, plans = [], []
    for name in MODES:
        first = next(blocks)
        ports = RouterPorts(http=first, endforward=first + 1, prometheus=first + 2)
        environment = os.environ | {
            "SGLANG_SBS_ROUTERS": f"tcp://127.0.0.1:{ports.endforward}",
            RUST_SERVER_ENV: str(int(name == "rust")),
        }
        options = ClusterOptions(
            model_path=str(cached_tiny_model()),
            unified_instances=int(cost is None and name == "python"),
            engine_flags=[*parallel_flags(DP), "--chunked-prefill-size", str(1024 * DP)],
            cpu=CpuEngines(cost),
            log_dir=log_dir,
            environment=environment,
            with_router=False,
        )
        plan = plan_cluster(options, blocks)
        named = tuple(
            replace(one, name=f"{name}-{one.name}", log_path=log_dir / f"{name}-{one.name}.log")
            for one in plan.instances
        )
        plans.append(replace(plan, instances=named))
        modes.append(Mode(name, named[0], named[1], ports))
    whole = replace(plans[0], instances=tuple(one for plan in plans for one in plan.instances))
    async with LocalCluster(whole) as cluster:
        unified = [one for one in cluster.instances if one.role is Role.UNIFIED]
        yield modes, unified[0] if unified else None


def url_of(instance: InstancePlan, rank: int) -> str:
    """Where a leg for that DP rank goes."""
    return rank_url(instance.url, rank) if instance.rank_servers > 1 else instance.url


async def answer_of(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> dict[str, Any]:
    """Of ``POST /generate``. Raises: RuntimeError, it was no success."""
    async with session.post(f"{url}/generate", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {answer}")
        return dict(answer)


async def by_hand(
    session: aiohttp.ClientSession, mode: Mode, prompt: Sequence[int], pair: tuple[int, int]
) -> list[int]:
    """Tokens of a prompt whose legs go to that pair of DP ranks."""
    prefill_rank, decode_rank = pair
    shared = {
        "input_ids": list(prompt),
        "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": mode.prefill.bootstrap_port,
        "bootstrap_room": pick_bootstrap_room(prefill_rank, DP),
    }
    answers = await asyncio.gather(
        answer_of(
            session,
            url_of(mode.prefill, prefill_rank),
            shared | prefill_members(prefill_rank, coupled=False),
        ),
        answer_of(
            session,
            url_of(mode.decode, decode_rank),
            shared | decode_members(prefill_rank, decode_rank, coupled=False),
        ),
    )
    return list(answers[1]["output_ids"])


async def compare_tokens(log_dir: Path, prompts: int) -> dict[str, Any]:
    """How many prompts gave other tokens than the engine asked directly, by mode and rank pair."""
    rng = random.Random(11)
    differ = {mode: {str(pair): 0 for pair in PAIRS} for mode in MODES}
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        both_modes(log_dir, None) as (modes, unified),
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        assert unified is not None
        for _ in range(prompts):
            for pair in PAIRS:
                prompt = [rng.randrange(10, 400) for _ in range(rng.randint(4, 600))]
                body = {
                    "input_ids": prompt,
                    "sampling_params": {
                        "max_new_tokens": NEW_TOKENS,
                        "temperature": 0,
                        "ignore_eos": True,
                    },
                }
                expected = (await answer_of(session, unified.url, body))["output_ids"]
                for mode in modes:
                    tokens = await by_hand(session, mode, prompt, pair)
                    differ[mode.name][str(pair)] += tokens != expected
    return {"prompts_per_pair": prompts, "differ": differ}


async def compare_times(log_dir: Path, rounds: int) -> dict[str, Any]:
    """Requests through a router of each mode in turns: one from idle, then four at once."""
    rng = random.Random(12)
    seconds: dict[str, dict[str, list[float]]] = {
        mode: {"idle_ttft": [], "burst_ttft": [], "burst_end": []} for mode in MODES
    }
    latency: dict[str, float] = {}
    failed: list[str] = []
    timeout = aiohttp.ClientTimeout(total=60)
    async with contextlib.AsyncExitStack() as stack:
        modes, _ = await stack.enter_async_context(both_modes(log_dir, COST))
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        urls = {}
        for mode in modes:
            instances = (mode.prefill, mode.decode)
            router = running_router(
                instances, mode.ports, ["--policy", "sbs"], log_dir, f"router-{mode.name}"
            )
            urls[mode.name] = await stack.enter_async_context(router)

        async def send(name: str) -> tuple[float, float]:
            ids = [rng.randrange(10, 400) for _ in range(rng.randint(50, 600))]
            sample = await send_one(session, urls[name], Arrival(0.0, ids, NEW_TOKENS))
            if sample.error:
                failed.append(f"{name}: {sample.error}")
            return sample.ttft_s, sample.e2e_s

        for number in range(rounds):
            for name in MODES if number % 2 else reversed(MODES):
                await asyncio.sleep(0.3)  # longer than anything of the last round takes
                ttft_s, _ = await send(name)
                burst = await asyncio.gather(*(send(name) for _ in range(4)))
                if number < 2:  # connections are new
                    continue
                seconds[name]["idle_ttft"].append(ttft_s)
                seconds[name]["burst_ttft"] += [first_s for first_s, _ in burst]
                seconds[name]["burst_end"] += [end_s for _, end_s in burst]
        for name, url in urls.items():
            async with session.get(f"{url}/get_server_info") as response:
                latency[name] = (await response.json())["sbs"]["latency_s"]
    return {"seconds": seconds, "l_net_s": latency, "failed": failed}


def summary(result: dict[str, Any]) -> str:
    """Both modes side by side, in milliseconds."""
    times = result["times"]
    lines = [f"failed: {times['failed'] or 'none'}"]
    for what in ("idle_ttft", "burst_ttft", "burst_end"):
        by_mode = {mode: sorted(times["seconds"][mode][what]) for mode in MODES}
        told = [
            f"{mode} median {statistics.median(values) * 1e3:.0f}, "
            f"p90 {values[int(0.9 * len(values))] * 1e3:.0f}, worst {values[-1] * 1e3:.0f}"
            for mode, values in by_mode.items()
        ]
        lines.append(f"{what} (ms, n={len(by_mode['rust'])}): " + "; ".join(told))
    shown = ", ".join(f"{m} {times['l_net_s'][m] * 1e3:.1f}" for m in MODES)
    return "\n".join([*lines, f"L_net (ms): {shown}"])


def main(argv: Sequence[str] | None = None) -> int:
    """0: nothing failed and all tokens are equal."""
    parser = argparse.ArgumentParser(prog="scripts/bench-rust-server", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="of part 2, per mode (40)")
    parser.add_argument("--prompts", type=int, default=6, help="of part 1, per rank pair (6)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, default=Path("out/rust-server"), help="logs")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    result: dict[str, Any] = {}
    if args.prompts:
        result["tokens"] = asyncio.run(compare_tokens(args.out, args.prompts))
        print(f"prompts whose tokens differ: {result['tokens']['differ']}", flush=True)
    result["times"] = asyncio.run(compare_times(args.out, args.rounds))
    print(summary(result))
    print(f"done in {time.monotonic() - started_s:.0f} s")
    if args.json is not None:
        args.json.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    differ = result.get("tokens", {"differ": {}})["differ"]
    wrong = sum(count for by_pair in differ.values() for count in by_pair.values())
    return 1 if wrong or result["times"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
