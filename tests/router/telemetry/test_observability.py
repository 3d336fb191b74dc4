"""Output for operators: logs with request ids, spans, the metrics their dashboards use."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from router_harness import cluster, until

from sglang_sbs.router import server
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.telemetry import logs, tracing
from sglang_sbs.router.telemetry.logs import JsonFormatter, current_request_id
from sglang_sbs.wire import EndForward
from tools.stand_ins.mock_engine import Behaviour

# Logs -------------------------------------------------------------------------------------------


class Lines(logging.Handler):
    """Log lines as they would be written."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonFormatter())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        assert "\n" not in text
        self.lines.append(json.loads(text))


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    handler = Lines()
    logger = logging.getLogger("sglang_sbs")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(before)


async def test_every_answer_is_a_line_with_the_id_of_its_request(lines: Any) -> None:
    async with cluster("--disable-retries") as c:
        for name, behaviour in (("one", Behaviour()), ("two", Behaviour(status=503))):
            c.decode[0].behaviours.append(behaviour)
            headers = {"X-Request-Id": name}
            async with c.post("/generate", {"text": "x"}, headers=headers) as response:
                await response.read()
        async with c.get("/nothing", headers={"X-Request-Id": "three\tbell"}) as response:
            assert response.status == 404
        async with c.get("/health") as response:
            assert response.status == 200
    answers = [line for line in lines if line["target"] == "sglang_sbs.access"]
    assert [(a["request_id"], a["status_code"], a["level"]) for a in answers[:3]] == [
        ("one", 200, "INFO"),
        ("two", 503, "ERROR"),
        ("three\tbell", 404, "WARNING"),
    ]
    assert answers[1]["error_code"] == "decode_unavailable"
    assert (answers[1]["method"], answers[1]["path"]) == ("POST", "/generate")
    assert answers[0]["latency_us"] > 0
    assert answers[3]["level"] == "DEBUG"


async def test_lines_about_a_request_carry_its_id_and_others_do_not(lines: Any) -> None:
    async with cluster(prefill=2, decode=2) as c:
        for engine in c.decode:
            engine.behaviours.append(Behaviour(status=500))
        headers = {"X-Request-Id": "mine"}
        async with c.post("/generate", {"text": "x"}, headers=headers) as response:
            assert response.status == 200
        c.server.registry.set_healthy(c.server.registry.of_role("decode")[0], False, "test")
    retries = [line for line in lines if "retrying" in line["message"]]
    assert retries and all(line["request_id"] == "mine" for line in retries)
    (down,) = (line for line in lines if "is down: test" in line["message"])
    assert "request_id" not in down


async def test_watching_a_worker_is_not_about_the_request_that_added_it(lines: Any) -> None:
    async with cluster() as c:
        body = {"url": "http://127.0.0.1:1", "worker_type": "decode"}
        async with c.post("/workers", body, headers={"X-Request-Id": "adds"}) as response:
            assert response.status == 202
        await until(lambda: any("not reachable yet" in line["message"] for line in lines))
    assert all("request_id" not in line for line in lines if "not reachable yet" in line["message"])


async def test_a_kept_connection_does_not_log_under_the_request_it_was_made_for(lines: Any) -> None:
    async with cluster() as c:
        headers = {"X-Request-Id": "first"}
        async with c.post("/generate", {"text": "x"}, headers=headers) as response:
            await response.read()
        connection = next(iter(c.server.pool._all))
        original = type(connection).connection_lost

        def spoken(self: Any, exc: Exception | None) -> None:
            logging.getLogger("sglang_sbs.test").info("connection ended")
            original(self, exc)

        type(connection).connection_lost = spoken  # type: ignore[method-assign]
        try:
            for engine in (*c.prefill, *c.decode):
                await engine.stop()
            await until(lambda: any(line["message"] == "connection ended" for line in lines))
        finally:
            type(connection).connection_lost = original  # type: ignore[method-assign]
    ended = [line for line in lines if line["message"] == "connection ended"]
    assert all("request_id" not in line for line in ended)


