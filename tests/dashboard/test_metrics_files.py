"""The Grafana dashboard, the alert rules and docs/metrics.md against what a router exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from router_harness import cluster, until

from sglang_sbs.scheduling import Scheduler, SchedulerConfig
from sglang_sbs.scheduling.explained.timelines import Timeline
from tools.reference.metrics import collect_facts, page

ROOT = Path(__file__).parents[2]
GRAFANA = json.loads((ROOT / "examples/grafana/sglang-sbs.json").read_text())
RULES = yaml.safe_load((ROOT / "examples/prometheus/alerts.yml").read_text())
ALWAYS = {"job", "instance"}
"""Labels that Prometheus adds."""


def panel_expressions() -> list[tuple[str, str, str]]:
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in GRAFANA["panels"]
        for target in panel.get("targets", [])
    ]


def rules() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def filled_in(expression: str) -> str:
    """Grafana's variables as Prometheus would get them."""
    return expression.replace("$__rate_interval", "1m").replace("$worker", ".*")


def selectors(node: Any) -> Iterator[Any]:
    """Every vector selector of an expression."""
    match type(node).__name__:
        case "VectorSelector":
            yield node
        case "MatrixSelector":
            yield node.vector_selector
        case "Call":
            for argument in node.args:
                yield from selectors(argument)
        case "BinaryExpr":
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case "AggregateExpr" | "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
            yield from selectors(node.expr)
        case "NumberLiteral" | "StringLiteral":
            return
        case other:
            raise AssertionError(f"what is a {other}?")


def grouping(expression: str) -> set[str]:
    """Labels in by (...), on (...), ignoring (...) and without (...)."""
    lists = re.findall(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)", expression)
    return {label.strip() for inside in lists for label in inside.split(",")} - {"le", ""}


def labels_used(expression: str) -> set[str]:
    parsed = promql_parser.parse(expression)
    of_matchers = {m.name for selector in selectors(parsed) for m in selector.matchers.matchers}
    return of_matchers | grouping(expression)


def base_name(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Labels by metric name, as the code declares them."""
    import asyncio

    facts = asyncio.run(collect_facts())
    return {fact.name: set(fact.labels) for fact in facts}


def test_the_walk_finds_every_selector() -> None:
    expression = "max by (a) (x{b='1'}) > 5 and on (c) rate(y_total{d!='2'}[5m]) / -(z)"
    parsed = promql_parser.parse(expression)
    assert {selector.name for selector in selectors(parsed)} == {"x", "y_total", "z"}
    assert labels_used(expression) == {"a", "b", "c", "d"}


@pytest.mark.parametrize(("title", "expression", "legend"), panel_expressions())
def test_panels_use_what_is_exported(
    title: str, expression: str, legend: str, exported: dict[str, set[str]]
) -> None:
    check(filled_in(expression), exported)
    shown = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend))
    names = [
        base_name(selector.name)
        for selector in selectors(promql_parser.parse(filled_in(expression)))
    ]
    assert shown <= set().union(*(exported[name] for name in names)), title


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alert_rules_use_what_is_exported(
    rule: dict[str, Any], exported: dict[str, set[str]]
) -> None:
    check(rule["expr"], exported)
    text = " ".join(rule["annotations"].values())
    shown = set(re.findall(r"\$labels\.(\w+)", text))
    assert shown <= labels_used(rule["expr"]), "a label that the expression aggregates away"
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "description"}


def check(expression: str, exported: dict[str, set[str]]) -> None:
    parsed = promql_parser.parse(expression)
    found = list(selectors(parsed))
    assert found
    known: set[str] = set()
    for selector in found:
        name = base_name(selector.name)
        assert name in exported, f"{selector.name} is not exported"
        of_this = {matcher.name for matcher in selector.matchers.matchers}
        assert of_this <= exported[name] | ALWAYS, f"{selector.name} has no such label"
        known |= exported[name]
    assert grouping(expression) <= known | ALWAYS


def test_a_wrong_name_or_label_would_be_noticed(exported: dict[str, set[str]]) -> None:
    for wrong in (
        "sbs_no_such_metric",
        "rate(sbs_hold_seconds_bucket{worker='x'}[5m])",
        "sum by (colour) (sbs_queue_requests)",
    ):
        with pytest.raises(AssertionError):
            check(wrong, exported)


async def test_a_live_router_on_mock_engines_exports_all_of_it(
    exported: dict[str, set[str]],
) -> None:
    """The metrics collected from the code are those that come over HTTP, with the same labels."""
    scheduler = Scheduler(SchedulerConfig())
    async with (
        cluster(prefill=2, decode=1, sbs_block=True, scheduler=scheduler) as running,
        aiohttp.ClientSession() as session,
    ):
        engines = (*running.prefill, *running.decode)
        for engine in engines:
            engine.connect_publisher(running.server.endforward_endpoint)

        def received() -> bool:
            """Says it again: what is published before the connection stands is lost."""
            for engine in engines:
                for rank in range(engine.dp_size):
                    engine.publish(engine.report(rank, kind="heartbeat"))
            snapshot = running.server.dispatcher.snapshot()
            instances = (*snapshot.prefill, *snapshot.decode)
            return all(rank.age_s is not None for instance in instances for rank in instance.ranks)

        await until(received)
        status, _ = await running.generate(text="hello", sampling_params={"max_new_tokens": 2})
        assert status == 200
        url = f"http://127.0.0.1:{running.server.prometheus_port}/metrics"
        async with session.get(url) as answer:
            text = await answer.text()
    live = {family.name: family for family in text_string_to_metric_families(text)}
    used = {
        base_name(selector.name)
        for expression in [
            *(filled_in(expression) for _, expression, _ in panel_expressions()),
            *(rule["expr"] for rule in rules()),
        ]
        for selector in selectors(promql_parser.parse(expression))
    }
    several_only = {
        "sbs_front_ends_alone",
        "sbs_scheduler_losses",
        "sbs_scheduler_losses_total",
    }
    for name in used - several_only:
        family = live.get(name) or live.get(name.removesuffix("_total"))
        assert family is not None, f"{name} is not in the scrape"
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == exported[name], sample


def test_grafana_panels_are_complete_and_do_not_overlap() -> None:
    panels = [panel for panel in GRAFANA["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in GRAFANA["panels"]}) == len(GRAFANA["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in GRAFANA["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert all(panel["title"] and panel["description"] and panel["targets"] for panel in panels)


def test_gain_split_and_tokens_have_panels() -> None:
    shown = {
        selector.name
        for _, expression, _ in panel_expressions()
        for selector in selectors(promql_parser.parse(filled_in(expression)))
    }
    assert shown >= {"sbs_gain_ratio", "sbs_ttft_part_seconds_sum", "sbs_completion_tokens_total"}


async def test_output_tokens_are_counted_and_an_absurd_number_is_bounded() -> None:
    async with cluster(real=True) as running:
        metrics = running.server.metrics
        status, answer = await running.generate(text="hello", sampling_params={"max_new_tokens": 3})
        assert status == 200
        said = answer["meta_info"]["completion_tokens"]
        await until(lambda: metrics.completion_tokens._value.get() == said > 0)
        absurd = Timeline("x", 0.0, 1, completion_tokens=10**30)
        metrics.request_over(absurd)
        assert metrics.completion_tokens._value.get() < 1e8


async def test_the_page_has_every_metric_once() -> None:
    facts = await collect_facts()
    text = page(facts)
    for fact in facts:
        assert text.count(f"| `{fact.name}` |") == 1
        assert fact.text
