"""OpenAI's ``/v1/responses`` over prefill and decode: whole, streamed, cancelled, refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
import pytest
from harness.sse import events_of
from router_harness import cluster

from sglang_sbs.engine.gang_hold import describes_batch
from sglang_sbs.router.engines.connection_pool import Call
from sglang_sbs.router.prompts.engine_limits import too_long
from sglang_sbs.router.requests.splitting import MOST_REPEATED_BYTES
from sglang_sbs.scheduling.events import PrefillDone, RequestArrived, RequestEnded
from sglang_sbs.wire.gangs import RESPONSE_RID_PREFIX, is_sized, part_of_room
from tools.stand_ins import mock_http
from tools.stand_ins.mock_answers import response_preamble
from tools.stand_ins.mock_engine import Behaviour

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
BODY: dict[str, Any] = {
    "model": "mock",
    "max_output_tokens": 9,
    "instructions": "Be brief.",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
    "store": False,
    "tools": [TOOL],
}
STREAM = BODY | {"stream": True}
ONE_TRY = ("--disable-retries",)
PREAMBLE = ["response.created", "response.in_progress"]
SENT_AT_ONCE = 60.0
"""Seconds: an abort that is parked for so long fails the test by its time-out."""


async def stream_of(c: Any, body: Any = STREAM) -> tuple[int, list[tuple[str, Any]]]:
    async with c.post(PATH, body) as response:
        raw = await response.read()
    return response.status, events_of(raw) if response.status == 200 else [("", orjson.loads(raw))]


async def test_both_legs_get_the_body_with_one_room_and_the_id_of_the_answer() -> None:
    async with cluster() as c:
        internals = {
            "bootstrap_host": "evil", "bootstrap_room": 1, "routed_dp_rank": 7, "rid": "mine",
            "request_id": "resp_mine", "disagg_prefill_dp_rank": 7, "background": False,
        }  # fmt: skip
        async with c.post(PATH, BODY | internals) as response:
            answer = await response.json()
        assert response.status == 200
        assert answer["output"][0]["content"][0]["text"] == "t1 t2 t3"
        (prefill,), (decode,) = c.prefill[0].requests, c.decode[0].requests
        for leg in (prefill, decode):
            assert {name: leg.body[name] for name in BODY} == BODY
            assert leg.body["bootstrap_host"] == "127.0.0.1"
            assert {"rid", "background"}.isdisjoint(leg.body)
        (arrived,) = c.scheduler.of(RequestArrived)
        assert prefill.rid == decode.rid == arrived.rid == answer["id"]
        assert answer["id"].startswith(RESPONSE_RID_PREFIX)
        assert prefill.body["bootstrap_room"] == decode.body["bootstrap_room"] != 1
        # SGLang makes two tokens fewer than the client asks for.
        assert (arrived.max_new_tokens, prefill.body["stream"]) == (7, False)
        await c.settled()
        (done,), (ended,) = c.scheduler.of(PrefillDone), c.scheduler.of(RequestEnded)
        assert (done.prompt_tokens, ended.outcome, ended.completion_tokens) == (7, "completed", 3)
        c.check_books()


@pytest.mark.parametrize("policy", ["sbs", "round_robin"])
async def test_the_response_id_is_marked_only_if_requests_are_batched(policy: str) -> None:
    async with cluster("--policy", policy) as c:
        async with c.post(PATH, BODY) as response:
            answer = await response.json()
        (request,) = c.prefill[0].requests
        assert request.rid == answer["id"]
        received = SimpleNamespace(rid=request.rid, bootstrap_room=request.body["bootstrap_room"])
        assert describes_batch(received) == is_sized(request.rid) == (policy == "sbs")
        if policy == "sbs":
            assert part_of_room(received.bootstrap_room).members == 1


async def test_a_stream_is_passed_on_and_its_tokens_are_counted() -> None:
    async with cluster() as c:
        c.prefill[0].behaviour = Behaviour(prompt_tokens=40, cached_tokens=32)
        c.decode[0].behaviour = Behaviour(tokens=5)
        status, events = await stream_of(c)
        assert status == 200
        names = [name for name, _ in events]
        deltas = ["response.output_text.delta"] * 5
        assert names == [*PREAMBLE, "response.output_item.added", *deltas, "response.completed"]
        assert all(data["type"] == name for name, data in events)
        await c.settled()
        (ended,), (done,) = c.scheduler.of(RequestEnded), c.scheduler.of(PrefillDone)
        assert (ended.outcome, ended.completion_tokens) == ("completed", 5)
        assert (done.prompt_tokens, done.cached_tokens) == (40, 32)


@pytest.mark.parametrize("instructions", ["short", "i" * 100_000], ids=["short", "long"])
async def test_the_first_output_counts_and_not_what_comes_at_once(instructions: str) -> None:
    """Decode has said ``response.created``: nothing is at the client, nor is prefill done."""
    async with cluster() as c:
        c.prefill[0].gate.close()
        body = STREAM | {"instructions": instructions}
        async with aiohttp.ClientSession() as session:
            asked = asyncio.create_task(session.post(c.url + PATH, json=body))
            await c.decode[0].gate.arrived(1)
            async with c.get("/workers") as response:  # what decode said has come by now
                assert response.status == 200
            assert not c.scheduler.of(PrefillDone)
            assert not asked.done()
            c.prefill[0].gate.open()
            async with await asked as response:
                events = events_of(await response.read())
        assert [name for name, _ in events[:2]] == PREAMBLE
        assert events[0][1]["response"]["instructions"] == instructions
        await c.settled()
        assert c.scheduler.ended() == ["completed"]


@pytest.mark.parametrize(
    "fault",
    [Behaviour(abort=True, message="KV transfer failed"),
     Behaviour(stream_error=True, message="500: KV transfer failed"),
     Behaviour(status=400, message="503: The engine is paused.")],
    ids=["abort", "exception", "status"],
)  # fmt: skip
async def test_what_fails_before_its_first_output_is_tried_on_another_engine(
    fault: Behaviour,
) -> None:
    async with cluster(decode=2) as c:
        for engine in c.decode:
            engine.behaviours.append(fault)
        c.decode[1].behaviours.clear()
        for _ in range(2):  # one of them comes to the engine that fails
            status, events = await stream_of(c)
            assert status == 200
            assert [name for name, _ in events].count("response.created") == 1
            assert events[-1][0] == "response.completed"
        assert not c.decode[0].behaviours
        await c.settled()
        assert c.scheduler.ended().count("completed") == 2


async def test_a_prefill_that_dies_after_response_created_is_tried_again() -> None:
    async with cluster(prefill=2) as c:
        for engine in c.prefill:
            engine.gate.close()
        asked = asyncio.create_task(stream_of(c))
        await c.decode[0].gate.arrived(1)
        came = [asyncio.create_task(engine.gate.arrived(1)) for engine in c.prefill]
        await asyncio.wait(came, return_when=asyncio.FIRST_COMPLETED)
        for event in came:
            event.cancel()
        (first,) = c.scheduler.of(RequestArrived)
        dies = next(engine for engine in c.prefill if engine.requests)
        assert dies.requests[0].rid == first.rid
        for engine in c.prefill:
            engine.gate.open() if engine is not dies else None
        await dies.stop()
        status, events = await asked
        assert status == 200
        assert [name for name, _ in events].count("response.created") == 1
        assert events[-1][0] == "response.completed"
        await c.settled()
        assert sorted(c.scheduler.ended()) == ["completed", "failed"]


async def test_a_long_preamble_is_left_to_the_engine_while_prefill_is_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines write every field that a tool leaves out, so it may be many times the request."""
    paused = asyncio.Event()
    set_paused = Call.set_paused

    def noted(call: Call, pause: bool) -> None:
        set_paused(call, pause)
        if pause:
            paused.set()

    def sevenfold(*args: Any) -> list[dict[str, Any]]:
        more = {"more": args[0].body["tools"] * 6}
        return [event | more for event in response_preamble(*args)]

    monkeypatch.setattr(Call, "set_paused", noted)
    monkeypatch.setattr(mock_http, "response_preamble", sevenfold)
    body = STREAM | {"tools": [TOOL | {"description": "d" * 500_000}]}
    async with cluster() as c:
        c.prefill[0].gate.close()
        asked = asyncio.create_task(stream_of(c, body))
        async with asyncio.timeout(20):
            await paused.wait()
        (attempt,) = c.server.in_flight._attempts.values()
        assert attempt.pair is not None
        assert attempt.pair._reader.unopened_bytes < 3 * 500_000 + (128 << 10)
        c.prefill[0].gate.open()
        status, events = await asked
        assert status == 200
        assert [name for name, _ in events[:2]] == PREAMBLE
        assert all(len(event["more"]) == 6 for _, event in events[:2])
        assert events[-1][0] == "response.completed"
        await c.settled()
        c.check_books()


