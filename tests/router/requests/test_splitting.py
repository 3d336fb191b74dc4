"""``n > 1`` and batches become single requests with rooms of their own, and one answer again."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from router_harness import cluster, sse_events

from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.relay.engine_json import opened
from sglang_sbs.router.relay.merged_answers import StreamMerger, merge_answers
from sglang_sbs.router.requests.plan import plan_request
from sglang_sbs.scheduling.events import RequestArrived
from tools.stand_ins.mock_engine import Behaviour

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def rooms(c: Any) -> list[int]:
    return [r.body["bootstrap_room"] for r in c.decode[0].requests]


async def test_generate_n_becomes_n_requests_and_a_list() -> None:
    async with cluster() as c:
        status, answer = await c.generate(text="x", sampling_params={"n": 3, "temperature": 0.5})
        assert status == 200
        assert [item["text"] for item in answer] == ["t1 t2 t3"] * 3
        assert len(set(rooms(c))) == 3
        for request in (*c.prefill[0].requests, *c.decode[0].requests):
            assert request.body["sampling_params"] == {"n": 1, "temperature": 0.5}
        assert len(c.scheduler.of(RequestArrived)) == 3
        await c.settled()
        c.check_books()


async def test_a_batch_is_split_prompt_by_prompt_sample_by_sample() -> None:
    async with cluster() as c:
        status, answer = await c.generate(
            input_ids=[[1], [2, 2]],
            sampling_params=[{"n": 2, "max_new_tokens": 5}, {"n": 2, "max_new_tokens": 6}],
            return_logprob=[True, False],
            rid="batch",
            bootstrap_room=[1, 2],
        )
        assert status == 200
        assert [item["meta_info"]["id"] for item in answer] == [f"batch_{i}" for i in range(4)]
        by_rid = {r.rid: r.body for r in c.decode[0].requests}
        arrived = c.scheduler.of(RequestArrived)
        bodies = [by_rid[event.rid] for event in arrived]
        assert [body["input_ids"] for body in bodies] == [[1], [1], [2, 2], [2, 2]]
        assert [body["return_logprob"] for body in bodies] == [True, True, False, False]
        assert [e.max_new_tokens for e in arrived] == [5, 5, 6, 6]
        assert [e.prompt_tokens for e in arrived] == [1, 1, 2, 2]
        assert len(set(rooms(c))) == 4
        assert not {1, 2} & set(rooms(c))
        assert len(answer[0]["meta_info"]["input_token_logprobs"]) == 7


async def test_a_batch_of_one_stays_a_list() -> None:
    async with cluster() as c:
        _, answer = await c.generate(text=["only"])
        assert isinstance(answer, list)
        assert len(answer) == 1
        assert c.decode[0].requests[0].body["text"] == "only"


async def test_openai_choices_are_renumbered_and_usage_summed() -> None:
    async with cluster() as c:
        body = {"prompt": ["a", "b"], "n": 2}
        async with c.post("/v1/completions", body) as response:
            answer = await response.json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"] == {
            "prompt_tokens": 14,
            "completion_tokens": 12,
            "total_tokens": 26,
        }
        assert sorted(r.body["prompt"] for r in c.decode[0].requests) == ["a", "a", "b", "b"]
        assert {r.body["n"] for r in c.prefill[0].requests} == {1}
        assert len(set(rooms(c))) == 4


async def test_streams_of_samples_are_merged() -> None:
    async with cluster() as c:
        body = CHAT | {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
        async with c.post("/v1/chat/completions", body) as response:
            events = sse_events(await response.read())
        assert events.count("[DONE]") == 1
        assert events[-1] == "[DONE]"
        usage = events[-2]
        assert usage["choices"] == []
        assert usage["usage"] == {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}
        pieces: dict[int, list[str]] = {}
        for event in events[:-2]:
            (choice,) = event["choices"]
            pieces.setdefault(choice["index"], []).append(choice["delta"]["content"])
        assert pieces == {i: ["t1", "t2", "t3"] for i in range(3)}
        assert len({event["id"] for event in events[:-1]}) == 1
        await c.settled()
        assert c.scheduler.ended() == ["completed"] * 3
        c.check_books()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 3, 2, 0]])
def test_a_prompts_cached_tokens_count_once_whichever_sample_ends_first(order: list[int]) -> None:
    """SGLang counts each prompt by its first sample (``UsageProcessor``)."""
    merger = StreamMerger(plan_request("completions", b'{"prompt": ["a", "b"], "n": 2}'), "id")
    for unit in order:
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": 3,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        assert merger.event(unit, {"choices": [], "usage": usage}) == ()
    (event, _) = sse_events(merger.end())
    assert event["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 12,
        "total_tokens": 32,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def extension_of(unit: int, length: int) -> dict[str, Any]:
    """SGLang's ``sglext`` of a chat with ``n`` 1 (``serving_chat.py``)."""
    ids = [unit] * length
    spent = {"spec_verify_ct": unit}
    return {"spec_tokens_details": spent, "input_ids": [7, 7], "output_ids": [ids]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [2, 100_000])
