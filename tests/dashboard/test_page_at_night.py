"""The dashboard's page as an operator needs it at night: what is over, why it was slow, what is
under the pointer, and nothing that looks well though it is not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from harness.pages import ScriptedFeed, served
from page_rig import (
    DECODE,
    GEOMETRY,
    LIGHTNESS,
    another_frame,
    frame_of,
    instance_of,
    open_page,
    past_of,
    slow_of,
    synthetic,
)
from playwright.async_api import Browser, expect
from router_harness import until


async def test_a_lost_router_is_no_green_page(browser: Browser) -> None:
    feed = ScriptedFeed()
    well = {"level": "green", "cause": "idle", "todo": "", "subject": "", "more": 0}
    async with served(feed) as (_, port):
        page, _ = await open_page(browser, port)
        await until(lambda: bool(feed.takes))
        feed.takes[0](orjson.dumps(frame_of([instance_of()], well=well)), True)
        await expect(page.locator("#well")).to_have_attribute("data-level", "green")
    await expect(page.locator("#well")).to_have_attribute("data-level", "red")
    await expect(page.locator("#well-cause")).to_contain_text("gets nothing from the router")
    await expect(page.locator("#board")).to_have_class("old")


async def test_past_alerts_are_shown_with_their_times_and_on_a_strip(browser: Browser) -> None:
    feed = ScriptedFeed()
    hour = {"time_s": 1_800_000_000.0, "now_s": 5000.0}
    past = [past_of(began_s=3000.0, ended_s=3130.0, times=3)]
    now = past_of(severity="critical", text="it is down", since_s=4880.0)
    async with served(feed) as (_, port):
        page, complaints = await open_page(browser, port, timezone_id="UTC")
        await until(lambda: bool(feed.takes))
        feed.takes[0](orjson.dumps(frame_of([instance_of()], past=past, **hour)), True)
        said = "07:26:40 to 07:28:50, 2 min, 3 times it was slow: wait"
        await expect(page.locator("#past-list")).to_have_text(said)
        await expect(page.locator("#alert-list")).to_have_text("none")
        frame = frame_of([instance_of()], alerts=[now], full=False, **hour)
        feed.takes[0](orjson.dumps(frame), False)
        await expect(page.locator("#alert-list")).to_have_text("since 07:58:00 it is down: wait")
        await expect(page.locator("#past-list")).to_have_text(said)
        pixel = await page.evaluate(
            """() => {
                const strip = document.getElementById("past-strip");
                return [...strip.getContext("2d").getImageData(strip.width - 3, 3, 1, 1).data];
            }"""
        )
        assert pixel[0] > pixel[1] + 40, "the hour ends red"
        box = await page.locator("#past-strip").bounding_box()
        assert box is not None
        await page.mouse.move(box["x"] + box["width"] * (1 - 1900 / 3600), box["y"] + 8)
        await expect(page.locator("#tip")).to_contain_text("it was slow")
        assert complaints == []


async def test_a_slow_request_opens_its_whole_story(browser: Browser) -> None:
    async with synthetic(2, 4, 1, 8, load=0.3) as (server, _):
        page, complaints = await open_page(browser, server.port)
        await page.locator("#slowest-rows .why").first.click()
        await expect(page.locator("#explain-page")).to_contain_text("Why there:")
        await page.click("#explain-close")
        await expect(page.locator("#explain")).to_be_hidden()
        assert complaints == []


async def test_a_pause_keeps_the_page_as_it_is(browser: Browser) -> None:
    async with synthetic(1, 2, 1, 2, load=0.5) as (server, _):
        page, complaints = await open_page(browser, server.port)
        await another_frame(page)
        await page.click("#pause")
        await expect(page.locator("#connection")).to_contain_text("paused at")
        await until(lambda: not server.scheduler.feed.watchers)  # type: ignore[attr-defined]
        kept = await page.locator("#board").get_attribute("data-frame")
        await page.click("#theme")  # drawn again
        assert await page.locator("#board").get_attribute("data-frame") == kept
        await page.click("#pause")
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#board")).not_to_have_attribute("data-frame", kept or "")
        assert complaints == []


async def test_the_scale_of_decode_is_absolute(browser: Browser) -> None:
    """Two of 128 requests look idle, though no rank has more."""
    feed = ScriptedFeed()
    async with served(feed) as (_, port):
        page, _ = await open_page(browser, port, color_scheme="light")
        await until(lambda: bool(feed.takes))
        shades = []
        for running, limit in ((2, 0), (120, 0), (2, 2)):
            instance = DECODE | {"running": [running], "max_running": limit}
            feed.takes[0](orjson.dumps(frame_of([instance_of()], decode=[instance])), True)
            most = page.locator("#decode-most")
            await expect(most).to_have_text(str(limit or 128))
            summary = page.locator("#decode-summary")
            await expect(summary).to_contain_text(f"{running} running")
            shades.append(await page.evaluate(LIGHTNESS.replace("prefill-map", "decode-map")))
        assert shades[0] > 600
        assert max(shades[1:]) < 300
        instance = DECODE | {"running": [300]}
        feed.takes[0](orjson.dumps(frame_of([instance_of()], decode=[instance])), True)
        await expect(page.locator("#decode-most")).to_have_text("512")
        feed.takes[0](orjson.dumps(frame_of([instance_of()], decode=[DECODE])), True)
        await expect(page.locator("#decode-summary")).to_contain_text("idle")
        await expect(page.locator("#decode-most")).to_have_text("512")


async def test_a_tip_follows_what_is_under_it(browser: Browser) -> None:
    feed = ScriptedFeed()
    async with served(feed) as (_, port):
        page, complaints = await open_page(browser, port)
        await until(lambda: bool(feed.takes))

        async def show(free: int, *passes: list[Any]) -> None:
            frame = frame_of([instance_of(free=free)], passes=list(passes))
            feed.takes[0](orjson.dumps(frame), True)

        async def point_at(canvas: str, share: float, y: int) -> None:
            await page.locator(canvas).scroll_into_view_if_needed()
            box = await page.locator(canvas).bounding_box()
            assert box is not None
            await page.mouse.move(box["x"] + box["width"] * share, box["y"] + y)

        await show(10)
        await expect(page.locator("#prefill-summary")).to_contain_text("1 instance")
        await point_at("#prefill-map", 0.01, 25)
        await expect(page.locator("#tip")).to_contain_text("10 of 10 tokens")
        await show(4)
        await expect(page.locator("#tip")).to_contain_text("4 of 10 tokens")
        await point_at("#timeline-map", 0.9, 15)
        await expect(page.locator("#tip")).to_contain_text("no pass")
        await show(4, ["http://p", 7.0, 9.5, 0.5, 0.3, [5]])
        await expect(page.locator("#tip")).to_contain_text("a pass of 2.50 s")
        await expect(page.locator("#tip")).to_contain_text("50 % of full chunks")
        await expect(page.locator("#tip")).to_contain_text("requests waited in the router")
        await page.mouse.move(2, 2)
        await expect(page.locator("#tip")).to_be_hidden()
        assert complaints == []


async def test_type_has_more_than_two_sizes_and_answers_are_largest(browser: Browser) -> None:
    feed = ScriptedFeed()
    async with served(feed) as (_, port):
        page, _ = await open_page(browser, port)
        await until(lambda: bool(feed.takes))
        feed.takes[0](orjson.dumps(frame_of([instance_of()])), True)
        await expect(page.locator("#board")).to_be_visible()
        sizes = [
            await page.locator(element).first.evaluate(
                "one => parseFloat(getComputedStyle(one).fontSize)"
            )
            for element in (
                "#gain-number",
                "#well-line",
                "#board h2",
                "#queue-now",
                "#board .legend",
            )
        ]
        assert sizes == sorted(set(sizes), reverse=True)


@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
async def test_trouble_moves_no_element(browser: Browser, size: tuple[int, int]) -> None:
    """Idle, down, slow, and well again, in both themes: everything stays where it is."""
    long = "it took work and fell silent: the watchdog reset its state 3 times in the last minute"
    well = {
        "level": "red",
        "cause": long,
        "todo": long,
        "kind": "x",
        "subject": "http://p",
        "more": 9,
    }
    alerts = [past_of(severity="critical", text=long, since_s=1.0)] * 12
    figures = {
        key: {"p50": 1.0, "p95": 2.0, "mean": 1.0} for key in ("measured", "modelled", "eta")
    }
    split: dict[str, Any] = {"requests": 50, "window_s": 300.0}
    split |= {
        name: {"ttft_s": 1.0, "parts_s": {"hold": 0.5, "pass": 0.5}} for name in ("p50", "p99")
    }
    boards: list[dict[str, Any]] = [
        {"well": well | {"level": "green", "cause": "idle", "todo": "", "subject": ""}},
        {"well": well, "alerts": alerts, "prefill": [instance_of(up=False)]},
        {
            "well": well,
            "past": alerts,
            "slowest": [slow_of()] * 8,
            "prefill": [instance_of(age=9.0)],
        },
        {"split": split, "ttft": {"requests": 9, "figures": figures, "unfinished": {"eta": 3}}},
    ]
    feed = ScriptedFeed()
    async with served(feed) as (_, port):
        viewport = {"width": size[0], "height": size[1]}
        page, complaints = await open_page(browser, port, viewport=viewport)
        await until(lambda: bool(feed.takes))
        found = []
        for number, board in enumerate(boards):
            frame = frame_of([instance_of()], decode=[DECODE], **{"now_s": 10.0 + number}) | board
            feed.takes[0](orjson.dumps(frame), True)
            await expect(page.locator("#board")).to_have_attribute("data-frame", str(10 + number))
            found.append(await page.evaluate(GEOMETRY))
            if number == 1:
                await page.click("#theme")
        for later in found[1:]:
            assert {name: box for name, box in later.items() if found[0][name] != box} == {}
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert complaints == []
