"""Requests that engines refuse with 400 are refused here, in the words of SGLang, and no others."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Optional
from unittest import mock

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_harness import cluster

from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.requests.plan import plan_request

RELEASES_DIFFER = 0
"""A repetition penalty that SGLang before 0.5.14 takes."""
GRID: dict[str, list[Any]] = {
    "temperature": [-0.001, -1, 0, 1e-7, 1e-6, 0.7, 2, 1e308],
    "top_p": [-0.5, 0, 1e-9, 0.5, 1, 1.0001, 7],
    "min_p": [-1e-9, 0, 0.5, 1, 1.5],
    "top_k": [-2, -1, 0, 1, 50],
    "frequency_penalty": [-2.1, -2, 0, 2, 3],
    "presence_penalty": [-2.1, -2, 0, 2, 3],
    "repetition_penalty": [-0.1, RELEASES_DIFFER, 0.1, 1, 2, 2.1],
    "min_new_tokens": [-1, 0, 1, 9],
    "max_new_tokens": [-1, 0, 1, 8, 1 << 40],
    "json_schema": ["", "{}"],
    "regex": ["", "a+"],
    "ebnf": ["", "root ::= 'a'"],
}
OPENAI_NAMES = {"min_new_tokens": "min_tokens"}
PROMPTS: dict[str, dict[str, Any]] = {
    "generate": {"text": "x"},
    "completions": {"prompt": "x"},
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "responses": {"input": "x"},
}
LIMITS = {
    "completions": ["max_tokens"],
    "chat": ["max_tokens", "max_completion_tokens"],
    "responses": ["max_output_tokens"],
}
values = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from([None, *some]) for name, some in GRID.items()}
)
Verify = Callable[[str, dict[str, Any]], str | None]


def refusal_of(kind: Any, body: dict[str, Any], **more: Any) -> str | None:
    try:
        plan_request(kind, orjson.dumps(PROMPTS[kind] | body), **more)
    except RouterError as error:
        assert (error.status, error.code) == (400, "invalid_request")
        return error.message
    return None


def body_of(kind: str, params: dict[str, Any], limit: str) -> dict[str, Any]:
    """A request with these sampling parameters; null means not given, as with OpenAI's clients."""
    if kind == "generate":
        return {"sampling_params": params}
    given_ones = {name: value for name, value in params.items() if value is not None}
    names = OPENAI_NAMES | {"max_new_tokens": limit}
    return {names.get(name, name): value for name, value in given_ones.items()}


@contextmanager
def sglang_aside() -> Iterator[None]:
    """Without SGLang's modules, and they come back. What it imports stays: PyTorch cannot be loaded
    twice by one process."""

    def taken_out() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] == "sglang"]
        return {name: sys.modules.pop(name) for name in names}

    before = taken_out()
    try:
        yield
    finally:
        taken_out()
        sys.modules.update(before)


