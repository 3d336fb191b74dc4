"""A batch that is over sends nothing more: not what its engines refused, not what nobody reads."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from router_harness import Cluster, cluster, sse_events, until

from sglang_sbs.router.relay import event_reader
from sglang_sbs.scheduling.events import Refuse, RequestArrived
from tools.stand_ins.mock_script import Behaviour

UNITS = 40


async def held(c: Cluster) -> asyncio.Task[tuple[int, Any]]:
    """A batch of which every unit waits for the scheduler."""
    c.scheduler.hold = True
    asking = asyncio.create_task(c.generate(text=["x"] * UNITS))
    await until(lambda: len(c.scheduler.held) == UNITS)
    return asking


def let_go(c: Cluster, refused: RequestArrived | None = None) -> None:
    """All at once, as a policy may; ``refused`` is not taken, and gets its refusal first."""
    dispatcher: Any = c.server.dispatcher
    c.scheduler.hold = False
    if refused is not None:
        refusal = Refuse(rid=refused.rid, cause="deadline", retry_after_s=1.0, message="late")
        dispatcher._on_decided(refusal)
    for event in c.scheduler.held.values():
        if event is not refused:
            dispatcher._on_decided(c.scheduler._place(event))


def received(c: Cluster) -> int:
    return sum(len(engine.requests) for engine in (*c.prefill, *c.decode))


async def test_when_a_unit_is_refused_those_that_only_wait_are_not_sent() -> None:
    async with cluster() as c:
        asking = await held(c)
        let_go(c, refused=next(iter(c.scheduler.held.values())))
        status, answer = await asking
        assert (status, answer["error"]["code"]) == (503, "queue_timeout")
        await c.settled()
        assert received(c) == 0
        assert c.scheduler.ended() == ["aborted"] * (UNITS - 1)
        assert len(c.server.in_flight) == 0


async def test_when_the_client_has_left_those_that_only_wait_are_not_sent() -> None:
    async with cluster() as c:
        for engine in (*c.prefill, *c.decode):
            engine.gate.close()  # what is sent is not answered
        asking = await held(c)
        let_go(c)
        c.server.in_flight.abort()
        status, _ = await asking
        assert status == 499
        await c.settled()
        assert received(c) <= UNITS // 2, "but for the first few, which leave in that very moment"
        assert set(c.scheduler.ended()) == {"aborted"}
        assert len(c.server.in_flight) == 0


@pytest.mark.parametrize("more", [{"rid": "mine"}, {"text": ["x", "x"]}], ids=["edited", "merged"])
async def test_too_long_an_event_blames_no_engine(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_reader, "MAX_EVENT_BYTES", 100_000)
    async with cluster() as c:
        tail = b"data: " + orjson.dumps({"text": "x" * 200_000}) + b"\n\n"
        c.decode[0].behaviour = Behaviour(garbage_tail=tail)
        async with c.post("/generate", {"text": "x", "stream": True} | more) as response:
            events = sse_events(await response.read())
        assert events[-1]["error"]["code"] == "decode_answer_too_large"
        assert events[-1]["error"]["status"] == 413
        await c.settled()
        worker = c.server.registry.get(c.decode[0].url)
        assert worker is not None and worker.failures == 0
        c.check_books()
