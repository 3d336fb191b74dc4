"""Workloads and the open-loop client."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from aiohttp import web

from benchmarks.demo.cli import parse_topology
from benchmarks.demo.load import Latency, Workload, run_load
from tools.stand_ins.ports import free_ports


def test_a_workload_is_reproducible_and_its_content_is_a_seed_of_its_own():
    base = {"qps": 10.0, "requests": 50, "max_prompt_tokens": 300}
    first, second = Workload(**base).arrivals(), Workload(**base).arrivals()
    assert first == second
    other = Workload(**base, content="second policy").arrivals()
    assert [a.at_s for a in other] == [a.at_s for a in first]
    assert [len(a.input_ids) for a in other] == [len(a.input_ids) for a in first]
    assert [a.input_ids for a in other] != [a.input_ids for a in first]


def test_latency_summarises_in_milliseconds():
    latency = Latency.of([0.1] * 99 + [1.0])
    assert (latency.mean, latency.p50, latency.p99) == pytest.approx((109, 100, 1000))


@pytest.fixture
async def engine(aiohttp_free_port: int):
    async def generate(request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if len(body["input_ids"]) == 1:
            return web.json_response({"error": "no"}, status=500)
        wanted = body["sampling_params"]["max_new_tokens"]
        given = wanted - 1 if len(body["input_ids"]) == 2 else wanted
        response = web.StreamResponse()
        await response.prepare(request)
        for i in range(1, given + 1):
            meta = {"id": "r", "completion_tokens": i, "finish_reason": None}
            if i == given:
                meta["finish_reason"] = {"type": "length"}
            await response.write(b"data: " + orjson.dumps({"meta_info": meta}) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", aiohttp_free_port).start()
    yield f"http://127.0.0.1:{aiohttp_free_port}"
    await runner.cleanup()


@pytest.fixture
def aiohttp_free_port() -> int:
    return free_ports(1)[0]


async def test_failures_and_short_answers_are_samples_with_a_reason(engine: str):
    workload = Workload(qps=1000, requests=3, max_prompt_tokens=50, max_new_tokens=4)
    arrivals = workload.arrivals()
    failing = [
        type(a)(a.at_s, ids, 4) for a, ids in zip(arrivals, ([1], [1, 2], [1, 2, 3]), strict=True)
    ]
    async with asyncio.timeout(10):
        samples = await run_load(engine, failing)
    assert [s.completed for s in samples] == [False, False, True]
    assert "HTTP 500" in samples[0].error
    assert "after 3 tokens" in samples[1].error
    assert samples[2].output_tokens == 4
    assert samples[2].rid == "r"
    assert 0 < samples[2].ttft_s <= samples[2].e2e_s


async def test_an_unreachable_server_is_a_failure_not_an_exception(aiohttp_free_port: int):
    arrivals = Workload(qps=1000, requests=2, max_prompt_tokens=5).arrivals()
    samples = await run_load(f"http://127.0.0.1:{aiohttp_free_port}", arrivals)
    assert [s.completed for s in samples] == [False, False]


@pytest.mark.parametrize("text", ["3P", "0P1D", "3P0D", "threeP1D", ""])
def test_a_bad_topology_says_what_to_write(text: str):
    with pytest.raises(ValueError, match="write e"):
        parse_topology(text)


def test_topologies():
    assert parse_topology("3P1D") == (3, 1)
    assert parse_topology("12p4d") == (12, 4)
