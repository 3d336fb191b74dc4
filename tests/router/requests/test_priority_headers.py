"""Priority, SLO and tenant: read from the client, sent to the scheduler, kept from engines."""

from __future__ import annotations

from typing import Any

import pytest
from multidict import CIMultiDict
from router_harness import cluster

from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.requests.headers import (
    RouterHeaders,
    asked_in,
    forwarded_headers,
    in_lower_case,
)
from sglang_sbs.scheduling.events import Refuse, RequestArrived

PD = ["--prefill", "http://p0:30000", "8998", "--decode", "http://d0:30000"]
QUIET = ["--sbs-endforward-bind", "none"]


async def arrivals(*flags: str, headers: Any = None, **body: Any) -> tuple[int, Any, list[Any]]:
    async with cluster(*flags) as c:
        body = {"text": "hi", **body}
        async with c.post("/generate", body, headers=headers or {}) as response:
            answer = await response.json()
            engines = [engine.requests for engine in (*c.prefill, *c.decode)]
            legs = [leg for requests in engines for leg in requests]
            return response.status, (answer, legs), c.scheduler.of(RequestArrived)


async def test_without_priority_headers_engines_get_no_priority() -> None:
    status, (_, legs), (arrived,) = await arrivals()
    assert status == 200
    assert (arrived.priority, arrived.ttft_slo_s, arrived.tenant) == (0, None, "")
    assert all("priority" not in leg.body for leg in legs)


@pytest.mark.parametrize(
    ("flags", "submitted"), [((), 3), (("--schedule-low-priority-values-first",), -3)]
)
async def test_priority_goes_to_the_scheduler_and_on_to_both_engines(
    flags: tuple[str, ...], submitted: int
) -> None:
    _, (_, legs), (arrived,) = await arrivals(*flags, priority=3)
    assert arrived.priority == submitted
    assert [leg.body["priority"] for leg in legs] == [3, 3]


async def test_slo_and_tenant_come_by_header_and_end_here() -> None:
    _, (_, legs), (arrived,) = await arrivals(
        "--sbs-tenant-header",
        "X-Tenant-Id",
        headers={"X-SGL-TTFT-SLO-MS": "800", "x-tenant-id": "gold"},
    )
    assert (arrived.ttft_slo_s, arrived.tenant) == (0.8, "gold")
    assert len(legs) == 2
    for leg in legs:
        assert not {"x-sgl-ttft-slo-ms", "x-tenant-id"} & leg.headers.keys()


async def test_without_the_flag_nobody_is_a_tenant() -> None:
    _, _, (arrived,) = await arrivals(headers={"x-tenant-id": "gold"})
    assert arrived.tenant == ""


@pytest.mark.parametrize("priority", ["1", 1.5, True, [1], {}])
async def test_a_priority_that_is_no_whole_number_is_a_400(priority: Any) -> None:
    status, (answer, legs), arrived = await arrivals(priority=priority)
    assert status == 400
    assert answer["error"]["code"] == "invalid_request"
    assert "priority must be a whole number" in answer["error"]["message"]
    assert legs == arrived == []


@pytest.mark.parametrize("slo", ["", "0", "-5", "fast", "1e3", "nan", "1,2", "9" * 13])
async def test_an_slo_that_is_no_time_is_a_400(slo: str) -> None:
    status, (answer, _), arrived = await arrivals(headers={"x-sgl-ttft-slo-ms": slo})
    assert status == 400
    assert "x-sgl-ttft-slo-ms must be milliseconds above 0" in answer["error"]["message"]
    assert arrived == []


