"""Failures beside the fault matrix: bounds of retries, refusals, clients that leave or are slow."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import aiohttp
import orjson
import pytest
from router_harness import Cluster, cluster, sse_events, until

from sglang_sbs.router.client import answer_stream
from sglang_sbs.router.engines.connection_pool import Call
from sglang_sbs.router.relay.leg_answers import DecodeLeg
from sglang_sbs.router.relay.pair import Pair
from sglang_sbs.scheduling.events import Refuse, RequestArrived, RequestEnded
from tools.stand_ins.mock_engine import Behaviour, MockEngine

ONE_TRY = ("--disable-retries",)


def engine_of(c: Cluster, leg: str) -> MockEngine:
    return c.prefill[0] if leg == "prefill" else c.decode[0]


def other_of(c: Cluster, leg: str) -> MockEngine:
    return c.decode[0] if leg == "prefill" else c.prefill[0]


async def both_arrived(
    c: Cluster, failing: str, body: dict[str, Any]
) -> asyncio.Task[aiohttp.ClientResponse]:
    """Send a request; both engines have it, and ``failing`` is the first to answer."""
    engine_of(c, failing).gate.close()
    other_of(c, failing).gate.close()

    async def send() -> aiohttp.ClientResponse:
        response: aiohttp.ClientResponse = await c.client.post(c.url + "/generate", json=body)
        return response

    task = asyncio.create_task(send())
    await other_of(c, failing).gate.arrived(1)
    await engine_of(c, failing).gate.arrived(1)
    engine_of(c, failing).gate.open()
    return task


# One leg fails ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "bad_request"), (404, "not_found"), (500, "internal_error"), (503, "unavailable")],
)
async def test_an_error_of_one_leg_reaches_the_client_and_aborts_the_other(
    leg: str, status: int, code: str, stream: bool
) -> None:
    async with cluster(*ONE_TRY) as c:
        engine_of(c, leg).behaviour = Behaviour(status=status, message="no such thing")
        response = await (await both_arrived(c, leg, {"text": "x", "stream": stream}))
        body = await response.json()
        assert response.status == status
        assert response.headers["X-SMG-Error-Code"] == f"{leg}_{code}"
        assert body["error"]["message"] == "no such thing"
        await other_of(c, leg).aborted(other_of(c, leg).requests[0].rid)
        await c.settled()
        assert c.scheduler.ended() == ["failed"]
        c.check_books()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_finish_reason_abort_of_openais_api_is_a_failure_too(leg: str) -> None:
    async with cluster(*ONE_TRY) as c:
        other_of(c, leg).gate.close()
        engine_of(c, leg).behaviour = Behaviour(abort=True)
        async with c.post("/v1/completions", {"prompt": "x"}) as response:
            assert response.status == 500
            assert response.headers["X-SMG-Error-Code"] == f"{leg}_internal_error"
        await c.settled()
        assert c.scheduler.ended() == ["failed"]


async def test_an_error_event_at_the_start_of_a_stream_becomes_a_status() -> None:
    async with cluster(*ONE_TRY) as c:
        c.decode[0].behaviour = Behaviour(stream_error=True, message="out of memory")
        async with c.post("/generate", {"text": "x", "stream": True}) as response:
            assert response.status == 500
            assert (await response.json())["error"]["message"] == "out of memory"


async def test_an_error_event_does_not_show_the_engines_keys() -> None:
    async with cluster(*ONE_TRY) as c:
        message = "bad launch: --api-key s3cret-of-the-engine"
        c.decode[0].behaviour = Behaviour(stream_error=True, message=message)
        async with c.post("/generate", {"text": "x", "stream": True}) as response:
            text = (await response.json())["error"]["message"]
            assert "bad launch" in text
            assert "s3cret" not in text


async def test_a_prefill_failure_after_decodes_first_byte_changes_nothing() -> None:
    async with cluster(*ONE_TRY) as c:
        c.prefill[0].reply_gate.close()
        c.prefill[0].behaviour = Behaviour(status=500, kv_sent=True)
        c.decode[0].token_gate.close()
        async with c.post("/generate", {"text": "x", "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            c.prefill[0].reply_gate.open()
            c.decode[0].token_gate.open()
            assert sse_events(await response.read())[-1] == "[DONE]"
        await c.settled()
        assert c.scheduler.ended() == ["completed"]
        assert c.decode[0].aborts == []


# Retries ----------------------------------------------------------------------------------------


async def test_retries_are_bounded() -> None:
    async with cluster("--retry-max-retries", "3") as c:
        c.decode[0].behaviour = Behaviour(status=500)
        status, body = await c.generate(text="x")
        assert (status, body["error"]["code"]) == (500, "decode_internal_error")
        assert len(c.scheduler.of(RequestArrived)) == 3
        await c.settled()
        assert c.scheduler.ended() == ["failed"] * 3
        c.check_books()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_request_that_ends_engines_is_not_sent_to_all_of_them(leg: str) -> None:
    async with cluster(prefill=3, decode=3) as c:
        engines = c.prefill if leg == "prefill" else c.decode
        for engine in engines:
            engine.behaviour = Behaviour(fault="reset_before_head")
        others = c.decode if leg == "prefill" else c.prefill
        for engine in others:
            engine.gate.close()
        status, body = await c.generate(text="x")
        assert (status, body["error"]["code"]) == (502, f"{leg}_server_error")
        assert sorted(len(engine.requests) for engine in engines) == [0, 1, 1]
        for engine in others:
            engine.gate.open()
        await c.settled()
        assert c.scheduler.ended() == ["failed"] * 2
        c.check_books()


async def test_engines_that_are_not_there_do_not_end_the_retries() -> None:
    """Nothing that a request did: it never came there."""
    async with cluster(prefill=4) as c:
        for engine in c.prefill[:3]:
            await engine.stop()
        assert (await c.generate(text="x"))[0] == 200
        await c.settled()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("others", [0, 1])
async def test_a_restart_between_decision_and_dispatch_can_be_tried_again(
    role: str, others: int
) -> None:
    """Elsewhere by the router, later by the client: nothing was sent."""
    async with cluster("--retry-max-retries", "2", **{role: 1 + others}) as c:
        c.scheduler.hold = True
        asked = asyncio.create_task(c.generate(text="x"))
        await until(lambda: c.scheduler.held)
        c.scheduler.hold = False
        (arrived,) = c.scheduler.held.values()
        decision = c.scheduler._place(arrived)
        restarted = c.server.registry.get(getattr(decision, role))
        assert restarted is not None
        restarted.info = None  # what it is now has not been asked yet
        c.server.dispatcher._on_decided(decision)
        status, answer = await asked
        assert status == (200 if others else 503), answer
        if not others:
            assert answer["error"]["code"] == f"{role}_unavailable"
        await c.settled()
        c.check_books()


async def test_client_errors_are_not_retried() -> None:
    async with cluster() as c:
        c.prefill[0].behaviour = Behaviour(status=400)
        c.decode[0].gate.close()
        status, _ = await c.generate(text="x")
        assert status == 400
        assert len(c.scheduler.of(RequestArrived)) == 1


async def test_nothing_is_retried_after_the_first_byte() -> None:
    async with cluster() as c:
        c.decode[0].behaviour = Behaviour(fault="reset_mid_body", kv_sent=True)
        c.prefill[0].reply_gate.close()
        async with c.post("/generate", {"text": "x", "stream": True}) as response:
            assert response.status == 200
            events = sse_events(await response.read())
        assert events[0]["text"] == "t1"
        assert events[-1]["error"]["code"] == "decode_server_error"
        assert events[-1]["error"]["status"] == 502
        await c.prefill[0].aborted(c.prefill[0].requests[0].rid)
        await c.settled()
        assert c.scheduler.ended() == ["failed"]
        assert len(c.decode[0].requests) == 1
        c.check_books()


# What decode announces to a prefill engine that refuses stays there for good -------------------


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_decode_gets_no_retry_that_prefill_refuses(status: int, monkeypatch: Any) -> None:
    started: list[str] = []
    start = Call.start

    def noted(call: Call, **how: Any) -> None:
        if isinstance(call.receiver, DecodeLeg):
            started.append(call.origin)
        start(call, **how)

    monkeypatch.setattr(Call, "start", noted)
    never = {"least_to_refuse_s": 1e6, "most_to_refuse_s": 1e6}
    async with cluster(prefill=2, relay=never) as c:
        refusal = Behaviour(status=status)
        for engine in c.prefill:
            engine.behaviours.extend([refusal, refusal])
        assert (await c.generate(text="x"))[0] == 200
        assert sum(len(engine.requests) for engine in c.prefill) == 5
        assert len(started) == 2, "for the first attempt, and for the one that prefill took"
        await c.settled()
        c.check_books()


async def test_rooms_that_refused_requests_leave_on_prefill_are_counted() -> None:
    async with cluster("--disable-retries", prefill=2) as c:
        assert (await c.generate(text="warm"))[0] == 200
        c.prefill[0].gate.close()
        c.prefill[1].gate.close()
        refusing = next(engine for engine in c.prefill if not engine.requests)
        refusing.behaviours.append(Behaviour(status=400))
        asked = asyncio.create_task(c.generate(text="x"))
        await refusing.gate.arrived(1)
        await c.decode[0].received(2)
        refusing.gate.open()
        assert (await asked)[0] == 400
        async with c.get("/workers") as response:
            workers = (await response.json())["workers"]
        left = {worker["url"]: worker["rooms_left"] for worker in workers}
        assert left[refusing.url] == 1
        assert sum(count or 0 for count in left.values()) == 1
        text = c.server.metrics.render().decode()
        assert f'sbs_rooms_left{{worker="{refusing.url}"}} 1.0' in text
        worker = c.server.registry.get(refusing.url)
        assert worker is not None
        c.server.registry._restarted(worker)
        assert worker.rooms_left == 0
        c.check_books()


async def test_a_retry_that_prefill_does_not_refuse_goes_to_decode() -> None:
    """Prefill answers only when decode has got the KV."""
    async with cluster(relay={"least_to_refuse_s": 0.001}) as c:
        c.prefill[0].behaviours.append(Behaviour(status=503))
        c.prefill[0].reply_gate.close()
        asked = asyncio.create_task(c.generate(text="x"))
        await c.prefill[0].reply_gate.arrived(1)
        await c.decode[0].received(1)
        c.prefill[0].reply_gate.release()
        await c.decode[0].received(2)
        c.prefill[0].reply_gate.open()
        assert (await asked)[0] == 200
        await c.settled()
        c.check_books()


# Time limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_hanging_leg_ends_with_the_request_timeout(leg: str) -> None:
    async with cluster("--request-timeout-secs", "2") as c:
        engine_of(c, leg).behaviour = Behaviour(fault="hang_before_head")
        other_of(c, leg).gate.close()
        status, body = await c.generate(text="x")
        assert (status, body["error"]["code"]) == (504, "request_timeout")
        for engine in (c.prefill[0], c.decode[0]):
            await engine.aborted(engine.requests[0].rid)
        await c.settled()
        c.check_books()


async def test_a_stream_that_stalls_ends_with_an_error_event() -> None:
    async with cluster("--request-timeout-secs", "2") as c:
        c.decode[0].behaviour = Behaviour(fault="hang_mid_body")
        async with c.post("/generate", {"text": "x", "stream": True}) as response:
            events = sse_events(await response.read())
        assert events[-1]["error"]["code"] == "request_timeout"
        await c.decode[0].aborted(c.decode[0].requests[0].rid)


# Clients that leave -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "status", "code", "retry_after"),
    [
        ("queue_full", 429, "queue_full", "3"),
        ("flow_control", 429, "flow_control", "3"),
        ("deadline", 503, "queue_timeout", "3"),
        ("no_prefill", 503, "no_prefill_servers", "3"),
        ("no_decode", 503, "no_decode_servers", "3"),
        ("too_long", 400, "context_length_exceeded", None),
    ],
)
async def test_refusals(cause: Any, status: int, code: str, retry_after: str | None) -> None:
    async with cluster() as c:
        c.scheduler.refuse.append(Refuse(rid="", cause=cause, retry_after_s=2.2, message="because"))
        async with c.post("/generate", {"text": "x"}) as response:
            body = await response.json()
            assert response.status == status
            assert response.headers["X-SMG-Error-Code"] == code
            assert response.headers.get("Retry-After") == retry_after
        assert body["error"]["message"] == "because"
        assert c.prefill[0].requests == []
        # A refused request is over for the scheduler: no RequestEnded.
        assert c.scheduler.of(RequestEnded) == []
        c.check_books()


async def test_the_front_door_queues_then_refuses() -> None:
    flags = ("--max-concurrent-requests", "1", "--queue-size", "1", "--queue-timeout-secs", "2")
    async with cluster(*flags) as c:
        c.decode[0].gate.close()
        inside = asyncio.create_task(c.generate(text="a"))
        await c.decode[0].gate.arrived(1)
        waiting = asyncio.create_task(c.generate(text="b"))
        await until(lambda: c.server.admission.queued == 1)
        async with c.post("/generate", {"text": "c"}) as response:
            assert response.status == 429
            assert response.headers["X-SMG-Error-Code"] == "queue_full"
            assert "Retry-After" in response.headers
        status, body = await waiting
        assert (status, body["error"]["code"]) == (503, "queue_timeout")
        queued = asyncio.create_task(c.generate(text="d"))
        await until(lambda: c.server.admission.queued == 1)
        c.decode[0].gate.open()
        assert (await inside)[0] == 200
        assert (await queued)[0] == 200
        assert c.server.admission.running == 0


async def test_a_scheduler_that_raises_is_a_500_not_a_hang() -> None:
    async with cluster() as c:
        real = c.scheduler.handle

        def broken(event: Any, now_s: float) -> Any:
            commands = real(event, now_s)
            if isinstance(event, RequestArrived):
                raise RuntimeError("defect")
            return commands

        c.scheduler.handle = broken  # type: ignore[method-assign]
        status, body = await c.generate(text="x")
        assert (status, body["error"]["code"]) == (500, "scheduler_error")
        assert c.scheduler.ended() == ["failed"]  # it may have it in its books
        c.check_books()


# Engines that fall silent, clients that are slow ------------------------------------------------


async def test_what_waits_for_an_engine_that_falls_silent_goes_elsewhere() -> None:
    async with cluster(decode=2) as c:
        up = next(up.instance for up in c.scheduler.up.values() if up.role == "decode")
        stopped = next(engine for engine in c.decode if engine.url == up)
        stopped.gate.close()
        task = asyncio.create_task(c.generate(text="x"))
        await stopped.gate.arrived(1)
        worker = c.server.registry.get(stopped.url)
        assert worker is not None
        c.server.registry.set_healthy(worker, False, "stopped")
        c.server.registry.silenced(worker)
        assert (await task)[0] == 200
        await c.settled()
        assert c.scheduler.ended() == ["failed", "completed"]
        c.check_books()


async def test_a_stream_of_a_silent_engine_is_ended_when_nothing_comes() -> None:
    async with cluster(relay={"last_chance_s": 0.05}) as c:
        c.decode[0].token_gate.close()
        worker = c.server.registry.get(c.decode[0].url)
        assert worker is not None
        async with c.post("/generate", {"text": "x", "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            c.server.registry.silenced(worker)
            events = sse_events(await response.read())
        assert events[-1]["error"]["code"] == "decode_server_error"
        await c.settled()
        c.check_books()


async def test_a_slow_client_pauses_decode_and_gets_everything(monkeypatch: Any) -> None:
    monkeypatch.setattr(answer_stream, "HIGH_WATER_BYTES", 64 * 1024)
    monkeypatch.setattr(answer_stream, "LOW_WATER_BYTES", 16 * 1024)
    calls: list[str] = []
    for name in ("pause", "resume"):
        original = getattr(Pair, name)

        def spy(pair: Pair, name: str = name, original: Any = original) -> None:
            calls.append(name)
            original(pair)

        monkeypatch.setattr(Pair, name, spy)
    async with cluster() as c:
        c.decode[0].behaviour = Behaviour(tokens=3000)
        reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port, limit=1024)
        body = orjson.dumps({"text": "x", "stream": True})
        head = f"POST /generate HTTP/1.0\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: "pause" in calls)
        raw = await reader.read()
        writer.close()
        events = sse_events(raw.partition(b"\r\n\r\n")[2])
        assert len(events) == 3001
        assert events[-2]["text"].endswith(" t3000")
        assert "resume" in calls
        await c.settled()
        c.check_books()


async def test_without_descriptors_requests_are_refused_and_nobody_is_blamed(
    monkeypatch: Any,
) -> None:
    async with cluster("--disable-retries") as c:
        c.server._file_limit = 66
        async with c.post("/generate", {"text": "x"}) as response:
            assert response.status == 503
            assert response.headers["X-SMG-Error-Code"] == "router_overloaded"
            assert "ulimit -n" in (await response.json())["error"]["message"]
        c.server._file_limit = 10_000

        async def connect(origin: str) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(c.server.pool, "connect", connect)
        async with c.post("/generate", {"text": "x"}) as response:
            assert response.status == 503
            assert response.headers["X-SMG-Error-Code"] == "router_overloaded"
        assert all(worker.usable and not worker.failures for worker in c.server.registry)
        c.check_books()
