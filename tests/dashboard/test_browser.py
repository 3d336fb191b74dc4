"""The dashboard's page in a real browser."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from harness.pages import ScriptedFeed, served
from page_rig import (
    DECODE,
    GEOMETRY,
    another_frame,
    colours,
    frame_of,
    instance_of,
    lightness,
    open_page,
    past_of,
    slow_of,
    synthetic,
)
from playwright.async_api import Browser, expect
from router_harness import cluster, until

EVIL = '<img src=x onerror="window.evil=1"><script>window.evil=1</script>'


async def test_256_ranks_are_shown_live_without_a_complaint(browser: Browser) -> None:
    async with synthetic(24, 8, 2, 32) as (server, _):
        page, complaints = await open_page(browser, server.port)
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#prefill-summary")).to_have_text("24 instances, 192 DP ranks")
        await expect(page.locator("#decode-summary")).to_contain_text("2 instances, 64 DP ranks")
        await expect(page.locator("#slowest-rows .why").nth(5)).to_be_visible()
        await expect(page.locator("#timeline-summary")).to_contain_text("% busy")
        await expect(page.locator("#ttft-note")).to_contain_text("estimate")
        await expect(page.locator("#ttft-bars .bar").nth(2)).to_contain_text("p95")
        await expect(page.locator("#hold-now")).to_contain_text("p50")
        for canvas in ("prefill-map", "decode-map", "timeline-map", "queue-trail"):
            assert await colours(page, canvas) > 3, canvas
        await another_frame(page)
        box = await page.locator("#prefill-map").bounding_box()
        assert box is not None
        await page.mouse.move(box["x"] + 10, box["y"] + 25)
        await expect(page.locator("#tip")).to_contain_text("C_avail")
        assert complaints == []


async def test_a_silent_engine_raises_an_alert(browser: Browser) -> None:
    async with synthetic(2, 4, 1, 8) as (server, engines):
        page, complaints = await open_page(browser, server.port)
        await expect(page.locator("#alert-list")).to_have_text("none")
        engines.silent.add(engines.engines[-1])
        await expect(page.locator("#alert-list")).to_contain_text("sent no EndForward")
        assert complaints == []


async def test_a_thousand_ranks_work(browser: Browser) -> None:
    async with synthetic(117, 8, 2, 32, load=0.002) as (server, _):
        page, complaints = await open_page(browser, server.port)
        await expect(page.locator("#prefill-summary")).to_have_text("117 instances, 936 DP ranks")
        await another_frame(page)
        assert await colours(page, "prefill-map") > 2
        assert complaints == []


async def test_the_key_is_asked_for_kept_in_the_tab_and_in_no_url(browser: Browser) -> None:
    asked: list[str] = []
    async with cluster("--admin-api-key", "open sesame", real=True) as running:
        page, _ = await open_page(browser, running.server.port)
        page.on("request", lambda request: asked.append(request.url))
        await expect(page.locator("#login")).to_be_visible()
        await expect(page.locator("#board")).to_be_hidden()
        await expect(page.locator("#refused")).to_have_text("")
        await page.fill("#key", "wrong")
        await page.click("#login button")
        await expect(page.locator("#refused")).to_contain_text("not accepted")
        await page.fill("#key", "open sesame")
        await page.click("#login button")
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#board")).to_be_visible()
        await expect(page.locator("#login")).to_be_hidden()
        await page.reload()
        await expect(page.locator("#connection")).to_have_text("live")
        kept = await page.evaluate("[JSON.stringify(localStorage), document.cookie]")
        assert "sesame" not in "".join([*asked, page.url, *kept])
        await page.click("#forget")
        await expect(page.locator("#login")).to_be_visible()


async def test_what_others_say_is_text_and_nothing_else(browser: Browser) -> None:
    frame = {
        **{"full": True, "now_s": 10.0, "alone": False, "policy": EVIL, "trigger": EVIL},
        "limits": {"queue_requests": 10},
        "queue": {
            **{"requests": 1, "tokens": 1, "oldest_wait_s": 1.0, "in_flight": 0},
            **{"throttled": False, "oldest": [[EVIL, 5, 1.0]]},
        },
        "timing": {"interval_s": 1, "mean_forward_s": 1, "latency_s": 1, "lead_s": None},
        "rates": {"batches": 1, "dispatched_per_s": 1.0, "refused_in_60_s": {}},
        "hold": {"requests": 0, "bounds_s": [1], "counts": [0, 0]},
        "prefill": [
            {
                **{
                    "instance": EVIL,
                    "up": True,
                    "tier": EVIL,
                    "chunk": 10,
                    "running": [],
                    "barrier": True,
                },
                **{"free_in_s": 0, "c_avail": [5], "flight": [0], "queued": [0]},
                **{"requests": [0], "age": [0.1]},
            }
        ],
        "decode": [],
        "ttft": {"requests": 0, "figures": {}, "unfinished": {EVIL: 3}},
        "alerts": [{"severity": EVIL, "kind": "x", "subject": EVIL, "text": EVIL}],
        "passes": [[EVIL, 8.0, 9.0, 0.0, 0.0, [5]]],
        "gangs": [],
        "slowest": [slow_of(rid=EVIL, prefill=EVIL, why=EVIL)],
        "past": [past_of(severity=EVIL, subject=EVIL, text=EVIL, todo=EVIL)],
        "queue_trail": [],
    }
    feed = ScriptedFeed()
    async with served(feed) as (_, port):
        page, complaints = await open_page(browser, port)
        await until(lambda: bool(feed.takes))
        feed.takes[0](orjson.dumps(frame), True)
        await expect(page.locator("#alert-list")).to_contain_text("<img")
        await expect(page.locator("#slowest-rows")).to_contain_text("onerror")
        await expect(page.locator("#past-list")).to_contain_text("<script>")
        await expect(page.locator("#oldest")).to_contain_text("<script>")
        await expect(page.locator("#ttft-note")).to_contain_text("<img")
        box = await page.locator("#prefill-map").bounding_box()
        assert box is not None
        await page.mouse.move(box["x"] + 10, box["y"] + 25)
        await expect(page.locator("#tip")).to_contain_text("<img")
        assert await page.evaluate("window.evil") is None
        assert await page.locator("img").count() == 0
        assert await page.locator("body script").count() == 0
        assert complaints == []


async def test_the_policy_of_the_page_stops_what_would_slip_through(browser: Browser) -> None:
    feed = ScriptedFeed()
    async with served(feed) as (_, port):
        page, complaints = await open_page(browser, port)
        await page.evaluate(
            """() => {
                const script = document.createElement("script");
                script.textContent = "window.evil = 1";
                document.body.append(script);
            }"""
        )
        assert await page.evaluate("window.evil") is None
        assert any("Content Security Policy" in text for text in complaints)


async def test_the_page_finds_the_router_again(browser: Browser) -> None:
    async with synthetic(1, 2, 1, 2) as (server, _):
        port = server.port
        page, _ = await open_page(browser, port)
        await expect(page.locator("#connection")).to_have_text("live")
    await expect(page.locator("#connection")).not_to_have_text("live")
    async with synthetic(2, 2, 1, 2, port):
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#prefill-summary")).to_have_text("2 instances, 4 DP ranks")


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_dark_and_light_follow_the_system_and_the_button(
    browser: Browser, scheme: Any
) -> None:
    async with synthetic(1, 2, 1, 2) as (server, _):
        page, complaints = await open_page(browser, server.port, color_scheme=scheme)
        theme = page.locator("html")
        await expect(theme).to_have_attribute("data-theme", scheme)
        other = "light" if scheme == "dark" else "dark"
        await page.click("#theme")
        await expect(theme).to_have_attribute("data-theme", other)
        await page.reload()
        await expect(theme).to_have_attribute("data-theme", other)
        assert complaints == []


async def test_an_empty_board_says_what_is_true(browser: Browser) -> None:
    feed = ScriptedFeed()
    async with served(feed) as (_, port):
        page, complaints = await open_page(browser, port)
        await until(lambda: bool(feed.takes))
        boards: list[tuple[list[dict[str, Any]], str]] = [
            ([], "No prefill instance is known."),
            ([instance_of()], "Idle: no pass in the last 15 s."),
            ([instance_of(age=None)], "1 DP rank never sent EndForward"),
            ([instance_of(age=9.0)], "nothing from 1 DP rank for over 3 s"),
            ([instance_of(up=False)], "Every prefill instance is down."),
        ]
        for prefill, says in boards:
            feed.takes[0](orjson.dumps(frame_of(prefill, decode=[DECODE])), True)
            await expect(page.locator("#timeline-none")).to_contain_text(says)
        await expect(page.locator("#decode-summary")).to_have_text("1 instance, 1 DP rank, idle")
        nothing = "Nothing waits, of at most 10 requests."
        await expect(page.locator("#queue-now")).to_have_text(nothing)
        await expect(page.locator("#ttft-note")).to_contain_text("no request was answered")
        await expect(page.locator("#ttft-bars")).to_be_hidden()
        await expect(page.locator("#hold")).to_be_hidden()
        await expect(page.locator("#slowest-none")).to_be_visible()
        await expect(page.locator("#past-list")).to_have_text("none that is over")
        assert complaints == []


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_busy_cells_stand_out_and_those_of_workers_down_have_no_shade(
    browser: Browser, scheme: Any
) -> None:
    feed = ScriptedFeed()
    async with served(feed) as (_, port):
        page, _ = await open_page(browser, port, color_scheme=scheme)
        await until(lambda: bool(feed.takes))
        found = []
        for instance in (
            instance_of(),
            instance_of(free=5),
            instance_of(free=0),
            instance_of(up=False),
        ):
            feed.takes[0](orjson.dumps(frame_of([instance])), True)
            down = ", 1 down" if not instance["up"] else ""
            summary = f"1 instance, 1 DP rank{down}"
            await expect(page.locator("#prefill-summary")).to_have_text(summary)
            # The words of the first three are the same; each state has a shade of its own.
            found.append(await lightness(page, unlike=found[-1:]))
        idle, half, full, lost = found
        if scheme == "light":
            assert idle > half > full
            assert lost >= idle - 10
        else:
            assert idle < half < full
            assert lost <= idle + 10


async def test_estimates_are_grey_where_the_model_is_too_far_off(browser: Browser) -> None:
    feed = ScriptedFeed()
    async with served(feed) as (_, port):
        page, _ = await open_page(browser, port)
        await until(lambda: bool(feed.takes))
        for modelled, grey in ((1.1, 0), (1.5, 3)):
            means = {"measured": 1.0, "modelled": modelled, "least_tokens": 2.0, "round_robin": 2.0}
            figures = {key: {"p50": mean, "p95": mean, "mean": mean} for key, mean in means.items()}
            ttft = {"requests": 9, "figures": figures, "unfinished": {}}
            feed.takes[0](orjson.dumps(frame_of([instance_of()], ttft=ttft)), True)
            await expect(page.locator("#ttft-note")).to_contain_text("10 %" if not grey else "50 %")
            await expect(page.locator("#ttft-bars .bar")).to_have_count(5)
            await expect(page.locator("#ttft-bars .far")).to_have_count(grey)


async def test_on_a_phone_nothing_is_lost(browser: Browser) -> None:
    queue = {"requests": 1, "tokens": 5, "oldest_wait_s": 1.0, "in_flight": 0, "throttled": False}
    queue["oldest"] = [["f" * 64, 12345, 12.5]]
    feed = ScriptedFeed()
    async with served(feed) as (_, port):
        page, complaints = await open_page(browser, port, viewport={"width": 390, "height": 844})
        await until(lambda: bool(feed.takes))
        frame = frame_of([instance_of()], decode=[DECODE], slowest=[slow_of()], queue=queue)
        feed.takes[0](orjson.dumps(frame), True)
        await expect(page.locator("#slowest-rows .why").first).to_contain_text("no decode DP rank")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        box = await page.locator("#oldest tbody tr").bounding_box()
        assert box is not None and box["height"] < 30
        waits = await page.locator("#oldest tbody td").last.bounding_box()
        assert waits is not None and waits["x"] + waits["width"] < 390
        why = page.locator("#slowest-rows .why").first
        shown = await why.evaluate("one => one.scrollHeight <= one.clientHeight + 1")
        assert shown, "all of the reason is to be read"
        assert complaints == []


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
async def test_no_element_moves_under_load(
    browser: Browser, size: tuple[int, int], scheme: Any
) -> None:
    async with synthetic(3, 8, 2, 8, load=0.5) as (server, _):
        viewport = {"width": size[0], "height": size[1]}
        page, complaints = await open_page(
            browser, server.port, color_scheme=scheme, viewport=viewport
        )
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#ttft-bars .bar").nth(2)).to_contain_text("p95")
        await expect(page.locator("#hold .bar")).to_have_count(9)
        first = await page.evaluate(GEOMETRY)
        assert len(first) > 60
        for _ in range(12):
            await another_frame(page)
            now = await page.evaluate(GEOMETRY)
            assert now == first
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert complaints == []


async def test_the_three_questions_are_answered_at_the_head(browser: Browser) -> None:
    baselines = {
        "eta": {"ratio": 0.86, "low": 0.8, "high": 0.92},
        "round_robin": {"ratio": 0.55, "low": 0.5, "high": 0.6},
    }
    gain = {
        **{"headline": "round_robin", "baselines": baselines, "minutes": 15, "requests": 900},
        **{"trend": "steady", "trail": [[-2, 0.6], [-1, 0.5]], "why": "", "load": 0.6},
        "model_off": 0.01,
    }
    split = {"requests": 50, "window_s": 300.0}
    split["p50"] = {"ttft_s": 1.0, "parts_s": {"hold": 0.5, "pass": 0.5}}
    split["p99"] = {"ttft_s": 4.0, "parts_s": {"hold": 3.0, "pass": 1.0}}
    well = {"level": "amber", "cause": EVIL, "todo": "do that", "kind": "x", "subject": ""}
    feed = ScriptedFeed()
    async with served(feed) as (_, port):
        page, complaints = await open_page(browser, port)
        await until(lambda: bool(feed.takes))

        async def show(**more: Any) -> None:
            feed.takes[0](orjson.dumps(frame_of([instance_of()], **more)), True)

        await show(well=well | {"more": 2}, gain=gain, split=split)
        await expect(page.locator("#board h2").first).to_have_text("Is all well?")
        await expect(page.locator("#well")).to_have_attribute("data-level", "amber")
        await expect(page.locator("#well-cause")).to_contain_text("<img")
        await expect(page.locator("#well-todo")).to_have_text("→ do that. 2 more alerts below.")
        await expect(page.locator("#gain-number")).to_have_text("0.55×")
        await expect(page.locator("#gain-note")).to_contain_text("(0.50 to 0.60), steady")
        await expect(page.locator("#gain-note")).to_contain_text("0.86× that of eta (0.80 to 0.92)")
        assert await colours(page, "gain-trail") > 2
        typical, slow = [
            await page.locator(f"#split-{name} .hold").bounding_box() for name in ("p50", "p99")
        ]
        assert typical is not None and slow is not None
        assert slow["width"] == pytest.approx(6 * typical["width"], rel=0.02)
        await expect(page.locator("#split-parts")).to_contain_text("held by the scheduler 500 ms")
        why = "not known yet: 1 of 3 whole minutes"
        green = {"level": "green", "cause": "idle", "todo": "", "subject": ""}
        await show(well=green, gain=gain | {"baselines": {}, "trend": "", "why": why})
        await expect(page.locator("#well-line")).to_contain_text("All is well: idle.")
        await expect(page.locator("#gain-number")).to_have_text("–")
        await expect(page.locator("#gain-note")).to_have_text(
            "The gain is not known yet: 1 of 3 whole minutes."
        )
        line = page.locator("#gain-trial")
        await expect(line).to_contain_text("No trial has measured it")
        arms = {name: {"requests": 600} for name in ("policy", "baseline")}
        trial = {
            **{"running": True, "text": "trial of sbs against eta: " + EVIL, "policy": "sbs"},
            **{"baseline": "eta", "now": "baseline", "slot": 6, "slots": 40, "slot_left_s": 75.0},
            **{"ratio": 0.7, "low": 0.6, "high": 0.8, "arms": arms, "warning": ""},
            **{"ended_at": None},
        }
        await show(gain=gain, trial=trial)
        await expect(line).to_contain_text("Trial of sbs against eta: <img")
        await expect(line).to_contain_text("slot 7 of at most 40 is eta’s, 75.0 s left")
        await expect(page.locator("#gain-number")).to_have_text("0.70×")
        await expect(page.locator("#gain-note")).to_have_text(
            "the mean TTFT of eta (0.60 to 0.80), measured by the trial that runs over 1,200 "
            "requests."
        )
        await show(gain=gain, trial=trial | {"high": None, "low": None})
        await expect(page.locator("#gain-number")).to_have_text("0.55×")
        over = trial | {"running": False, "now": None, "ended_at": 1.0}
        await show(gain=gain, trial=over, time_s=10.0)
        await expect(page.locator("#gain-number")).to_have_text("0.70×")
        await show(gain=gain, trial=over, time_s=200_000.0)
        await expect(page.locator("#gain-number")).to_have_text("0.55×")
        assert complaints == []
