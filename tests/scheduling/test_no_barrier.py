"""Workers whose DP ranks make passes each for itself: DWDP, or no gather between schedulers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.scheduling import (
    Dispatch,
    ForwardEnded,
    InstanceDown,
    InstanceUp,
    LoadPolled,
    PrefillDone,
    RequestArrived,
    RequestEnded,
    Scheduler,
    SchedulerConfig,
    TimerFired,
    WakeAt,
)
from sglang_sbs.scheduling.events import (
    BlocksStored,
    Command,
    Event,
    RequestAdopted,
)
from sglang_sbs.wire import EndForward

CHUNK = 1000


def up(name: str = "p", dp_size: int = 4, *, barrier: bool = False, **more: Any) -> InstanceUp:
    return InstanceUp(
        instance=name,
        role="prefill",
        dp_size=dp_size,
        chunk_tokens=CHUNK,
        barrier=barrier,
        **more,
    )


DECODE = InstanceUp(instance="d", role="decode", dp_size=4)


def scheduler_with(*workers: InstanceUp, **config: Any) -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(**config))
    for event in (*workers, DECODE):
        scheduler.handle(event, 0.0)
    return scheduler


def says(rank: int, name: str = "p", dp_size: int = 4, **fields: Any) -> ForwardEnded:
    values = {"boot_id": "b", "role": "prefill", "seq": 0, "kind": "forward", "instance_id": name}
    report = EndForward(dp_rank=rank, dp_size=dp_size, barrier=False, **(values | fields))
    return ForwardEnded(instance=name, report=report)


def arrive(
    scheduler: Scheduler, rid: str, now_s: float, tokens: int = 100, **more: Any
) -> Dispatch:
    event = RequestArrived(rid=rid, prompt_tokens=tokens, **more)
    (made,) = [c for c in scheduler.handle(event, now_s) if isinstance(c, Dispatch)]
    return made


def ranks_of(scheduler: Scheduler, now_s: float, name: str = "p") -> Any:
    (state,) = [
        instance for instance in scheduler.snapshot(now_s).prefill if instance.instance == name
    ]
    return state


# Beliefs --------------------------------------------------------------------------------------


def test_a_rank_that_computes_is_not_taken_for_idle_because_another_counts_higher() -> None:
    scheduler = scheduler_with(up(dp_size=2), policy="eta", t_default_s=0.4)
    scheduler.handle(says(0, dp_size=2, forward_id=5000, forward_s=0.1, extend_tokens=900), 1.0)
    scheduler.handle(says(0, dp_size=2, seq=1, kind="idle", forward_id=5000), 1.0)
    launch = says(1, dp_size=2, kind="launch", forward_id=3, extend_tokens=1000)
    scheduler.handle(launch, 1.0)
    busy, idle = scheduler.prefill["p rank 1"], scheduler.prefill["p rank 0"]
    assert [a_pass.tokens for a_pass in busy.passes] == [[1000]]
    assert busy.free_at_s(1.0, 0.0) > 1.1
    assert idle.idle
    assert [arrive(scheduler, f"r{i}", 1.01).prefill_rank for i in range(2)] == [0, 0]


def test_every_rank_s_end_counts_whatever_its_number() -> None:
    scheduler = scheduler_with(up(dp_size=3), t_default_s=0.4)
    for turn, ids in enumerate([(900, 7, 31), (901, 8, 32), (902, 9, 33)]):
        for rank, forward_id in enumerate(ids):
            now_s = 1.0 + turn + rank / 10
            fields = {"forward_id": forward_id, "extend_tokens": 500 + rank}
            launch = says(rank, dp_size=3, seq=2 * turn, kind="launch", **fields)
            scheduler.handle(launch, now_s)
            assert len(scheduler.prefill[f"p rank {rank}"].passes) == 1
            end = says(rank, dp_size=3, seq=2 * turn + 1, forward_s=0.05, **fields)
            scheduler.handle(end, now_s + 0.05)
            assert not scheduler.prefill[f"p rank {rank}"].passes
    state = ranks_of(scheduler, 5.0)
    assert state.passes == 9
    assert not state.barrier
    assert len(state.ranks) == 3


def test_a_pass_of_one_rank_is_as_long_as_its_own_tokens_say() -> None:
    """The rank's report about others, as engines that gather do, is not of this pass."""
    scheduler = scheduler_with(up(dp_size=2))
    fields = {"forward_id": 1, "extend_tokens": 400, "tokens_per_rank": [400, 1000]}
    scheduler.handle(says(0, dp_size=2, kind="launch", **fields), 1.0)
    assert [a_pass.tokens for a_pass in scheduler.prefill["p rank 0"].passes] == [[400]]
    assert not scheduler.prefill["p rank 1"].passes