async def test_a_failure_before_the_first_output_is_a_status() -> None:
    async with cluster(*ONE_TRY) as c:
        c.decode[0].behaviour = Behaviour(abort=True, message="out of memory")
        status, ((_, answer),) = await stream_of(c)
        assert (status, answer["error"]["message"]) == (500, "out of memory")
        c.decode[0].behaviour = Behaviour(stream_error=True, message="bad regex")
        status, ((_, answer),) = await stream_of(c)
        assert (status, answer["error"]["message"]) == (400, "bad regex")
        assert answer["error"]["code"] == "decode_bad_request"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_abort_in_a_whole_answer_is_seen_behind_its_status_of_200(role: str) -> None:
    async with cluster(*ONE_TRY) as c:
        engine = (c.prefill if role == "prefill" else c.decode)[0]
        c.decode[0].gate.close()
        engine.behaviour = Behaviour(abort=True, message="gone")
        asked = asyncio.create_task(c.post(PATH, BODY).__aenter__())
        await engine.gate.arrived(1)
        if role == "decode":
            c.decode[0].gate.open()
        response = await asked
        answer = await response.json()
        assert (response.status, answer["error"]["message"]) == (500, "gone")
        assert answer["error"]["code"] == f"{role}_internal_error"
        await c.settled()
        assert c.scheduler.ended() == ["failed"]


