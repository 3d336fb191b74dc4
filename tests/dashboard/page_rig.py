"""The dashboard's page in a real browser, and frames for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import Browser, Page, expect

from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.server import RouterServer
from tools.pictures.synthetic_cluster import SyntheticCluster, WatchedScheduler

PATIENCE_MS = 30_000


@asynccontextmanager
async def synthetic(
    prefill: int,
    prefill_dp: int,
    decode: int,
    decode_dp: int,
    port: int = 0,
    load: float = 0.05,
) -> AsyncIterator[tuple[RouterServer, SyntheticCluster]]:
    """A real router whose engines exist only as events."""
    options = parse_flags(
        [
            *("--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"),
            *("--prometheus-port", "0", "--sbs-endforward-bind", "none", "--policy", "sbs"),
        ]
    )
    scheduler = WatchedScheduler(options.scheduler, remembers=4096)
    server = RouterServer(options, scheduler)
    await server.start()
    engines = SyntheticCluster(
        scheduler,
        server.dispatcher.submit,
        prefill=prefill,
        prefill_dp=prefill_dp,
        decode=decode,
        decode_dp=decode_dp,
        load=load,
    )
    engines.begin()
    try:
        yield server, engines
    finally:
        await engines.end()
        await server.stop(grace_s=0.0)


async def open_page(browser: Browser, port: int, **context: Any) -> tuple[Page, list[str]]:
    """The page, and what it complains about."""
    context.setdefault("viewport", {"width": 1400, "height": 1000})
    page = await browser.new_page(**context)
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    complaints: list[str] = []

    def on_console(message: Any) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    page.on("console", on_console)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    await page.goto(f"http://127.0.0.1:{port}/dashboard")
    return page, complaints


async def colours(page: Page, canvas: str) -> int:
    """How many different colours a canvas shows."""
    return int(
        await page.evaluate(
            """id => {
                const canvas = document.getElementById(id);
                const { width, height } = canvas;
                const image = canvas.getContext("2d").getImageData(0, 0, width, height);
                return new Set(new Uint32Array(image.data.buffer)).size;
            }""",
            canvas,
        )
    )


async def another_frame(page: Page) -> None:
    """Wait until the page shows a later frame than now."""
    shown = await page.locator("#board").get_attribute("data-frame")
    await expect(page.locator("#board")).not_to_have_attribute("data-frame", shown or "")


def slow_of(**more: Any) -> dict[str, Any]:
    request = {
        "rid": "abc",
        "request_id": "",
        "ended_s": 5.0,
        "ttft_s": 4.25,
        "prompt_tokens": 12345,
    }
    why = "hold in the scheduler 3,200 ms: no decode DP rank had room for the request"
    return request | {"prefill": "http://p", "prefill_rank": 3, "why": why} | more


def past_of(**more: Any) -> dict[str, Any]:
    alert = {
        "severity": "warning",
        "kind": "x",
        "subject": "",
        "text": "it was slow",
        "todo": "wait",
    }
    return alert | {"began_s": 4.0, "ended_s": 8.0, "times": 1} | more


def frame_of(prefill: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A whole frame of a router with nothing to do, but for ``more``."""
    idle: dict[str, Any] = {
        **{"full": True, "now_s": 10.0, "alone": False, "policy": "sbs", "trigger": "adaptive"},
        "limits": {"queue_requests": 10},
        "queue": {
            **{"requests": 0, "tokens": 0, "oldest_wait_s": 0.0, "in_flight": 0},
            **{"throttled": False, "oldest": []},
        },
        "timing": {"interval_s": 1, "mean_forward_s": 1, "latency_s": 1, "lead_s": None},
        "rates": {"batches": 0, "dispatched_per_s": 0.0, "refused_in_60_s": {}},
        "hold": {"requests": 0, "bounds_s": [1], "counts": [0, 0]},
        **{"prefill": prefill, "decode": []},
        "ttft": {"requests": 0, "figures": {}, "unfinished": {}},
        **{"alerts": [], "passes": [], "gangs": [], "queue_trail": []},
    }
    return idle | more


def instance_of(up: bool = True, age: float | None = 0.1, free: int = 10) -> dict[str, Any]:
    return {
        **{"instance": "http://p", "up": up, "tier": "endforward", "chunk": 10, "running": []},
        **{"barrier": True, "free_in_s": 0, "c_avail": [free], "flight": [0], "queued": [0]},
        **{"requests": [0], "age": [age]},
    }


DECODE = {
    **{"instance": "http://d", "up": True, "running": [0], "flight": [0], "kv": [0]},
    **{"kv_capacity": 100, "age": [0.1]},
}


LIGHTNESS = """() => {
    const context = document.getElementById("prefill-map").getContext("2d");
    const pixel = context.getImageData(4, 15 + 4, 1, 1).data;
    return pixel[0] + pixel[1] + pixel[2];
}"""


async def lightness(page: Page, unlike: list[int]) -> int:
    """Return the lightness of the first prefill cell's ground, 1 to 765, once it has changed."""
    await page.wait_for_function(f"known => !known.includes(({LIGHTNESS})())", arg=[0, *unlike])
    return int(await page.evaluate(LIGHTNESS))


GEOMETRY = """() => {
    const found = {};
    const block = "header, header > *, #figures > div, #board section, #board h2, #board p, " +
        "#board canvas, #board ul, #board .map, #board .oldest, #board .bar, #board .stack";
    document.querySelectorAll(block).forEach((element, i) => {
        const box = element.getBoundingClientRect();
        const name = i + " " + element.tagName + "#" + (element.id || element.parentElement.id);
        found[name] = [box.top + scrollY, box.height, box.left, box.width].map(Math.round);
    });
    return found;
}"""
