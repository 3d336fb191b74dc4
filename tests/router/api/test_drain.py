"""``POST /workers/{id}/drain`` keeps new requests away; what runs there ends normally."""

from __future__ import annotations

import asyncio
from typing import Any

from router_harness import Cluster, cluster, until

from sglang_sbs.scheduling.events import InstanceDown


async def change(c: Cluster, url: str, what: str, **kwargs: Any) -> tuple[int, Any]:
    worker = c.server.registry.get(url)
    assert worker is not None
    async with c.client.post(f"{c.url}/workers/{worker.id}/{what}", **kwargs) as response:
        answer = await response.json() if response.status != 401 else None
        return response.status, answer


async def stream(c: Cluster) -> Any:
    body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 4}}
    async with c.post("/generate", body) as response:
        assert response.status == 200
        return await response.read()


async def test_new_requests_go_elsewhere_and_running_ones_end() -> None:
    async with cluster("--policy", "round_robin", real=True, prefill=2, decode=2, decode_dp=1) as c:
        for engine in c.decode:
            engine.token_gate.close()
        before = [asyncio.create_task(stream(c)) for _ in range(4)]
        await until(lambda: all(len(engine.requests) == 2 for engine in c.decode))
        drained, other = c.decode
        status, shown = await change(c, drained.url, "drain")
        assert (status, shown["draining"], shown["usable"], shown["load"]) == (200, True, False, 2)
        after = [asyncio.create_task(stream(c)) for _ in range(6)]
        await until(lambda: len(other.requests) == 8)
        for engine in c.decode:
            engine.token_gate.open()
        answers = await asyncio.gather(*before, *after)
        assert all(answer.rstrip().endswith(b"[DONE]") for answer in answers)
        assert (len(drained.requests), len(other.requests)) == (2, 8)
        await c.settled()
        async with c.get("/workers") as response:
            workers = {worker["url"]: worker for worker in (await response.json())["workers"]}
        assert {url: worker["draining"] for url, worker in workers.items()} == {
            worker.url: worker is drained for worker in (*c.prefill, *c.decode)
        }
        assert workers[drained.url]["load"] == 0
        assert workers[drained.url]["is_healthy"]
        status, shown = await change(c, drained.url, "undrain")
        assert (status, shown["draining"], shown["usable"]) == (200, False, True)
        await asyncio.gather(*(stream(c) for _ in range(4)))
        assert (len(drained.requests), len(other.requests)) == (4, 10)


async def test_a_drained_worker_stays_drained_through_a_restart() -> None:
    async with cluster(real=True, prefill=2) as c:
        url = c.prefill[0].url
        registry = c.server.registry
        worker = registry.get(url)
        assert worker is not None
        downs: list[InstanceDown] = []

        def observe(event: Any, commands: Any, now_s: float) -> None:
            if isinstance(event, InstanceDown):
                downs.append(event)

        c.server.dispatcher.pump.observer = observe
        for _ in range(2):
            assert (await change(c, url, "drain"))[0] == 200
        registry.set_healthy(worker, False, "it restarts")
        registry.set_healthy(worker, True)
        assert not worker.usable
        # Each is sent to the scheduler: what it believed of the engine is over, then that it works.
        assert [worker.drained for worker in downs] == [True, False, True]
        await asyncio.gather(*(c.generate(text="a") for _ in range(4)))
        assert c.prefill[0].requests == []
        assert len(c.prefill[1].requests) == 4


async def test_with_every_worker_of_a_role_drained_the_router_is_not_ready() -> None:
    async with cluster("--sbs-outage-hold-secs", "0", real=True) as c:
        await change(c, c.decode[0].url, "drain")
        async with c.get("/readiness") as response:
            assert response.status == 503
        status, answer = await c.generate(text="a")
        assert (status, answer["error"]["code"]) == (503, "no_decode_servers")
        await change(c, c.decode[0].url, "undrain")
        assert (await c.generate(text="a"))[0] == 200


async def test_the_admin_key_is_needed_and_the_worker_must_exist() -> None:
    async with cluster("--admin-api-key", "the-admin-key") as c:
        url = c.prefill[0].url
        assert (await change(c, url, "drain"))[0] == 401
        headers = {"Authorization": "Bearer the-admin-key"}
        assert (await change(c, url, "drain", headers=headers))[0] == 200
        for name, status in (("7b8bb4b6-0000-4000-8000-000000000000", 404), ("p0", 400)):
            path = f"{c.url}/workers/{name}/drain"
            async with c.client.post(path, headers=headers) as response:
                assert response.status == status
