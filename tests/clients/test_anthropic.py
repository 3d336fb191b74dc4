"""The ``anthropic`` package against the router and against one engine: the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import pytest
import pytest_asyncio
from client_sides import Sides

from sglang_sbs.scheduling.eventlog import read_event_log
from sglang_sbs.scheduling.events import PrefillDone, RequestArrived, RequestEnded

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session")]

WAIT_S = 60.0
QUIET = {"type": "disabled"}
USER = {"role": "user", "content": "What's the weather in Köln? 天気"}
TEXT = {"type": "text", "text": "the prefill of a batch and decode"}
CITY = {"city": {"type": "string", "enum": ["Rome"]}}
ROME = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}
WEATHER = {"name": "weather", "input_schema": ROME, "strict": True}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
CALLED = {"role": "assistant", "content": [TEXT, CALL]}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [TEXT]}
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
    "rkJggg=="
)
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}

CASES: dict[str, dict[str, Any]] = {
    "text": {"thinking": QUIET},
    "system": {"system": "Be brief.", "thinking": QUIET},
    "system blocks": {"system": [TEXT | {"cache_control": {"type": "ephemeral"}}, TEXT]},
    "turns": {"messages": [USER, {"role": "assistant", "content": "Grey."}, USER]},
    "begun": {"messages": [USER, {"role": "assistant", "content": "It is"}], "thinking": QUIET},
    "parts": {"messages": [{"role": "user", "content": [TEXT, TEXT]}]},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "thought": {
        "messages": [USER, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, TEXT]}, USER]
    },
    "tools": {"tools": [WEATHER], "thinking": QUIET},
    "a tool": {"tools": [WEATHER], "tool_choice": {"type": "any"}, "thinking": QUIET,
               "max_tokens": 200},
    "the tool": {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"},
                 "thinking": QUIET, "max_tokens": 200},
    "no tool": {"tools": [WEATHER], "tool_choice": {"type": "none"}, "thinking": QUIET},
    "result": {"messages": [USER, CALLED, {"role": "user", "content": [RESULT, TEXT]}],
               "tools": [WEATHER], "thinking": QUIET},
    "server tool": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "stop": {"stop_sequences": ["e"], "thinking": QUIET},
    "top": {"extra_body": {"top_k": 1, "top_p": 0.9}, "thinking": QUIET},
    "metadata": {"metadata": {"user_id": "u"}, "thinking": QUIET},
    "image": {"messages": [{"role": "user", "content": [IMAGE, TEXT]}], "thinking": QUIET},
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "no tokens": {"max_tokens": 0},
    "no model": {"model": ""},
    "odd role": {"messages": [{"role": "nobody", "content": "x"}]},
    "small budget": {"thinking": {"type": "enabled", "budget_tokens": 1}},
    "redacted": {"messages": [USER, {"role": "assistant", "content": [
        {"type": "redacted_thinking", "data": "x"}]}, USER]},
    "unknown tool": {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "nope"}},
}  # fmt: skip


@pytest_asyncio.fixture(loop_scope="session")
async def clients(sides: Sides) -> AsyncIterator[list[anthropic.AsyncAnthropic]]:
    """Of the router and of the ordinary engine; neither tries again by itself."""
    made = [
        anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0, timeout=WAIT_S)
        for url in (sides.router, sides.direct)
    ]
    yield made
    for one in made:
        await one.close()


def asked(case: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 12, "messages": [USER], "extra_body": {}} | case | {
        "extra_body": {"temperature": 0.0} | case.get("extra_body", {})
    }  # fmt: skip


def without_ids(value: Any) -> Any:
    """Ids are made up anew for each answer."""
    if isinstance(value, dict):
        return {name: without_ids(one) for name, one in value.items() if name != "id"}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


async def answer(client: anthropic.AsyncAnthropic, case: dict[str, Any]) -> Any:
    """The whole message, or the error that it became."""
    try:
        message = await client.messages.create(**asked(case))
    except anthropic.APIStatusError as error:
        return type(error).__name__, error.status_code, error.body
    return without_ids(message.model_dump())


async def events(client: anthropic.AsyncAnthropic, case: dict[str, Any]) -> Any:
    """A stream's events; deltas in a row as one, as engines join what comes together."""
    found: list[Any] = []
    try:
        async for event in await client.messages.create(**asked(case), stream=True):
            one = without_ids(event.model_dump())
            if one["type"] != "content_block_delta":
                found.append(one)
                continue
            delta = one["delta"]
            (text_name,) = delta.keys() & {"text", "thinking", "partial_json", "signature"}
            last = found[-1]
            if last["type"] == one["type"] and last["delta"]["type"] == delta["type"]:
                last["delta"][text_name] += delta[text_name]
            else:
                found.append(one)
    except anthropic.APIStatusError as error:
        return type(error).__name__, error.status_code, error.body
    return found


