"""Counts in answers that no engine can mean: every request still ends once, in all books."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from router_harness import cluster

from sglang_sbs.router.limits import MAX_COUNT
from sglang_sbs.router.processes.messages import decode_to_scheduler, encode
from sglang_sbs.router.workers.health import parse_loads
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import WorkerInfo
from sglang_sbs.router.workers.worker_view import describe_worker
from sglang_sbs.scheduling.events import InstanceUp, PrefillDone, RequestArrived, RequestEnded
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from tools.stand_ins.mock_engine import Behaviour

ABSURD = [b"9" * 5000, b"%d" % 2**41, b"%d" % 2**63]


def answer(count: bytes) -> bytes:
    meta = b'{"prompt_tokens":%s,"cached_tokens":-1,"completion_tokens":%s,"finish_reason":null}'
    return b'{"text":"","meta_info":%s}' % (meta % (count, count))


@pytest.mark.parametrize("count", ABSURD, ids=len)
async def test_an_absurd_number_of_output_tokens_leaks_no_request(count: bytes) -> None:
    async with cluster() as c:
        c.decode[0].behaviour = Behaviour(garbage=answer(count))
        async with c.post("/generate", {"text": "hi"}) as response:
            assert await response.read() == answer(count)
        await c.settled()
        (ended,) = c.scheduler.of(RequestEnded)
        assert (ended.outcome, ended.completion_tokens) == ("completed", MAX_COUNT)
        assert decode_to_scheduler(encode(ended)) == ended
        c.check_books()


async def test_an_absurd_number_of_prompt_tokens_reaches_the_scheduler_as_a_count() -> None:
    async with cluster() as c:
        c.prefill[0].behaviour = Behaviour(prompt_tokens=2**41, cached_tokens=-1)
        for _ in range(3):
            assert (await c.generate(text="x" * 400))[0] == 200
        await c.settled()
        done = c.scheduler.of(PrefillDone)
        assert [(event.prompt_tokens, event.cached_tokens) for event in done] == [
            (MAX_COUNT, 0)
        ] * 3
        assert decode_to_scheduler(encode(done[0])) == done[0]
        c.check_books()
        tokens = [event.prompt_tokens for event in c.scheduler.of(RequestArrived)]
        assert tokens[-1] == pytest.approx(100, rel=0.05)


async def test_the_scheduler_receives_which_lengths_are_estimates() -> None:
    async with cluster() as c:
        await c.generate(text="hi")
        await c.generate(input_ids=[1, 2, 3])
        assert [event.estimated for event in c.scheduler.of(RequestArrived)] == [True, False]


def test_absurd_loads_are_counts() -> None:
    registry = Registry()
    worker = registry.add("http://p:1", "prefill")
    registry.described(worker, WorkerInfo())
    load = {
        "dp_rank": 0,
        "num_running_reqs": 2**62,
        "num_used_tokens": -5,
        "num_total_tokens": 1e300,
        "num_waiting_uncached_tokens": 5,
    }
    polled = parse_loads(worker, [orjson.dumps({"loads": [load]})])
    assert polled is not None
    assert polled.queued_tokens == polled.running_requests == [MAX_COUNT]
    assert polled.kv_tokens == [0]


@pytest.mark.parametrize("page", [{"loads": ["x"]}, {"loads": [None]}, {"loads": {}}, [], {}])
def test_loads_of_no_known_form_are_none(page: Any) -> None:
    registry = Registry()
    worker = registry.add("http://p:1", "prefill")
    registry.described(worker, WorkerInfo(rust_server=True))
    assert parse_loads(worker, [orjson.dumps(page)]) is None


def test_a_bad_rank_costs_only_its_own_loads() -> None:
    registry = Registry()
    worker = registry.add("http://p:1", "prefill")
    registry.described(worker, WorkerInfo(dp_size=4))
    good = {"num_running_reqs": 2, "num_used_tokens": 30, "num_total_tokens": 40}
    bad: list[Any] = [None, {"dp_rank": 1, "num_used_tokens": "many"}, {"dp_rank": 2} | good]
    bad += [{"dp_rank": "x"}, {"dp_rank": None}, "x", {"dp_rank": 0} | good]
    polled = parse_loads(worker, [orjson.dumps({"loads": bad})])
    assert polled is not None
    assert polled.kv_tokens == [30, -1, 30, -1]
    assert polled.queued_tokens == [10, -1, 10, -1]
    assert polled.running_requests == [2, -1, 2, -1]
    registry.described(worker, WorkerInfo(dp_size=2, rust_server=True))
    pages = [b"", orjson.dumps({"loads": [good]})]
    polled = parse_loads(worker, pages)
    assert polled is not None
    assert polled.kv_tokens == [-1, 30]


def test_a_rank_without_loads_keeps_what_is_known_of_it() -> None:
    up = InstanceUp(instance="p", role="prefill", dp_size=2, chunk_tokens=1000)
    prefill = PrefillInstance(up, t_default_s=0.3, default_chunk_tokens=1000)
    prefill.on_load_poll([600, 700], 0.0)
    prefill.on_load_poll([-1, 100], 0.1)
    assert [rank.queued_tokens for rank in prefill.ranks] == [600, 100]


async def test_signal_says_when_loads_are_of_no_use() -> None:
    async with cluster() as c:
        worker = c.server.registry.get(c.prefill[0].url)
        assert worker is not None
        assert describe_worker(worker, 0.0)["signal"] == "polls"
        c.server.registry.report_problem(worker, "loads", "no use: timers only")
        assert describe_worker(worker, 0.0)["signal"] == "timers"