def test_each_request_lives_and_ends_at_its_rank() -> None:
    scheduler = scheduler_with(up(), policy="least_tokens")
    made = [arrive(scheduler, f"r{i}", 1.0) for i in range(4)]
    assert [dispatch.prefill for dispatch in made] == ["p"] * 4
    assert sorted(dispatch.prefill_rank for dispatch in made) == [0, 1, 2, 3]
    assert [r.flight_tokens for r in ranks_of(scheduler, 1.0).ranks] == [100] * 4
    named = made[2]
    accepted = says(named.prefill_rank, rids=[named.rid], kind="heartbeat", accepted_requests=1)
    scheduler.handle(accepted, 1.0)
    assert [r.flight_tokens for r in ranks_of(scheduler, 1.0).ranks].count(0) == 1
    scheduler.handle(PrefillDone(rid=named.rid), 1.2)
    assert [r.outstanding_requests for r in ranks_of(scheduler, 1.2).ranks].count(0) == 1
    for dispatch in made:
        scheduler.handle(RequestEnded(rid=dispatch.rid, outcome="completed"), 2.0)
    assert [r.outstanding_requests for r in ranks_of(scheduler, 2.0).ranks] == [0] * 4


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_the_worker_does_not_have_changes_nothing(rank: int) -> None:
    scheduler = scheduler_with(up())
    before = ranks_of(scheduler, 1.0)
    scheduler.handle(says(rank, kind="launch", forward_id=1, extend_tokens=900), 1.0)
    scheduler.handle(BlocksStored(instance="p", dp_rank=rank, blocks=[1]), 1.0)
    assert ranks_of(scheduler, 1.0) == before


# It is as many instances ------------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "launch", "forward", "idle", "answer", "end", "wait"]),
        st.integers(0, 2),
        st.integers(1, 1500),
    ),
    max_size=60,
)


class Twin:
    """The same events sent to a worker without a barrier and to instances of one rank."""

    def __init__(self, ranks: int, **config: Any) -> None:
        self.ranks = ranks
        self.worker = Scheduler(SchedulerConfig(**config))
        self.instances = Scheduler(SchedulerConfig(**config))
        self.now_s = 1.0
        self.sent: list[str] = []
        self.rank_of: dict[str, int] = {}
        self.answered: list[str] = []
        self.counts = [0] * ranks
        """Passes and messages of each rank; each begins somewhere else."""
        self.tell(up("p", ranks), *[up(f"p rank {rank}", 1) for rank in range(ranks)])
        self.tell(DECODE, DECODE)

    def tell(self, event: Event, *others: Event) -> None:
        commands = self.worker.handle(event, self.now_s)
        other = [c for other in others for c in self.instances.handle(other, self.now_s)]
        assert [self.inside(c) for c in commands if not isinstance(c, WakeAt)] == [
            c for c in other if not isinstance(c, WakeAt)
        ]
        assert [c for c in commands if isinstance(c, WakeAt)][-1:] == [
            c for c in other if isinstance(c, WakeAt)
        ][-1:]
        sent = {c.rid: c.prefill_rank for c in commands if isinstance(c, Dispatch)}
        self.sent += sent
        self.rank_of |= sent

    @staticmethod
    def inside(command: Command) -> Command:
        if not isinstance(command, Dispatch):
            return command
        assert not command.barrier
        name = f"{command.prefill} rank {command.prefill_rank}"
        return msgspec.structs.replace(command, prefill=name, prefill_rank=0, barrier=True)

    def report(self, rank: int, kind: str, tokens: int) -> None:
        self.counts[rank] += 1
        fields: dict[str, Any] = {
            "kind": kind,
            "seq": self.counts[rank],
            "forward_id": 1000 * rank + self.counts[rank] // 2,
            "extend_tokens": tokens if kind != "idle" else 0,
            "forward_s": 0.1 if kind == "forward" else 0.0,
            "waiting_tokens": tokens // 3 if kind == "forward" else 0,
            "waiting_requests": kind == "forward",
            # On another rank it would have moved, which instances do not do.
            "rids": [rid for rid in self.sent if self.rank_of[rid] == rank][-1:],
            "accepted_requests": len(self.sent),
        }
        self.tell(says(rank, "p", self.ranks, **fields), says(0, f"p rank {rank}", 1, **fields))