def test_an_exception_is_one_json_line() -> None:
    handler = Lines()
    logger = logging.Logger("sglang_sbs.test")
    logger.addHandler(handler)
    token = current_request_id.set("id-1")
    try:
        raise ValueError("bad\nnews")
    except ValueError:
        logger.exception("it failed", extra={"fields": {"worker": Path("/x")}})
    finally:
        current_request_id.reset(token)
    (line,) = handler.lines
    assert (line["level"], line["request_id"], line["worker"]) == ("ERROR", "id-1", "/x")
    assert "ValueError: bad\nnews" in line["exception"]


@pytest.mark.parametrize("as_json", [False, True])
def test_the_log_file_has_the_same_lines(tmp_path: Path, as_json: bool) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    token = current_request_id.set("id\n1")
    try:
        logs.set_up_logging("info", tmp_path / "logs", as_json=as_json, process="router")
        logging.getLogger("sglang_sbs.x").info("hello %s", "there")
        logging.getLogger("sglang_sbs.x").debug("not this")
    finally:
        current_request_id.reset(token)
        for handler in root.handlers:
            handler.close()
        root.handlers, root.level = before, level
    (line,) = (tmp_path / "logs" / "router.log").read_text().splitlines()
    if as_json:
        assert json.loads(line)["message"] == "hello there"
        assert json.loads(line)["request_id"] == "id\n1"
        assert json.loads(line)["process"].startswith("router ")
    else:
        assert line.endswith("sglang_sbs.x: [id?1] hello there")


# Traces -----------------------------------------------------------------------------------------


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Finished spans, newest last; ``--enable-trace`` is on for the routers of this test."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    exporter = memory.InMemorySpanExporter()
    monkeypatch.setattr(
        tracing, "_exporting_to", lambda endpoint: export.SimpleSpanProcessor(exporter)
    )
    return exporter.get_finished_spans


TRACE = ("--enable-trace", "--otlp-traces-endpoint", "collector:4317")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def by_name(spans: Any) -> dict[str, Any]:
    return {span.name: span for span in spans}


async def test_a_request_is_hold_dispatch_prefill_first_byte_end(spans: Any) -> None:
    async with cluster(*TRACE) as c:
        headers = {"traceparent": PARENT, "tracestate": "a=b", "X-Request-Id": "mine"}
        body = {"text": "x", "stream": True}
        async with c.post("/generate", body, headers=headers) as response:
            assert response.status == 200
            await response.read()
        await c.settled()
    named = by_name(spans())
    assert set(named) == {
        *("POST /generate", "attempt", "hold", "dispatch", "prefill", "first byte", "end"),
    }
    request, attempt = named["POST /generate"], named["attempt"]
    assert request.attributes["request_id"] == "mine"
    assert request.attributes["http.response.status_code"] == 200
    assert f"{request.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    assert attempt.parent.span_id == request.context.span_id
    assert attempt.attributes["outcome"] == "completed"
    assert attempt.attributes["sbs.reason"] == "round robin"
    steps = [named[name] for name in ("hold", "dispatch", "first byte", "end")]
    assert all(step.parent.span_id == attempt.context.span_id for step in steps)
    for earlier, later in itertools.pairwise(steps):
        assert earlier.end_time <= later.start_time or earlier.name == "dispatch"
        assert earlier.start_time <= later.start_time
    assert all(step.status.is_ok or step.status.is_unset for step in steps)
    # Engines' spans become children of the router's.
    for engine in (*c.prefill, *c.decode):
        (version, trace_id, span_id, _) = engine.requests[0].headers["traceparent"].split("-")
        assert (version, trace_id) == ("00", PARENT.split("-")[1])
        assert span_id == f"{request.context.span_id:016x}"
        assert engine.requests[0].headers["tracestate"] == "a=b"


