"""Bodies that unfold, never end, or come back whole."""

from __future__ import annotations

import asyncio
import zlib

import orjson

from benchmarks.hostile.case import Target, case

_MIB = 1 << 20
_LARGE = 31 * _MIB
"""Just below ``--max-payload-size``."""


def _filled(before: bytes, filling: bytes, after: bytes, size: int = _LARGE) -> bytes:
    return before + filling * (size // len(filling)) + after


@case("gzip-bomb", "0.5 MB of gzip that would become 512 MB")
async def gzip_bomb(target: Target) -> None:
    bomb = await asyncio.to_thread(zlib.compress, bytes(512 * _MIB), wbits=31)
    await target.post(bomb, headers=b"Content-Encoding: gzip\r\n")


@case("json-lists", "31 MiB of empty lists")
async def lists(target: Target) -> None:
    await target.post(_filled(b'{"text":"x","extra":[', b"[],", b"0]}"))


@case("json-objects-chat", "31 MiB of small objects as messages")
async def objects(target: Target) -> None:
    path = "/v1/chat/completions"
    await target.post(_filled(b'{"messages":[', b'{"a":1},', b"0]}"), path)


@case("json-token-ids", "31 MiB of token ids, more than any engine takes")
async def token_ids(target: Target) -> None:
    await target.post(_filled(b'{"input_ids":[', b"70000,", b"1]}"))


@case("json-text", "31 MiB of text, ten times, more than any engine takes")
async def text(target: Target) -> None:
    body = _filled(b'{"text":"', b"a word, ", b'"}')
    await asyncio.gather(*(target.post(body) for _ in range(10)))


@case("json-chat", "31 MiB of chat with letters of four bytes, more than any takes")
async def chat(target: Target) -> None:
    before = b'{"messages":[{"role":"user","content":"'
    body = _filled(before, "a word \U0001f600, ".encode(), b'"}]}')
    await target.post(body, "/v1/chat/completions")


@case("json-field", "31 MiB of another field than the prompt, which goes to the engines")
async def another_field(target: Target) -> None:
    await target.post(_filled(b'{"text":"x","more":"', b"a word, ", b'"}'))


@case("json-no-prompt", "thirty bodies of 8 MiB without a prompt, one after the other")
async def no_prompt(target: Target) -> None:
    body = _filled(b'{"txt":"', b"a word, ", b'"}', 8 * _MIB)
    for _ in range(30):
        await target.post(body)
    target.sent_bytes = len(body)  # of each nothing may be left when the next one comes


@case("unfinished", "twenty bodies of 30 MB that never end")
async def unfinished(target: Target) -> None:
    body = bytes(30_000_000)
    length = len(body) + 1
    await asyncio.gather(*(target.post(body, length=length, leave_after_s=5.0) for _ in range(20)))


@case("rids", "2,000,000 request ids")
async def rids(target: Target) -> None:
    await target.post(_filled(b'{"text":"x","rid":[', b'"r",', b'"r"]}', 8_000_000))


@case("echo", "a 30 MB string where a number should be")
async def echo(target: Target) -> None:
    body = _filled(b'{"prompt":"x","n":"', b"x", b'"}', 30_000_000)
    await target.post(body, "/v1/completions")


@case("long-texts", "two texts of 19 MB to a router with a tokenizer", tokenizer=True)
async def long_texts(target: Target) -> None:
    body = _filled(b'{"text":"', b"some words, ", b'"}', 19_000_000)
    await asyncio.gather(target.post(body), target.post(body))


@case("longish-texts", "ten texts of 1.5 MB, which are tokenized", tokenizer=True)
async def longish_texts(target: Target) -> None:
    bodies = [
        orjson.dumps({"text": f"{number} some words, " * (1_500_000 // 14)}) for number in range(10)
    ]
    await asyncio.gather(*map(target.post, bodies))


@case("json-deep", "31 MiB of lists in each other, three times")
async def deep(target: Target) -> None:
    body = b'{"text":"x","extra":' + b"[" * (_LARGE // 2) + b"]" * (_LARGE // 2) + b"}"
    await asyncio.gather(*(target.post(body) for _ in range(3)))


def _logit_bias(size: int) -> bytes:
    entry = b'"%d":-1,'
    entries = b"".join(entry % token for token in range(130_000))
    repeated = entries * (size // len(entries)) + entries[: size % len(entries)].rpartition(b",")[0]
    return b'{"text":"x","sampling_params":{"logit_bias":{%b}}}' % repeated


@case("logit-bias", "3 MB of logit_bias")
async def logit_bias(target: Target) -> None:
    await target.post(_logit_bias(3_000_000))


@case("logit-bias-large", "31 MB of logit_bias")
async def logit_bias_large(target: Target) -> None:
    await target.post(_logit_bias(31_000_000))


@case("logit-bias-chat", "1.3 MB of logit_bias of a chat, and of 100 texts")
async def logit_bias_chat(target: Target) -> None:
    generate = orjson.loads(_logit_bias(3_000_000))
    bias = generate["sampling_params"]
    message = {"role": "user", "content": "x"}
    await target.post(orjson.dumps({"messages": [message]} | bias), "/v1/chat/completions")
    await target.post(orjson.dumps({"prompt": ["x"] * 100} | bias), "/v1/completions")
