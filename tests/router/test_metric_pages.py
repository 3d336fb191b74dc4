"""Several processes' metrics as one page."""

from __future__ import annotations

from sglang_sbs.router.metric_pages import add_pages
from sglang_sbs.router.metrics import RouterMetrics, gauge


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