@pytest.fixture(scope="module")
def verify() -> Iterator[Verify]:
    """SGLang's own judgement of a body: the text of its refusal. Its packages are entered without
    their ``__init__``, which need more than there is on a host without GPU."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs SGLang")
    root = Path(spec.submodule_search_locations[0])
    with sglang_aside():
        for parts in ("", "srt", "srt.sampling", "srt.entrypoints", "srt.entrypoints.openai"):
            package = ModuleType(f"sglang.{parts}".rstrip("."))
            package.__path__ = [str(root.joinpath(*parts.split(".")))]
            sys.modules[package.__name__] = package
        from pydantic import ValidationError
        from sglang.srt.entrypoints.openai import protocol
        from sglang.srt.sampling.sampling_params import SamplingParams

        def params_of(kind: str, body: dict[str, Any]) -> dict[str, Any]:
            if kind == "generate":
                return dict(body["sampling_params"])
            request: Any = {
                "completions": protocol.CompletionRequest,
                "chat": protocol.ChatCompletionRequest,
                "responses": protocol.ResponsesRequest,
            }[kind](**PROMPTS[kind], **body)
            if kind != "completions":
                first: Any = [] if kind == "chat" else None
                asked: dict[str, Any] = request.to_sampling_params(first, {})
                return asked
            # ``_build_sampling_params`` of ``serving_completions.py``.
            names = {name: OPENAI_NAMES.get(name, name) for name in GRID}
            names["max_new_tokens"] = "max_tokens"
            return {name: getattr(request, field) for name, field in names.items()}

        def judged(kind: str, body: dict[str, Any]) -> str | None:
            try:
                SamplingParams(**params_of(kind, body)).verify(vocab_size=1000)
            except ValidationError as error:
                return str(error)
            except ValueError as error:
                return str(error)
            return None

        yield judged


@settings(max_examples=600, deadline=None)
@given(kind=st.sampled_from(sorted(PROMPTS)), params=values, data=st.data())
def test_what_is_refused_here_sglang_refuses_too(
    verify: Verify, kind: str, params: dict[str, Any], data: st.DataObject
) -> None:
    body = body_of(kind, params, data.draw(st.sampled_from(LIMITS.get(kind, [""]))))
    if refusal_of(kind, body) is not None:
        assert verify(kind, body) is not None


@pytest.mark.parametrize("kind", sorted(PROMPTS))
def test_what_sglang_refuses_is_refused_here_in_its_words(verify: Verify, kind: str) -> None:
    """One odd value, and pairs of those that are compared with each other."""
    pairs = [("temperature", "top_k"), ("min_new_tokens", "max_new_tokens")]
    pairs += itertools.combinations(("json_schema", "regex", "ebnf"), 2)
    cases = [{name: value} for name, some in GRID.items() for value in some]
    cases += [
        {field: a, other: b} for field, other in pairs for a in GRID[field] for b in GRID[other]
    ]
    cases += [{"temperature": 1.0, "top_k": value} for value in GRID["top_k"]]
    refused = 0
    for params, limit in itertools.product(cases, LIMITS.get(kind, [""])):
        body = body_of(kind, params, limit)
        theirs, ours = verify(kind, body), refusal_of(kind, body)
        refused += ours is not None
        if ours is None:
            # What depends on the release, or on defaults that an engine may have of its own.
            uncertain = params.get("repetition_penalty") == RELEASES_DIFFER
            uncertain |= "top_k" in params and "temperature" not in params
            uncertain |= kind == "chat" and params.get("max_new_tokens") == 0
            assert theirs is None or uncertain, (params, theirs)
        else:
            assert theirs is not None
            assert ours in theirs, params
    assert refused > 20


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": True, "top_p": "7", "top_k": [0], "min_p": {}, "max_new_tokens": "-1"},
        {"temperature": None, "top_p": None, "min_new_tokens": None, "max_new_tokens": None},
        {"json_schema": {"a": 1}, "regex": 5, "ebnf": "x"},
    ],
)
def test_odd_values_are_left_to_the_engine(params: dict[str, Any]) -> None:
    assert refusal_of("generate", {"sampling_params": params}) is None


def test_each_of_several_sampling_params_is_looked_at() -> None:
    body = {"text": ["x", "y"], "sampling_params": [{"top_p": 1}, {"top_p": 0}]}
    assert refusal_of("generate", body) == "top_p must be in (0, 1], got 0."


def test_two_limits_of_a_chat_are_left_to_the_engine() -> None:
    """Releases differ in which of them counts."""
    assert refusal_of("chat", {"max_tokens": -1, "max_completion_tokens": 5}) is None


ASKS: dict[str, dict[str, Any]] = {
    "input_embeds": {"text": None, "input_embeds": [[0.5, 1.0]]},
    "custom_logit_processor": {"custom_logit_processor": "x"},
    "return_hidden_states": {"return_hidden_states": True},
    "lora_path": {"lora_path": "adapter"},
}
LACKS: dict[str, dict[str, Any]] = {
    "input_embeds": {"disable_radix_cache": False},
    "custom_logit_processor": {"enable_custom_logit_processor": False},
    "return_hidden_states": {"enable_return_hidden_states": False},
    "lora_path": {"enable_lora": None},
}


@pytest.mark.parametrize("field", sorted(ASKS))
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_a_role_refuses_by_its_flags_gets_to_no_engine(field: str, role: str) -> None:
    """Only prefill refusing left a room on it for good with each such request."""
    says: dict[str, Any] = {f"{role}_says": LACKS[field]}
    async with cluster(prefill=2, decode=2, **says) as c:
        status, answer = await c.generate(**PROMPTS["generate"] | ASKS[field])
        assert status == 400
        about = {"lora_path": "LoRA adapter 'adapter'", "input_embeds": "input_embeds is"}
        assert about.get(field, "The server is not configured") in answer["error"]["message"]
        assert not any(engine.requests for engine in (*c.prefill, *c.decode))
        assert (await c.generate(text="x"))[0] == 200
        # A single engine that takes it is enough.
        worker = next(worker for worker in c.server.registry if worker.role == role)
        assert worker.info is not None
        worker.info = msgspec.structs.replace(worker.info, refused_fields=())
        c.server.tokenizers._looked_s = float("-inf")
        assert (await c.generate(**PROMPTS["generate"] | ASKS[field]))[0] == 200


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        ("generate", {"input_embeds": [[0.5]]}, "input_embeds"),  # beside text it is ignored
        ("completions", {"input_embeds": [[0.5]]}, "input_embeds"),
        ("generate", {"return_hidden_states": False}, "return_hidden_states"),
        ("generate", {"lora_path": ""}, "lora_path"),
        ("generate", {"lora_path": None, "custom_logit_processor": None}, "lora_path"),
    ],
)
def test_fields_that_ask_for_nothing_are_no_refusals(
    kind: str, body: dict[str, Any], field: str
) -> None:
    assert refusal_of(kind, body, refused=[field]) is None


async def test_the_longest_prompt_is_the_longest_that_sglang_takes() -> None:
    """The limit is SGLang's own function, which is the same from 0.5.6 to 0.5.23."""
    spec = PathFinder.find_spec("sglang")  # ``verify`` may have put another module in its place
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs SGLang")
    path = Path(spec.submodule_search_locations[0]) / "srt" / "managers" / "utils.py"
    (function,) = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "validate_input_length"
    ]
    names: dict[str, Any] = {"logger": mock.Mock(), "Optional": Optional, "Req": Any}
    exec(compile(ast.unparse(function), str(path), "exec"), names)
    for cuts in (False, True):
        says = {"max_req_input_len": 50, "allow_auto_truncate": cuts}
        async with cluster(prefill_says=says, decode_says=says) as c:
            for tokens in (48, 49, 50, 51):
                request = SimpleNamespace(origin_input_ids=[7] * tokens)
                refusal = names["validate_input_length"](request, 50, cuts)
                status, _ = await c.generate(input_ids=[7] * tokens)
                assert status == (400 if refusal else 200), (tokens, refusal)
            longest = c.server.tokenizers.known().longest.tokens
            assert longest == (50 if cuts else 49)


