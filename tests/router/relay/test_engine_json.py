"""Answers of engines are opened as far as somebody looks; what is long in them stays JSON."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_harness import cluster, until

from sglang_sbs.router.lanes import Pace
from sglang_sbs.router.relay import engine_json, leg_answers, pair
from sglang_sbs.router.relay.engine_json import dumped_pieces, opened
from sglang_sbs.router.relay.merged_answers import merge_echoed_logprobs, merge_input_logprobs
from sglang_sbs.router.requests.raw_json import JsonError
from sglang_sbs.scheduling.events import PrefillDone, RequestArrived

numbers = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=9)
values = st.recursive(numbers, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
lists = st.lists(values, max_size=6)
metas = st.fixed_dictionaries(
    {"prompt_tokens": st.integers(0, 9)},
    optional=dict.fromkeys(("input_token_logprobs", "input_top_logprobs"), lists | st.none()),
)
parallel = st.fixed_dictionaries({}, optional=dict.fromkeys(("tokens", "text_offset"), lists))
choice = st.fixed_dictionaries({"logprobs": parallel})
choices = st.lists(choice, min_size=1, max_size=1) | st.lists(
    st.dictionaries(st.text(), values) | choice, max_size=2
)
answers = st.dictionaries(st.text(), values, max_size=3) | st.fixed_dictionaries(
    {"meta_info": metas, "choices": choices}
)


def with_all_long(body: bytes) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_json, "SHORT_BYTES", 8)
        return opened(body)


@given(answers)
def test_what_was_opened_is_the_same_when_it_is_closed(answer: dict[str, Any]) -> None:
    body = orjson.dumps(answer)
    assert orjson.loads(b"".join(dumped_pieces(with_all_long(body)))) == answer


@given(answers, answers)
def test_long_logprobs_are_merged_as_short_ones(ours: Any, theirs: Any) -> None:
    for merge in (merge_input_logprobs, merge_echoed_logprobs):
        output, prefill = (orjson.loads(orjson.dumps(value)) for value in (ours, theirs))
        long = with_all_long(orjson.dumps(output))
        merge(long, with_all_long(orjson.dumps(prefill)))
        merge(output, prefill)
        assert orjson.loads(b"".join(dumped_pieces(long))) == output


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"a":' + b"[" * 100_000, b"x" * 100_000, b""])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(JsonError):
        opened(body)


def reply_to(logprobs: list[Any], meta: dict[str, Any] | None = None, **more: Any) -> bytes:
    counts = {"prompt_tokens": 5, "cached_tokens": 2}
    meta = counts | {"input_token_logprobs": logprobs} | (meta or {})
    body = orjson.dumps({"text": "x", "meta_info": meta} | more)
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize("rid", [{}, {"rid": "mine"}])
async def test_long_logprobs_are_never_unfolded(monkeypatch: Any, rid: dict[str, str]) -> None:
    unfolded: list[int] = []

    def loads(data: Any) -> Any:
        unfolded.append(len(data))
        return orjson.loads(data)

    watched = SimpleNamespace(loads=loads, dumps=orjson.dumps, Fragment=orjson.Fragment)
    monkeypatch.setattr(engine_json, "orjson", watched)
    logprobs = [[-0.5, token, None] for token in range(100_000)]
    async with cluster() as c:
        c.prefill[0].raw_answers["/generate"] = reply_to(logprobs)
        c.decode[0].raw_answers["/generate"] = reply_to([])
        status, answer = await c.generate(text="x", return_logprob=True, **rid)
        assert status == 200
        assert answer["meta_info"]["input_token_logprobs"] == logprobs
        assert unfolded
        assert max(unfolded) <= 64 << 10
        await c.settled()
        c.check_books()


def flat_logprobs(rows: int) -> dict[str, Any]:
    """SGLang's fields for ``return_flat_raw_top_logprobs`` in base64 (``tokenizer_manager.py``),
    which decode sends with no rows."""
    values = "QUJD" * 30_000 if rows else ""
    return {
        "input_top_logprobs_val_flat_b64": values,
        "input_top_logprobs_idx_flat_b64": values,
        "input_top_logprobs_val_flat_b64_dtype": "float32",
        "input_top_logprobs_idx_flat_b64_dtype": "int32",
        "input_top_logprobs_shape": [rows, 2],
        "input_top_logprobs_null_prefix": min(1, rows),
    }


async def test_flat_logprobs_are_those_of_prefill() -> None:
    async with cluster() as c:
        c.prefill[0].raw_answers["/generate"] = reply_to([[-0.5, 1, None]], flat_logprobs(4))
        c.decode[0].raw_answers["/generate"] = reply_to([], flat_logprobs(0))
        asked = {
            "return_logprob": True,
            "top_logprobs_num": 2,
            "return_flat_raw_top_logprobs": True,
        }
        status, answer = await c.generate(text="x", **asked)
        assert status == 200
        assert flat_logprobs(4).items() <= answer["meta_info"].items()


async def test_decode_streams_while_a_long_prefill_reply_is_parsed(
    monkeypatch: Any,
) -> None:
    read = asyncio.Event()
    monkeypatch.setattr(Pace, "wait_s", lambda pace, size: 0.0 if read.is_set() else 0.01)

    in_parts = engine_json.opened_in_parts

    def opened_in_parts(body: bytearray) -> Any:
        while not read.is_set():
            yield
        return (yield from in_parts(body))

    monkeypatch.setattr(engine_json, "opened_in_parts", opened_in_parts)
    async with cluster() as c:
        c.prefill[0].raw_answers["/generate"] = reply_to([[-0.5, 1, None]] * 10_000)
        c.decode[0].raw_answers["/generate"] = reply_to([])
        asked = asyncio.create_task(c.generate(text="x", return_logprob=True))
        await until(lambda: len(c.scheduler.of(PrefillDone)) == 1)
        read.set()
        assert (await asked)[0] == 200
        assert [done.prompt_tokens for done in c.scheduler.of(PrefillDone)] == [None, 5]
        await c.settled()


async def test_an_unneeded_long_prefill_reply_is_not_parsed(
    monkeypatch: Any,
) -> None:
    counts: list[int | None] = []
    finished = pair.Pair.prefill_finished

    def watched(its: pair.Pair, reply: leg_answers.PrefillReply) -> None:
        counts.append(reply.prompt_tokens)
        finished(its, reply)

    monkeypatch.setattr(pair.Pair, "prefill_finished", watched)
    async with cluster() as c:
        c.decode[0].raw_answers["/generate"] = reply_to([])
        for size in (10, 3 << 20):
            c.prefill[0].raw_answers["/generate"] = reply_to([], text="x" * size)
            status, _ = await c.generate(text="x")
            assert status == 200
        await until(lambda: len(counts) == 2)
        assert counts == [5, None]
        await c.settled()
        c.check_books()


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_prefill_have_a_bound_and_no_engine_is_blamed(
    monkeypatch: Any, stream: bool
) -> None:
    """They were asked for: elsewhere they would be as long."""
    bound = "MAX_STREAMED_LOGPROBS_BYTES" if stream else "MAX_LOGPROBS_BYTES"
    monkeypatch.setattr(leg_answers, bound, 1 << 20)
    async with cluster() as c:
        c.prefill[0].raw_answers["/generate"] = reply_to([[-0.5, 1, None]] * 100_000)
        status, answer = await c.generate(text="x", return_logprob=True, stream=stream)
        assert status == 413
        assert "over 1 MiB" in answer["error"]["message"]
        assert len(c.scheduler.of(RequestArrived)) == 1, "it is not tried again"
        assert all(worker.failures == 0 for worker in c.server.registry)
        await c.settled()
        c.check_books()
