"""`sglang-sbs demo --keep`: serves at the ports it was given, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
from cluster_requests import STARTUP_TIMEOUT_S, writers

from sglang_sbs.cluster.ports import free_port_blocks

pytestmark = pytest.mark.cluster


async def until(stream: asyncio.StreamReader, last: str) -> dict[str, str]:
    """Lines of two words or more up to the one that starts with ``last``, by their first word."""
    lines: dict[str, str] = {}
    while line := (await stream.readline()).decode():
        words = line.split(None, 1)
        if len(words) == 2:
            lines[words[0]] = words[1].strip()
        if line.startswith(last):
            return lines
    pytest.fail(f"the output ended before {last!r}: {lines}")


async def test_a_kept_demo_serves_the_printed_urls_and_stops_on_ctrl_c(tmp_path: Path) -> None:
    port = next(free_port_blocks(2))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang_sbs.cli", "demo", "--keep"),
        *("--topology", "1P1D", "--dp", "1", "--out", str(tmp_path)),
        *("--port", str(port), "--prometheus-port", str(port + 1)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(STARTUP_TIMEOUT_S), aiohttp.ClientSession() as http:
            places = await until(process.stdout, "Load:")
            assert places["router"] == f"http://127.0.0.1:{port}"
            curl, dash_h, header, url, dash_d, body = shlex.split(places["a"].split(None, 1)[1])
            assert (curl, dash_h, dash_d) == ("curl", "-H", "-d")
            name, _, value = header.partition(": ")
            async with http.post(url, data=body, headers={name: value}) as response:
                assert response.status == 200, await response.text()
                assert (await response.json())["meta_info"]["completion_tokens"] == 8
            async with http.get(places["dashboard"]) as response:
                assert (response.status, response.content_type) == (200, "text/html")
            top = await asyncio.create_subprocess_exec(
                *shlex.split(places["terminal"]), "--once", stdout=asyncio.subprocess.PIPE
            )
            frame, _ = await top.communicate()
            assert (top.returncode, places["router"] in frame.decode()) == (0, True)
            async with http.get(places["metrics"]) as response:
                assert "sbs_dispatches_total" in await response.text()
            async with http.get(places["workers"].removeprefix("curl ")) as response:
                workers = (await response.json())["workers"]
            assert sorted(worker["worker_type"] for worker in workers) == ["decode", "prefill"]
        assert {log.name for log in writers(tmp_path).values()} == {
            *("nursery.log", "prefill-0.log", "decode-0.log", "router.log")
        }
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert "everything that was started has stopped" in output.decode()
    assert writers(tmp_path) == {}
