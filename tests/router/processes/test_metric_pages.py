"""Several processes' metrics as one page."""

from __future__ import annotations

from sglang_sbs.router.processes.summed_metrics import FrontEndPages, add_pages, of_workers
from sglang_sbs.router.telemetry.metrics import RouterMetrics, gauge


def page(aborts: int, seconds: float, ratio: float) -> str:
    metrics = RouterMetrics()
    metrics.aborts.inc(aborts)
    metrics.http_active.set(aborts)
    metrics.ttft_seconds.observe(seconds)

    def collect():
        family = gauge("sbs_prompt_bytes_per_token", "ratio")
        family.add_metric([], ratio)
        yield family

    metrics.collect_with(collect)
    return metrics.render().decode()


def value(text: str, series: str) -> float | None:
    for line in text.splitlines():
        if line.rpartition(" ")[0] == series:
            return float(line.rpartition(" ")[2])
    return None


def test_counters_histograms_and_gauges_are_added_ratios_averaged():
    text = add_pages([page(3, 0.2, 2.0), page(4, 0.7, 4.0)])
    assert value(text, "sbs_aborts_total") == 7
    assert value(text, "smg_http_connections_active") == 7
    assert value(text, "smg_pd_ttft_seconds_count") == 2
    assert value(text, 'smg_pd_ttft_seconds_bucket{le="0.25"}') == 1
    assert value(text, "sbs_prompt_bytes_per_token") == 3.0
    assert text.count("# TYPE sbs_aborts_total counter") == 1


def test_what_a_dead_process_counted_stays_and_its_gauges_go():
    dead = add_pages(["", page(3, 0.2, 2.0)], lasting_only=True)
    text = add_pages([page(4, 0.7, 4.0), dead])
    assert value(text, "sbs_aborts_total") == 7
    assert value(text, "smg_http_connections_active") == 4
    assert value(text, "sbs_prompt_bytes_per_token") == 4.0


def test_a_page_that_cannot_be_read_is_left_out():
    text = add_pages(["no metrics {{{ here\n", page(4, 0.7, 4.0)])
    assert value(text, "sbs_aborts_total") == 4


def test_own_families_are_added_without_being_read():
    own = RouterMetrics()
    own.aborts.inc(5)
    own.ttft_seconds.observe(0.1)
    text = add_pages([page(3, 0.2, 2.0)], own=own.registry.collect())
    assert value(text, "sbs_aborts_total") == 8
    assert value(text, "smg_pd_ttft_seconds_count") == 2
    assert value(text, 'smg_pd_ttft_seconds_bucket{le="0.1"}') == 1
    assert text.count("# TYPE smg_pd_ttft_seconds histogram") == 1
    alone = add_pages([], own=own.registry.collect())
    assert alone == add_pages([own.render().decode()])


def test_series_of_workers_that_are_not_known_are_left_out_and_nothing_else():
    metrics = RouterMetrics()
    for url in ("http://d0:1", "http://d1:1"):
        metrics.dispatches.labels("decode", url, "0").inc()
        metrics.forward_seconds.labels(url).observe(0.1)
    odd = 'model\u2028,worker="http://d1:1'
    metrics.request_failed("generate", odd, "x")
    page = metrics.render().decode()
    text = of_workers(page, lambda url: url == "http://d0:1")
    gone = [line for line in page.split("\n") if line not in text.split("\n")]
    assert gone and all('{worker="http://d1:1"' in g or ',worker="http://d1:1"' in g for g in gone)
    assert value(text, 'sbs_forward_seconds_count{worker="http://d0:1"}') == 1
    assert value(text, 'sbs_forward_seconds_count{worker="http://d1:1"}') is None
    assert "smg_router_request_errors_total{" in text
    assert of_workers(page, lambda url: True) == page
    assert of_workers("", lambda url: False) == ""


def test_counters_of_many_former_front_ends_stay_in_few_pages() -> None:
    pages, of_each = FrontEndPages(lambda worker: True), page(1, 0.2, 2.0)
    for number in range(20):
        pages.joined(f"front end {number}")
        pages.put(f"front end {number}", of_each)
        pages.left(f"front end {number}")
    assert len(pages.pages()) <= 9
    assert value(add_pages(pages.pages()), "sbs_aborts_total") == 20
