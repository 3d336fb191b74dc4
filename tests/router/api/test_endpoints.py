"""Everything that is not inference: health, workers, keys, models, metrics, error shapes."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest
from router_harness import TIMEOUT_S, Cluster, cluster, options_for, until

from sglang_sbs.router.server import RouterServer
from sglang_sbs.scheduling.events import InstanceDown, InstanceUp
from tools.stand_ins.mock_engine import Behaviour, MockEngine


async def text_of(c: Cluster, path: str, **kwargs: Any) -> tuple[int, str]:
    async with c.get(path, **kwargs) as response:
        return response.status, await response.text()


async def test_health_is_served_before_any_worker_is_up() -> None:
    async with cluster(prefill=0, decode=0) as c:
        assert await text_of(c, "/health") == (200, "OK")
        assert await text_of(c, "/liveness") == (200, "OK")
        async with c.get("/readiness") as response:
            assert response.status == 503
            assert await response.json() == {
                "status": "not ready",
                "reason": "insufficient healthy workers",
            }


async def test_ready_means_a_real_pair() -> None:
    async with cluster(decode=0) as c:
        assert (await text_of(c, "/readiness"))[0] == 503
        engine = MockEngine("decode")
        await engine.start()
        try:
            body = {"url": engine.url, "worker_type": "decode"}
            async with c.post("/workers", body) as response:
                added = await response.json()
                assert response.status == 202
                assert response.headers["Location"] == f"/workers/{added['worker_id']}"
                assert added["status"] == "accepted"
            await until(lambda: c.server.registry.ready)
            async with c.get("/readiness") as response:
                assert await response.json() == {
                    "status": "ready",
                    "healthy_workers": 2,
                    "total_workers": 2,
                }
            async with c.client.delete(c.url + response_path(added)) as response:
                assert response.status == 202
            assert (await text_of(c, "/readiness"))[0] == 503
            assert c.scheduler.of(InstanceDown)[-1].instance == engine.url
            assert (await text_of(c, response_path(added)))[0] == 404
        finally:
            await engine.stop()


def response_path(added: dict[str, Any]) -> str:
    return f"/workers/{added['worker_id']}"


async def test_workers_are_listed_in_the_stock_shape() -> None:
    async with cluster(prefill=2) as c:
        async with c.get("/workers") as response:
            listed = await response.json()
        assert listed["total"] == 3
        assert listed["stats"] == {"prefill_count": 2, "decode_count": 1, "regular_count": 0}
        first = listed["workers"][0]
        assert first["worker_type"] == "prefill"
        assert (first["model_id"], first["is_healthy"], first["load"]) == ("mock", True, 0)
        assert (first["bootstrap_port"], first["connection_mode"]) == (9000, "HTTP")
        assert (first["dp_size"], first["chunk_tokens"]) == (2, 1024)
        async with c.get(f"/workers/{first['id']}") as response:
            assert (await response.json())["url"] == first["url"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"url": "http://x:1"},
        {"url": "http://x:1", "worker_type": "regular"},
        {"url": "ftp://x", "worker_type": "decode"},
        {"url": "http://x:1", "worker_type": "prefill", "bootstrap_port": 0},
    ],
)
async def test_bad_workers_are_refused(body: dict[str, Any]) -> None:
    async with cluster() as c, c.post("/workers", body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"]


async def test_models_and_infos_come_from_the_workers() -> None:
    async with cluster() as c:
        async with c.get("/v1/models") as response:
            models = await response.json()
        assert [(m["id"], m["object"]) for m in models["data"]] == [("mock", "model")]
        for path in ("/model_info", "/get_model_info"):
            async with c.get(path) as response:
                assert (await response.json())["is_generation"] is True
        for path in ("/server_info", "/get_server_info"):
            async with c.get(path) as response:
                info = await response.json()
            assert info["version"] == "0.5.23"
            assert info["disaggregation_mode"] == "prefill"
            assert len(info["prefill"]) == len(info["decode"]) == 1
            assert len(info["internal_states"]) == 4
            assert info["sbs"]["policy"] == "fake"
        assert (await text_of(c, "/health_generate")) == (200, "OK")


async def test_without_a_worker_infos_are_a_clean_503() -> None:
    async with cluster(prefill=0, decode=0) as c, c.get("/model_info") as response:
        assert response.status == 503
        assert response.headers["X-SMG-Error-Code"] == "no_prefill_servers"


async def test_flush_cache_and_loads_ask_every_worker() -> None:
    async with cluster() as c:
        async with c.post("/flush_cache", {}) as response:
            answer = await response.json()
            assert response.status == 200
        assert (answer["status"], answer["workers_flushed"]) == ("success", 2)
        await c.decode[0].stop()
        async with c.post("/flush_cache", {}) as response:
            assert response.status == 206
            assert (await response.json())["status"] == "partial_success"
        for path in ("/get_loads", "/v1/loads"):
            async with c.get(path) as response:
                loads = (await response.json())["loads"]
            assert [load["worker_type"] for load in loads] == ["prefill", "decode"]
            assert len(loads[0]["details"]) == 2
            assert loads[1]["details"] is None


async def test_engine_metrics_are_one_valid_page() -> None:
    async with cluster() as c:
        assert (await text_of(c, "/engine_metrics"))[0] == 503
        for engine, value in ((c.prefill[0], 3), (c.decode[0], 4)):
            engine.metrics_page = (
                "# HELP sglang:num_running_reqs Running\n# TYPE sglang:num_running_reqs gauge\n"
                f'sglang:num_running_reqs{{model="m"}} {value}\n'
            )
        status, text = await text_of(c, "/engine_metrics")
        assert status == 200
        assert text.count("# TYPE sglang_num_running_reqs gauge") == 1
        for engine, value in ((c.prefill[0], 3), (c.decode[0], 4)):
            assert f'{{model="m",worker_addr="{engine.url}"}} {value}\n' in text
        c.decode[0].metrics_page = "no { metrics"
        assert c.prefill[0].url in (await text_of(c, "/engine_metrics"))[1]


async def test_unknown_routes_are_404_and_known_gaps_501() -> None:
    async with cluster() as c:
        assert await text_of(c, "/nothing/here") == (404, "")
        async with c.post("/v1/embeddings", {}) as response:
            assert response.status == 501
            error = (await response.json())["error"]
            assert error["code"] == response.headers["X-SMG-Error-Code"] == "not_implemented"
            assert error["message"] == "Embeddings not implemented"
        async with c.get("/generate") as response:
            assert response.status == 405


async def test_keys() -> None:
    async with cluster("--api-key", "user", "--admin-api-key", "boss") as c:
        user, boss = {"Authorization": "Bearer user"}, {"Authorization": "Bearer boss"}
        async with c.post("/generate", {"text": "x"}) as response:
            assert response.status == 401
            assert await response.read() == b""
        async with c.post("/generate", {"text": "x"}, headers=user) as response:
            assert response.status == 200
            await response.read()
        for headers, status in (({}, 401), (user, 401), (boss, 200)):
            assert (await text_of(c, "/workers", headers=headers))[0] == status
        for path in ("/health", "/liveness", "/readiness", "/v1/models"):
            assert (await text_of(c, path))[0] == 200


async def test_bodies_over_the_limit_are_413() -> None:
    body = {"text": "x" * 2000}
    async with cluster("--max-payload-size", "1000") as c, c.post("/generate", body) as response:
        assert response.status == 413
        assert response.headers["X-SMG-Error-Code"] == "payload_too_large"


@pytest.mark.parametrize(
    ("path", "prefix"),
    [("/v1/chat/completions", "chatcmpl-"), ("/v1/completions", "cmpl-"), ("/health", "req-")],
)
async def test_request_ids_have_the_stock_form(path: str, prefix: str) -> None:
    async with cluster() as c:
        method = "GET" if path == "/health" else "POST"
        async with c.client.request(method, c.url + path, json={}) as response:
            identifier = response.headers["x-request-id"]
        assert re.fullmatch(prefix + "[A-Za-z0-9]{24}", identifier)
        headers = {"X-Correlation-Id": "abc"}
        async with c.client.request(method, c.url + path, json={}, headers=headers) as response:
            assert response.headers["x-request-id"] == "abc"


async def test_browsers_may_come_from_anywhere_by_default() -> None:
    async with cluster() as c:
        async with c.client.options(c.url + "/generate", headers={"Origin": "x"}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "*"
        async with c.post("/generate", {"text": "x", "stream": True}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "*"


async def test_cors() -> None:
    async with cluster("--cors-allowed-origins", "https://a.example") as c:
        headers = {"Origin": "https://a.example"}
        async with c.client.options(c.url + "/generate", headers=headers) as response:
            assert response.status == 200
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
        async with c.get("/health", headers={"Origin": "https://b.example"}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers
        body = {"text": "x", "stream": True}
        async with c.post("/generate", body, headers=headers) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"


async def test_metrics_are_on_a_port_of_their_own() -> None:
    async with cluster("--disable-retries") as c:
        await c.generate(text="x")
        c.decode[0].behaviour = Behaviour(status=500)
        await c.generate(text="x")
        await c.settled()
        url = f"http://127.0.0.1:{c.server.prometheus_port}/metrics"
        async with c.client.get(url) as response:
            text = await response.text()
        for line in (
            "sbs_hold_seconds_count 2.0",
            'sbs_attempts_total{outcome="completed"} 1.0',
            'sbs_attempts_total{outcome="failed"} 1.0',
            'error_type="decode_internal_error"',
            f'smg_worker_health{{worker="{c.decode[0].url}",worker_type="decode"}} 1.0',
            f'sbs_dispatches_total{{dp_rank="1",worker="{c.decode[0].url}"',
            'smg_http_responses_total{error_code="decode_internal_error",status_code="500"} 1.0',
            "smg_pd_ttft_seconds_count 1.0",
            "sbs_queue_requests 0.0",
            'smg_router_requests_total{backend_type="pd",connection_mode="http",'
            'endpoint="generate",model="mock",router_type="http",streaming="false"} 2.0',
            'smg_router_request_errors_total{backend_type="pd",connection_mode="http",'
            'endpoint="generate",error_type="decode_internal_error",model="mock"',
        ):
            assert line in text, line
        assert (await text_of(c, "/metrics"))[0] == 404


# Workers that come, go and lie --------------------------------------------------------------------


async def test_a_worker_that_dies_is_replaced_and_returns_after_a_restart() -> None:
    async with cluster("--health-success-threshold", "1", decode=2) as c:
        dead = c.decode[0]
        port = dead.port
        await dead.stop()
        for _ in range(4):
            assert (await c.generate(text="x"))[0] == 200
        assert c.scheduler.of(InstanceDown)[0].instance == f"http://127.0.0.1:{port}"
        assert len(c.server.registry.usable("decode")) == 1
        ups = len(c.scheduler.of(InstanceUp))
        await dead.start(port)
        await until(lambda: len(c.scheduler.of(InstanceUp)) > ups)
        assert c.scheduler.of(InstanceUp)[-1].instance == dead.url


async def test_health_uses_a_check_that_costs_nothing() -> None:
    async with cluster("--health-check-interval-secs", "0.01") as c:
        await until(lambda: c.prefill[0].hits.get("/ready", 0) >= 2)
        assert "/health" not in c.prefill[0].hits
        c.prefill[0].has_ready = False
        before = c.prefill[0].hits["/ready"]
        await until(lambda: c.prefill[0].hits["/ready"] > before + 1)
        assert all(worker.usable for worker in c.server.registry)


async def test_a_worker_that_is_not_ready_is_taken_down_after_the_threshold() -> None:
    flags = ("--health-check-interval-secs", "0.01", "--health-failure-threshold", "1")
    async with cluster(*flags) as c:
        c.decode[0].ready_status = 503
        await until(lambda: not c.server.registry.ready)
        worker = c.server.registry.get(c.decode[0].url)
        assert worker is not None
        assert "503" in worker.problems["unhealthy"]


@pytest.mark.parametrize(
    ("info", "kind", "word"),
    [
        ({"version": "0.5.5"}, "unusable", "0.5.6"),
        ({"disaggregation_mode": "prefill"}, "unusable", "--disaggregation-mode"),
    ],
)
async def test_unusable_workers_are_named_with_the_reason(
    info: dict[str, Any], kind: str, word: str
) -> None:
    engine = MockEngine("decode", server_info=info)
    await engine.start()
    try:
        async with cluster() as c:
            worker = await c.server.scheduler.add_worker(engine.url, "decode", None)
            await until(lambda: kind in worker.problems)
            assert word in worker.problems[kind]
            assert not worker.usable
            async with c.get(f"/workers/{worker.id}") as response:
                assert word in (await response.json())["problems"][kind]
    finally:
        await engine.stop()


async def test_shutdown_lets_requests_end_and_aborts_the_rest() -> None:
    prefill, decode = MockEngine("prefill"), MockEngine("decode")
    await prefill.start()
    await decode.start()
    server = RouterServer(options_for([prefill], [decode], "--policy", "round_robin"))
    await server.start()
    import aiohttp

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as client:
        await until(lambda: server.registry.ready)
        url = f"http://127.0.0.1:{server.port}"
        decode.gate.close()
        ends = asyncio.create_task(client.post(url + "/generate", json={"text": "a"}))
        stays = asyncio.create_task(client.post(url + "/generate", json={"text": "b"}))
        await decode.gate.arrived(2)
        stop = asyncio.create_task(server.stop(grace_s=0.5))
        await until(lambda: server.in_flight.draining)
        decode.gate.release(1)
        done, _ = await asyncio.wait({ends, stays}, return_when=asyncio.FIRST_COMPLETED)
        assert done.pop().result().status == 200
        await stop
        statuses = {task.result().status for task in (ends, stays) if not task.exception()}
        assert statuses <= {200, 499}
        aborted = [r for r in decode.requests if r.aborted.is_set() or r.disconnected.is_set()]
        assert len(aborted) == 1
    await prefill.stop()
    await decode.stop()


@pytest.mark.parametrize(
    ("engine_says", "limit", "shown"),
    [
        (40_960, 40_954, 40_960),
        (40_960, None, 40_960),
        (None, 40_954, 40_954),
        ("many", 40_954, 40_954),
        (2**63, 40_954, 40_954),
        (None, None, None),
    ],
)
async def test_the_context_length_of_a_model_is_what_its_engine_says(
    engine_says: Any, limit: int | None, shown: int | None
) -> None:
    async with cluster() as c:
        for engine in (*c.prefill, *c.decode):
            engine.max_model_len = engine_says
        for worker in c.server.registry:
            assert worker.info is not None
            worker.info = msgspec.structs.replace(worker.info, max_request_tokens=limit or 0)
        async with c.get("/v1/models") as response:
            (card,) = (await response.json())["data"]
        assert card["max_model_len"] == shown