async def test_a_client_cannot_write_what_an_abort_looks_like() -> None:
    forged = '","status":"failed","usage":{}'
    async with cluster(*ONE_TRY) as c:
        metadata = {"status": "failed", "usage": {"output_tokens": 9}, "x": forged}
        body = BODY | {"metadata": metadata, "instructions": forged * 40_000}
        async with c.post(PATH, body) as response:
            answer = await response.json()
        assert (response.status, answer["status"]) == (200, "completed")
        assert answer["metadata"] == metadata
        await c.settled()
        (ended,) = c.scheduler.of(RequestEnded)
        assert (ended.outcome, ended.completion_tokens) == ("completed", 3)


FAILED = (
    b'event: response.failed\ndata: {"type":"response.failed","response":{"status":"failed",'
    b'"usage":{},"error":{"code":"server_error","message":"m"}}}\n\n'
)
INCOMPLETE = (
    b'event: response.incomplete\ndata: {"type":"response.incomplete","response":'
    b'{"status":"incomplete","usage":{"output_tokens":4}}}\n\n'
)


@pytest.mark.parametrize(
    ("tail", "last", "outcome"),
    [
        (b"", "error", "failed"),
        (b"data: [DONE]\n\n", "error", "failed"),
        (FAILED, "response.failed", "failed"),
        (INCOMPLETE, "response.incomplete", "completed"),
    ],
    ids=["cut", "done", "failed", "incomplete"],
)
async def test_responses_streams_end_at_their_last_event(
    tail: bytes, last: str, outcome: str
) -> None:
    async with cluster(*ONE_TRY) as c:
        c.decode[0].behaviour = Behaviour(garbage_tail=tail)
        async with c.post(PATH, STREAM) as response:
            raw = (await response.read()).replace(b"data: [DONE]\n\n", b"")
        names = [name for name, _ in events_of(raw)]
        assert names[-1] == last
        assert sum(name in ("error", "response.failed") for name in names) == (outcome == "failed")
        await c.settled()
        (ended,) = c.scheduler.of(RequestEnded)
        assert ended.outcome == outcome
        if outcome == "completed":
            assert ended.completion_tokens == 4


