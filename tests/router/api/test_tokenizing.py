"""``/v1/tokenize``, ``/v1/detokenize``. Real engines: ``tests/cluster/test_prompt_tokens.py``."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from router_harness import Cluster, cluster

from sglang_sbs.router.api import tokenizing
from sglang_sbs.router.prompts.chat_tokenizer import ChatTokenizer
from tools.cpu_engine.tiny_model import cached_tiny_model

MODEL = cached_tiny_model()
TEXT = "the prefill of a batch <|im_start|> ü 漢字\n"
CHAT = [{"role": "user", "content": TEXT}]


async def asked(c: Cluster, path: str, body: Any) -> tuple[int, Any]:
    async with c.post(path, body) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_texts_and_chats_become_ids_and_ids_texts(prefix: str) -> None:
    own = ChatTokenizer.load(MODEL)
    text, chat = own.text_ids(TEXT).tolist(), own.chat_ids({"messages": CHAT}).ids.tolist()
    async with cluster("--tokenizer-path", str(MODEL)) as c:
        common = {"max_model_len": 40960}
        single = (200, common | {"tokens": text, "count": len(text)})
        assert await asked(c, f"{prefix}/tokenize", {"prompt": TEXT}) == single
        many = (200, common | {"tokens": [text, []], "count": [len(text), 0]})
        assert await asked(c, f"{prefix}/tokenize", {"prompt": [TEXT, ""]}) == many
        of_chat = (200, common | {"tokens": chat, "count": len(chat)})
        assert await asked(c, f"{prefix}/tokenize", {"messages": CHAT}) == of_chat
        path = f"{prefix}/detokenize"
        plain = TEXT.replace("<|im_start|>", "")
        assert await asked(c, path, {"tokens": text}) == (200, {"text": plain})
        kept = {"tokens": [text, []], "skip_special_tokens": False}
        assert await asked(c, path, kept) == (200, {"text": [TEXT, ""]})
        assert await asked(c, path, {"tokens": []}) == (200, {"text": ""})
        assert c.prefill[0].requests == []  # no engine was asked


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("tokenize", {}, "exactly one of prompt and messages"),
        ("tokenize", {"prompt": "x", "messages": CHAT}, "exactly one"),
        ("tokenize", {"prompt": 1}, "a string or a list of strings"),
        ("tokenize", {"prompt": ["x", 1]}, "a string or a list of strings"),
        ("tokenize", {"prompt": "x", "add_special_tokens": "no"}, "add_special_tokens"),
        ("tokenize", {"messages": "x"}, "messages must be a list"),
        ("tokenize", {"messages": [{"role": "nobody"}]}, "nobody"),
        ("tokenize", {"messages": CHAT, "add_generation_prompt": False}, "ask an engine"),
        ("tokenize", {"prompt": "x" * (1 << 20 | 1)}, "cannot be cut"),
        ("tokenize", {"messages": CHAT, "tools": [{}] * 500_000}, "too many values"),
        ("tokenize", [], "must be a JSON object"),
        ("detokenize", {}, "tokens must be a list"),
        ("detokenize", {"tokens": [[1], 2]}, "2 is not a list"),
        ("detokenize", {"tokens": [1, True]}, "is not a token id"),
        ("detokenize", {"tokens": [-1]}, "is not a token id"),
        ("detokenize", {"tokens": [1 << 40]}, "is not a token id"),
        ("detokenize", {"tokens": [1], "skip_special_tokens": 1}, "skip_special_tokens"),
    ],
)
async def test_invalid_tokenize_requests_are_refused_with_a_reason(
    path: str, body: Any, says: str
) -> None:
    async with cluster("--tokenizer-path", str(MODEL)) as c:
        status, answer = await asked(c, f"/v1/{path}", body)
        assert status == 400
        assert says in answer["error"]["message"]


@pytest.mark.parametrize("skip", [True, False])
def test_many_ids_become_text_in_parts(skip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters of several tokens are never parted; nobody gets all ids at once."""
    monkeypatch.setattr(tokenizing, "_PART_IDS", 32)
    tokenizer = ChatTokenizer.load(MODEL).tokenizer
    ids = array("I", tokenizer.encode((TEXT + "😀" * 9) * 40).ids)
    most = 0

    class Watched:
        def decode_batch(self, lists: list[list[int]], **more: Any) -> list[str]:
            nonlocal most
            most = max(most, *map(len, lists))
            return tokenizer.decode_batch(lists, **more)

    watched: Any = Watched()
    expected = tokenizer.decode(ids.tolist(), skip_special_tokens=skip)
    assert tokenizing._decoded(watched, ids, skip=skip) == expected
    assert most <= 32 < len(ids) // 10

    class Strips(Watched):
        """Strips the first space like some decoders: there is no place to part the ids."""

        def decode_batch(self, lists: list[list[int]], **more: Any) -> list[str]:
            return [text[1:] for text in super().decode_batch(lists, **more)]

    assert tokenizing._decoded(Strips(), ids, skip=skip) == expected[1:]


async def test_a_body_without_end_is_refused() -> None:
    async with cluster("--tokenizer-path", str(MODEL)) as c:
        status, answer = await asked(c, "/v1/tokenize", {"prompt": "a b " * (1 << 20)})
        assert (status, answer["error"]["code"]) == (413, "payload_too_large")


async def test_without_a_tokenizer_it_says_which_flag_is_missing() -> None:
    async with cluster() as c:
        status, answer = await asked(c, "/v1/tokenize", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (400, "tokenizer_not_found")
        assert "--tokenizer-path" in answer["error"]["message"]


async def test_the_tokenizer_is_listed_in_the_stock_form() -> None:
    async with cluster("--tokenizer-path", str(MODEL)) as c, c.get("/v1/tokenizers") as response:
        (single,) = (await response.json())["tokenizers"]
        assert single["source"] == str(MODEL)
        assert single["vocab_size"] == 512


async def test_tokenize_requires_the_key_of_prompts() -> None:
    async with (
        cluster("--api-key", "k", "--tokenizer-path", str(MODEL)) as c,
        c.client.post(c.url + "/v1/tokenize", json={"prompt": "x"}) as response,
    ):
        assert response.status == 401
