"""A real API server of Kubernetes on loopback, in front of a real etcd; its binary is not ours to
bring: ``KUBE_APISERVER`` names it.

Owns its start, its users and what a scheduler may do there: the Role of
``examples/kubernetes/rbac.yaml``, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from benchmarks import CHECKOUT
from benchmarks.chaos.etcd_process import running_etcd
from sglang_sbs.cluster.ports import free_port_blocks

VARIABLE = "KUBE_APISERVER"
MANIFEST = CHECKOUT / "examples" / "kubernetes" / "rbac.yaml"
_START_S = 60.0
_USER = "scheduler"


def apiserver_binary() -> str | None:
    """``None``: there is none."""
    return os.environ.get(VARIABLE) or None


@dataclass
class ApiServer:
    url: str
    namespace: str
    process: asyncio.subprocess.Process
    session: aiohttp.ClientSession
    token: str
    """Of the one user, who has the Role."""

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """As an administrator: status and answer."""
        async with self.session.request(method, self.url + path, json=body) as response:
            return response.status, await response.json(content_type=None)

    async def make(self, path: str, body: object) -> None:
        """Raises: RuntimeError, it is not taken."""
        status, answer = await self.call("POST", path, body)
        if status not in (200, 201, 409):
            raise RuntimeError(f"POST {path}: {status} {answer}")

    def lease(self, name: str) -> str:
        """The path of a Lease."""
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/{name}"

    def kubeconfig(self, folder: Path, name: str = "kubeconfig", server: str = "") -> Path:
        """For the user; ``server``: through a forwarder, whose address no certificate names."""
        path = folder / name
        cluster = {"server": server or self.url, "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": _USER, "user": {"token": self.token}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": _USER}}],
        }
        path.write_text(json.dumps(config))
        return path

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def running_apiserver(folder: Path, namespace: str = "llm") -> AsyncIterator[ApiServer]:
    """``folder``: for its keys, its etcd and its log.

    Raises:
        RuntimeError: there is no binary, or it refuses what it is given.
        TimeoutError: it does not come up.
    """
    binary = apiserver_binary()
    if binary is None:
        raise RuntimeError(f"{VARIABLE} names no kube-apiserver")
    admin, user = secrets.token_hex(16), secrets.token_hex(16)
    key, tokens = folder / "service-account.key", folder / "tokens.csv"
    tokens.write_text(f"{admin},admin,1,system:masters\n{user},{_USER},2\n")
    tokens.chmod(0o600)
    await _make_key(key)
    port = next(free_port_blocks(1))
    url = f"https://127.0.0.1:{port}"
    async with contextlib.AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(running_etcd(folder))
        log = stack.enter_context((folder / "kube-apiserver.log").open("wb"))
        process = await asyncio.create_subprocess_exec(
            *(binary, "--etcd-servers", etcd.url, "--secure-port", str(port)),
            *("--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1"),
            *("--cert-dir", str(folder / "certificates"), "--token-auth-file", str(tokens)),
            *("--authorization-mode", "RBAC", "--endpoint-reconciler-type", "none"),
            *("--service-cluster-ip-range", "10.0.0.0/24"),
            *("--service-account-issuer", "https://kubernetes.default.svc"),
            *("--service-account-key-file", str(key), "--service-account-signing-key-file"),
            str(key),
            stdout=log,
            stderr=log,
        )
        stack.push_async_callback(_end, process)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=False),
                headers={"Authorization": f"Bearer {admin}"},
                timeout=aiohttp.ClientTimeout(total=5),
            )
        )
        server = ApiServer(url, namespace, process, session, user)
        await _until_ready(server)
        await _grant(server)
        yield server


async def _make_key(path: Path) -> None:
    """Raises: RuntimeError."""
    made = await asyncio.create_subprocess_exec(
        *("openssl", "genrsa", "-out", str(path), "2048"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    if await made.wait():
        raise RuntimeError("openssl genrsa failed")


async def _until_ready(server: ApiServer) -> None:
    """Raises: RuntimeError, it ended; TimeoutError."""
    async with asyncio.timeout(_START_S):
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with server.session.get(f"{server.url}/readyz") as answer:
                    if answer.status == 200:
                        return
            if server.process.returncode is not None:
                raise RuntimeError("kube-apiserver ended at its start; its log says why")
            await asyncio.sleep(0.2)


async def _grant(server: ApiServer) -> None:
    """The namespace, and for the user what the manifest grants the schedulers."""
    documents = yaml.safe_load_all(MANIFEST.read_text())
    (role,) = [one for one in documents if one is not None and one["kind"] == "Role"]
    name = role["metadata"]["name"]
    rbac = "rbac.authorization.k8s.io"
    inside = f"/apis/{rbac}/v1/namespaces/{server.namespace}"
    await server.make("/api/v1/namespaces", {"metadata": {"name": server.namespace}})
    metadata = {"name": name, "namespace": server.namespace}
    await server.make(f"{inside}/roles", {"metadata": metadata, "rules": role["rules"]})
    binding = {
        "metadata": metadata,
        "subjects": [{"kind": "User", "name": _USER, "apiGroup": rbac}],
        "roleRef": {"kind": "Role", "name": name, "apiGroup": rbac},
    }
    await server.make(f"{inside}/rolebindings", binding)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
