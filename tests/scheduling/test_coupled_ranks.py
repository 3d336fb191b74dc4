"""Decode ranks of engines that couple them to prefill's (SGLang before 0.5.10)."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.scheduling import Dispatch, InstanceUp, RequestArrived, RequestEnded, Scheduler
from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.events import ForwardEnded, RankChoice
from sglang_sbs.scheduling.policy_registry import Policy
from sglang_sbs.wire import EndForward

SIZES = st.integers(1, 12)


def scheduler_with(
    prefill_dp: int, *decodes: tuple[str, int, RankChoice], policy: Policy = "round_robin"
) -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(policy=policy))
    up = InstanceUp(instance="p", role="prefill", dp_size=prefill_dp, chunk_tokens=1024)
    scheduler.handle(up, 0.0)
    for name, dp_size, choice in decodes:
        up = InstanceUp(instance=name, role="decode", dp_size=dp_size, rank_choice=choice)
        scheduler.handle(up, 0.0)
    return scheduler


def dispatch(scheduler: Scheduler, count: int) -> list[Dispatch]:
    made = []
    for number in range(count):
        arrived = RequestArrived(rid=f"r{number}", prompt_tokens=10, max_new_tokens=5)
        commands = scheduler.handle(arrived, 1.0 + number / 1000)
        made += [command for command in commands if isinstance(command, Dispatch)]
    assert len(made) == count
    return made


@given(SIZES, SIZES)
def test_a_pair_always_has_a_room_and_every_rank_is_used(prefill_dp: int, decode_dp: int) -> None:
    divisor = math.gcd(prefill_dp, decode_dp)
    made = dispatch(scheduler_with(prefill_dp, ("d", decode_dp, "by_room")), 4 * math.lcm(4, 12))
    assert all((d.decode_rank - d.prefill_rank) % divisor == 0 for d in made)
    assert {d.decode_rank for d in made} == set(range(decode_dp))


def test_only_the_instance_that_couples_is_restricted() -> None:
    scheduler = scheduler_with(4, ("old", 4, "by_room"), ("new", 3, "free"), policy="least_tokens")
    made = dispatch(scheduler, 64)
    for d in made:
        if d.decode == "old":
            assert d.decode_rank == d.prefill_rank
    assert any(d.decode == "new" and (d.decode_rank - d.prefill_rank) % 4 for d in made)


def report(rank: int, *rids: str) -> ForwardEnded:
    message = EndForward(
        instance_id="d",
        boot_id="b",
        role="decode",
        dp_rank=rank,
        dp_size=2,
        seq=0,
        kind="heartbeat",
        rids=list(rids),
        accepted_requests=len(rids),
        running_requests=len(rids),
    )
    return ForwardEnded(instance="d", report=message)


def test_the_books_follow_an_engine_that_chooses() -> None:
    scheduler = scheduler_with(2, ("d", 2, "engine"))
    (made,) = dispatch(scheduler, 1)
    other = 1 - made.decode_rank
    scheduler.handle(report(other, "r0"), 2.0)
    books = scheduler.decode["d"]
    assert [len(rank.outstanding) for rank in books.ranks] == [int(i == other) for i in range(2)]
    loads = books.loads()
    assert [load.running for load in loads] == [int(i == other) for i in range(2)]
    scheduler.handle(RequestEnded(rid="r0", outcome="completed"), 3.0)
    assert not books.has_outstanding
    assert all(load.committed_tokens == 0 for load in books.loads())


def test_where_ranks_are_free_a_report_moves_nothing() -> None:
    scheduler = scheduler_with(2, ("d", 2, "free"))
    (made,) = dispatch(scheduler, 1)
    scheduler.handle(report(1 - made.decode_rank, "r0"), 2.0)
    ranks = scheduler.decode["d"].ranks
    assert len(ranks[made.decode_rank].outstanding) == 1


def test_a_relaunch_with_another_method_is_taken_over() -> None:
    scheduler = scheduler_with(4, ("d", 4, "engine"))
    up = InstanceUp(instance="d", role="decode", dp_size=4, rank_choice="by_room")
    scheduler.handle(up, 0.5)
    assert all(d.decode_rank == d.prefill_rank for d in dispatch(scheduler, 16))
