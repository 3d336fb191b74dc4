"""Records what real engines and a router say of themselves, for ``docs/compatibility.md``.

    python -m tools.record_deployments                     every kind, one cluster after the other
    python -m tools.record_deployments "no barrier"        one of them

Each kind is a 1P1D cluster of SGLang on CPU, in which whatever can be turned on is. It answers
some requests, then the doctor asks it. What the rows of ``doctor --features`` read of the answers
is kept in ``tests/doctor/deployments``, with the engines called p0 and d0, and
``tools.feature_deployments`` makes the table of it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from sglang_sbs.cluster.local import LocalCluster
from sglang_sbs.cluster.plan import (
    PORTS_PER_INSTANCE,
    RUST_SERVER_ENV,
    ClusterOptions,
    ClusterPlan,
    plan_cluster,
)
from sglang_sbs.cluster.ports import free_port_blocks
from sglang_sbs.doctor.examine import gather
from sglang_sbs.doctor.facts import ClusterFacts
from sglang_sbs.doctor.features import feature_rows
from sglang_sbs.doctor.options import parse_options
from tools.cpu_engine.engines import CpuEngines
from tools.cpu_engine.tiny_model import cached_tiny_model
from tools.cpu_engine.virtual_gpu import VirtualGpuCost
from tools.feature_deployments import RECORDS, REQUEST_LIMIT, record_path, recorded

RANKS = 2
REQUESTS = 8
STARTUP_S = 400.0
WAIT_S = 60.0
SETTLED_S = 8.0
"""Front ends hear of passes by the second, and ask engines for their tokens meanwhile."""

COST = VirtualGpuCost(prefill_base_s=0.2, prefill_per_max_token_s=3e-4, decode_base_s=0.02)

Kind = dict[str, Any]
KINDS: dict[str, Kind] = {
    "one machine": {},
    "several nodes": {"prefill_nodes": 2},
    "attention TP": {"tp": 2 * RANKS},
    "Rust server": {"rust": True},
    "Rust server, several nodes": {"rust": True, "prefill_nodes": 2},
    "no barrier": {"prefill_flags": ("--dwdp-size", str(RANKS))},
}
"""Differences of each kind from a cluster on one machine."""


class Noted(dict[str, Any]):
    """A JSON object that knows which of its fields were read."""

    def __init__(self, value: dict[str, Any]) -> None:
        super().__init__({key: noted(part) for key, part in value.items()})
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def kept(self) -> dict[str, Any]:
        return {key: kept(part) for key, part in self.items() if key in self._read}


def noted(value: Any) -> Any:
    if isinstance(value, dict):
        return Noted(value)
    return [noted(part) for part in value] if isinstance(value, list) else value


def kept(value: Any) -> Any:
    if isinstance(value, Noted):
        return value.kept()
    if isinstance(value, dict):
        return {key: kept(part) for key, part in value.items()}
    return [kept(part) for part in value] if isinstance(value, list) else value


def plan_of(kind: Kind, folder: Path) -> tuple[ClusterPlan, list[str]]:
    """The cluster, and the doctor's flags beside its router's URL."""
    key = folder / "key"
    key.write_text("0123456789abcdef" * 4)
    blocks = free_port_blocks(PORTS_PER_INSTANCE)
    spare = next(blocks)
    options = ClusterOptions(
        model_path=str(cached_tiny_model()),
        prefill_nodes=kind.get("prefill_nodes", 1),
        engine_flags=[
            *("--tp", str(kind.get("tp", RANKS)), "--dp", str(RANKS)),
            *("--enable-dp-attention", "--page-size", "16"),
        ],
        prefill_flags=[
            "--prefill-max-requests",
            str(REQUEST_LIMIT),
            *kind.get("prefill_flags", ()),
        ],
        cpu=CpuEngines(COST),
        log_dir=folder,
        environment={**os.environ, RUST_SERVER_ENV: str(int(kind.get("rust", False)))},
        router_flags=[
            *("--policy", "sbs", "--frontends", "2"),
            *("--sbs-endforward-key-file", str(key), "--prometheus-port", str(spare)),
        ],
    )
    plan = plan_cluster(options, blocks)
    second = f"tcp://127.0.0.1:{spare + 1}"  # of a router that is not there

    def with_second(process: Any) -> Any:
        environment = dict(process.environment)
        environment["SGLANG_SBS_ROUTERS"] += f",{second}"
        return dataclasses.replace(process, environment=environment)

    instances = tuple(
        with_second(
            dataclasses.replace(instance, followers=tuple(map(with_second, instance.followers)))
        )
        for instance in plan.instances
    )
    return dataclasses.replace(plan, instances=instances), ["--sbs-endforward-key-file", str(key)]


async def record(name: str) -> ClusterFacts:
    """Start it, use it, ask it. Raises: TimeoutError or RuntimeError: it did not work."""
    draw = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="sbs-record-") as folder:
        plan, words = plan_of(KINDS[name], Path(folder))
        assert plan.router is not None
        url = plan.router.url
        async with LocalCluster(plan, STARTUP_S), aiohttp.ClientSession() as session:
            async with asyncio.timeout(WAIT_S):
                while not await is_ready(session, url):  # noqa: ASYNC110 (another process)
                    await asyncio.sleep(0.5)
            prompts = [[draw.randrange(10, 400) for _ in range(200)] for _ in range(REQUESTS)]
            await asyncio.gather(*(answer(session, url, prompt) for prompt in prompts))
            await asyncio.sleep(SETTLED_S)
            return await gather(parse_options(["--router", url, *words]))


async def is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(f"{url}/workers") as response:
        listed = (await response.json())["workers"]
    return len(listed) == 2 and all(worker["usable"] for worker in listed)


async def answer(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> None:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    async with session.post(f"{url}/generate", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")


def keep(name: str, facts: ClusterFacts) -> None:
    """Write what the doctor reads. Raises: RuntimeError: from that it would say something else."""
    router = facts.router
    assert router is not None
    renamed: dict[str, str] = {}
    for engine in facts.engines:
        number = sum(text.startswith(f"http://{engine.role[0]}") for text in renamed.values())
        renamed[engine.url] = f"http://{engine.role[0]}{number}:30000"
    renamed |= {router.url: "http://r:30000", str(cached_tiny_model()): "tiny"}
    whole = {
        "engines": [
            {
                "role": engine.role,
                "url": engine.url,
                "closed_kv_ports": [str(port) for port in engine.closed_kv_ports],
                "server_info": noted(engine.data),
            }
            for engine in facts.engines
        ],
        "workers": noted(router.workers),
        "state": noted(router.state),
        "options": noted(router.options),
    }
    before = {row.id: row.state for row in feature_rows(recorded(whole))}
    text = orjson.dumps(kept(whole), option=orjson.OPT_INDENT_2).decode()
    for old, new in renamed.items():
        text = text.replace(old, new)
    after = {row.id: row.state for row in feature_rows(recorded(orjson.loads(text)))}
    if before != after or after != {row.id: row.state for row in feature_rows(facts)}:
        raise RuntimeError(f"{name}: {before} became {after}")
    record_path(name).write_text(text + "\n", "utf-8")
    off = [f"{row.title}: {row.why}" for row in feature_rows(facts) if row.state != "on"]
    print(f"{name}: written; not on: {'; '.join(off) or 'nothing'}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """0: all were recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    names = parser.parse_args(argv).kinds or list(KINDS)
    if unknown := set(names) - KINDS.keys():
        parser.error(f"{unknown} is none of {', '.join(KINDS)}")
    RECORDS.mkdir(exist_ok=True)
    for name in names:
        keep(name, asyncio.run(record(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