def test_a_header_that_is_there_twice_or_too_long_is_refused() -> None:
    slo = in_lower_case(CIMultiDict({"X-SGL-TTFT-SLO-MS": " 1500.5 "}))
    assert asked_in(slo, None) == RouterHeaders(1.5005, "")
    twice = in_lower_case(CIMultiDict([("x-t", "a"), ("X-T", "b")]))
    # Bytes that are not UTF-8 cannot be sent to the scheduler process.
    for headers in (twice, [("x-t", "a" * 65)], [("x-t", "a\udcff")]):
        with pytest.raises(RouterError) as error:
            asked_in(headers, "x-t")
        assert error.value.status == 400
        assert "x-t" in error.value.message
    assert asked_in(twice, None) == RouterHeaders()


def test_the_headers_are_not_among_those_that_go_on() -> None:
    headers = [("x-sgl-ttft-slo-ms", "5"), ("x-tenant-id", "a")]
    assert forwarded_headers(headers, "id") == b"x-request-id: id\r\n"


async def test_a_missed_slo_is_a_429_with_retry_after() -> None:
    async with cluster() as c:
        c.scheduler.refuse.append(Refuse(rid="", cause="slo", retry_after_s=2.4, message="no way"))
        async with c.post("/generate", {"text": "hi"}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "3"
            assert response.headers["X-SMG-Error-Code"] == "slo_unreachable"
            assert (await response.json())["error"]["message"] == "no way"


async def test_metrics_are_by_class_and_say_whether_the_slo_was_met() -> None:
    async with cluster() as c:
        for priority in (-3, 0, 7):
            body = {"text": "hi", "priority": priority}
            headers = {"x-sgl-ttft-slo-ms": "60000" if priority else "0.001"}
            async with c.post("/generate", body, headers=headers) as response:
                assert response.status == 200
        await c.settled()
        page = c.server.metrics.render().decode()
    for name in ("low", "normal", "high"):
        assert f'sbs_class_ttft_seconds_count{{class="{name}"}} 1.0' in page
        assert f'sbs_class_hold_seconds_count{{class="{name}"}} 1.0' in page
    assert 'sbs_slo_total{result="met"} 2.0' in page
    assert 'sbs_slo_total{result="missed"} 1.0' in page


# Flags ------------------------------------------------------------------------------------------


def test_flags_become_options() -> None:
    options = parse_flags(
        [
            *PD,
            *QUIET,
            *("--sbs-priority-step-ms", "1500", "--sbs-refuse-missed-slo"),
            *("--sbs-tenant-header", "X-Tenant-Id", "--sbs-tenant-weights", "gold=3,free=0.5"),
        ]
    )
    assert options.scheduler.priority_step_s == 1.5
    assert options.scheduler.refuse_missed_slo
    assert options.scheduler.tenant_weights == {"gold": 3.0, "free": 0.5}
    assert options.tenant_header == "x-tenant-id"
    assert not options.relay.low_priority_values_first
    assert options.warnings == ()


def test_all_of_it_is_off_by_default() -> None:
    options = parse_flags([*PD, *QUIET])
    assert not options.scheduler.refuse_missed_slo
    assert (options.scheduler.tenant_weights, options.tenant_header) == ({}, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--sbs-tenant-header", "a b"],
            "--sbs-tenant-header 'a b': write the name of a separate header",
        ),
        (["--sbs-tenant-header", "Authorization"], "--sbs-tenant-header"),
        (["--sbs-tenant-weights", "gold"], "--sbs-tenant-weights: 'gold': write NAME=WEIGHT"),
        (["--sbs-tenant-weights", "gold=1000"], "between 0.01 and 100"),
        (["--sbs-tenant-weights", "a=1,a=2"], "each name once"),
        (["--sbs-priority-step-ms", "0"], "--sbs-priority-step-ms"),
    ],
)
def test_a_bad_flag_says_what_to_write(flags: list[str], message: str) -> None:
    with pytest.raises(FlagError) as error:
        parse_flags([*PD, *QUIET, *flags])
    assert message in str(error.value)


def test_weights_without_a_header_are_warned_of() -> None:
    options = parse_flags([*PD, *QUIET, "--sbs-tenant-weights", "gold=3"])
    (warning,) = options.warnings
    assert "no effect without --sbs-tenant-header" in warning
