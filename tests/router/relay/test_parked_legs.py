"""Decode requests whose KV may be on its way get neither an abort nor a closed connection, where
their engine would free the pages at once (``relay/parking.py``)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from router_harness import Cluster, cluster, until

from sglang_sbs.router.relay import parking
from sglang_sbs.router.relay.in_flight import Attempt
from sglang_sbs.scheduling.events import PrefillDone, RequestEnded
from tools.stand_ins.mock_engine import Behaviour, MockEngine
from tools.stand_ins.mock_script import RecordedRequest

OLD = {"version": "0.5.20", "disaggregation_transfer_backend": "mooncake"}
LONG = ("--kv-transfer-timeout-secs", "3600")
SHORT = ("--kv-transfer-timeout-secs", "0.05")
ONE_TRY = ("--disable-retries",)


@asynccontextmanager
async def held(*flags: str, says: dict[str, Any] = OLD, **kwargs: Any) -> AsyncIterator[Cluster]:
    """A cluster whose engines keep what they get; all is let go of at the end."""
    async with cluster(*flags, decode_says=says, **kwargs) as c:
        for engine in (*c.prefill, *c.decode):
            engine.gate.close()
        try:
            yield c
        finally:
            for engine in (*c.prefill, *c.decode):
                engine.gate.open()
            let_go(c)
            await c.settled()
            c.check_books()


def let_go(c: Cluster) -> None:
    for pair in list(c.server.in_flight.parking._parked):
        c.server.in_flight.parking.release(pair)


async def leave(c: Cluster, *, stream: bool) -> tuple[RecordedRequest, RecordedRequest]:
    """A client that leaves while both engines have its request; what they got."""
    async with aiohttp.ClientSession() as session:
        body = {"text": "x", "stream": stream}
        task = asyncio.create_task(_post(session, c.url + "/generate", body))
        await c.prefill[0].gate.arrived(1)
        await c.decode[0].gate.arrived(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return c.prefill[0].requests[-1], c.decode[0].requests[-1]


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with session.post(url, json=body) as response:
        await response.read()


def untouched(engine: MockEngine, request: RecordedRequest) -> bool:
    """Neither an abort nor a FIN."""
    return request.rid not in engine.aborts and not request.disconnected.is_set()


async def parked(c: Cluster) -> None:
    await until(lambda: len(c.server.in_flight.parking) == 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_is_aborted_and_decode_is_parked(stream: bool) -> None:
    async with held(*LONG) as c:
        prefill, decode = await leave(c, stream=stream)
        await c.prefill[0].aborted(prefill.rid)
        await parked(c)
        assert untouched(c.decode[0], decode)
        done = c.scheduler.of(PrefillDone)
        assert [event.aborted for event in done] == [True]
        assert c.scheduler.of(RequestEnded) == []
        worker = c.server.registry.get(c.decode[0].url)
        assert worker is not None and worker.active == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_decode_byte_ends_a_parked_request(stream: bool) -> None:
    async with held(*LONG) as c:
        c.decode[0].token_gate.close()
        _, decode = await leave(c, stream=stream)
        await parked(c)
        c.prefill[0].gate.open()
        c.decode[0]._rooms.prefilled(int(decode.body["bootstrap_room"]))
        assert untouched(c.decode[0], decode)
        c.decode[0].gate.open()
        await until(lambda: len(c.server.in_flight.parking) == 0)
        if stream:
            await c.decode[0].aborted(decode.rid)
        c.decode[0].token_gate.open()


async def test_prefill_that_answers_200_ends_it() -> None:
    async with held(*LONG) as c:
        for engine in c.prefill:
            engine.gate.open()
            engine.reply_gate.close()
        c.prefill[0].ignores_aborts = True
        async with aiohttp.ClientSession() as session:
            task = asyncio.create_task(_post(session, c.url + "/generate", {"text": "x"}))
            await c.prefill[0].reply_gate.arrived(1)
            await c.decode[0].gate.arrived(1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        decode = c.decode[0].requests[-1]
        await parked(c)
        assert untouched(c.decode[0], decode)
        c.prefill[0].reply_gate.open()
        await c.decode[0].aborted(decode.rid)


async def test_the_transfer_time_out_after_prefills_end_ends_it() -> None:
    async with held(*SHORT) as c:
        prefill, decode = await leave(c, stream=True)
        await c.prefill[0].aborted(prefill.rid)
        await c.decode[0].aborted(decode.rid)


async def test_the_time_out_does_not_run_while_prefill_has_not_answered() -> None:
    async with held(*SHORT) as c:
        c.prefill[0].ignores_aborts = True
        _, decode = await leave(c, stream=True)
        await parked(c)
        await asyncio.sleep(0.2)  # four time-outs
        assert untouched(c.decode[0], decode)


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_request_that_prefill_refused_is_aborted_at_once(status: int) -> None:
    async with held(*LONG, *ONE_TRY) as c:
        c.prefill[0].behaviour = Behaviour(status=status)
        answer = asyncio.create_task(c.generate(text="x"))
        await c.decode[0].gate.arrived(1)
        c.prefill[0].gate.open()
        assert (await answer)[0] == status
        await c.decode[0].aborted(c.decode[0].requests[0].rid)
        assert c.server.in_flight.parking.parked_total == 0


async def test_a_request_that_prefill_never_got_is_aborted_at_once() -> None:
    async with held(*LONG, *ONE_TRY) as c:
        await c.prefill[0].stop()
        assert (await c.generate(text="x"))[0] == 502
        assert c.server.in_flight.parking.parked_total == 0


@pytest.mark.parametrize("fault", ["reset_before_head", None])
async def test_a_retry_does_not_wait(fault: Any) -> None:
    async with held(*LONG, prefill=2) as c:
        fails_once = deque([Behaviour(fault=fault, status=200 if fault else 500)])
        for engine in c.prefill:
            engine.behaviours = fails_once  # whichever is asked first
        answer = asyncio.create_task(c.generate(text="x"))
        await c.decode[0].gate.arrived(1)
        for engine in c.prefill:
            engine.gate.open()
        await c.decode[0].gate.arrived(2)
        await parked(c)
        first, second = c.decode[0].requests
        assert first.rid != second.rid
        assert untouched(c.decode[0], first) and untouched(c.decode[0], second)
        c.decode[0].gate.open()
        assert (await answer)[0] == 200


async def test_a_time_out_parks() -> None:
    async with held(*LONG, "--request-timeout-secs", "0.3") as c:
        assert (await c.generate(text="x"))[0] == 504
        await parked(c)
        assert untouched(c.decode[0], c.decode[0].requests[0])


async def test_an_abort_by_rid_parks() -> None:
    async with held(*LONG) as c:
        answer = asyncio.create_task(c.generate(text="x", rid="mine"))
        await c.decode[0].gate.arrived(1)
        async with c.post("/abort_request", {"rid": "mine"}) as response:
            assert response.status == 200
        assert (await answer)[0] == 499
        await parked(c)
        assert untouched(c.decode[0], c.decode[0].requests[0])


async def test_a_shutdown_waits_for_parked_requests(caplog: pytest.LogCaptureFixture) -> None:
    async with held("--kv-transfer-timeout-secs", "0.5") as c:
        c.prefill[0].ignores_aborts = True
        answer = asyncio.create_task(c.generate(text="x"))
        await c.decode[0].gate.arrived(1)
        decode = c.decode[0].requests[0]
        stopping = asyncio.create_task(c.server.stop(grace_s=0.0))
        await answer
        await parked(c)
        assert untouched(c.decode[0], decode) and not stopping.done()
        await stopping
        assert "requests are closed while prefill has not answered" in caplog.text


async def test_with_too_many_parked_new_requests_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parking, "MOST_PARKED", 1)
    async with held(*LONG) as c:
        await leave(c, stream=False)
        await parked(c)
        status, body = await c.generate(text="y")
        assert (status, body["error"]["code"]) == (503, "too_many_parked")
        assert len(c.decode[0].requests) == 1


@pytest.mark.parametrize(
    "says",
    [
        {"version": "0.5.21", "disaggregation_transfer_backend": "mooncake"},
        {"version": "0.5.22", "disaggregation_transfer_backend": "mori"},
        {"version": "0.5.23"},
    ],
)
async def test_engines_that_defer_the_release_are_aborted_at_once(says: dict[str, Any]) -> None:
    async with held(*LONG, says=says) as c:
        _, decode = await leave(c, stream=True)
        await c.decode[0].aborted(decode.rid)
        assert c.server.in_flight.parking.parked_total == 0


@pytest.mark.parametrize(
    "says",
    [
        {"version": "0.5.21", "disaggregation_transfer_backend": "mori"},
        {"version": "0.5.23", "disaggregation_transfer_backend": "ascend"},
        {"version": "0.5.23", "sbs": {"boot_id": "b", "deferred_release": False}},
        {"version": "0.0.0", "disaggregation_transfer_backend": "mooncake"},
    ],
)
async def test_engines_that_may_not_defer_it_are_not(says: dict[str, Any]) -> None:
    async with held(*LONG, says=says) as c:
        _, decode = await leave(c, stream=True)
        await parked(c)
        assert untouched(c.decode[0], decode)


@pytest.mark.parametrize("status", [400, 408, 500])
async def test_a_refusal_after_the_abort_proves_nothing(status: int) -> None:
    async with held(*LONG) as c:
        c.prefill[0].ignores_aborts = True
        c.prefill[0].behaviour = Behaviour(status=status)
        _, decode = await leave(c, stream=True)
        await parked(c)
        (pair,) = c.server.in_flight.parking._parked
        c.prefill[0].gate.open()
        await until(lambda: pair.prefill_over)
        assert untouched(c.decode[0], decode) and pair in c.server.in_flight.parking._parked


@pytest.mark.parametrize("status", [408, 499])
async def test_prefill_that_gave_up_in_the_middle_may_have_written(status: int) -> None:
    async with held(*LONG, *ONE_TRY) as c:
        c.prefill[0].behaviour = Behaviour(status=status)
        answer = asyncio.create_task(c.generate(text="x"))
        await c.decode[0].gate.arrived(1)
        c.prefill[0].gate.open()
        await answer
        await parked(c)
        assert untouched(c.decode[0], c.decode[0].requests[0])


async def test_prefill_that_breaks_off_is_waited_for_no_longer_than_a_transfer() -> None:
    async with held(*SHORT, *ONE_TRY) as c:
        c.prefill[0].behaviour = Behaviour(fault="reset_before_head")
        answer = asyncio.create_task(c.generate(text="x"))
        await c.decode[0].gate.arrived(1)
        c.prefill[0].gate.open()
        assert (await answer)[0] == 502
        assert c.server.in_flight.parking.parked_total == 1
        await c.decode[0].aborted(c.decode[0].requests[0].rid)


async def test_the_place_on_an_engine_that_is_gone_is_given_back() -> None:
    async with held(*LONG) as c:
        c.prefill[0].ignores_aborts = True
        await leave(c, stream=True)
        await parked(c)
        worker = c.server.registry.get(c.decode[0].url)
        assert worker is not None and worker.parked == 1
        (pair,) = c.server.in_flight.parking._parked
        c.server.in_flight.fail_worker(worker)
        assert pair in c.server.in_flight.parking._parked  # silent, but its connection is there
        await c.decode[0].stop()
        await until(lambda: pair.decode_call.over)
        assert pair in c.server.in_flight.parking._parked
        c.server.in_flight.fail_worker(worker)
        assert len(c.server.in_flight.parking) == worker.parked == worker.active == 0


async def test_lost_prefill_is_waited_for_no_longer_than_a_transfer() -> None:
    async with held(*SHORT) as c:
        c.prefill[0].ignores_aborts = True
        _, decode = await leave(c, stream=True)
        await parked(c)
        worker = c.server.registry.get(c.prefill[0].url)
        assert worker is not None
        c.server.in_flight.fail_worker(worker)
        await c.decode[0].aborted(decode.rid)


async def test_prefill_lost_under_way_is_waited_for_no_longer_than_a_transfer() -> None:
    """Its request is parked only after the loss, and its connection stays open and silent."""
    async with held(*SHORT, *ONE_TRY) as c:
        c.prefill[0].ignores_aborts = True
        answer = asyncio.create_task(c.generate(text="x"))
        await c.prefill[0].gate.arrived(1)
        await c.decode[0].gate.arrived(1)
        worker = c.server.registry.get(c.prefill[0].url)
        assert worker is not None
        c.server.in_flight.fail_worker(worker)
        assert (await answer)[0] == 502
        assert c.server.in_flight.parking.parked_total == 1
        await c.decode[0].aborted(c.decode[0].requests[0].rid)


async def test_the_engines_own_time_out_counts_where_it_is_longer() -> None:
    says = {"sbs": {"boot_id": "b", "transfer_timeout_s": 3600}}
    async with held(*SHORT, prefill_says=says) as c:
        _, decode = await leave(c, stream=True)
        await parked(c)
        (pair,) = c.server.in_flight.parking._parked
        await until(lambda: pair.prefill_over)
        timer, _ = c.server.in_flight.parking._parked[pair]
        assert timer.when() - asyncio.get_running_loop().time() > 3000
        assert untouched(c.decode[0], decode)


async def test_a_parked_request_keeps_no_body() -> None:
    async with held(*LONG) as c:
        async with aiohttp.ClientSession() as session:
            body = {"text": "x" * (1 << 20), "stream": False}
            task = asyncio.create_task(_post(session, c.url + "/generate", body))
            await c.decode[0].gate.arrived(1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await parked(c)
        assert len(c.server.in_flight) == 0
        assert not any(
            isinstance(request, Attempt) for request in c.server.dispatcher._requests.values()
        )
        (pair,) = c.server.in_flight.parking._parked
        assert pair.decode_call.payload == pair.prefill_call.payload == ()


async def test_workers_show_what_is_parked() -> None:
    async with held(*LONG) as c:
        await leave(c, stream=True)
        await parked(c)
        async with c.get("/workers") as response:
            workers = (await response.json())["workers"]
        shown = {worker["url"]: worker["parked"] for worker in workers}
        assert shown == {c.prefill[0].url: 0, c.decode[0].url: 1}
        let_go(c)
        worker = c.server.registry.get(c.decode[0].url)
        assert worker is not None and worker.parked == 0