@pytest.mark.parametrize("name", CASES)
async def test_a_message_is_the_engines(clients: list[anthropic.AsyncAnthropic], name: str) -> None:
    got, wanted = [await answer(client, CASES[name]) for client in clients]
    assert got == wanted
    if name == "thinking":
        assert got["content"][0]["type"] == "thinking"


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_is_the_engines(clients: list[anthropic.AsyncAnthropic], name: str) -> None:
    got, wanted = [await events(client, CASES[name]) for client in clients]
    assert got == wanted
    if isinstance(got, list):
        assert [got[0]["type"], got[-1]["type"]] == ["message_start", "message_stop"]


async def test_what_routers_decide_is_not_the_clients_to_say(
    clients: list[anthropic.AsyncAnthropic],
) -> None:
    internals = {"bootstrap_room": 7, "routed_dp_rank": 9, "bootstrap_host": "10.0.0.1"}
    forged = CASES["text"] | {"extra_body": internals | {"rid": "mine"}}
    assert await answer(clients[0], forged) == await answer(clients[1], CASES["text"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", REFUSED)
async def test_a_refusal_is_the_engines(
    clients: list[anthropic.AsyncAnthropic], name: str, stream: bool
) -> None:
    ask = events if stream else answer
    got, wanted = [await ask(client, REFUSED[name]) for client in clients]
    assert got == wanted
    assert got[1] == 400


@pytest.mark.parametrize("ask", [answer, events])
async def test_a_refusal_of_sglangs_openai_layer_gets_anthropics_type(
    clients: list[anthropic.AsyncAnthropic], ask: Any
) -> None:
    """SGLang calls it ``BadRequestError`` there, and streams it behind a status of 200."""
    case = {"extra_body": {"temperature": -1.0}}
    got, wanted = [await ask(client, case) for client in clients]
    assert got[:2] == ("BadRequestError", 400)
    assert got[2]["error"]["type"] == "invalid_request_error"
    assert got[2]["error"]["message"] == wanted[2]["error"]["message"]


async def test_what_is_too_long_is_recognised(clients: list[anthropic.AsyncAnthropic]) -> None:
    case = {"messages": [USER | {"content": "the prefill of a batch " * 20_000}]}
    got, wanted = [await answer(client, case) for client in clients]
    assert got[:2] == wanted[:2] == ("BadRequestError", 400)
    assert got[2]["error"]["type"] == "invalid_request_error"
    for words in ("prompt is too long", "is longer than the model's context length"):
        assert words in got[2]["error"]["message"]


async def test_tokens_are_counted_alike(clients: list[anthropic.AsyncAnthropic]) -> None:
    for name, case in CASES.items():
        fields = ("messages", "system", "tools", "tool_choice", "thinking")
        body = {"model": "m", "messages": [USER]} | {n: case[n] for n in fields if n in case}
        counts = [await client.messages.count_tokens(**body) for client in clients]
        assert counts[0].input_tokens == counts[1].input_tokens > 0, name


async def test_the_router_knows_the_length_before_and_endforward_names_the_request(
    sides: Sides, clients: list[anthropic.AsyncAnthropic]
) -> None:
    message = await clients[0].messages.create(
        model="m", max_tokens=4, system="Be brief.", messages=[USER], tools=[WEATHER]
    )
    ended: dict[str, int | None] = {}
    arrived: dict[str, RequestArrived] = {}
    counted: dict[str, int | None] = {}
    named: set[str] = set()
    async with asyncio.timeout(WAIT_S):
        while not arrived or list(arrived)[-1] not in ended or list(arrived)[-1] not in named:
            for record in read_event_log(sides.event_log):
                event = record.event
                if isinstance(event, RequestArrived):
                    arrived[event.rid] = event
                elif isinstance(event, PrefillDone) and event.prompt_tokens is not None:
                    counted[event.rid] = event.prompt_tokens
                elif isinstance(event, RequestEnded):
                    ended[event.rid] = event.completion_tokens
                else:
                    named.update(getattr(getattr(event, "report", None), "rids", ()))
            await asyncio.sleep(0.2)
    rid = list(arrived)[-1]
    assert not arrived[rid].estimated
    assert arrived[rid].prompt_tokens == counted[rid] == message.usage.input_tokens
    assert ended[rid] == message.usage.output_tokens


async def test_a_client_that_leaves_ends_the_request_on_both_engines(
    sides: Sides, clients: list[anthropic.AsyncAnthropic]
) -> None:
    stream = await clients[0].messages.create(
        model="m", max_tokens=4000, messages=[USER], stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    async with aiohttp.ClientSession() as http, asyncio.timeout(WAIT_S):
        for url in sides.engines:
            while await busy(http, url):  # noqa: ASYNC110 - engines announce no end
                await asyncio.sleep(0.2)


async def busy(http: aiohttp.ClientSession, url: str) -> int:
    """Requests that the engine has."""
    async with http.get(f"{url}/v1/loads?include=core") as response:
        loads = (await response.json())["loads"]
    return sum(one["num_running_reqs"] + one["num_waiting_reqs"] for one in loads)
