"""Anthropic's ``/v1/messages`` over prefill and decode: whole, streamed, cancelled, refused."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from harness.sse import events_of
from router_harness import cluster

from sglang_sbs.router.relay.answer_kinds import ANSWER_KINDS
from sglang_sbs.router.relay.event_reader import EventReader
from sglang_sbs.scheduling.events import PrefillDone, RequestArrived, RequestEnded
from tools.stand_ins.mock_engine import Behaviour

PATH = "/v1/messages"
BODY: dict[str, Any] = {
    "model": "mock",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [{"role": "user", "content": "Hello"}],
}
ONE_TRY = ("--disable-retries",)


async def test_both_legs_get_the_body_with_one_room_and_one_rid() -> None:
    async with cluster() as c:
        internals = {
            "bootstrap_host": "evil", "bootstrap_room": 1, "routed_dp_rank": 7,
            "disagg_prefill_dp_rank": 7, "rid": "mine",
        }  # fmt: skip
        headers = {"X-Override-Rid": "mine", "X-Data-Parallel-Rank": "7"}
        async with c.post(PATH + "?beta=true", BODY | internals, headers=headers) as response:
            answer = await response.json()
        assert response.status == 200
        assert (answer["type"], answer["content"][0]["text"]) == ("message", "t1 t2 t3")
        (prefill,), (decode,) = c.prefill[0].requests, c.decode[0].requests
        assert (prefill.path, decode.path) == (PATH, PATH)
        for leg in (prefill, decode):
            assert {name: leg.body[name] for name in BODY} == BODY
            assert leg.body["bootstrap_host"] == "127.0.0.1"
            assert "x-data-parallel-rank" not in leg.headers
        (arrived,) = c.scheduler.of(RequestArrived)
        assert prefill.rid == decode.rid == arrived.rid
        assert prefill.body["bootstrap_room"] == decode.body["bootstrap_room"] != 1
        assert (arrived.max_new_tokens, arrived.prompt_tokens) == (9, 12)
        assert "stream_options" not in decode.body
        await c.settled()
        (done,), (ended,) = c.scheduler.of(PrefillDone), c.scheduler.of(RequestEnded)
        assert (done.prompt_tokens, ended.outcome, ended.completion_tokens) == (7, "completed", 3)
        c.check_books()


async def test_a_stream_is_passed_on_and_its_tokens_are_counted() -> None:
    async with cluster() as c:
        c.prefill[0].behaviour = Behaviour(prompt_tokens=40, cached_tokens=32)
        async with c.post(PATH, BODY | {"stream": True}) as response:
            events = events_of(await response.read())
        assert response.headers["Content-Type"] == "text/event-stream"
        assert [name for name, _ in events] == [
            "message_start", "content_block_start", *["content_block_delta"] * 3,
            "content_block_stop", "message_delta", "message_stop",
        ]  # fmt: skip
        assert all(data["type"] == name for name, data in events)
        assert c.prefill[0].requests[0].body["stream"] is False
        await c.settled()
        (ended,) = c.scheduler.of(RequestEnded)
        assert (ended.outcome, ended.completion_tokens) == ("completed", 3)
        (done,) = c.scheduler.of(PrefillDone)
        assert (done.prompt_tokens, done.cached_tokens) == (40, 32)


async def test_the_first_byte_is_the_first_token_and_not_message_start() -> None:
    """An engine that errs before the first token sends ``message_start`` in front of the error."""
    async with cluster(decode=2) as c:
        for engine in c.decode:
            engine.behaviours.append(Behaviour(stream_error=True, message="KV transfer failed"))
        c.decode[1].behaviours.clear()
        async with c.post(PATH, BODY | {"stream": True}) as response:
            events = events_of(await response.read())
        assert response.status == 200
        assert [name for name, _ in events].count("message_start") == 1
        assert events[-1][0] == "message_stop"
        await c.settled()
        assert sorted(c.scheduler.ended())[0] == "completed"


async def test_an_error_before_the_first_token_is_a_status_in_anthropics_form() -> None:
    async with cluster(*ONE_TRY) as c:
        c.decode[0].behaviour = Behaviour(stream_error=True, message="out of memory")
        async with c.post(PATH, BODY | {"stream": True}) as response:
            answer = await response.json()
        assert response.status == 500
        error = {"type": "api_error", "message": "out of memory"}
        assert answer == {"type": "error", "error": error}


async def test_a_stream_that_breaks_ends_with_an_error_event_of_anthropics() -> None:
    async with cluster(*ONE_TRY) as c:
        c.decode[0].behaviour = Behaviour(fault="reset_mid_body")
        async with c.post(PATH, BODY | {"stream": True}) as response:
            events = events_of(await response.read())
        names = [name for name, _ in events]
        assert names[-1] == "error"
        assert "message_stop" not in names
        assert events[-1][1]["type"] == "error"
        assert events[-1][1]["error"]["type"] == "api_error"
        await c.settled()
        assert c.scheduler.ended() == ["failed"]


@pytest.mark.parametrize(
    ("tail", "outcome"),
    [
        (b"", "failed"),  # without message_stop it is not complete
        (b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"m"}}\n\n'
         b'event: message_stop\ndata: {"type":"message_stop"}\n\n', "failed"),
        (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', "completed"),
    ],
    ids=["cut", "error", "whole"],
)  # fmt: skip
async def test_messages_streams_end_at_their_last_event(tail: bytes, outcome: str) -> None:
    async with cluster(*ONE_TRY) as c:
        c.decode[0].behaviour = Behaviour(garbage_tail=tail)
        async with c.post(PATH, BODY | {"stream": True}) as response:
            events = events_of(await response.read())
        assert [name for name, _ in events].count("error") == (outcome == "failed")
        await c.settled()
        assert c.scheduler.ended() == [outcome]


async def test_prefills_abort_looks_like_an_end_of_turn() -> None:
    async with cluster(*ONE_TRY) as c:
        c.decode[0].gate.close()
        c.prefill[0].behaviour = Behaviour(abort=True)
        async with c.post(PATH, BODY) as response:
            answer = await response.json()
        assert response.headers["X-SMG-Error-Code"] == "prefill_internal_error"
        assert (response.status, answer["error"]["type"]) == (500, "api_error")
        await c.settled()
        assert c.scheduler.ended() == ["failed"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_both_legs_with_and_without_their_rid(
    stream: bool,
) -> None:
    """Engines without the plugin know no rid of it: the closed connection has to tell them."""
    async with cluster() as c:
        c.prefill[0].gate.close()
        c.decode[0].gate.close()
        for engine in (c.prefill[0], c.decode[0]):
            engine.ignores_aborts = True
        async with aiohttp.ClientSession() as session:
            body = BODY | {"stream": stream}
            task = asyncio.create_task(session.post(c.url + PATH, json=body))
            await c.prefill[0].gate.arrived(1)
            await c.decode[0].gate.arrived(1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for engine in (c.prefill[0], c.decode[0]):
            await engine.requests[0].disconnected.wait()
            await engine.aborted(engine.requests[0].rid)
        await c.settled()
        assert c.scheduler.ended() == ["aborted"]
        c.check_books()


async def test_the_routers_own_errors_have_anthropics_form() -> None:
    async def error_of(c: Any, body: Any, **kwargs: Any) -> tuple[int, str]:
        async with c.post(PATH, body, **kwargs) as response:
            answer = await response.json()
        assert answer["type"] == "error"
        assert set(answer["error"]) == {"type", "message"}
        assert response.headers["X-SMG-Error-Code"]
        return response.status, answer["error"]["type"]

    async with cluster("--api-key", "user", "--max-payload-size", "1000") as c:
        assert await error_of(c, BODY) == (401, "authentication_error")
        wrong = {"X-Api-Key": "guess"}
        assert await error_of(c, BODY, headers=wrong) == (401, "authentication_error")
        right = {"X-Api-Key": "user"}
        large = BODY | {"system": "x" * 1000}
        assert await error_of(c, large, headers=right) == (413, "request_too_large")
        empty = BODY | {"messages": []}
        assert await error_of(c, empty, headers=right) == (400, "invalid_request_error")
        hot = BODY | {"temperature": -1}
        assert await error_of(c, hot, headers=right) == (400, "invalid_request_error")
        long = BODY | {"stream": 7}
        assert await error_of(c, long, headers=right) == (400, "invalid_request_error")
        async with c.get(PATH, headers=right) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert (await response.json())["type"] == "error"
        async with c.get(f"{PATH}/batches", headers=right) as response:
            assert response.status == 501
            assert (await response.json())["type"] == "error"
        assert not c.prefill[0].requests
    async with cluster("--max-concurrent-requests", "1", "--queue-size", "0", *ONE_TRY) as c:
        c.decode[0].gate.close()
        held = asyncio.create_task(error_of(c, BODY))
        await c.decode[0].gate.arrived(1)
        assert await error_of(c, BODY) == (429, "rate_limit_error")
        c.decode[0].behaviour = Behaviour(status=503)
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
    async with cluster(prefill=0, decode=0, wait=False) as c:
        assert await error_of(c, BODY) == (503, "overloaded_error")
    async with cluster("--request-timeout-secs", "1", *ONE_TRY) as c:
        c.decode[0].gate.close()
        assert await error_of(c, BODY) == (504, "timeout_error")


async def test_the_key_of_anthropics_clients_reaches_engines_as_a_bearer_token() -> None:
    async with cluster("--api-key", "user") as c:
        async with c.post(PATH, BODY, headers={"x-api-key": "user"}) as response:
            assert response.status == 200
        for engine in (c.prefill[0], c.decode[0]):
            assert engine.requests[0].headers["authorization"] == "Bearer user"
            assert "x-api-key" not in engine.requests[0].headers
        # Only there: other endpoints have one way.
        async with c.post("/generate", {"text": "x"}, headers={"x-api-key": "user"}) as response:
            assert response.status == 401


async def test_engines_before_0_5_22_get_no_messages() -> None:
    old = {"version": "0.5.21"}
    async with cluster(decode_says=old) as c:
        async with c.post(PATH, BODY) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["type"]) == (501, "api_error")
        assert "runs SGLang 0.5.21" in answer["error"]["message"]
        assert not c.prefill[0].requests
        assert not c.decode[0].requests
        await c.settled()
        c.check_books()
        assert (await c.generate(text="x"))[0] == 200


def test_a_stream_opens_with_its_first_content() -> None:
    reader = EventReader(ANSWER_KINDS["messages"], "decode:1")
    start = b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n'
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'
    block = b'event: content_block_start\ndata: {"type":"content_block_start","index":0}\n\n'
    says_error = b'event: content_block_delta\ndata: {"delta":{"text":"\\"error\\""}}\n\n'
    assert not reader.feed(start)
    assert not reader.feed(ping)
    assert not reader.opened
    assert b"".join(reader.feed(block)) == start + ping + block
    assert reader.feed(says_error)
    assert not reader.failed
    delta = b'event: message_delta\ndata: {"usage":{"output_tokens":17}}\n\n'
    reader.feed(delta + b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert reader.done
    assert ANSWER_KINDS["messages"].output_tokens(reader.last) == 17
