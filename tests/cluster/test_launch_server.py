"""`python -m sglang_sbs.launch_server` brings up engines and router, and takes them down again."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from cluster_requests import ENGINE_FLAGS, STARTUP_TIMEOUT_S, writers

from sglang_sbs.cluster.ports import free_port_blocks
from tools.cpu_engine.tiny_model import cached_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session")]
BODY = {"text": "hello world", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}


@asynccontextmanager
async def launched(
    log_dir: Path, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The launcher, ready, and the URL it printed."""
    port = next(free_port_blocks(2))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang_sbs.launch_server"),
        *("--model-path", str(cached_tiny_model()), *ENGINE_FLAGS, "--virtual-gpu"),
        *("--port", str(port), "--router-prometheus-port", str(port + 1)),
        *("--router-policy", "sbs", "--log-dir", str(log_dir), *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(STARTUP_TIMEOUT_S):
            line = (await process.stdout.readline()).decode()
        ready = re.match(r"Ready: (\S+) ", line)
        if ready is None:
            pytest.fail(f"{line}\n{(await process.stderr.read()).decode()}")
        yield process, ready[1]
    finally:
        if process.returncode is None:
            process.terminate()
            await process.communicate()


async def five_tokens(
    http: aiohttp.ClientSession, url: str, headers: dict[str, str] | None = None
) -> None:
    async with http.post(f"{url}/generate", json=BODY, headers=headers) as response:
        reply = await response.json()
    assert reply["meta_info"]["completion_tokens"] == 5, reply


async def test_serves_with_the_engines_key_and_stops_on_ctrl_c(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with launched(tmp_path, "--api-key", "k1", "--admin-api-key", "a1") as (process, url):
        async with http.post(f"{url}/generate", json=BODY) as response:
            assert response.status == 401
        await five_tokens(http, url, {"Authorization": "Bearer k1"})
        admin = {"Authorization": "Bearer a1"}
        async with http.get(f"{url}/workers", headers=admin) as response:
            workers = (await response.json())["workers"]
        assert sorted(worker["worker_type"] for worker in workers) == ["decode", "prefill"]
        assert {log.name for log in writers(tmp_path).values()} == {
            *("nursery.log", "prefill-0.log", "decode-0.log", "router.log")
        }
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 0
    assert writers(tmp_path) == {}


async def test_serves_until_an_engine_dies_and_names_it(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with launched(tmp_path) as (process, url):
        await five_tokens(http, url)
        # The server process leads the process group of its instance.
        (decode,) = [
            pid
            for pid, log in writers(tmp_path).items()
            if log.name == "decode-0.log" and os.getpgid(pid) == pid
        ]
        os.kill(decode, signal.SIGKILL)
        _output, errors = await process.communicate()
    assert process.returncode == 1
    assert "decode-0 ended by itself (killed by SIGKILL)" in errors.decode()
    assert writers(tmp_path) == {}