@pytest.mark.parametrize(
    "config",
    [{}, {"trigger": "paper"}, {"policy": "eta"}, {"policy": "least_tokens"}],
    ids=["sbs", "paper", "eta", "least_tokens"],
)
@given(actions=ACTIONS)
def test_it_is_as_many_instances_of_one_rank(
    config: dict[str, Any], actions: list[tuple[str, int, int]]
) -> None:
    twin = Twin(3, **config)
    for number, (what, rank, tokens) in enumerate(actions):
        twin.now_s += 0.013
        if what == "arrive":
            event: Event = RequestArrived(rid=f"r{number}", prompt_tokens=tokens)
            twin.tell(event, event)
        elif what in ("launch", "forward", "idle"):
            twin.report(rank, what, min(tokens, CHUNK))
        elif what == "wait":
            twin.now_s += tokens / 5000
            twin.tell(TimerFired(), TimerFired())
        elif twin.sent:
            rid = twin.sent[tokens % len(twin.sent)]
            event = (
                PrefillDone(rid=rid)
                if what == "answer"
                else RequestEnded(rid=rid, outcome="completed")
            )
            twin.tell(event, event)
    worker = twin.worker.snapshot(twin.now_s).prefill
    instances = twin.instances.snapshot(twin.now_s).prefill
    assert [r for instance in worker for r in instance.ranks] == [
        r for instance in instances for r in instance.ranks
    ]
    assert sum(instance.passes for instance in worker) == sum(
        instance.passes for instance in instances
    )


# Membership -------------------------------------------------------------------------------------


def test_all_its_ranks_go_and_come_with_the_worker() -> None:
    scheduler = scheduler_with(up("p"), up("q", 2), policy="random", seed=1)
    scheduler.handle(InstanceDown(instance="p"), 1.0)
    assert not ranks_of(scheduler, 1.0).up
    assert {arrive(scheduler, f"a{i}", 2.0).prefill for i in range(12)} == {"q"}
    scheduler.handle(up("p"), 3.0)
    assert {arrive(scheduler, f"b{i}", 4.0).prefill for i in range(12)} == {"p", "q"}


def test_a_worker_that_stays_away_is_forgotten_with_all_its_ranks() -> None:
    scheduler = scheduler_with(up("p"), up("q"))
    scheduler.handle(InstanceDown(instance="p"), 1.0)
    scheduler.handle(up("r"), 1000.0)
    assert {instance.worker for instance in scheduler.prefill.values()} == {"q", "r"}
    assert scheduler.lone.instances("p") == ["p"]
    assert scheduler.lone.outside("p rank 1", 0, 1).worker == "p rank 1"


def test_a_retry_avoids_all_ranks_of_the_worker_it_failed_on() -> None:
    scheduler = scheduler_with(up("p"), up("q", 1, barrier=True), policy="least_tokens")
    made = [arrive(scheduler, f"r{i}", 1.0, exclude=("p",)) for i in range(5)]
    assert {dispatch.prefill for dispatch in made} == {"q"}
    assert arrive(scheduler, "only", 1.0, exclude=("p", "q")).prefill == "p"


def test_it_may_turn_out_later_that_there_is_no_barrier() -> None:
    scheduler = scheduler_with(up(barrier=True), policy="least_tokens")
    first = [arrive(scheduler, f"r{i}", 1.0) for i in range(4)]
    scheduler.handle(up(), 1.1)
    assert set(scheduler.prefill) == {f"p rank {rank}" for rank in range(4)}
    assert [r.flight_tokens for r in ranks_of(scheduler, 1.1).ranks] == [100] * 4
    for dispatch in first:
        scheduler.handle(RequestEnded(rid=dispatch.rid, outcome="completed"), 2.0)
    assert [r.outstanding_requests for r in ranks_of(scheduler, 2.0).ranks] == [0] * 4
    scheduler.handle(up(barrier=True), 3.0)
    assert set(scheduler.prefill) == {"p"}
    assert ranks_of(scheduler, 3.0).barrier


