"""The ``anthropic`` and ``openai`` packages, LangChain and LiteLLM against the router and against
one engine: the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import aiohttp
import anthropic_side
import openai
import openai_side
import pytest
import pytest_asyncio
from client_sides import WAIT_S, Sides

from sglang_sbs.scheduling.eventlog import read_event_log
from sglang_sbs.scheduling.events import PrefillDone, RequestArrived, RequestEnded

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session")]

PACKAGES = {"anthropic": anthropic_side, "openai": openai_side}
CASES = [(package, name) for package, side in PACKAGES.items() for name in side.CASES]
REFUSED = [(package, name) for package, side in PACKAGES.items() for name in side.REFUSED]
INTERNALS = {"bootstrap_room": 7, "routed_dp_rank": 9, "bootstrap_host": "10.0.0.1", "rid": "mine"}
LONG = "the prefill of a batch " * 20_000
UNIQUE = 5
"""Output tokens that only one request asks for; the ids of messages are the engine's own."""
TOO_LONG = ("prompt is too long", "is longer than the model's context length")


@pytest_asyncio.fixture(loop_scope="session")
async def clients(sides: Sides) -> AsyncIterator[dict[str, list[Any]]]:
    """Yield clients of the router and of the ordinary engine, by package. None tries again by
    itself."""
    made = {
        package: [side.client_of(url) for url in (sides.router, sides.direct)]
        for package, side in PACKAGES.items()
    }
    yield made
    for pair in made.values():
        for process in pair:
            await process.close()


async def on_both(clients: list[Any], ask: Any, case: dict[str, Any]) -> list[Any]:
    """The router's answer and the ordinary engine's; at the same time, which takes less."""
    return list(await asyncio.gather(*(ask(client, case) for client in clients)))


@pytest.mark.parametrize(("package", "name"), CASES)
async def test_an_answer_is_the_engines(
    clients: dict[str, list[Any]], package: str, name: str
) -> None:
    side = PACKAGES[package]
    got, wanted = await on_both(clients[package], side.answer, side.CASES[name])
    assert got == wanted
    shown = str(got)
    assert name != "thinking" or "'type': 'thinking'" in shown or "'type': 'reasoning'" in shown


@pytest.mark.parametrize(("package", "name"), CASES)
async def test_a_stream_is_the_engines(
    clients: dict[str, list[Any]], package: str, name: str
) -> None:
    side = PACKAGES[package]
    got, wanted = await on_both(clients[package], side.events, side.CASES[name])
    assert got == wanted
    assert (package, name) != ("openai", "the tool") or "'type': 'function_call'" in str(got)
    if not isinstance(got, list):
        return  # images are refused here
    ends = got[0]["type"], got[-1]["type"]
    if package == "anthropic":
        assert ends == ("message_start", "message_stop")
    else:
        assert ends[0] == "response.created"
        assert ends[1] in ("response.completed", "response.incomplete")


@pytest.mark.parametrize(
    ("package", "name", "more"),
    [("anthropic", "text", {}), ("openai", "text", {"request_id": "resp_mine"})],
)
async def test_what_routers_decide_is_not_the_clients_to_say(
    clients: dict[str, list[Any]], package: str, name: str, more: dict[str, Any]
) -> None:
    side = PACKAGES[package]
    forged = side.CASES[name] | {"extra_body": INTERNALS | more}
    got, wanted = clients[package]
    assert await side.answer(got, forged) == await side.answer(wanted, side.CASES[name])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("package", "name"), REFUSED)
async def test_a_refusal_is_the_engines(
    clients: dict[str, list[Any]], package: str, name: str, stream: bool
) -> None:
    side = PACKAGES[package]
    ask = side.events if stream else side.answer
    got, wanted = await on_both(clients[package], ask, side.REFUSED[name])
    if isinstance(wanted, list):  # behind a status of 200, which the router does not need
        wanted = ("BadRequestError", 400, wanted[-1]["response"]["error"]["message"])
    assert got == wanted
    assert got[1] in (400, 404)


@pytest.mark.parametrize("ask", [anthropic_side.answer, anthropic_side.events])
async def test_a_refusal_of_sglangs_openai_layer_gets_anthropics_type(
    clients: dict[str, list[Any]], ask: Any
) -> None:
    """SGLang calls it ``BadRequestError`` there, and streams it behind a status of 200."""
    case = {"extra_body": {"temperature": -1.0}}
    got, wanted = [await ask(client, case) for client in clients["anthropic"]]
    assert got[:2] == ("BadRequestError", 400)
    assert got[2]["error"]["type"] == "invalid_request_error"
    assert got[2]["error"]["message"] == wanted[2]["error"]["message"]


async def test_what_is_too_long_is_recognised_by_anthropics_clients(
    clients: dict[str, list[Any]],
) -> None:
    case = {"messages": [anthropic_side.USER | {"content": LONG}]}
    got, wanted = [await anthropic_side.answer(client, case) for client in clients["anthropic"]]
    assert got[:2] == wanted[:2] == ("BadRequestError", 400)
    assert got[2]["error"]["type"] == "invalid_request_error"
    assert all(words in got[2]["error"]["message"] for words in TOO_LONG)


async def test_what_is_too_long_is_recognised_by_openais_clients(
    clients: dict[str, list[Any]],
) -> None:
    for ask in (openai_side.answer, openai_side.events):
        got = await ask(clients["openai"][0], {"input": LONG})
        assert got[:2] == ("BadRequestError", 400)
        assert all(words in got[2] for words in TOO_LONG)