async def test_more_tokens_than_a_context_has_get_to_no_engine() -> None:
    async with cluster(decode=2, decode_says={"context_length": 100}) as c:
        params = {"max_new_tokens": 41}
        status, answer = await c.generate(input_ids=[7] * 60, sampling_params=params)
        assert status == 400
        assert answer["error"]["message"] == (
            "Requested token count exceeds the model's maximum context length of 100 tokens. You "
            "requested a total of 101 tokens: 60 tokens from the input messages and 41 tokens for "
            "the completion. Please reduce the number of tokens in the input messages or the "
            "completion to fit within the limit."
        )
        chat = PROMPTS["chat"] | {"input_ids": [7] * 99, "max_tokens": 9}
        async with c.post("/v1/chat/completions", chat) as response:
            assert response.status == 200, "older engines count the messages"
        sent = len(c.decode[0].requests) + len(c.decode[1].requests)
        assert sent == 1
        # The default limit is the engine's business, and so is an estimated length.
        assert (await c.generate(input_ids=[7] * 60))[0] == 200
        assert (await c.generate(input_ids=[7] * 60, sampling_params={"max_new_tokens": 40}))[0]
        assert (await c.generate(text="x " * 400, sampling_params={"max_new_tokens": 90}))[0] == 200


@pytest.mark.parametrize(("says", "status"), [({}, 400), ({"allow_auto_truncate": True}, 200)])
async def test_logprobs_from_behind_the_prompt_get_to_no_engine(
    says: dict[str, Any], status: int
) -> None:
    """Both engines refuse them; before SGLang 0.5.21 that left a room."""
    async with cluster(prefill_says=says, decode_says=says) as c:
        asked = {"input_ids": [[1, 2, 3]] * 2, "return_logprob": True}
        got, answer = await c.generate(**asked, logprob_start_len=[0, 4])
        assert got == status
        if status == 400:
            assert answer["error"]["message"] == (
                "req.logprob_start_len=4 is higher than the number of input tokens "
                "len(req.origin_input_ids)=3. Please use a smaller logprob_start_len."
            )
            assert not c.prefill[0].requests
            assert (await c.generate(**asked, logprob_start_len=3))[0] == 200
            unasked = asked | {"return_logprob": False}
            assert (await c.generate(**unasked, logprob_start_len=4))[0] == 200
