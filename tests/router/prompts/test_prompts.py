"""What the router finds out about prompts, what the scheduler is told, and what engines get."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from router_harness import Cluster, cluster, until

from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.prompts.block_names import BlockFormat, BlockNamer
from sglang_sbs.router.prompts.chat_tokenizer import ChatTokenizer
from sglang_sbs.router.prompts.known_text import MOST_WHOLE_CHARS
from sglang_sbs.router.prompts.length_estimate import PromptLengths, chat_bytes
from sglang_sbs.router.prompts.reader import LongestPrompt, PromptKind, PromptReader, ReadPrompt
from sglang_sbs.router.prompts.tokenizer_check import longest_prompt
from sglang_sbs.router.relay.engine_json import token_counts
from sglang_sbs.router.requests.body_fields import Namespace
from sglang_sbs.router.requests.plan import plan_request
from sglang_sbs.router.requests.raw_json import json_of_ids, token_ids_of
from sglang_sbs.router.requests.splitting import MOST_READ_BYTES
from sglang_sbs.scheduling.events import PrefillDone, RequestArrived
from sglang_sbs.testing.tiny_model import cached_tiny_model

USER = {"role": "user", "content": "What is the weather in Köln? " * 8}
IMAGE = {"type": "image_url", "image_url": {"url": "u"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEXT = "the model and the batch of it <|im_start|> ü " * 8


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(cached_tiny_model())


class Known:
    """Engines as a test wants them."""

    def __init__(self) -> None:
        self.format: BlockFormat | None = BlockFormat(16)
        self.wrong: set[PromptKind] = set()
        self.ids = True
        self.models = {"org:model"}
        self.longest: LongestPrompt | None = None

    def block_format(self) -> BlockFormat | None:
        return self.format

    def agrees(self, kind: PromptKind) -> bool:
        return kind not in self.wrong

    def takes_ids(self, kind: PromptKind) -> bool:
        return self.ids

    def serves(self, model: str) -> bool:
        return model in self.models

    def longest_prompt(self) -> LongestPrompt | None:
        return self.longest


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
            reader.close()
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
        ("generate", {"text": TEXT, "input_ids": [1]}),
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


def engine_tokenize(tokenizer: ChatTokenizer, body: dict[str, Any]) -> list[Any] | None:
    """As an engine with that tokenizer answers ``/tokenize``."""
    if "messages" in body:
        return tokenizer.chat_ids(body).ids.tolist()
    return [tokenizer.text_ids(text).tolist() for text in body["prompt"]]


def shouting(tokenizer: ChatTokenizer, body: dict[str, Any]) -> list[Any] | None:
    """An engine with the same vocabulary and another template."""
    answer = engine_tokenize(tokenizer, body)
    return [*answer, 1] if answer is not None and "messages" in body else answer


async def asked(system: Cluster, tokenize: Any, *, version: str = "0.5.23") -> None:
    """Let the engines have a tokenizer, and wait until all were asked about it."""
    for engine in (*system.prefill, *system.decode):
        engine._server_info |= {"version": version}
        engine.tokenize = tokenize
    registry, tokenizers = system.server.registry, system.server.tokenizers
    for worker in registry:
        worker.recheck = True
        registry.doubted(worker)
    await until(lambda: all(w.info and w.info.version == version for w in registry))
    await until(lambda: all(tokenizers.verdict(w).text is not None for w in registry))


def bodies(system: Cluster) -> list[dict[str, Any]]:
    """What the engines got, prefill and decode of each request."""
    records = [*system.prefill[0].requests, *system.decode[0].requests]
    return [record.body for record in records]


MODEL_FLAG = ("--tokenizer-path", str(cached_tiny_model()))


@pytest.fixture
def fast_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_sbs.router.prompts.tokenizer_check._EVERY_S", 0.02)
    monkeypatch.setattr("sglang_sbs.router.prompts.tokenizer_check._AGAIN_S", 0.02)


async def test_the_scheduler_is_told_blocks_and_session() -> None:
    async with cluster(*MODEL_FLAG) as system:
        prompt = list(range(100))
        body = {"input_ids": prompt, "session_id": "body"}
        await system.generate(**body)
        async with system.post("/generate", body, headers={"x-smg-routing-key": "key"}) as answer:
            assert answer.status == 200
        async with system.post(
            "/v1/completions", {"prompt": "x", "prompt_cache_key": "cached"}
        ) as answer:
            assert answer.status == 200
        arrived = system.scheduler.of(RequestArrived)
    assert [event.session for event in arrived] == ["body", "key", "cached"]
    assert arrived[0].blocks == names(prompt, page=arrived[0].block_tokens)
    assert arrived[0].block_tokens >= 1


async def test_no_blocks_where_nothing_looks_for_them() -> None:
    for flags in (("--sbs-prefix-source", "off"), ("--policy", "round_robin")):
        async with cluster(*flags) as system:
            await system.generate(input_ids=list(range(100)))
            (event,) = system.scheduler.of(RequestArrived)
        assert (event.blocks, event.block_tokens) == ([], 0)


async def test_engines_with_our_tokenizer_get_ids_on_both_legs(
    fast_checks: None, tokenizer: ChatTokenizer
) -> None:
    chat = {"messages": [USER], "tools": [TOOL], "max_tokens": 4}
    async with cluster(*MODEL_FLAG) as system:
        await asked(system, lambda body: engine_tokenize(tokenizer, body))
        await system.generate(text=TEXT, sampling_params={"max_new_tokens": 3})
        async with system.post("/v1/completions", {"prompt": TEXT, "stream": True}) as answer:
            await answer.read()
        async with system.post("/v1/chat/completions", chat) as answer:
            await answer.read()
        got = bodies(system)
        assert all(worker.problems == {} for worker in system.server.registry)
        page = system.server.metrics.render().decode()
    assert 'sbs_prompts_total{counted="tokenized"} 3.0' in page
    assert "sbs_requests_sent_as_ids_total 3.0" in page
    ids = tokenizer.text_ids(TEXT).tolist()
    assert len(got) == 6
    for generate in (got[0], got[3]):
        assert generate["input_ids"] == ids
        assert "text" not in generate
        assert generate["sampling_params"] == {"max_new_tokens": 3}
    for completion in (got[1], got[4]):
        assert completion["prompt"] == ids
    for leg in (got[2], got[5]):
        assert leg["input_ids"] == tokenizer.chat_ids(chat).ids.tolist()
        assert leg["messages"] == [USER]
        assert leg["tools"] == [TOOL]


async def test_prefill_is_asked_what_it_had_cached_where_it_would_not_say(
    fast_checks: None, tokenizer: ChatTokenizer
) -> None:
    chat = {"messages": [USER]}
    async with cluster(*MODEL_FLAG) as system:
        await asked(system, lambda body: engine_tokenize(tokenizer, body), version="0.5.22")
        async with system.post("/v1/chat/completions", chat) as answer:
            assert answer.status == 200
        await asked(system, lambda body: engine_tokenize(tokenizer, body))
        for body in (chat, chat | {"return_cached_tokens_details": False}):
            async with system.post("/v1/chat/completions", body) as answer:
                assert answer.status == 200
        await system.generate(text=TEXT)
        await system.settled()
        prefill, decode = (
            [record.body.get("return_cached_tokens_details") for record in engine.requests]
            for engine in (system.prefill[0], system.decode[0])
        )
        found = [e.cached_tokens for e in system.scheduler.of(PrefillDone) if e.prompt_tokens]
    assert prefill == [None, True, False, None]
    assert decode == [None, None, False, None]
    # The mock's usage has no cached tokens, and an engine that was asked leaves out a zero.
    assert found[:3] == [None, 0, None]
    assert isinstance(found[3], int)


def test_cached_tokens_of_all_tiers_count() -> None:
    usage = {"prompt_tokens": 100, "prompt_tokens_details": None}
    details = {"device": 48, "host": 16, "storage_backend": "file"}
    body = {"usage": usage, "sglext": {"cached_tokens_details": details}}
    assert token_counts(body, asks_cached=True) == (100, 64)
    assert token_counts({"usage": usage}, asks_cached=True) == (100, 0)
    assert token_counts({"usage": usage}, asks_cached=False) == (100, None)


async def test_an_engine_with_another_template_gets_chats_as_they_are_and_it_is_said(
    fast_checks: None, tokenizer: ChatTokenizer
) -> None:
    async with cluster(*MODEL_FLAG) as system:
        await asked(system, lambda body: shouting(tokenizer, body))
        await until(lambda: not system.server.tokenizers.agrees("chat"))
        await system.generate(text=TEXT)
        async with system.post("/v1/chat/completions", {"messages": [USER]}) as answer:
            await answer.read()
        async with system.get("/workers") as answer:
            workers = (await answer.json())["workers"]
        got = bodies(system)
        events = system.scheduler.of(RequestArrived)
    assert [("input_ids" in body) for body in got] == [True, False, True, False]
    assert all("other token ids for chat" in worker["problems"]["tokenizer"] for worker in workers)
    assert events[0].blocks == names(tokenizer.text_ids(TEXT).tolist(), events[0].block_tokens)
    assert events[1].blocks != names(
        tokenizer.chat_ids({"messages": [USER]}).ids.tolist(), events[1].block_tokens or 1
    )


async def test_an_engine_with_another_vocabulary_gets_text_and_no_prefix_is_looked_for(
    fast_checks: None,
) -> None:
    flags = (*MODEL_FLAG, "--sbs-prefix-source", "events", "--api-key", "secret")
    async with cluster(*flags) as system:
        await asked(system, lambda body: [[7]] * len(body.get("prompt", ())))
        await until(lambda: not system.server.tokenizers.agrees("text"))
        headers = {"Authorization": "Bearer secret"}
        async with system.post("/generate", {"text": TEXT}, headers=headers) as answer:
            assert answer.status == 200
        (event,) = system.scheduler.of(RequestArrived)
        assert all(body["text"] == TEXT for body in bodies(system))
        problems = [worker.problems["tokenizer"] for worker in system.server.registry]
    assert event.blocks == []
    assert all("for text and chat" in problem for problem in problems)


async def test_an_engine_that_cannot_answer_now_is_asked_later(
    fast_checks: None, tokenizer: ChatTokenizer
) -> None:
    failures = iter([True, True, False])

    def tokenize(body: dict[str, Any]) -> list[Any] | None:
        if next(failures, False):
            raise RuntimeError("not yet")
        return engine_tokenize(tokenizer, body)

    async with cluster(*MODEL_FLAG) as system:
        await asked(system, tokenize)
        verdicts = [system.server.tokenizers.verdict(w) for w in system.server.registry]
    assert all(verdict.text and verdict.chat for verdict in verdicts)


async def test_old_engines_and_unasked_ones_get_text(
    fast_checks: None, tokenizer: ChatTokenizer
) -> None:
    async with cluster(*MODEL_FLAG) as system:
        await system.generate(text=TEXT)
        assert all("text" in body for body in bodies(system))
    async with cluster(*MODEL_FLAG) as system:
        await asked(system, lambda body: engine_tokenize(tokenizer, body), version="0.5.15")
        async with system.post("/v1/chat/completions", {"messages": [USER]}) as answer:
            await answer.read()
        assert all("input_ids" not in body for body in bodies(system))


async def test_forwarding_can_be_forced_and_forbidden(
    fast_checks: None, tokenizer: ChatTokenizer
) -> None:
    async with cluster(*MODEL_FLAG, "--sbs-forward-token-ids", "on") as system:
        await system.generate(text=TEXT)
        assert all("input_ids" in body for body in bodies(system))
    async with cluster(*MODEL_FLAG, "--sbs-forward-token-ids", "off") as system:
        await asked(system, lambda body: engine_tokenize(tokenizer, body))
        await system.generate(text=TEXT)
        assert all(body["text"] == TEXT for body in bodies(system))


async def test_a_restarted_engine_is_asked_again(
    fast_checks: None, tokenizer: ChatTokenizer
) -> None:
    async with cluster(*MODEL_FLAG, sbs_block=True) as system:
        await asked(system, lambda body: engine_tokenize(tokenizer, body))
        (prefill,) = system.prefill
        prefill.tokenize = lambda body: shouting(tokenizer, body)
        await prefill.restart()
        worker = system.server.registry.get(prefill.url)
        assert worker is not None
        system.server.registry.doubted(worker)
        worker.recheck = True
        await until(lambda: system.server.tokenizers.verdict(worker).chat is False)


async def test_different_pages_are_said_once_and_the_most_common_counts(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async with cluster(prefill=3) as system:
        registry = system.server.registry
        for worker, page in zip(
            [w for w in registry if w.role == "prefill"], (64, 32, 64), strict=True
        ):
            assert worker.info is not None
            worker.info = msgspec.structs.replace(worker.info, page_size=page)
        tokenizers = system.server.tokenizers
        for _ in range(2):
            tokenizers._looked_s = float("-inf")
            assert tokenizers.block_format() == BlockFormat(64)
    assert caplog.text.count("--page-size") == 1


async def test_a_text_too_long_to_be_tokenized_is_estimated(tokenizer: ChatTokenizer) -> None:
    reader = PromptReader(tokenizer, PromptLengths(), BlockNamer(), Known(), names_text=False)
    text = "y" * (MOST_WHOLE_CHARS + 1)
    for kind, body in (
        ("generate", {"text": text}),
        ("chat", {"messages": [{"role": "user", "content": text}]}),
    ):
        plan = plan_request(kind, orjson.dumps(body))  # type: ignore[arg-type]
        (read,) = await reader.read(plan)
        assert read.counted == "estimated"
        assert not read.length.exact
        assert read.length.tokens > MOST_WHOLE_CHARS // 20
    reader.close()


def test_token_ids_are_written_as_orjson_would() -> None:
    for count in (0, 1, 70_000, 200_000):
        ids = array("I", (number * 7919 % 150_000 for number in range(count)))
        assert json_of_ids(ids) == orjson.dumps(ids.tolist())
        assert token_ids_of(json_of_ids(ids)) == ids


# Longer than any engine takes ---------------------------------------------------------------------


def refusal_of(engines: Known, kind: str = "generate", **body: Any) -> str | None:
    try:
        reading(engines, None)(kind, **body)
    except RouterError as error:
        assert (error.status, error.code) == (400, "prompt_too_long")
        return error.message
    return None


def test_a_prompt_longer_than_any_engine_takes_is_refused(engines: Known) -> None:
    engines.longest = LongestPrompt(1000)
    assert refusal_of(engines, input_ids=[7] * 1000) is None
    message = refusal_of(engines, input_ids=[7] * 1001)
    assert message == "the prompt has 1,001 tokens; no engine takes more than 1,000"
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
        with pytest.raises(RouterError, match=r"at least [0-9,]+ tokens; no engine takes more"):
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
        assert (status, answer["error"]["code"]) == (400, "prompt_too_long")
        assert not c.prefill[0].requests
