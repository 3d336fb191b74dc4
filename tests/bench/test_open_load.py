"""The load that runs beside a fault: what counts as an answer, and when service was back."""

from __future__ import annotations

import asyncio
import math

import orjson
import pytest
from aiohttp import web

from benchmarks.chaos.open_load import (
    LEAST_SETTLED,
    Fate,
    OpenLoad,
    Outcome,
    first_token_median_s,
    first_token_worst_s,
    recovery_s,
    steps,
)
from benchmarks.demo.load import Arrival, Sample

LIMIT_S = 1.0


def outcome(sent_s: float, ttft_s: float = 0.5, error: str = "") -> Outcome:
    return Outcome(sent_s, sent_s + 2, Sample(sent_s, 10, ttft_s=ttft_s, error=error))


def good(*sent_s: float) -> list[Outcome]:
    return [outcome(s) for s in sent_s]


def test_recovery_is_when_the_first_of_the_lasting_good_ones_was_sent() -> None:
    slow = [outcome(10 + i, ttft_s=3.0) for i in range(5)]
    failed = [outcome(15 + i, ttft_s=math.nan, error="HTTP 503: no") for i in range(5)]
    assert recovery_s(good(*range(10)) + slow + failed + good(*range(20, 40)), 10, LIMIT_S) == 10


def test_good_ones_between_bad_ones_are_no_recovery() -> None:
    mixed = [outcome(10 + i, ttft_s=0.5 if i % 2 else 3.0) for i in range(20)]
    # From 27 on only one is bad, which may be.
    assert recovery_s(mixed + good(*range(30, 50)), 10, LIMIT_S) == 17


def test_recovery_tolerates_one_late_request_in_twenty() -> None:
    after = [*good(*range(10, 30)), outcome(30, ttft_s=9.0), *good(*range(31, 60))]
    assert recovery_s(after, 10, LIMIT_S) == 0


def test_no_recovery_without_enough_good_ones_at_the_end() -> None:
    bad = [outcome(10 + i, ttft_s=3.0) for i in range(10)]
    few = good(*range(20, 19 + LEAST_SETTLED))
    assert recovery_s(bad + few, 10, LIMIT_S) is None
    assert recovery_s([*bad, *few, outcome(40)], 10, LIMIT_S) == 10
    assert recovery_s([], 10, LIMIT_S) is None


def test_steps_are_counted_from_the_fault_by_when_requests_were_sent() -> None:
    before = [outcome(8.5, ttft_s=0.2), outcome(9.9, ttft_s=0.7)]
    failed = [outcome(10.0, ttft_s=math.nan, error="HTTP 503: no") for _ in range(3)]
    seen = steps([*failed, outcome(13.9, ttft_s=4.0), outcome(12.0, ttft_s=5.0), *before], 10.0)
    assert [(step.from_s, step.failed) for step in seen] == [(-2.0, 0), (0.0, 3), (2.0, 0)]
    assert [step.longest_ttft_s for step in seen[::2]] == [0.7, 5.0]
    assert math.isnan(seen[1].longest_ttft_s)


@pytest.mark.parametrize(
    ("error", "fate", "label"),
    [
        (
            'HTTP 503: {"error":{"type":"x","code":"no_decode_servers"}}',
            Fate.ERROR,
            "503 no_decode_servers",
        ),
        ("{'type': 'x', 'code': 'decode_server_error'}", Fate.ERROR, "event decode_server_error"),
        ("{'message': 'y', 'code': 502}", Fate.ERROR, "event 502"),
        ("TimeoutError: ", Fate.UNANSWERED, None),
        ("ServerDisconnectedError: Server disconnected", Fate.CUT_OFF, None),
        ("finished by None after 3 tokens", Fate.CUT_OFF, None),
        ("the stream was empty", Fate.CUT_OFF, None),
        ("ClientConnectorError: Cannot connect", Fate.NOT_ACCEPTED, None),
        ("", Fate.ANSWERED, None),
    ],
)
def test_what_counts_as_an_answer(error: str, fate: Fate, label: str | None) -> None:
    ended = outcome(0, error=error)
    assert ended.fate is fate
    if label is not None:
        assert ended.label == label


def test_first_tokens_that_never_came_are_in_no_figure() -> None:
    outcomes = [outcome(0, ttft_s=t) for t in (0.1, 0.3, 0.2, math.nan)]
    assert first_token_median_s(outcomes) == 0.2
    assert first_token_worst_s(outcomes) == 0.3
    assert math.isnan(first_token_worst_s(outcomes[3:]))


async def test_finish_waits_for_what_was_sent_and_sends_no_more() -> None:
    asked = asyncio.Event()
    answer = asyncio.Event()

    async def generate(request: web.Request) -> web.StreamResponse:
        await request.read()
        asked.set()
        await answer.wait()
        event = {"meta_info": {"completion_tokens": 3, "finish_reason": {"type": "length"}}}
        return web.Response(body=b"data: " + orjson.dumps(event) + b"\n\n")

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        async with OpenLoad(f"http://127.0.0.1:{port}", timeout_s=30) as load:
            load.send([Arrival(0.0, [1, 2], 3), Arrival(1000.0, [1, 2], 3)])
            await asked.wait()
            ending = asyncio.create_task(load.finish())
            await asyncio.sleep(0)
            assert not ending.done()
            answer.set()
            outcomes = await ending
        assert [outcome.fate for outcome in outcomes] == [Fate.ANSWERED]
    finally:
        await runner.cleanup()
