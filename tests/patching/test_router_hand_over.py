"""The patched ``sglang_router`` 0.3.2, for real: ``--policy sbs`` starts this router.

A copy of the installed package is patched; the installed one stays as it is.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from sglang_sbs.patching import cli
from tools.stand_ins.mock_engine import MockEngine, Rooms

TIMEOUT_S = 120.0

pytest.importorskip("sglang_router")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A copy of the installed package; its large library is shared."""
    installed = importlib.metadata.distribution("sglang-router")
    root = Path(str(installed.locate_file("")))
    for source in (root / "sglang_router", *root.glob("sglang_router-*.dist-info")):
        target = tmp_path / source.name
        target.mkdir()
        for path in source.glob("*"):
            if path.suffix == ".so":
                (target / path.name).symlink_to(path)
            elif path.is_file():
                shutil.copy(path, target / path.name)
    (report,) = cli.run("revert", "sglang-router", site=tmp_path)
    assert report.ok
    return tmp_path


async def run(site: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of the stock command line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang_router.launch_router", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(site)},
    )
    async with asyncio.timeout(TIMEOUT_S):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_without_the_patch_the_choices_are_closed(site: Path) -> None:
    code, output = await run(site, "--policy", "sbs")
    assert code == 2
    assert "invalid choice: 'sbs'" in output


async def test_with_the_patch_our_errors_are_shown_and_help_names_the_policy(site: Path) -> None:
    assert cli.run("apply", "sglang-router", site=site)[0].ok
    code, output = await run(site, "--policy", "sbs", "--sbs-triger", "paper")
    assert code == 2
    assert "--sbs-triger" in output
    code, output = await run(site, "--help")
    assert code == 0
    assert "manual,sbs}" in output


@asynccontextmanager
async def engines() -> AsyncIterator[tuple[MockEngine, MockEngine]]:
    rooms = Rooms()
    prefill, decode = MockEngine("prefill", rooms=rooms), MockEngine("decode", rooms=rooms)
    await prefill.start()
    await decode.start()
    try:
        yield prefill, decode
    finally:
        await prefill.stop()
        await decode.stop()


async def test_the_stock_command_serves_through_us(site: Path) -> None:
    assert cli.run("apply", "sglang-router", site=site)[0].ok
    async with engines() as (prefill, decode):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"),
            *("--prefill", prefill.url, "8998", "--decode", decode.url, "--policy", "sbs"),
            *("--host", "127.0.0.1", "--port", "0"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", "0"),
            *("--sbs-endforward-bind", "tcp://127.0.0.1:*", "--sbs-trigger", "paper"),
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(site)},
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                said = ""
                while "policy sbs at " not in said:
                    line = (await process.stderr.readline()).decode()
                    assert line, said
                    said += line
                address = said.split("policy sbs at ")[1].split(",")[0]
                async with aiohttp.ClientSession() as client:
                    while True:
                        async with client.get(f"http://{address}/readiness") as response:
                            if response.status == 200:
                                break
                        await asyncio.sleep(0.05)
                    body = {"text": "hello"}
                    async with client.post(f"http://{address}/generate", json=body) as response:
                        assert response.status == 200
                        assert (await response.json())["text"] == "t1 t2 t3"
        finally:
            process.terminate()
            await process.wait()
        assert len(prefill.requests) == len(decode.requests) == 1
