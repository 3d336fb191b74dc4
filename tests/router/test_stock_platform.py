"""Kubernetes discovery and tokens, side by side with a running ``sglang_router`` 0.3.2.

Both routers watch the same API server and trust the same issuer. That the stock router's client
(kube-rs) is content with the stand-ins also says that they speak the real protocols.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from harness.jwt_issuer import AUDIENCE, Issuer, bearer
from harness.until import until

from tools.stand_ins.kubernetes_server import FakeKubernetes, pod
from tools.stand_ins.mock_engine import MockEngine, Rooms
from tools.stand_ins.ports import free_ports

MODULES = ("sglang_router.launch_router", "sglang_sbs.launch_router")
LIMIT_S = 90.0


@asynccontextmanager
async def router(module: str, log: Path, *flags: str, **environment: str) -> AsyncIterator[str]:
    """A router process; yields its URL once it answers."""
    port, metrics_port = free_ports(2)
    flags = (
        *("--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *flags,
    )
    if module.startswith("sglang_sbs"):
        flags += ("--sbs-endforward-bind", "none")
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *flags),
            env=os.environ | environment,
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as session:

            async def listens() -> bool:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/liveness"):
                        return True
                return False

            await until(listens, LIMIT_S, every_s=0.05)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize("module", MODULES)
async def test_the_same_pods_become_the_same_workers(module: str, tmp_path: Path) -> None:
    api = FakeKubernetes()
    await api.start()
    prefill = MockEngine("prefill", dp_size=2, rooms=Rooms())
    await prefill.start()
    port = prefill.url.rpartition(":")[2]
    labels = {"app": "sglang", "component": "prefill"}
    annotations = {"sglang.ai/bootstrap-port": "9000"}
    flags = (
        *("--service-discovery", "--service-discovery-namespace", "llm"),
        *("--service-discovery-port", port),
        *("--prefill-selector", "app=sglang", "component=prefill"),
        *("--decode-selector", "app=sglang", "component=decode"),
    )
    await api.put(pod("other", "127.0.0.9", labels={"app": "sglang"}))
    await api.put(pod("elsewhere", "127.0.0.9", labels=labels, namespace="b"))
    await api.put(pod("starting", "127.0.0.9", labels=labels, ready=False))
    try:
        environment = {"KUBECONFIG": str(api.kubeconfig(tmp_path))}
        async with (
            router(module, tmp_path / "log", *flags, **environment) as url,
            aiohttp.ClientSession() as session,
        ):

            async def workers() -> list[tuple[Any, ...]]:
                async with session.get(f"{url}/workers") as response:
                    shown = (await response.json())["workers"]
                names = ("url", "worker_type", "bootstrap_port", "is_healthy")
                return [tuple(worker[name] for name in names) for worker in shown]

            async def becomes(*wanted: tuple[Any, ...]) -> None:
                async def holds() -> bool:
                    return await workers() == list(wanted)

                await until(holds, LIMIT_S, every_s=0.05)

            engine = (prefill.url, "prefill", 9000, True)
            await until(lambda: _watched(api), LIMIT_S, every_s=0.05)
            assert await workers() == []
            await api.put(pod("p0", "127.0.0.1", labels=labels, annotations=annotations))
            await becomes(engine)
            await api.change("p0", deletionTimestamp="2026-01-01T00:00:10Z")
            await becomes()
            await api.delete("p0")
            later = pod("p1", "127.0.0.1", labels=labels, annotations=annotations)
            await api.put(later)
            await becomes(engine)
    finally:
        await prefill.stop()
        await api.stop()


async def _watched(api: FakeKubernetes) -> bool:
    return api.watches > 0


async def test_the_same_tokens_open_the_same_doors(tmp_path: Path) -> None:
    issuer = Issuer()
    await issuer.start()
    issuer.add_ec("ec-1")
    issuer.add_rsa("unpublished")
    issuer.hidden.add("unpublished")
    tokens = {
        "admin": issuer.token(roles=["Ops"]),
        "elliptic": issuer.token("ec-1", roles=["Ops"]),
        "a reader": issuer.token(roles=["Readers"]),
        "no role": issuer.token(drop=("roles",)),
        "role claim": issuer.token(drop=("roles",), role="Ops"),
        "groups claim": issuer.token(drop=("roles",), groups=["x", "Ops"]),
        "unknown role": issuer.token(roles=["admin"]),
        "expired": issuer.token(exp=int(time.time()) - 120),
        "other audience": issuer.token(aud="api://other"),
        "several audiences": issuer.token(aud=["x", AUDIENCE], roles=["Ops"]),
        "other issuer": issuer.token(iss="https://elsewhere.example"),
        "without expiry": issuer.token(drop=("exp",)),
        "unpublished key": issuer.token("unpublished", roles=["Ops"]),
        "garbage": "a.b.c",
        "an admin's key": "adm",
        "a user's key": "usr",
        "no key": "other",
    }
    flags = (
        # Nobody listens there, and nobody needs to.
        *("--prefill", "http://127.0.0.1:1", "9000", "--decode", "http://127.0.0.1:2"),
        *("--worker-startup-timeout-secs", "3600"),
        *("--jwt-issuer", issuer.url, "--jwt-audience", AUDIENCE),
        *("--jwt-role-mapping", "Ops=admin", "Readers=user"),
        *("--control-plane-api-keys", "ops:Ops:admin:adm", "ro:Reader:user:usr"),
    )
    answers: dict[str, dict[str, int]] = {}
    try:
        for module in MODULES:
            async with (
                router(module, tmp_path / "log", *flags) as url,
                aiohttp.ClientSession() as session,
            ):
                answers[module] = {}
                for name, token in tokens.items():
                    async with session.get(f"{url}/workers", headers=bearer(token)) as response:
                        answers[module][name] = response.status
                async with session.get(f"{url}/workers") as response:
                    answers[module]["nothing"] = response.status
    finally:
        await issuer.stop()
    stock, ours = answers.values()
    assert ours == stock
    assert {name for name, status in ours.items() if status == 200} == {
        *("admin", "elliptic", "role claim", "groups claim"),
        *("several audiences", "an admin's key"),
    }
