"""A request's memory is released with its answer, even if that is an error.

An error knows the frames it came through, and they what they worked on. Where one of them knows the
error, too, all of it would wait for the garbage collector, which comes once in many thousand
requests.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import aiohttp
import pytest
from msgspec.structs import asdict
from router_harness import Cluster, cluster, until

from sglang_sbs.router.client.intake import BodyShare
from sglang_sbs.router.relay import relay
from sglang_sbs.router.requests.plan import RequestPlan, plan_request
from tools.stand_ins.mock_script import Behaviour


class _Body(bytearray):
    """One that can be watched."""


class _Plan(RequestPlan, frozen=True, weakref=True, gc=True):
    """The same of a plan."""


Watched = list[Any]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """The bodies and plans that are still there."""
    seen: list[weakref.ref[Any]] = []

    def watch(thing: Any) -> Any:
        seen.append(weakref.ref(thing))
        return thing

    async def read(self: BodyShare, *args: Any) -> Any:
        return watch(_Body(await _read(self, *args)))

    def plan(*args: Any) -> RequestPlan:
        made = plan_request(*args)
        return watch(_Plan(**asdict(made)))

    _read = BodyShare.read
    monkeypatch.setattr(BodyShare, "read", read)
    monkeypatch.setattr(relay, "plan_request", plan)

    class Left(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            assert seen, "nothing was watched"
            return (thing for each in seen if (thing := each()) is not None)

    gc.collect()
    gc.disable()
    try:
        yield Left()
    finally:
        gc.enable()


LONGEST = {"max_req_input_len": 50_000}
LARGE = "x" * 100_000
"""So much is planned in a thread."""
GENERATE, CHAT = "/generate", "/v1/chat/completions"

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (GENERATE, {"text": LARGE}),
    (GENERATE, {"text": "x", "stream": True}),
    (GENERATE, {"text": ["x"] * 9}),
    (CHAT, {"messages": [{"role": "user"}], "n": 2, "stream": True}),
    (GENERATE, {"text": "x", "return_logprob": True}),
    (GENERATE, {"no prompt": LARGE}),
    (GENERATE, {"no prompt": "x"}),
    (GENERATE, {"text": LARGE, "sampling_params": {"n": 99}}),
    (GENERATE, {"input_ids": [7] * 100_000}),
]


def behaves(c: Cluster, **behaviour: Any) -> None:
    for engine in (*c.prefill, *c.decode):
        engine.behaviour = Behaviour(**behaviour)


async def is_let_go(watched: Watched) -> None:
    await until(lambda: not any(True for _ in watched))


async def test_request_bodies_are_freed_after_answers(watched: Watched) -> None:
    async with cluster(prefill_says=LONGEST) as c:
        for path, body in REQUESTS:
            async with c.post(path, body) as response:
                await response.read()
            await is_let_go(watched)


async def test_timed_out_requests_are_freed(watched: Watched) -> None:
    async with cluster("--request-timeout-secs", "1") as c:
        behaves(c, fault="hang_before_head")
        status, _ = await c.generate(text=LARGE)
        assert status == 504
        await is_let_go(watched)


@pytest.mark.parametrize(
    "behaviour",
    [
        {"status": 400},
        {"status": 500},
        {"abort": True},
        {"stream_error": True},
        {"garbage": b"no JSON"},
        {"garbage_tail": b"data: no JSON\n\n"},
        {"fault": "reset_before_head"},
        {"fault": "reset_mid_body"},
    ],
    ids=str,
)
async def test_failed_requests_are_freed(watched: Watched, behaviour: dict[str, Any]) -> None:
    async with cluster("--retry-max-retries", "2", "--disable-circuit-breaker") as c:
        behaves(c, **behaviour)
        for stream, text in product((False, True), ("x", ["x"] * 5)):
            async with c.post(GENERATE, {"text": text, "stream": stream, "rid": "r"}) as response:
                with suppress(aiohttp.ClientError):
                    await response.read()
            await is_let_go(watched)


@pytest.mark.parametrize("text", ["x", ["x"] * 5], ids=["single", "batch"])
@pytest.mark.parametrize("held", [False, True], ids=["sent", "queued"])
async def test_abandoned_requests_are_freed(watched: Watched, text: Any, held: bool) -> None:
    async with cluster() as c:
        c.scheduler.hold = held
        behaves(c, fault="hang_before_head")
        for aborted in (False, True):
            asking = asyncio.create_task(c.generate(text=text, rid="mine"))
            await until(lambda: len(c.server.in_flight) == (1 if text == "x" else 5))
            if aborted:
                c.server.in_flight.abort()
            else:
                asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: not len(c.server.in_flight))
        await is_let_go(watched)
