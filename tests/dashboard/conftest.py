"""Makes ``router_harness`` importable here, and starts a browser where there is one."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))

BROWSER_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def find_chromium() -> str:
    """Skips where there is none, unless scripts/install would have installed it."""
    path = shutil.which("chromium")
    if path is not None:
        return path
    release = Path("/etc/os-release")
    debian = release.exists() and "ID=debian" in release.read_text().splitlines()
    text = "NO BROWSER, the dashboard is not tested: install Debian's chromium (scripts/install)"
    if debian and os.geteuid() == 0:
        pytest.fail(text)
    pytest.skip(text)


@pytest_asyncio.fixture
async def browser() -> AsyncIterator[Browser]:
    """Headless Chromium."""
    path = find_chromium()
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=path, args=BROWSER_FLAGS)
        yield launched
        await launched.close()
