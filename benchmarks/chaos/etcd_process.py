"""A real etcd on loopback, and a way to its JSON API for what a test does behind a candidate."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from sglang_sbs.cluster.ports import free_port_blocks


def etcd_binary() -> str | None:
    """``scripts/install`` takes it out of Debian's ``etcd-server``; ``None``: there is none."""
    return shutil.which("etcd") or shutil.which("etcd", path=Path(sys.executable).parent)


@dataclass
class Etcd:
    url: str
    process: asyncio.subprocess.Process

    async def call(self, method: str, **body: Any) -> Any:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/v3/{method}", json=body) as response,
        ):
            return await response.json(content_type=None)

    async def delete(self, key: str) -> None:
        await self.call("kv/deleterange", key=b64encode(key.encode()).decode())

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def running_etcd(folder: Path) -> AsyncIterator[Etcd]:
    """``folder``: for its data and its log.

    Raises:
        RuntimeError: there is no etcd on this machine.
        TimeoutError: it does not come up.
    """
    binary = etcd_binary()
    if binary is None:
        raise RuntimeError("there is no etcd here (Debian: apt-get install etcd-server)")
    first = next(free_port_blocks(2))
    client, peer = f"http://127.0.0.1:{first}", f"http://127.0.0.1:{first + 1}"
    with (folder / "etcd.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(binary, "--data-dir", str(folder / "etcd")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
            stdout=log,
            stderr=log,
        )
    try:
        etcd = Etcd(client, process)
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    if "header" in await etcd.call("maintenance/status"):
                        break
                await asyncio.sleep(0.05)
        yield etcd
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