def test_ids_of_every_choice_are_in_the_merged_extension(stream: bool, length: int) -> None:
    """SGLang has one ``output_ids`` per choice, one ``spec_tokens_details`` per sample."""
    plan = plan_request("chat", orjson.dumps(CHAT | {"n": 3}))
    if stream:
        merger = StreamMerger(plan, "id")
        for unit in (2, 0, 1):
            data = orjson.dumps(
                {"id": f"{unit}", "choices": [], "sglext": extension_of(unit, length)}
            )
            assert merger.event(unit, opened(data)) == ()
        answer, end = sse_events(merger.end())
        assert (answer["id"], answer["choices"], end) == ("id", [], "[DONE]")
    else:
        choices = [{"index": 0, "message": {"role": "assistant", "content": "x"}}]
        answers = [{"choices": choices, "sglext": extension_of(unit, length)} for unit in range(3)]
        merged = merge_answers(plan, [orjson.dumps(each) for each in answers])
        answer = orjson.loads(b"".join(merged))
    assert answer["sglext"] == {
        "spec_tokens_details": [{"spec_verify_ct": unit} for unit in range(3)],
        "input_ids": [7, 7],
        "output_ids": [[unit] * length for unit in range(3)],
    }


async def test_generate_streams_of_a_batch_carry_their_index() -> None:
    async with cluster() as c:
        async with c.post("/generate", {"text": ["a", "b"], "stream": True}) as response:
            events = sse_events(await response.read())
        assert events[-1] == "[DONE]"
        assert events.count("[DONE]") == 1
        last = {event["index"]: event["text"] for event in events[:-1]}
        assert last == {0: "t1 t2 t3", 1: "t1 t2 t3"}


async def test_one_failed_sample_fails_the_request_and_aborts_the_others() -> None:
    async with cluster("--disable-retries") as c:
        c.decode[0].behaviours.append(Behaviour(status=500, message="broken"))
        c.decode[0].behaviour = Behaviour(fault="hang_before_head")
        status, answer = await c.generate(text="x", sampling_params={"n": 3})
        assert status == 500
        assert answer["error"]["message"] == "broken"
        await c.settled()
        outcomes = sorted(c.scheduler.ended())
        assert outcomes == ["aborted", "aborted", "failed"]
        for request in c.decode[0].requests[1:]:
            await c.decode[0].aborted(request.rid)
        c.check_books()


def plan(kind: Any, **body: Any) -> Any:
    return plan_request(kind, orjson.dumps(body))


@pytest.mark.parametrize(
    ("kind", "body", "units"),
    [
        ("generate", {"text": "a"}, 1),
        ("generate", {"text": ["a", "b"]}, 2),
        ("generate", {"input_ids": [1, 2]}, 1),
        ("generate", {"input_ids": [[1], [2]]}, 2),
        ("generate", {"input_embeds": [[0.1, 0.2]]}, 1),
        ("generate", {"input_embeds": [[[0.1]], [[0.2]]]}, 2),
        ("generate", {"text": "a", "sampling_params": {"n": 4, "beam_width": 4}}, 1),
        ("completions", {"prompt": [1, 2, 3]}, 1),
        ("completions", {"prompt": [[1], [2]]}, 2),
        ("completions", {"prompt": "a", "n": None}, 1),
        ("chat", CHAT | {"n": 2}, 2),
    ],
)
def test_inputs_that_are_split_into_several_requests(
    kind: Any, body: dict[str, Any], units: int
) -> None:
    result = plan(kind, **body)
    assert len(result.units) == units


def test_per_prompt_lists_are_not_confused_with_lists_of_their_own_right() -> None:
    result = plan("generate", text=["a", "b"], token_ids_logprob=[5, 6, 7])
    assert orjson.loads(b"{%b}" % result.common)["token_ids_logprob"] == [5, 6, 7]
    result = plan("generate", text=["a", "b"], image_data=["one", "two"])
    assert orjson.loads(b"{%b}" % result.prompts[1].own)["image_data"] == "two"


@pytest.mark.parametrize(
    "body",
    [
        {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]},
        {"text": ["a", "b"], "image_data": ["only one"]},
        {"text": "a", "sampling_params": {"n": True}},
        {"text": "a", "sampling_params": "n=2"},
        {"text": "a", "sampling_params": {"n": 100_000}},
        {"text": 5},
        {"text": "a", "rid": 5},
    ],
)
def test_impossible_batches_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RouterError) as error:
        plan("generate", **body)
    assert error.value.status == 400


def test_only_what_makes_the_prompt_of_a_chat_becomes_objects() -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [], "reasoning_effort": "low"}
    body = chat | {"logit_bias": {"1": 2}, "extra": [[]], "model": "m", "temperature": 1}
    (prompt,) = plan_request("chat", orjson.dumps(body)).prompts
    assert prompt.value == chat
