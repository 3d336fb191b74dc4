"""The scheduler receives the prompts' lengths and blocks; engines get their token ids."""

from __future__ import annotations

from array import array
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from prompt_setup import TEXT, TOOL, USER, Known
from router_harness import Cluster, cluster, until

from sglang_sbs.router.prompts.block_names import BlockFormat, BlockNamer
from sglang_sbs.router.prompts.chat_tokenizer import ChatTokenizer
from sglang_sbs.router.prompts.known_text import MOST_WHOLE_CHARS
from sglang_sbs.router.prompts.length_estimate import PromptLengths
from sglang_sbs.router.prompts.reader import PromptReader
from sglang_sbs.router.relay.answer_kinds import TOKEN_ANSWERS
from sglang_sbs.router.requests.body_fields import Namespace
from sglang_sbs.router.requests.plan import plan_request
from sglang_sbs.router.requests.raw_json import json_of_ids, token_ids_of
from sglang_sbs.router.requests.sessions import digest_of
from sglang_sbs.scheduling.events import PrefillDone, RequestArrived
from tools.cpu_engine.tiny_model import cached_tiny_model


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(cached_tiny_model())


def names(ids: list[int], page: int = 16, **namespace: str) -> list[int]:
    return BlockNamer().names(ids, BlockFormat(page), Namespace(**namespace)).tolist()


def engine_tokenize(tokenizer: ChatTokenizer, body: dict[str, Any]) -> list[Any] | None:
    """Answer ``/tokenize`` like an engine with that tokenizer."""
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
        worker.boot.recheck = True
        registry.doubted(worker)
    await until(lambda: all(w.info and w.info.version == version for w in registry))
    await until(lambda: all(tokenizers.verdict(w).text is not None for w in registry))


def bodies(system: Cluster) -> list[dict[str, Any]]:
    """Return the bodies that the engines got, prefill and decode of each request."""
    records = [*system.prefill[0].requests, *system.decode[0].requests]
    return [record.body for record in records]


MODEL_FLAG = ("--tokenizer-path", str(cached_tiny_model()))


def compared(*flags: str, **more: Any) -> AbstractAsyncContextManager[Cluster]:
    """A cluster whose router soon compares its tokenizer with each engine's."""
    monitor = {"tokenizers_every_s": 0.02, "tokenizers_again_s": 0.02}
    return cluster(*MODEL_FLAG, *flags, **more, monitor=monitor)


async def test_the_scheduler_receives_blocks_and_session() -> None:
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
    sessions = [digest_of(name) for name in ("body", "key", "cached")]
    assert [event.session for event in arrived] == sessions
    assert arrived[0].blocks == names(prompt, page=arrived[0].block_tokens)
    assert arrived[0].block_tokens >= 1


async def test_no_blocks_where_nothing_looks_for_them() -> None:
    for flags in (("--sbs-prefix-source", "off"), ("--policy", "round_robin")):
        async with cluster(*flags) as system:
            await system.generate(input_ids=list(range(100)))
            (event,) = system.scheduler.of(RequestArrived)
        assert (event.blocks, event.block_tokens) == ([], 0)


async def test_engines_with_our_tokenizer_get_ids_on_both_legs(tokenizer: ChatTokenizer) -> None:
    chat = {"messages": [USER], "tools": [TOOL], "max_tokens": 4}
    async with compared() as system:
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
    tokenizer: ChatTokenizer,
) -> None:
    chat = {"messages": [USER]}
    async with compared() as system:
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
    assert TOKEN_ANSWERS.token_counts(body, asks_cached=True) == (100, 64)
    assert TOKEN_ANSWERS.token_counts({"usage": usage}, asks_cached=True) == (100, 0)
    assert TOKEN_ANSWERS.token_counts({"usage": usage}, asks_cached=False) == (100, None)


async def test_an_engine_with_another_template_gets_chats_as_they_are_and_it_is_said(
    tokenizer: ChatTokenizer,
) -> None:
    async with compared() as system:
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


async def test_an_engine_with_another_vocabulary_gets_text_and_no_prefix_is_looked_for() -> None:
    flags = ("--sbs-prefix-source", "events", "--api-key", "secret")
    async with compared(*flags) as system:
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


async def test_an_engine_that_cannot_answer_now_is_asked_later(tokenizer: ChatTokenizer) -> None:
    failures = iter([True, True, False])

    def tokenize(body: dict[str, Any]) -> list[Any] | None:
        if next(failures, False):
            raise RuntimeError("not yet")
        return engine_tokenize(tokenizer, body)

    async with compared() as system:
        await asked(system, tokenize)
        verdicts = [system.server.tokenizers.verdict(w) for w in system.server.registry]
    assert all(verdict.text and verdict.chat for verdict in verdicts)


async def test_old_engines_and_unasked_ones_get_text(tokenizer: ChatTokenizer) -> None:
    async with compared() as system:
        await system.generate(text=TEXT)
        assert all("text" in body for body in bodies(system))
    async with compared() as system:
        await asked(system, lambda body: engine_tokenize(tokenizer, body), version="0.5.15")
        async with system.post("/v1/chat/completions", {"messages": [USER]}) as answer:
            await answer.read()
        assert all("input_ids" not in body for body in bodies(system))


async def test_forwarding_can_be_forced_and_forbidden(tokenizer: ChatTokenizer) -> None:
    async with compared("--sbs-forward-token-ids", "on") as system:
        await system.generate(text=TEXT)
        assert all("input_ids" in body for body in bodies(system))
    async with compared("--sbs-forward-token-ids", "off") as system:
        await asked(system, lambda body: engine_tokenize(tokenizer, body))
        await system.generate(text=TEXT)
        assert all(body["text"] == TEXT for body in bodies(system))


async def test_a_restarted_engine_is_asked_again(tokenizer: ChatTokenizer) -> None:
    async with compared(sbs_block=True) as system:
        await asked(system, lambda body: engine_tokenize(tokenizer, body))
        (prefill,) = system.prefill
        prefill.tokenize = lambda body: shouting(tokenizer, body)
        await prefill.restart()
        worker = system.server.registry.get(prefill.url)
        assert worker is not None
        system.server.registry.doubted(worker)
        worker.boot.recheck = True
        await until(lambda: system.server.tokenizers.verdict(worker).chat is False)


async def test_different_pages_are_said_once_and_the_most_common_counts(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async with cluster(prefill=3) as system:
        registry = system.server.registry
        for worker, page in zip(
            [w for w in registry if w.role == "prefill"], (128, 64, 128), strict=True
        ):
            assert worker.info is not None
            worker.info = msgspec.structs.replace(worker.info, page_size=page)
        tokenizers = system.server.tokenizers
        for _ in range(2):
            tokenizers._looked_s = float("-inf")
            assert tokenizers.known().blocks == BlockFormat(128)
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
        assert read.length.counted == "estimated"
        assert not read.length.exact
        assert read.length.tokens > MOST_WHOLE_CHARS // 20
    reader.lanes.close()


def test_token_ids_are_written_as_orjson_would() -> None:
    for count in (0, 1, 70_000, 200_000):
        ids = array("I", (number * 7919 % 150_000 for number in range(count)))
        assert json_of_ids(ids) == orjson.dumps(ids.tolist())
        assert token_ids_of(json_of_ids(ids)) == ids


# Longer than any engine takes ---------------------------------------------------------------------
