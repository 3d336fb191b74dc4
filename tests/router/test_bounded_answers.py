"""The cost of one large answer: memory, and pieces of work on the event loop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from harness.memory_peak import peak_of

from sglang_sbs.router.client.answer_stream import joined
from sglang_sbs.router.errors import LegFailure
from sglang_sbs.router.relay.answer_kinds import TOKEN_ANSWERS
from sglang_sbs.router.relay.leg_answers import DecodeLeg
from sglang_sbs.router.relay.merged_answers import merge_answers
from sglang_sbs.router.requests.plan import plan_request

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "cut"), [(10, 1), (10, 7), (10, 100), (2 * MIB, 16 << 10), (2 * MIB, (16 << 10) + 1)]
)
def test_an_abort_is_found_in_an_answer_however_it_comes(size: int, cut: int) -> None:
    """Only the abort itself is read from a large answer: all of it is not parsed on the event
    loop."""
    reason = {"type": "abort", "message": "no room", "status_code": 503}
    answer = orjson.dumps({"text": "x" * size, "meta_info": {"finish_reason": reason}})
    failures: list[LegFailure] = []
    pair: Any = SimpleNamespace(stream=False, must_park=False, decode="http://d:1")
    pair.answers, pair.leg_failed = TOKEN_ANSWERS, failures.append
    leg = DecodeLeg(pair)
    leg.head_received(200, {})
    for at in range(0, len(answer), cut):
        leg.body_received(answer[at : at + cut])
    leg.message_complete()
    ((status, message),) = [(failure.status, failure.message) for failure in failures]
    assert (status, message) == (
        (503, "no room") if size == 10 else (500, "request aborted by decode worker")
    )


async def test_a_large_answer_is_put_together_in_slices() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    busy = asyncio.create_task(others())
    pieces = [b"a" * MIB, memoryview(b"b" * 8 * MIB), *[b"c"] * 10_000]
    assert await joined(pieces) == b"".join(pieces)
    busy.cancel()
    assert 16 <= turns <= 32


def test_a_merged_answer_is_not_copied_before_it_is_whole() -> None:
    plan = plan_request("completions", orjson.dumps({"prompt": "x", "n": 2}))
    answer = orjson.dumps({"choices": [{"index": 0, "text": "x" * 8 * MIB}]})
    assert peak_of(lambda: merge_answers(plan, [answer, answer])) < MIB