async def test_every_attempt_has_its_own_spans(spans: Any) -> None:
    async with cluster(*TRACE, prefill=2, decode=2) as c:
        for engine in c.decode:
            engine.behaviours.append(Behaviour(status=500))
        assert (await c.generate(text="x"))[0] == 200
        await c.settled()
    attempts = [span for span in spans() if span.name == "attempt"]
    outcomes = [span.attributes["outcome"] for span in attempts]
    assert outcomes[-1] == "completed" and set(outcomes[:-1]) == {"failed"}
    assert len({span.context.trace_id for span in spans()}) == 1
    failed = [span for span in spans() if span.name == "first byte" and not span.status.is_ok]
    assert (
        len([span for span in failed if span.status.status_code.name == "ERROR"])
        == len(outcomes) - 1
    )


async def test_a_request_that_leaves_the_queue_has_only_been_held(spans: Any) -> None:
    async with cluster(*TRACE) as c:
        c.scheduler.hold = True
        task = asyncio.create_task(c.generate(text="x"))
        await until(lambda: c.scheduler.held)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await c.settled()
        await until(lambda: len(spans()) == 3)
    named = by_name(spans())
    assert set(named) == {"POST /generate", "attempt", "hold"}
    assert named["attempt"].attributes["outcome"] == "aborted"
    assert named["hold"].status.status_code.name == "ERROR"


async def test_without_the_packages_the_router_says_so_and_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    async with cluster(*TRACE) as c:
        assert c.server.traces is None
        assert (await c.generate(text="x"))[0] == 200
    assert "--enable-trace has no effect" in caplog.text
    assert "pip install 'sglang-sbs[trace]'" in caplog.text


def test_tracing_is_off_unless_asked_for() -> None:
    assert parse_flags([]).otlp_endpoint is None
    assert parse_flags(["--enable-trace"]).otlp_endpoint == "localhost:4317"
    assert server.open_traces is tracing.open_traces


# Metrics ----------------------------------------------------------------------------------------

STOCK_SERIES = """
    smg_http_requests_total{method,path} smg_http_responses_total{status_code,error_code}
    smg_http_request_duration_seconds_count{method,path} smg_http_connections_active{}
    smg_http_rate_limit_total{result}
    smg_router_requests_total{router_type,backend_type,connection_mode,model,endpoint,streaming}
    smg_router_request_duration_seconds_count{router_type,backend_type,connection_mode,model,endpoint}
    smg_router_request_errors_total{router_type,backend_type,connection_mode,model,endpoint,error_type}
    smg_worker_errors_total{worker_type,connection_mode,error_type}
    smg_worker_retries_total{worker_type,endpoint}
    smg_worker_retries_exhausted_total{worker_type,endpoint}
    smg_worker_cb_state{worker} smg_worker_cb_outcomes_total{worker,outcome}
    smg_worker_cb_consecutive_failures{worker} smg_worker_cb_consecutive_successes{worker}
    smg_worker_cb_transitions_total{worker,from,to}
    smg_worker_selection_total{worker_type,connection_mode,model,policy}
    smg_worker_requests_active{worker} smg_worker_health{worker}
    smg_worker_health_checks_total{worker_type,result}
    smg_worker_pool_size{worker_type,connection_mode,model} smg_worker_routing_keys_active{worker}
    smg_worker_retry_backoff_seconds_sum{attempt} smg_worker_retry_backoff_seconds_count{attempt}
    smg_http_inflight_request_age_count{gt,le}
"""
"""Series of sglang_router 0.3.2 in PD mode over HTTP, with the labels its dashboards select by."""
OUR_SERIES = """
    sbs_interval_seconds sbs_hold_seconds_count sbs_lead_error_seconds sbs_batch_fill_count
    sbs_active_ranks_count sbs_active_ranks_share_count sbs_chunk_utilisation_count
    sbs_rank_tokens_max_over_mean_count
    sbs_rank_c_avail_tokens sbs_rank_running_requests sbs_rank_kv_tokens sbs_signal_tier
    sbs_watchdog_fires_total sbs_refusals_total sbs_ledger_drift_requests
"""