def test_what_is_in_flight_counts_after_the_barrier_turns_out_to_be_there() -> None:
    scheduler = scheduler_with(up(), policy="least_tokens")
    sent = [arrive(scheduler, f"r{i}", 1.0) for i in range(3)]
    scheduler.handle(up(barrier=True), 1.1)
    assert [r.flight_tokens for r in ranks_of(scheduler, 1.1).ranks] == [100, 100, 100, 0]
    scheduler.handle(PrefillDone(rid=sent[0].rid), 2.0)
    for dispatch in sent:
        scheduler.handle(RequestEnded(rid=dispatch.rid, outcome="completed"), 2.0)
    assert [r.outstanding_requests for r in ranks_of(scheduler, 2.0).ranks] == [0] * 4


def test_another_number_of_ranks_replaces_them() -> None:
    scheduler = scheduler_with(up(dp_size=4))
    scheduler.handle(up(dp_size=2), 1.0)
    assert set(scheduler.prefill) == {"p rank 0", "p rank 1"}
    scheduler.handle(msgspec.structs.replace(up(), role="decode"), 2.0)
    assert not scheduler.prefill
    assert set(scheduler.decode) == {"d", "p"}


def test_what_others_sent_counts_at_its_rank_before_and_after_the_worker_is_known() -> None:
    scheduler = scheduler_with()
    adopted = {"prompt_tokens": 70, "prefill": "p", "decode": "d", "decode_rank": 0}
    scheduler.handle(RequestAdopted(rid="before", prefill_rank=1, **adopted), 0.5)
    scheduler.handle(up(), 1.0)
    scheduler.handle(RequestAdopted(rid="after", prefill_rank=3, **adopted), 1.5)
    assert [r.outstanding_requests for r in ranks_of(scheduler, 2.0).ranks] == [0, 1, 0, 1]


# Signals and places ---------------------------------------------------------------------------


def test_a_load_poll_is_divided_among_the_ranks() -> None:
    scheduler = scheduler_with(up(dp_size=2))
    poll = LoadPolled(
        instance="p", queued_tokens=[0, 640], running_requests=[0, 1], kv_tokens=[0, 640]
    )
    scheduler.handle(poll, 1.0)
    assert [r.queued_tokens for r in ranks_of(scheduler, 1.0).ranks] == [0, 640]
    short = LoadPolled(instance="p", queued_tokens=[9], running_requests=[0], kv_tokens=[0])
    scheduler.handle(short, 1.0)
    assert [r.queued_tokens for r in ranks_of(scheduler, 1.0).ranks] == [0, 640]


def test_cached_prefixes_are_found_at_the_rank_that_published_them() -> None:
    worker = up(page_size=16, prefix_source="events", kv_capacity_tokens=10_000)
    scheduler = scheduler_with(worker)
    scheduler.handle(BlocksStored(instance="p", dp_rank=2, blocks=list(range(1, 31))), 1.0)
    made = arrive(scheduler, "r", 2.0, 500, blocks=list(range(1, 31)), block_tokens=16)
    assert (made.prefill, made.prefill_rank, made.cached_tokens) == ("p", 2, 480)


def test_one_batch_goes_to_one_rank() -> None:
    """So the gang gate of a rank has nothing to wait for on others."""
    scheduler = scheduler_with(up(dp_size=2), t_default_s=0.3)
    for rank in range(2):
        launch = says(rank, dp_size=2, kind="launch", forward_id=7 * rank + 1, extend_tokens=900)
        scheduler.handle(launch, 1.0)
    made: list[Dispatch] = []
    wake_s = 1.0
    for i in range(6):
        event: Event = RequestArrived(rid=f"r{i}", prompt_tokens=300)
        for command in scheduler.handle(event, 1.01):
            wake_s = command.time_s if isinstance(command, WakeAt) else wake_s
            made += [command] if isinstance(command, Dispatch) else []
    for _ in range(20):
        now_s = max(1.01, wake_s)
        for command in scheduler.handle(TimerFired(), now_s):
            wake_s = command.time_s if isinstance(command, WakeAt) else wake_s
            made += [command] if isinstance(command, Dispatch) else []
        if len(made) == 6:
            break
    assert len(made) == 6
    places = {(dispatch.batch, dispatch.prefill_rank) for dispatch in made}
    assert len(places) == len({dispatch.batch for dispatch in made}) >= 2


def test_gateway_policies_choose_among_workers_not_ranks() -> None:
    scheduler = scheduler_with(up("p", 4), up("q", 1), policy="random_rank")
    made = [arrive(scheduler, f"r{i}", 1.0) for i in range(40)]
    assert [dispatch.prefill for dispatch in made] == ["p", "q"] * 20
    assert {dispatch.prefill_rank for dispatch in made if dispatch.prefill == "p"} == {0, 1, 2, 3}
