"""DP ranks that join or leave an engine while it runs, in a running router."""

from __future__ import annotations

import asyncio
from typing import Any

from router_harness import cluster, until

from tools.stand_ins.kv_publisher import KvPublisher
from tools.stand_ins.ports import free_ports

ELASTIC = {"elastic_ep_backend": "mooncake"}


async def test_endforward_of_a_rank_that_joined_brings_it_in_and_loses_no_request() -> None:
    first = free_ports(6)[0]
    publishers = [KvPublisher(first + d, first + 3 + d, dp_rank=d) for d in range(3)]
    says: dict[str, Any] = {
        **ELASTIC,
        "page_size": 4,
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": first,
            "replay_endpoint_port_base": first + 3,
            "topic": "",
            "block_size": 4,
            "dp_size": 2,
        },
    }
    for publisher in publishers:
        await publisher.start()
    try:
        async with cluster(sbs_block=True, prefill_says=says) as c:
            (engine,) = c.prefill
            (worker,) = c.server.registry.of_role("prefill")
            engine.gate.close()
            before = asyncio.create_task(c.generate(text="x"))
            await engine.gate.arrived(1)
            engine.dp_size = says["kv_events"]["dp_size"] = 3
            assert not c.server.registry.reported(worker, engine.report(2))
            await until(lambda: c.scheduler.up[engine.url].dp_size == 3)
            assert worker.usable and not worker.problems.get("dp_size")
            # The KV events of the rank that joined are followed: it is asked for its past.
            await until(lambda: publishers[2].replays)
            engine.gate.open()
            assert (await before)[0] == 200
            answers = [await c.generate(text="x") for _ in range(3)]
            assert [status for status, _ in answers] == [200] * 3
            rooms = {request.body["bootstrap_room"] % 3 for request in engine.requests[1:]}
            assert rooms == {0, 1, 2}
            assert c.server.registry.reported(worker, engine.report(2))
            await c.settled()
            c.check_books()
    finally:
        for publisher in publishers:
            publisher.stop()


async def test_a_health_check_finds_that_ranks_left_an_engine_without_plugin() -> None:
    says = dict(ELASTIC)
    often = {"health_interval_s": 0.05, "recheck_every_s": 0.0}
    async with cluster(prefill_says=says, monitor=often) as c:
        (engine,) = c.prefill
        engine.dp_size = 1
        await until(lambda: c.scheduler.up[engine.url].dp_size == 1)
        assert (await c.generate(text="x"))[0] == 200
        c.check_books()


async def test_a_request_for_a_rank_that_left_since_it_was_chosen_is_tried_again() -> None:
    async with cluster(prefill=2, prefill_says=dict(ELASTIC)) as c:
        place, wrong = c.scheduler._place, iter([9])

        def once(event: Any) -> Any:
            command = place(event)
            fields = {name: getattr(command, name) for name in command.__struct_fields__}
            return type(command)(**fields | {"prefill_rank": next(wrong, 0)})

        c.scheduler._place = once  # type: ignore[method-assign]
        assert (await c.generate(text="x"))[0] == 200
        await c.settled()
        c.check_books()