async def test_stored_responses_are_refused_as_by_engines(clients: dict[str, list[Any]]) -> None:
    words: list[str] = []
    for client in clients["openai"]:
        for ask in (client.responses.retrieve, client.responses.cancel):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask("resp_1")
            words.append(caught.value.body["message"])
    assert set(words) == {words[0]}
    assert words[0].startswith("Response store is disabled.")


async def test_tokens_are_counted_alike(clients: dict[str, list[Any]]) -> None:
    for name, case in anthropic_side.CASES.items():
        fields = ("messages", "system", "tools", "tool_choice", "thinking")
        body = {"model": "m", "messages": [anthropic_side.USER]}
        body |= {field: case[field] for field in fields if field in case}
        counts = [await client.messages.count_tokens(**body) for client in clients["anthropic"]]
        assert counts[0].input_tokens == counts[1].input_tokens > 0, name


@pytest.mark.parametrize("package", PACKAGES)
async def test_the_router_knows_the_length_before_and_endforward_names_the_request(
    sides: Sides, clients: dict[str, list[Any]], package: str
) -> None:
    client = clients[package][0]
    if package == "anthropic":
        user, tools = anthropic_side.USER, [anthropic_side.WEATHER]
        answer = await client.messages.create(
            model="m", max_tokens=UNIQUE, system="Be brief.", messages=[user], tools=tools
        )
    else:
        answer = await client.responses.create(**openai_side.asked(openai_side.CASES["codex"]))
    named_by_engine = package == "anthropic"
    ended: dict[str, int | None] = {}
    arrived: RequestArrived | None = None
    counted: dict[str, int | None] = {}
    named: set[str] = set()
    async with asyncio.timeout(WAIT_S):
        while arrived is None or not named & ended.keys() & {arrived.rid}:
            for record in read_event_log(sides.event_log):
                event = record.event
                if isinstance(event, RequestArrived):
                    is_it = event.max_new_tokens == UNIQUE
                    if is_it if named_by_engine else event.rid == answer.id:
                        arrived = event
                elif isinstance(event, PrefillDone) and event.prompt_tokens is not None:
                    counted[event.rid] = event.prompt_tokens
                elif isinstance(event, RequestEnded):
                    ended[event.rid] = event.completion_tokens
                else:
                    named.update(getattr(getattr(event, "report", None), "rids", ()))
            await asyncio.sleep(0.2)
    assert not arrived.estimated
    assert arrived.prompt_tokens == counted[arrived.rid] == answer.usage.input_tokens
    assert ended[arrived.rid] == answer.usage.output_tokens


@pytest.mark.parametrize("package", PACKAGES)
async def test_a_client_that_leaves_ends_the_request_on_both_engines(
    sides: Sides, clients: dict[str, list[Any]], package: str
) -> None:
    client = clients[package][0]
    if package == "anthropic":
        asked = {"model": "m", "max_tokens": 4000, "messages": [anthropic_side.USER]}
        stream = await client.messages.create(**asked, stream=True)
    else:
        asked = openai_side.asked({"max_output_tokens": 4000})
        stream = await client.responses.create(**asked, stream=True)
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
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


@pytest.fixture(scope="module")
def litellm() -> ModuleType:
    with pytest.MonkeyPatch.context() as patched:
        # It would ask the network for prices.
        patched.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm

        return litellm


async def test_litellm_gets_the_engines_answers(sides: Sides, litellm: ModuleType) -> None:
    how = {"model": f"openai/{openai_side.MODEL}", "api_key": "any", "max_retries": 0}
    asked = {"temperature": 0.0, "max_tokens": 8, "messages": [openai_side.USER]}
    texts, responses = [], []
    for url in (sides.router, sides.direct):
        answer = await litellm.acompletion(**how, api_base=f"{url}/v1", **asked)
        texts.append(answer.choices[0].message.model_dump())
        response = await litellm.aresponses(
            **how, api_base=f"{url}/v1", input="Hello", max_output_tokens=8, temperature=0.0
        )
        responses.append([item.type for item in response.output] + [response.status])
    assert texts[0] == texts[1]
    assert responses[0] == responses[1]


async def test_litellm_knows_what_is_too_long(sides: Sides, litellm: ModuleType) -> None:
    """``context_window_fallbacks`` rest on that."""
    how = {"model": f"openai/{openai_side.MODEL}", "api_key": "any", "max_retries": 0}
    how |= {"api_base": f"{sides.router}/v1"}
    with pytest.raises(litellm.ContextWindowExceededError):
        await litellm.acompletion(**how, messages=[openai_side.USER | {"content": LONG}])
    with pytest.raises(litellm.ContextWindowExceededError):
        await litellm.aresponses(**how, input=LONG)
    how |= {"model": "anthropic/m", "api_base": sides.router}
    with pytest.raises(litellm.ContextWindowExceededError):
        await litellm.acompletion(**how, messages=[openai_side.USER | {"content": LONG}])


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
async def test_langchain_gets_the_engines_answers(sides: Sides, responses: bool) -> None:
    from langchain_core.exceptions import ContextOverflowError
    from langchain_openai import ChatOpenAI

    answers: list[Any] = []
    for url in (sides.router, sides.direct):
        chat = ChatOpenAI(
            base_url=f"{url}/v1", api_key="any", model=openai_side.MODEL, temperature=0.0,
            max_tokens=14, max_retries=0, timeout=WAIT_S, use_responses_api=responses,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )  # fmt: skip
        whole = await chat.ainvoke("Köln? 天気")
        streamed = [chunk.text async for chunk in chat.astream("Köln? 天気")]
        answers.append((whole.text, "".join(streamed)))
        if url == sides.router:
            with pytest.raises(ContextOverflowError):
                await chat.ainvoke(LONG)
    assert answers[0] == answers[1]
    assert answers[0][0] == answers[0][1] != ""
