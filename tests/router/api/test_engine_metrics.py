"""``/engine_metrics``: engines' pages as one, whatever is on them, and in turns with others."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from router_harness import cluster, until

from sglang_sbs.router.api.endpoints import Control
from sglang_sbs.router.api.engine_metrics import merge_pages

A, B = "http://10.0.0.1:1", "http://10.0.0.2:1"


def real_page(value: float) -> str:
    """Return a page in prometheus_client's own format."""
    registry = CollectorRegistry()
    gauge = Gauge("sglang:running", 'Text with "quotes"\nand \\ lines', ["who"], registry=registry)
    gauge.labels('odd "} , {x="\n\\').set(value)
    Counter("sglang:served", "Served", registry=registry).inc(value)
    Histogram("sglang:ttft", "Time", ["rank"], registry=registry).labels("0").observe(value)
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def merged_text(*pages: tuple[str, str]) -> str:
    encoded = [(url, page.encode()) for url, page in pages]
    return b"".join(await asyncio.to_thread(merge_pages, encoded)).decode()


async def test_every_sample_is_there_under_its_engine() -> None:
    pages = [(A, real_page(3)), (B, real_page(1e20))]
    merged = await merged_text(*pages)
    wanted = {
        (name.replace(":", "_"), tuple(sorted([*labels, ("worker_addr", url)]))): value
        for url, page in pages
        for (name, labels), value in samples(page).items()
    }
    assert samples(merged) == wanted
    kinds = {family.name: family.type for family in text_string_to_metric_families(merged)}
    assert kinds["sglang_ttft"] == "histogram"
    assert kinds["sglang_served"] == "counter"
    for line in set(merged.splitlines()):
        if line.startswith("#"):
            assert merged.splitlines().count(line) == 1


@pytest.mark.parametrize(
    "bad",
    [
        *("no { metrics", 'x{a="b} 1', "x 1 2 3", "x one", "# TYPE x nonsense", "x"),
        *('x{worker_addr="http://other:1"} 1', "x{} 1" + "\x00"),
    ],
)
async def test_a_page_that_cannot_be_read_is_left_out(bad: str) -> None:
    merged = await merged_text((A, f"good 1\n{bad}\n"), (B, "good 2\n"))
    assert merged == f'good{{worker_addr="{B}"}} 2\n'


@given(st.text(max_size=200) | st.text(alphabet='ab{}="\\,: 1\n#', max_size=200))
def test_whatever_a_page_is_the_result_is_one(text: str) -> None:
    merged = asyncio.run(merged_text((A, text), (B, "good 2\n")))
    assert f'good{{worker_addr="{B}"}} 2\n' in merged
    list(text_string_to_metric_families(merged))


async def test_others_get_their_turn_while_pages_are_merged() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await merged_text((A, 'x{a="b"} 1\n' * 20_000))
    task.cancel()
    assert turns > 50


def test_a_long_page_is_read_in_small_turns_and_hardly_grows() -> None:
    page = b'x{a="b"} 1\n' * 100_000
    turns = 0

    async def merge() -> int:
        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        tracemalloc.start()
        try:
            await asyncio.to_thread(merge_pages, [(A, page)])
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            task.cancel()

    merged = len(page) + 100_000 * len(f',worker_addr="{A}"')
    assert asyncio.run(merge()) < 1.5 * merged
    assert turns > len(page) // (32 << 10)


@pytest.mark.parametrize(
    "bad", ["".join(f"family{n} 1\n" for n in range(20_000)), f'x{{a="{"b" * 100_000}"}} 1\n']
)
async def test_a_page_of_endless_names_is_left_out(bad: str) -> None:
    assert await merged_text((A, bad), (B, "good 2\n")) == f'good{{worker_addr="{B}"}} 2\n'


async def test_concurrent_scrapes_ask_each_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wants no key."""
    entered: list[object] = []
    answer = Control.engine_metrics

    async def counted(control: Control, request: web.Request) -> web.StreamResponse:
        entered.append(request)
        return await answer(control, request)

    monkeypatch.setattr(Control, "engine_metrics", counted)
    async with cluster() as c:
        engine = c.prefill[0]
        engine.raw_answers["/metrics"] = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nrunning 3"
        engine.freeze()

        async def ask() -> bytes:
            async with c.get("/engine_metrics") as response:
                return bytes(await response.read())

        asked = [asyncio.create_task(ask()) for _ in range(30)]
        await until(lambda: len(entered) == 30)
        engine.thaw()
        answers = await asyncio.gather(*asked)
        assert len(set(answers)) == 1
        assert b"running{" in answers[0]
        assert engine.hits["/metrics"] == 1


async def test_a_long_page_is_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "".join(f'family{number % 7}{{a="{number}"}} {number}\n' for number in range(20_000))
    sizes = []
    write = web.StreamResponse.write

    async def counted(self: web.StreamResponse, data: Any) -> None:
        sizes.append(len(data))
        await write(self, data)

    async with cluster() as c:
        c.prefill[0].metrics_page = page
        monkeypatch.setattr(web.StreamResponse, "write", counted)
        async with c.get("/engine_metrics") as response:
            text = await response.text()
            assert int(response.headers["Content-Length"]) == len(text)
    assert len(samples(text)) == 20_000
    assert sum(sizes) >= len(text) > 500_000
    assert max(sizes) <= 1 << 16