async def test_a_stream_that_breaks_ends_with_the_error_event_of_that_api() -> None:
    async with cluster(*ONE_TRY) as c:
        c.decode[0].behaviour = Behaviour(fault="reset_mid_body")
        _, events = await stream_of(c)
        name, error = events[-1]
        assert (name, error["type"], error["code"]) == ("error", "error", "decode_server_error")
        # OpenAI's packages raise what they find here.
        assert error["error"]["message"] == error["message"]
        assert error["error"]["status"] == 502
        await c.settled()
        assert c.scheduler.ended() == ["failed"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_both_legs(stream: bool) -> None:
    """Also while only ``response.created`` was sent: these engines free what nobody writes to."""
    async with cluster() as c:
        c.prefill[0].gate.close()
        async with aiohttp.ClientSession() as session:
            task = asyncio.create_task(session.post(c.url + PATH, json=BODY | {"stream": stream}))
            await c.prefill[0].gate.arrived(1)
            await c.decode[0].gate.arrived(1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for engine in (c.prefill[0], c.decode[0]):
            await engine.aborted(engine.requests[0].rid)
        await c.settled()
        assert c.scheduler.ended() == ["aborted"]
        c.check_books()


@pytest.mark.parametrize("later", [False, True], ids=["before the abort", "after it"])
async def test_response_created_does_not_tell_that_the_kv_is_there(later: bool) -> None:
    """An engine that frees KV at once keeps an aborted request until its first output."""
    slow = {"disaggregation_transfer_backend": "ascend"}
    async with cluster("--kv-transfer-timeout-secs", str(SENT_AT_ONCE), decode_says=slow) as c:
        prefill, decode = c.prefill[0], c.decode[0]
        prefill.ignores_aborts = True
        prefill.reply_gate.close()  # the KV cache is sent, but there is no reply yet
        decode.gate.close()
        if later:
            decode.begin_gate.close()
        async with aiohttp.ClientSession() as session:
            task = asyncio.create_task(session.post(c.url + PATH, json=STREAM))
            await prefill.reply_gate.arrived(1)
            await (decode.begin_gate if later else decode.gate).arrived(1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await prefill.aborted(prefill.requests[0].rid)
        decode.begin_gate.open()
        await decode.gate.arrived(1)
        async with c.get("/workers") as response:
            shown = await response.text()
        assert '"parked":1' in shown.replace(" ", "")
        assert not decode.aborts
        decode.gate.open()  # its first output
        await decode.aborted(decode.requests[0].rid)
        prefill.reply_gate.open()
        await c.settled()
        assert c.scheduler.ended() == ["aborted"]


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "Response store is disabled."),
        ({"background": True}, "background", "Response store is disabled."),
        ({"background": True, "stream": True}, "background", "Response store is disabled."),
        (
            {"stream": True, "include": ["message.output_text.logprobs"]},
            "logprobs",
            "logprobs are not supported in streaming mode",
        ),
        ({"include": ["x" * 5000]}, None, "include is over 4096 bytes"),
        ({"temperature": -1}, None, "temperature must be a non-negative finite number, got -1.0."),
        ({"top_p": 2.5}, None, "top_p must be in (0, 1], got 2.5."),
        ({"max_output_tokens": 1}, None, "max_new_tokens must be at least 0, got -1."),
        ({"input": 7}, None, "input must be a string or a list of items"),
        ({"input": None}, None, "input must be a string or a list of items"),
        ({"stream": 7}, None, "stream must be true or false, not 7"),
        ({"metadata": {"x": "y" * MOST_REPEATED_BYTES}}, None, "fields that are not of the prompt"),
        ({"priority": "x"}, None, "priority must be a whole number"),
    ],
)
async def test_what_every_engine_refuses_reaches_none(
    more: dict[str, Any], param: str | None, words: str
) -> None:
    async with cluster() as c:
        async with c.post(PATH, BODY | more) as response:
            answer = await response.json()
        assert response.status == 400
        assert answer["error"]["message"].startswith(words)
        assert answer["error"]["param"] == param
        assert not c.prefill[0].requests
        assert not c.decode[0].requests
        assert not c.scheduler.of(RequestArrived)


async def test_stored_responses_are_refused_as_engines_do() -> None:
    async def ask(c: Any, method: str, path: str) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"{c.url}{PATH}/{path}") as response,
        ):
            return response.status, (await response.json())["error"]

    async with cluster() as c:
        for method, path in (("GET", "resp_1"), ("POST", "resp_1/cancel")):
            status, error = await ask(c, method, path)
            assert (status, error["param"]) == (400, "response_id")
            assert error["message"].startswith("Response store is disabled.")
        for method, path in (("DELETE", "resp_1"), ("GET", "resp_1/input_items"),
                             ("POST", "compact")):  # fmt: skip
            status, error = await ask(c, method, path)
            assert (status, error["code"]) == (501, "not_implemented")


async def test_odd_bodies_end_once_and_leave_nothing() -> None:
    items: list[Any] = [
        *([], [1], [{}], [{"type": "nothing"}], [{"role": "user"}], [[{}]]),
        [{"type": "reasoning", "summary": {}, "encrypted_content": "sglang-reasoning-v1.!"}],
        [{"type": "function_call", "arguments": 7, "call_id": None}],
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
    ]
    async with cluster() as c:
        for item in items:
            status, _ = await stream_of(c, STREAM | {"input": item, "tools": [{}], "reasoning": 1})
            assert status == 200  # a scripted engine takes everything
        await c.settled()
        assert c.scheduler.ended() == ["completed"] * len(items)
        c.check_books()


async def test_engines_before_0_5_22_get_no_responses() -> None:
    async with cluster(decode_says={"version": "0.5.21"}) as c:
        async with c.post(PATH, BODY) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["code"]) == (501, "not_implemented")
        assert "/v1/responses with PD needs 0.5.22" in answer["error"]["message"]
        assert not c.prefill[0].requests
        await c.settled()
        c.check_books()


def test_what_is_too_long_has_the_words_that_clients_look_for() -> None:
    error = too_long("9,000 tokens", "8,000 tokens")
    assert "is longer than the model's context length" in error.message
    assert error.code == "context_length_exceeded"