def series(text: str) -> dict[str, set[str]]:
    """Labels by series."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            pairs = labels.rstrip("}").split('",')
            found.setdefault(name, set()).update(p.partition("=")[0] for p in pairs if p)
    return found


async def test_dashboards_of_the_stock_router_find_their_series() -> None:
    from sglang_sbs.scheduling import Scheduler, SchedulerConfig

    flags = ("--max-concurrent-requests", "1", "--queue-size", "0", "--retry-max-retries", "2")
    scheduler = Scheduler(SchedulerConfig())
    breaker = ("--cb-failure-threshold", "1", "--prefill", "http://127.0.0.1:1")
    async with cluster(*flags, *breaker, scheduler=scheduler, decode=2, wait=False) as c:
        await until(lambda: c.server.registry.ready)
        c.decode[0].behaviour = c.decode[1].behaviour = Behaviour(status=500)
        assert (await c.generate(text="x"))[0] == 500
        for sick, well in (c.decode, c.decode[::-1]):  # that one serves blames the other
            sick.behaviour, well.behaviour = Behaviour(status=500), Behaviour()
            assert (await c.generate(text="x"))[0] == 200
            if any(worker.breaker.state == "open" for worker in c.server.registry):
                break
        c.prefill[0].gate.close()
        inside = asyncio.create_task(c.generate(text="x"))
        await until(lambda: c.server.admission.running == 1)
        assert (await c.generate(text="y"))[0] == 429
        c.prefill[0].gate.open()
        await inside
        for engine in (*c.prefill, *c.decode):
            worker = c.server.registry.get(engine.url)
            assert worker is not None
            for rank in range(engine.dp_size):
                fields: dict[str, Any] = {"chunk_tokens": 1024, "extend_tokens": 512}
                fields |= {"forward_s": 0.1, "tokens_per_rank": [512] * engine.dp_size}
                report: EndForward = engine.report(rank, instance_id=engine.url, **fields)
                c.server.registry.reported(worker, report)
                c.server.scheduler._watch._reported(worker, report)
        text = c.server.metrics.render().decode()
    found = series(text)
    for wanted in STOCK_SERIES.split():
        name, _, labels = wanted.partition("{")
        assert name in found, name
        missing = set(filter(None, labels.rstrip("}").split(","))) - found[name]
        assert not missing, (name, missing)
    for name in OUR_SERIES.split():
        assert name in found, name


async def test_what_is_in_flight_is_counted_by_age_and_by_conversation() -> None:
    async with cluster() as c:
        metrics, (worker,) = c.server.metrics, c.server.registry.of_role("prefill")
        metrics.on_http_started("GET", "/old", time.monotonic() - 100)
        c.prefill[0].gate.close()
        keys = ("a", "b", "a", "")
        sent = [
            asyncio.create_task(posted(c, {"x-smg-routing-key": key} if key else {}))
            for key in keys
        ]
        await c.prefill[0].gate.arrived(len(keys))
        page = metrics.render().decode()
        assert f'smg_worker_routing_keys_active{{worker="{worker.url}"}} 2.0' in page
        assert 'smg_http_inflight_request_age_count{gt="0",le="30"} 4.0' in page
        assert 'smg_http_inflight_request_age_count{gt="60",le="180"} 1.0' in page
        c.prefill[0].gate.open()
        await asyncio.gather(*sent)
        await c.settled()
        page = metrics.render().decode()
        assert f'smg_worker_routing_keys_active{{worker="{worker.url}"}} 0.0' in page
        assert 'smg_http_inflight_request_age_count{gt="0",le="30"} 0.0' in page


async def posted(c: Any, headers: dict[str, str]) -> None:
    async with c.post("/generate", {"text": "x"}, headers=headers) as response:
        await response.read()
