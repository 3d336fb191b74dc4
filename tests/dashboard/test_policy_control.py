"""The policy is switched from the dashboard, which asks before it does."""

from __future__ import annotations

from page_rig import open_page, synthetic
from playwright.async_api import Browser, expect
from router_harness import cluster


async def test_the_page_switches_the_policy_only_after_confirmation(browser: Browser) -> None:
    async with synthetic(2, 4, 1, 8) as (server, _):
        page, complaints = await open_page(browser, server.port)
        await expect(page.locator("#policy")).to_contain_text("sbs")
        await page.click("#switch")
        await page.select_option("#switch-to", "eta")
        await expect(page.locator("#switch-asked")).to_contain_text("Switch from sbs to eta?")
        await page.click("#switch-no")
        await expect(page.locator("#switching")).to_be_hidden()
        assert server.scheduler.policy.policy == "sbs"
        await page.click("#switch")
        await page.select_option("#switch-to", "eta")
        await page.click("#switch-yes")
        await expect(page.locator("#switching")).to_be_hidden()
        assert server.scheduler.policy.policy == "eta"
        await expect(page.locator("#policy")).to_have_text("eta")
        await page.click("#switch")
        await page.select_option("#switch-to", "sbs")
        await expect(page.locator("#switch-asked")).to_contain_text("Switch from eta to sbs?")
        await page.click("#switch-yes")
        await expect(page.locator("#policy")).to_contain_text("sbs")
        assert complaints == []


async def test_the_page_sends_the_given_key_and_shows_refusals(
    browser: Browser,
) -> None:
    async with cluster("--admin-api-key", "open sesame", real=True) as running:
        page, _ = await open_page(browser, running.server.port)
        await expect(page.locator("#login")).to_be_visible()
        await expect(page.locator("#switch")).to_be_hidden()
        await page.fill("#key", "open sesame")
        await page.click("#login button")
        await page.click("#switch")
        await page.select_option("#switch-to", "round_robin")
        await page.click("#switch-yes")
        await expect(page.locator("#switching")).to_be_hidden()
        assert running.server.scheduler.policy.policy == "round_robin"
        await page.click("#switch")
        await page.select_option("#switch-to", "sbs")
        await page.evaluate("sessionStorage.clear()")
        await page.click("#switch-yes")
        await expect(page.locator("#switch-failed")).to_contain_text("the router answers 401")
        assert running.server.scheduler.policy.policy == "round_robin"
