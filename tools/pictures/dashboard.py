"""Pictures of the dashboard for the documentation: a real router over synthetic engines, seen in
headless Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.async_api import async_playwright

from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.server import RouterServer
from sglang_sbs.scheduling.explained.timelines import MOST_OVER
from tools.pictures.synthetic_cluster import SyntheticCluster, WatchedScheduler

_COLOURS = 256
_SETTLE_S = 3.0
_DOWN_S = 20.0
_SLOW_S = 45.0
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
_ENGINES = {"prefill": 3, "prefill_dp": 8, "decode": 2, "decode_dp": 8}


async def take(minutes: float, load: float, folder: Path) -> None:
    """Let the cluster run so long, with a death in between, and take all pictures."""
    options = parse_flags(
        [
            *("--host", "127.0.0.1", "--port", "0", "--prometheus-host", "127.0.0.1"),
            *("--prometheus-port", "0", "--sbs-endforward-bind", "none", "--policy", "sbs"),
        ]
    )
    scheduler = WatchedScheduler(options.scheduler, remembers=MOST_OVER)
    server = RouterServer(options, scheduler)
    await server.start()
    cluster = SyntheticCluster(scheduler, server.dispatcher.submit, load=load, **_ENGINES)
    cluster.begin()
    url = f"http://127.0.0.1:{server.port}/dashboard"
    name = cluster.engines[1]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=[*_FLAGS]
        )
        await asyncio.sleep(60 * minutes / 4)
        cluster.go_down(name)
        await asyncio.sleep(_DOWN_S)
        cluster.come_up(name)
        await asyncio.sleep(60 * minutes * 3 / 4)
        await _picture(browser, url, folder / "dashboard.png", (1440, 900), "light", whole=True)
        await _picture(browser, url, folder / "images/dashboard-phone.png", (390, 844), "dark")
        cluster.slow_down(name, 6.0)
        await asyncio.sleep(_SLOW_S)
        await _picture(browser, url, folder / "images/dashboard-slow.png", (1440, 900), "dark")
        await browser.close()
    await cluster.end()
    await server.stop(grace_s=0.0)


async def _picture(
    browser: Any, url: str, path: Path, size: tuple[int, int], scheme: str, *, whole: bool = False
) -> None:
    viewport = {"width": size[0], "height": size[1]}
    page = await browser.new_page(viewport=viewport, color_scheme=scheme)
    await page.goto(url)
    await asyncio.sleep(_SETTLE_S)
    shot = Image.open(io.BytesIO(await page.screenshot(full_page=whole)))
    await page.close()
    _save(shot, path)


def _save(shot: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # MAXCOVERAGE keeps what there is little of, as the red of an alert.
    few = shot.convert("RGB").quantize(_COLOURS, Image.Quantize.MAXCOVERAGE)
    few.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 where there is no browser."""
    made = argparse.ArgumentParser(
        prog="scripts/dashboard-pictures",
        description="Take the pictures of the dashboard in docs/: three synthetic prefill "
        "instances of eight DP ranks, one of which dies, comes back, and becomes slow. Wants "
        "Chromium.",
        epilog="example: scripts/dashboard-pictures --minutes 5",
    )
    made.add_argument("--minutes", type=float, default=5.0, help="to run before (default 5)")
    made.add_argument("--load", type=float, default=0.7, help="share of full passes (default 0.7)")
    made.add_argument("--output", type=Path, default=Path("docs"), help="(default docs)")
    args = made.parse_args(argv)
    if shutil.which("chromium") is None:
        print("scripts/dashboard-pictures: there is no chromium on PATH", file=sys.stderr)
        return 1
    asyncio.run(take(args.minutes, args.load, args.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
