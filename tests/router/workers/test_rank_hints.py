"""Engines that take the DP rank of a request as a hint only are recognised by what they do."""

from __future__ import annotations

import msgspec
import pytest
from router_harness import Cluster, cluster, until

from sglang_sbs.router.schedulers import OwnScheduler
from sglang_sbs.router.workers.served_ranks import MOST_ELSEWHERE, WINDOW, ServedRanks


def served(*ranks: tuple[int, int]) -> ServedRanks:
    """``ranks``: of each request the named rank and the one that accepted it first."""
    out = ServedRanks()
    for number, (named, rank) in enumerate(ranks):
        out.accepted(f"r{number}", named, rank)
    return out


class TestServedRanks:
    def test_a_rank_is_a_hint_where_over_a_fifth_of_the_last_fifty_ran_elsewhere(self) -> None:
        few = [(0, 1)] * MOST_ELSEWHERE + [(1, 1)] * (WINDOW - MOST_ELSEWHERE)
        assert not served(*few).problem
        assert f"{MOST_ELSEWHERE + 1} of the last {WINDOW}" in served(*few[:-1], (0, 1)).problem
        assert not served(*[(0, 1)] * (WINDOW - 1)).problem, "too few to tell"
        assert not served(*few[:-1], (0, 1), *[(1, 1)] * 2).problem, "over by now"

    def test_a_request_that_moved_later_was_where_it_was_sent(self) -> None:
        first, after = ServedRanks(), ServedRanks()
        for number in range(2 * WINDOW):
            rid = f"r{number}"
            for at, rank in (first, 0), (first, 1), (after, 1), (after, 0):
                at.accepted(rid, 0, rank)
        assert (first.problem, after.problem) == ("", ""), "messages of two ranks have no order"


async def generate(c: Cluster, times: int, shift: int) -> list[tuple[dict, dict]]:
    """Each of so many requests is accepted by the ``shift``-th rank after the one it was sent to;
    bodies of both legs."""
    (engine,), before = c.prefill, len(c.prefill[0].requests)
    (worker,) = c.server.registry.of_role("prefill")
    schedulers = c.server.scheduler
    assert isinstance(schedulers, OwnScheduler)
    out = []
    for number in range(times):
        assert (await c.generate(text="x"))[0] == 200
        body = engine.requests[before + number].body
        rank = (body["bootstrap_room"] + shift) % engine.dp_size
        report = engine.report(rank, kind="heartbeat", rids=[body["rid"]], instance_id=worker.url)
        schedulers._watch._listener._handle(report, "")
        decode = next(r.body for r in c.decode[0].requests if r.body["rid"] == body["rid"])
        out.append((body, decode))
    return out


@pytest.mark.parametrize("policy", ["sbs", "least_tokens"])
async def test_such_an_engine_is_sent_no_rank_until_it_restarts(policy: str) -> None:
    async with cluster("--policy", policy, real=True, sbs_block=True) as c:
        (worker,) = c.server.registry.of_role("prefill")
        for prefill, decode in await generate(c, WINDOW, shift=0):
            assert prefill["routed_dp_rank"] == prefill["bootstrap_room"] % 2
            assert decode["disagg_prefill_dp_rank"] == prefill["routed_dp_rank"]
        assert "rank-is-a-hint" not in worker.problems
        await generate(c, MOST_ELSEWHERE + 1, shift=1)
        async with c.client.get(f"{c.url}/workers") as response:
            (shown,) = [w for w in (await response.json())["workers"] if w["url"] == worker.url]
        assert "as a hint" in shown["problems"]["rank-is-a-hint"]
        metrics = c.server.metrics.render().decode()
        assert 'problem="rank-is-a-hint"' in metrics
        for prefill, decode in await generate(c, 3, shift=1):
            assert not {"routed_dp_rank", "disagg_prefill_dp_rank"} & prefill.keys()
            assert "disagg_prefill_dp_rank" not in decode
            assert "routed_dp_rank" in decode
        await c.settled()
        c.check_books()
        engine = c.prefill[0]
        engine.boot_id = "another"
        registry = c.server.registry
        assert worker.info is not None and worker.info.sbs is not None
        registry.check_boot(
            worker,
            msgspec.structs.replace(
                worker.info, sbs=msgspec.structs.replace(worker.info.sbs, boot_id="another")
            ),
        )
        assert not worker.rank_is_a_hint and "rank-is-a-hint" not in worker.problems
        await until(lambda: worker.usable)
        ((prefill, decode),) = await generate(c, 1, shift=0)
        assert {"routed_dp_rank", "disagg_prefill_dp_rank"} <= prefill.keys() & decode.keys()
