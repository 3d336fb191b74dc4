"""Short outages as clients and operators see them: held requests, one line, what DELETE says."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from urllib.parse import quote

import pytest
from router_harness import Cluster, cluster, until

from sglang_sbs.router.telemetry import logs

ACCESS = "sglang_sbs.access"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_missed_health_check_of_the_last_worker_refuses_none_of_58(role: str) -> None:
    async with cluster("--sbs-outage-hold-secs", "600", real=True) as c:
        (worker,) = c.server.registry.of_role(role)  # type: ignore[arg-type]
        c.server.registry.set_healthy(worker, False, "GET /ping: no answer in time")
        asked = [asyncio.create_task(c.generate(text="a")) for _ in range(58)]
        await until(lambda: c.server.dispatcher.waiting == 58)
        c.server.registry.set_healthy(worker, True)
        answers = await asyncio.gather(*asked)
        assert [status for status, _ in answers] == [200] * 58
        await c.settled()


async def test_clients_that_leave_while_they_are_held_leave_nothing(caplog: Any) -> None:
    async with cluster("--sbs-outage-hold-secs", "600", real=True) as c:
        (worker,) = c.server.registry.of_role("decode")
        c.server.registry.set_healthy(worker, False, "GET /ping: no answer in time")
        asked = [asyncio.create_task(c.generate(text="a")) for _ in range(4)]
        await until(lambda: c.server.dispatcher.waiting == 4)
        for task in asked:
            task.cancel()
        await c.settled()
        assert c.server.dispatcher.snapshot().queue_requests == 0


async def test_refusals_are_one_line_and_a_count(caplog: Any) -> None:
    caplog.set_level(logging.INFO, ACCESS)
    async with cluster("--sbs-outage-hold-secs", "0", real=True, decode=2) as c:
        for worker in c.server.registry.of_role("decode"):
            c.server.registry.set_healthy(worker, False, "GET /ping: no answer in time")
        for _ in range(20):
            assert (await c.generate(text="a"))[0] == 503
        lines = [record.getMessage() for record in caplog.records if record.name == ACCESS]
        assert len(lines) == 1
        assert "POST /generate 503 no_decode_servers" in lines[0]
    last = [record for record in caplog.records if record.name == ACCESS][-1]
    assert last.getMessage() == "503 no_decode_servers: 19 more refused within 5 s"
    assert last.levelno == logging.ERROR


async def test_refusals_are_counted_by_kind_until_there_are_none(caplog: Any) -> None:
    caplog.set_level(logging.INFO, ACCESS)
    refusals = logs.RefusalLog(every_s=0.001)
    assert refusals.is_news(200, "")
    assert refusals.is_news(200, "")
    assert refusals.is_news(503, "no_decode_servers")
    assert refusals.is_news(429, "queue_full")
    assert not refusals.is_news(503, "no_decode_servers")
    assert not refusals.is_news(503, "no_decode_servers")
    await until(lambda: caplog.records)
    assert [record.getMessage() for record in caplog.records] == [
        "503 no_decode_servers: 2 more refused within 0.001 s"
    ]
    # Nothing was refused for a while, so the next one is news again.
    await until(lambda: refusals.is_news(503, "no_decode_servers"))


async def delete(c: Cluster, path: str) -> tuple[int, Any]:
    async with c.client.delete(c.url + path) as response:
        return response.status, await response.json()


async def test_a_worker_is_removed_by_its_url_and_the_answer_says_what_that_did() -> None:
    async with cluster(real=True, prefill=3) as c:
        first, second, third = (engine.url for engine in c.prefill)
        status, answer = await delete(c, f"/workers?url={quote(first, safe='')}")
        assert (status, answer["url"], answer["worker_type"], answer["load"]) == (
            202,
            first,
            "prefill",
            0,
        )
        assert answer["message"] == f"{first} (prefill) is removed and gets no new requests"
        assert c.server.registry.get(first) is None
        c.decode[0].token_gate.close()
        body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 4}}
        async with c.post("/generate", body) as stream:
            url = c.decode[0].url
            status, answer = await delete(c, f"/workers/{quote(url, safe='')}")
            assert (status, answer["load"]) == (202, 1)
            assert "1 request in flight there may run to their end" in answer["message"]
            assert "no other decode worker is usable" in answer["message"]
            c.decode[0].token_gate.open()
            assert (await stream.read()).rstrip().endswith(b"[DONE]")
        worker = c.server.registry.get(second)
        assert worker is not None
        assert (await delete(c, f"/workers/{worker.id}"))[1]["worker_id"] == worker.id
        assert [worker.url for worker in c.server.registry] == [third]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/workers", 400),
        ("/workers?url=", 400),
        ("/workers?url=p0", 400),
        ("/workers?url=http%3A%2F%2Fnobody%3A1", 404),
        ("/workers/http%3A%2F%2Fnobody%3A1", 404),
        ("/workers/http%3A%2F%2Fa%3Ab%3Ac", 404),
        ("/workers/p0", 400),
    ],
)
async def test_what_is_no_worker_is_not_removed(path: str, status: int) -> None:
    async with cluster() as c:
        answer = await delete(c, path)
        assert answer[0] == status
        assert answer[1]["error"]
        assert len(c.server.registry) == 2
