"""Lengths, blocks and token ids of prompts: read by the router, sent to scheduler and engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import orjson
import pytest
from prompt_setup import TEXT, TOOL, USER, Known
from router_harness import cluster

from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.prompts.block_names import BlockFormat, BlockNamer
from sglang_sbs.router.prompts.chat_tokenizer import ChatTokenizer
from sglang_sbs.router.prompts.engine_limits import LongestPrompt
from sglang_sbs.router.prompts.length_estimate import PromptLengths, chat_bytes
from sglang_sbs.router.prompts.reader import PromptReader, ReadPrompt
from sglang_sbs.router.prompts.tokenizer_check import longest_prompt
from sglang_sbs.router.requests.body_fields import Namespace
from sglang_sbs.router.requests.plan import plan_request
from sglang_sbs.router.requests.splitting import MOST_READ_BYTES
from sglang_sbs.router.workers.server_info import KvEventsBlock
from tools.cpu_engine.tiny_model import cached_tiny_model

IMAGE = {"type": "image_url", "image_url": {"url": "u"}}


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(cached_tiny_model())


Read = Callable[..., ReadPrompt]


@pytest.fixture
def engines() -> Known:
    return Known()


def reading(engines: Known, tokenizer: ChatTokenizer | None, *, names_text: bool = False) -> Read:
    reader = PromptReader(tokenizer, PromptLengths(), BlockNamer(), engines, names_text=names_text)

    def read(kind: Any, **body: Any) -> ReadPrompt:
        try:
            (prompt,) = asyncio.run(reader.read(plan_request(kind, orjson.dumps(body))))
        finally:
            reader.lanes.close()
        return prompt

    return read


def names(ids: list[int], page: int = 16, **namespace: str) -> list[int]:
    return BlockNamer().names(ids, BlockFormat(page), Namespace(**namespace)).tolist()


def test_text_is_tokenized_named_and_ready_to_be_sent_as_ids(
    engines: Known, tokenizer: ChatTokenizer
) -> None:
    ids = tokenizer.text_ids(TEXT).tolist()
    for kind, body in (("generate", {"text": TEXT}), ("completions", {"prompt": TEXT})):
        prompt = reading(engines, tokenizer)(kind, **body)
        assert (prompt.length.tokens, prompt.length.exact) == (len(ids), True)
        assert prompt.blocks.tolist() == names(ids)
        assert prompt.block_tokens == 16
        assert prompt.ids_json == str(ids).replace(" ", "").encode()


def test_a_chat_is_tokenized_and_named(engines: Known, tokenizer: ChatTokenizer) -> None:
    body = {"messages": [USER], "tools": [TOOL]}
    ids = tokenizer.chat_ids(body).ids.tolist()
    prompt = reading(engines, tokenizer)("chat", **body)
    assert prompt.length.tokens == len(ids)
    assert prompt.blocks.tolist() == names(ids)
    assert prompt.ids_json is not None


def test_messages_are_counted_and_named_as_the_chat_that_engines_make_of_them(
    engines: Known, tokenizer: ChatTokenizer
) -> None:
    system = {"role": "system", "content": "Be brief."}
    ids = tokenizer.chat_ids({"messages": [system, USER]}).ids.tolist()
    body = {"messages": [USER], "system": "Be brief.", "max_tokens": 9}
    prompt = reading(engines, tokenizer)("messages", **body)
    assert (prompt.length.tokens, prompt.length.exact) == (len(ids), True)
    assert prompt.blocks.tolist() == names(ids)
    assert prompt.ids_json is None
    engines.longest = LongestPrompt(len(ids) - 1)
    assert refusal_of(engines, "messages", tokenizer, **body) is not None
    # What only the engine's parsers decide may make it shorter, too: it is not refused here.
    thinking = body | {"thinking": {"type": "adaptive"}}
    prompt = reading(engines, tokenizer)("messages", **thinking)
    assert (prompt.length.tokens, prompt.length.exact) == (len(ids) - 1, False)
    assert prompt.blocks.tolist() == names(ids)


def test_messages_that_cannot_be_converted_are_estimated_by_their_size(
    engines: Known, tokenizer: ChatTokenizer
) -> None:
    for message in (7, USER | {"content": [{}]}):
        body = {"messages": [message], "x": "y" * 400}
        length = reading(engines, tokenizer)("messages", **body).length
        assert not length.exact
        assert length.tokens > 50
    text = {"type": "text", "text": "a word " * (MOST_READ_BYTES // 7 + 1)}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text]}
    length = reading(engines, tokenizer)("messages", messages=[USER | {"content": [result]}]).length
    assert length.tokens > MOST_READ_BYTES // 8


def test_ids_of_the_client_need_no_tokenizer(engines: Known) -> None:
    ids = list(range(700))
    for kind, body in (
        ("generate", {"input_ids": ids}),
        ("completions", {"prompt": ids}),
        ("chat", {"messages": [USER], "input_ids": ids}),
    ):
        prompt = reading(engines, None)(kind, **body)
        assert (prompt.length.tokens, prompt.length.exact) == (700, True)
        assert prompt.blocks.tolist() == names(ids)
        assert prompt.ids_json is None


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("generate", {"text": TEXT, "image_data": "u"}),
        ("generate", {"text": TEXT, "session_params": {"id": "s"}}),
        ("generate", {"input_ids": [1] * 64, "image_data": ["u"]}),
        ("chat", {"messages": [{"role": "user", "content": [IMAGE]}]}),
        ("chat", {"messages": [{"role": "nobody", "content": "x"}]}),
    ],
)
def test_prompts_of_more_than_text_are_estimated_and_have_no_names(
    engines: Known, tokenizer: ChatTokenizer, kind: str, body: dict[str, Any]
) -> None:
    prompt = reading(engines, tokenizer)(kind, **body)
    assert not prompt.length.exact
    assert not prompt.blocks
    assert prompt.ids_json is None


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("completions", {"prompt": TEXT, "echo": True}),
        ("generate", {"text": TEXT, "input_ids": [1] * 600}),
        ("chat", {"messages": [USER], "reasoning_effort": "low"}),
    ],
)
def test_text_is_sent_as_text_where_ids_might_change_the_answer(
    engines: Known, tokenizer: ChatTokenizer, kind: str, body: dict[str, Any]
) -> None:
    prompt = reading(engines, tokenizer)(kind, **body)
    assert prompt.ids_json is None
    assert prompt.blocks


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_an_engine_with_other_tokens_makes_counts_estimates(
    engines: Known, tokenizer: ChatTokenizer, kind: Any
) -> None:
    engines.wrong = {kind}
    read = reading(engines, tokenizer)
    prompt = read("generate", text=TEXT) if kind == "text" else read("chat", messages=[USER])
    assert not prompt.length.exact
    assert prompt.length.tokens > 10
    assert not prompt.blocks
    assert prompt.ids_json is None


def test_nobody_wants_names(engines: Known, tokenizer: ChatTokenizer) -> None:
    engines.format = None
    prompt = reading(engines, tokenizer, names_text=True)("generate", text=TEXT)
    assert (prompt.blocks.tolist(), prompt.block_tokens) == ([], 0)
    assert prompt.length.exact


def test_namespaces_follow_salt_adapter_and_model(engines: Known, tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.text_ids(TEXT).tolist()

    def blocks(**body: Any) -> list[int]:
        read = reading(engines, tokenizer)
        return read("completions", prompt=TEXT, **body).blocks.tolist()

    assert blocks(cache_salt="s") == names(ids, cache_salt="s")
    assert blocks(cache_salt="") == names(ids)
    assert blocks(lora_path="a") == names(ids, lora="a")
    assert blocks(model="base:a", lora_path="b") == names(ids, lora="a")
    assert blocks(model="org:model") == names(ids)
    assert blocks(cache_salt=["s"]) == []


def test_text_without_tokenizer_is_named_by_its_bytes_for_the_approximate_index(
    engines: Known,
) -> None:
    long = TEXT * 10
    assert not reading(engines, None)("generate", text=long).blocks
    prompt = reading(engines, None, names_text=True)("generate", text=long)
    assert not prompt.length.exact
    expected = BlockNamer().text_names(long.encode(), 16).tolist()
    assert prompt.blocks.tolist() == expected
    assert len(expected) == len(long.encode()) // 64
    turns = [USER, {"role": "assistant", "content": "Grey."}, USER]
    chats = [
        reading(engines, None, names_text=True)("chat", messages=turns[:n]).blocks.tolist()
        for n in (1, 3)
    ]
    assert chats[1][: len(chats[0])] == chats[0]
    assert chats[0]
    assert chat_bytes({"messages": turns}) is not None


def test_embeddings_and_nonsense_have_no_names(engines: Known) -> None:
    for value in ([[0.1] * 4] * 40, [-1] * 40, ["x"] * 40):
        key = "input_embeds" if isinstance(value[0], list) else "input_ids"
        assert not reading(engines, None)("generate", **{key: value}).blocks


# Through the router ---------------------------------------------------------------------------


def refusal_of(
    engines: Known, kind: str = "generate", tokenizer: ChatTokenizer | None = None, **body: Any
) -> str | None:
    try:
        reading(engines, tokenizer)(kind, **body)
    except RouterError as error:
        assert (error.status, error.code) == (400, "context_length_exceeded")
        return error.message
    return None


def test_a_prompt_longer_than_any_engine_takes_is_refused(engines: Known) -> None:
    engines.longest = LongestPrompt(1000)
    assert refusal_of(engines, input_ids=[7] * 1000) is None
    message = refusal_of(engines, input_ids=[7] * 1001)
    # The words that LiteLLM looks for, and those that LangChain and Claude Code look for.
    assert message is not None
    assert "is longer than the model's context length (1,000 tokens)" in message
    assert message.startswith("prompt is too long: the input (1,001 tokens)")
    assert refusal_of(engines, text="a word " * 9000) is None  # it might be one token in 63 bytes
    assert refusal_of(engines, text="a word " * 10_000) is not None
    large = "a word " * (MOST_READ_BYTES // 7 + 1)
    assert refusal_of(engines, text=large) is not None
    assert refusal_of(engines, "chat", messages=[USER | {"content": large}]) is not None


def test_a_text_of_too_many_tokens_is_refused_before_all_were_counted(
    engines: Known, tokenizer: ChatTokenizer
) -> None:
    engines.longest = LongestPrompt(1000)
    text = " ".join(f"word {number}" for number in range(6000))
    chat = {"messages": [USER | {"content": text}]}
    for kind, body in (("generate", {"text": text}), ("chat", chat)):
        with pytest.raises(RouterError, match=r"at least [0-9,]+ tokens\) is longer"):
            reading(engines, tokenizer)(kind, **body)
    image = {"messages": [USER | {"content": [{"type": "text", "text": text}, IMAGE]}]}
    length = reading(engines, tokenizer)("chat", **image).length
    assert (length.tokens, length.exact) == (1000, False), "its tokens are not all known here"
    engines.wrong = {"text"}
    length = reading(engines, tokenizer)("generate", text=text).length
    assert (length.tokens, length.exact) == (1000, False), "engines count otherwise"
    engines.longest, engines.wrong = LongestPrompt(1000, cuts=True), set()
    assert reading(engines, tokenizer)("generate", text=text).length.tokens == 1000


def test_an_estimate_is_no_more_than_engines_take(engines: Known) -> None:
    engines.longest = LongestPrompt(1000)
    length = reading(engines, None)("generate", text="a word " * 5000).length
    assert (length.tokens, length.exact, length.size_bytes) == (1000, False, 0)


def test_engines_that_cut_prompts_get_every_prompt(engines: Known) -> None:
    engines.longest = LongestPrompt(1000, cuts=True)
    prompt = reading(engines, None)("generate", input_ids=[7] * 5000)
    assert (prompt.length.tokens, prompt.length.exact) == (1000, False)


async def test_how_long_a_prompt_may_be_is_what_some_engine_of_each_role_takes() -> None:
    async with cluster(prefill=2, decode=1) as c:
        workers = list(c.server.registry)

        def longest(*limits: int, cuts: bool = False) -> LongestPrompt | None:
            for worker, limit in zip(workers, limits, strict=True):
                assert worker.info is not None
                worker.info = msgspec.structs.replace(
                    worker.info, max_request_tokens=limit, cuts_prompts=cuts
                )
            return longest_prompt(workers)

        assert [worker.role for worker in workers] == ["prefill", "prefill", "decode"]
        assert longest(100, 200, 300) == LongestPrompt(200)
        assert longest(100, 200, 150, cuts=True) == LongestPrompt(150, cuts=True)
        assert longest(100, 0, 300) is None
        longest(100, 50, 300)
        c.server.tokenizers._looked_s = float("-inf")
        status, answer = await c.generate(input_ids=[7] * 101)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert not c.prefill[0].requests


async def test_blocks_are_pages_where_engines_publish_kv_events_and_coarse_elsewhere() -> None:
    async with cluster("--policy", "sbs") as c:
        prefill, decode = c.server.registry
        assert prefill.info is not None
        assert decode.info is not None
        tokenizers = c.server.tokenizers
        for publisher, page, block in (
            (None, 1, 64), (None, 16, 64), (None, 24, 72), (None, 64, 64), (None, 128, 128),
            (prefill, 1, 1), (decode, 1, 1), (decode, 64, 64),
        ):  # fmt: skip
            for worker in (prefill, decode):
                assert worker.info is not None
                events = KvEventsBlock(port=1, replay_port=None, topic="", block_tokens=page)
                worker.info = msgspec.structs.replace(
                    worker.info,
                    page_size=page,
                    kv_events=events if worker is publisher else None,
                    radix_cache=True,
                )
            tokenizers._looked_s = float("-inf")
            assert tokenizers.known().blocks == BlockFormat(block)
        for worker in (prefill, decode):
            assert worker.info is not None
            worker.info = msgspec.structs.replace(worker.info, radix_cache=False)
        tokenizers._looked_s = float("-inf")
        assert tokenizers.known().blocks is None, "no engine has a prefix cache"
