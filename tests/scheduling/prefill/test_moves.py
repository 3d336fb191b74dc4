"""Requests that the engine puts on another prefill DP rank than they were dispatched to."""

from __future__ import annotations

import msgspec
import pytest
from driver import Driver
from harness.learned_instance import instance
from hypothesis import given, settings
from hypothesis import strategies as st
from model_engine import PrefillEngine

from sglang_sbs.scheduling import (
    BlocksStored,
    ForwardEnded,
    InstanceUp,
    PrefillDone,
    RequestEnded,
)
from sglang_sbs.scheduling.events import RequestAdopted
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.prefill.moves import Stray
from sglang_sbs.wire import EndForward

DP, CHUNK = 3, 500


class Cluster(Driver):
    """A scheduler and one prefill engine that may move what waits there to another rank."""

    def __init__(self, **config):
        super().__init__(policy="least_tokens", **config)
        self.engine = PrefillEngine("p0", DP, CHUNK)
        self.up(dp=DP, chunk=CHUNK)
        self.rank_of: dict[str, int] = {}
        """Where each request is that prefill has not answered."""
        self.travelling: dict[str, int] = {}
        """Dispatched and not at the engine yet: tokens."""
        self.left: list[int] | None = None
        """Tokens that each rank held when the running pass was launched."""

    @property
    def books(self) -> PrefillInstance:
        return self.scheduler.prefill["p0"]

    def send(self, rid: str, tokens: int) -> None:
        (made,) = self.arrive(rid, tokens)
        self.rank_of[rid] = made.prefill_rank
        self.travelling[rid] = tokens

    def accept(self, rid: str) -> None:
        self.engine.accept(rid, self.rank_of[rid], self.travelling.pop(rid))

    def move(self, rid: str, rank: int) -> None:
        """The engine moves a waiting request, which the new rank accepts."""
        entry = next(e for r in self.engine.ranks for e in r.waiting if e[0] == rid)
        self.engine.abort(rid)
        self.engine.accept(rid, rank, entry[1])
        self.rank_of[rid] = rank

    def say(self, message: EndForward) -> None:
        self.tell(ForwardEnded(instance="p0", report=message))

    def all_speak(self) -> None:
        for rank in range(DP):
            self.say(self.engine.message(rank, "heartbeat"))

    def launch(self) -> None:
        for message in self.engine.launch():
            self.say(message)

    def finish(self) -> None:
        self.now_s += self.engine.forward_s
        done, messages = self.engine.finish()
        for message in messages:
            self.say(message)
        for rid in done:
            del self.rank_of[rid]
            self.tell(PrefillDone(rid=rid))

    @property
    def true_backlog(self) -> int:
        """Tokens that are on their way or wait at a rank, and are in no pass."""
        waiting = sum(rank.queued_tokens for rank in self.engine.ranks)
        return sum(self.travelling.values()) + waiting

    def believed_ranks(self) -> dict[str, list[int]]:
        """On which ranks each open request is counted."""
        return {
            rid: [at for at, rank in enumerate(self.books.ranks) if rid in rank.requests]
            for rid in self.rank_of
        }


def other(rank: int) -> int:
    return (rank + 1) % DP


class TestOneMove:
    def test_what_waits_is_counted_where_it_is(self) -> None:
        it = Cluster()
        it.send("a", 300)
        it.accept("a")
        it.all_speak()
        old, new = it.rank_of["a"], other(it.rank_of["a"])
        it.move("a", new)
        it.say(it.engine.message(new, "heartbeat"))
        assert [r.queued_tokens for r in it.books.ranks] == [300 * (n == new) for n in range(DP)]
        assert it.books.ranks.backlog_tokens == it.true_backlog == 300
        it.say(it.engine.message(old, "heartbeat"))
        assert it.books.ranks.backlog_tokens == 300

    def test_the_old_rank_may_speak_first(self) -> None:
        it = Cluster()
        it.send("a", 300)
        it.send("b", 200)
        for rid in ("a", "b"):
            it.accept(rid)
        it.all_speak()
        old = it.rank_of["a"]
        it.move("a", new := other(old))
        for rank in (old, new, 3 - old - new):
            it.say(it.engine.message(rank, "heartbeat"))
        assert it.books.ranks.backlog_tokens == it.true_backlog == 500

    def test_what_the_old_rank_never_named_is_not_in_flight_there(self) -> None:
        it = Cluster()
        it.send("a", 300)
        it.accept("a")
        old, new = it.rank_of["a"], other(it.rank_of["a"])
        it.move("a", new)
        it.say(it.engine.message(new, "heartbeat"))
        assert it.believed_ranks() == {"a": [new]}
        assert it.books.ranks.backlog_tokens == 300 and not it.books.ranks.has_flight
        # Its acceptance there was reported late, and moves nothing back.
        it.say(it.engine.message(old, "heartbeat"))
        assert it.believed_ranks() == {"a": [new]}
        assert it.books.ranks.backlog_tokens == 300

    def test_a_lost_acceptance_by_the_old_rank_accepts_no_other_request(self) -> None:
        it = Cluster()
        for rid in ("a", "b", "c", "d"):
            it.send(rid, 100)
        old = it.rank_of["a"]
        assert it.rank_of["d"] == old
        it.say(it.engine.message(old, "heartbeat"))
        it.accept("a")
        it.engine.message(old, "heartbeat")  # lost
        it.move("a", new := other(old))
        it.say(it.engine.message(new, "heartbeat"))
        it.say(it.engine.message(old, "heartbeat"))
        assert "d" in it.books.ranks[old].flight
        assert it.books.ranks.backlog_tokens == it.true_backlog == 400

    def test_a_move_back_is_a_move(self) -> None:
        it = Cluster()
        it.send("a", 300)
        it.accept("a")
        it.all_speak()
        first = it.rank_of["a"]
        for rank in (other(first), first):
            it.move("a", rank)
            it.all_speak()
            assert it.believed_ranks() == {"a": [rank]}

    def test_the_end_of_a_moved_request_leaves_nothing_on_either_rank(self) -> None:
        it = Cluster()
        it.send("a", 300)
        it.accept("a")
        it.all_speak()
        it.move("a", other(it.rank_of["a"]))
        it.all_speak()
        it.tell(RequestEnded(rid="a", outcome="aborted"))
        it.engine.abort("a")
        it.all_speak()
        assert not it.books.ranks.has_outstanding and it.books.ranks.backlog_tokens == 0
        assert not any(rank.requests for rank in it.books.ranks)

    def test_a_message_that_is_not_believed_moves_nothing(self) -> None:
        it = Cluster()
        it.send("a", 300)
        it.accept("a")
        it.all_speak()
        old, new = it.rank_of["a"], other(it.rank_of["a"])
        late = msgspec.structs.replace(it.engine.message(new, "heartbeat"), rids=["a"], seq=0)
        it.say(late)
        assert it.believed_ranks() == {"a": [old]}

    @pytest.mark.parametrize("named", [False, True])
    def test_a_moved_request_gives_no_latency_sample(self, named: bool) -> None:
        it = Cluster()
        it.send("a", 300)
        it.accept("a")
        old, new = it.rank_of["a"], other(it.rank_of["a"])
        if named:
            it.say(it.engine.message(old, "heartbeat"))
        before = it.scheduler.interval.latency_s
        it.now_s += 0.4
        it.move("a", new)
        for message in sorted(it.engine.launch(), key=lambda message: message.dp_rank != new):
            it.say(message)
        assert it.scheduler.interval.latency_s == before

    def test_a_prefix_that_stays_behind_is_computed_again(self) -> None:
        it = Cluster()
        event = InstanceUp(
            instance="p0", role="prefill", dp_size=DP, chunk_tokens=CHUNK, page_size=50,
            prefix_source="events",
        )  # fmt: skip
        it.tell(event)
        it.tell(BlocksStored(instance="p0", dp_rank=0, blocks=[1, 2]))
        (made,) = it.arrive("a", 300, blocks=[1, 2, 3, 4, 5, 6], block_tokens=50)
        assert (made.prefill_rank, made.cached_tokens) == (0, 100)
        assert it.books.ranks[0].outstanding_tokens == 200
        it.rank_of["a"], it.travelling["a"] = 0, 300
        it.accept("a")
        it.move("a", 1)
        it.say(it.engine.message(1, "heartbeat"))
        assert [rank.outstanding_tokens for rank in it.books.ranks] == [0, 300, 0]

    def test_an_adopted_request_that_moved_is_not_moved_back(self) -> None:
        it = Cluster()
        it.tell(
            RequestAdopted(
                rid="a", prompt_tokens=300, prefill="p0", prefill_rank=0, decode="d0", decode_rank=0
            )
        )
        it.rank_of["a"], it.travelling["a"] = 0, 300
        it.accept("a")
        it.engine.message(0, "heartbeat")  # before this scheduler led
        it.move("a", 1)
        it.say(it.engine.message(1, "heartbeat"))
        it.say(it.engine.message(0, "heartbeat"))
        assert it.believed_ranks() == {"a": [1]}


def test_ranks_without_a_barrier_move_requests_too() -> None:
    it = Driver(policy="least_tokens")
    it.tell(InstanceUp(instance="p0", role="prefill", dp_size=2, chunk_tokens=1000, barrier=False))
    it.tell(InstanceUp(instance="d0", role="decode", dp_size=2))
    (made,) = it.arrive("a", 300)
    new = 1 - made.prefill_rank
    it.report("p0", new, kind="heartbeat", rids=["a"], accepted_requests=1, waiting_requests=1,
              waiting_tokens=300)  # fmt: skip
    ranks = it.prefill_state().ranks
    assert [rank.outstanding_requests for rank in ranks] == [int(n == new) for n in range(2)]
    assert [rank.flight_tokens for rank in ranks] == [0, 0]
    it.tell(RequestEnded(rid="a", outcome="completed"))
    assert [rank.outstanding_requests for rank in it.prefill_state().ranks] == [0, 0]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "accept", "accept", "move", "move", "pass", "end"]),
        st.integers(0, 99),
        st.integers(1, 900),
    ),
    max_size=40,
)


@pytest.mark.parametrize("order", ["ascending", "descending"])
@given(steps=STEPS)
@settings(deadline=None)
def test_the_tokens_of_all_ranks_are_the_truth(
    order: str, steps: list[tuple[str, int, int]]
) -> None:
    """After each message each request is on one rank, and only what changed since the last message
    of the old rank may be counted wrongly. After its next message all tokens are where they are."""
    it = Cluster()
    ranks = range(DP) if order == "ascending" else range(DP)[::-1]
    for number, (what, pick, tokens) in enumerate(steps):
        it.now_s += 1e-6  # no time for a pass that nobody reports: none is presumed
        waiting = [rid for rank in it.engine.ranks for rid, _ in rank.waiting]
        whole = [rid for rid in waiting if _is_whole(it, rid)]
        unknown = 0
        """Tokens of which the old rank has not said that they left."""
        if what == "send":
            it.send(f"r{number}", tokens)
        elif what == "accept" and it.travelling:
            # Each rank takes its requests in the order in which they were sent.
            rank = it.rank_of[[*it.travelling][pick % len(it.travelling)]]
            it.accept(next(rid for rid in it.travelling if it.rank_of[rid] == rank))
        elif what == "move" and whole:
            rid = whole[pick % len(whole)]
            it.move(rid, (it.rank_of[rid] + 1 + tokens % (DP - 1)) % DP)
            unknown = _tokens_of(it, rid)
        elif what == "end" and whole:
            rid = whole[pick % len(whole)]
            unknown = _tokens_of(it, rid)
            it.tell(RequestEnded(rid=rid, outcome="aborted"))
            it.engine.abort(rid)
            del it.rank_of[rid]
        elif what == "pass" and it.engine.has_work:
            it.launch()
            it.finish()
        for rank in ranks:
            it.say(it.engine.message(rank, "heartbeat"))
            assert all(len(at) == 1 for at in it.believed_ranks().values())
            assert abs(it.books.ranks.backlog_tokens - it.true_backlog) <= unknown
        if unknown:
            it.all_speak()
        assert it.books.ranks.backlog_tokens == it.true_backlog
        assert it.believed_ranks() == {rid: [rank] for rid, rank in it.rank_of.items()}
        queued = [rank.queued_tokens for rank in it.books.ranks]
        assert queued == [rank.queued_tokens for rank in it.engine.ranks]
    for rid in [*it.rank_of]:
        it.tell(RequestEnded(rid=rid, outcome="completed"))
    assert not it.books.ranks.has_outstanding


def _tokens_of(it: Cluster, rid: str) -> int:
    return next(size for rank in it.engine.ranks for waits, size in rank.waiting if waits == rid)


def _is_whole(it: Cluster, rid: str) -> bool:
    """No pass has computed any of it."""
    sizes = [rank.requests[rid].tokens for rank in it.books.ranks if rid in rank.requests]
    return sizes == [_tokens_of(it, rid)]


def test_an_instance_whose_last_request_moved_elsewhere_owes_nothing() -> None:
    """Each rank is an instance here, so the source gets no report of its own about the move."""
    source, target = instance("a", dp_size=1), instance("b", dp_size=1)
    source.on_dispatched("x", 0, 500, 1.0)
    accepted = PrefillEngine("a", 1, CHUNK).message(0, "heartbeat")
    queued = {"rids": ["x"], "waiting_requests": 1, "waiting_tokens": 500}
    source.on_report(msgspec.structs.replace(accepted, **queued), 1.1)
    assert source.ranks.backlog_tokens == 500
    target.moves.follow(target.ranks, 0, [Stray("x", source, 0, 500, 0)])
    assert source.ranks.backlog_tokens == 0
    assert source.quiescent


def test_a_request_that_was_given_up_and_then_moved_leaves_nothing_where_it_was():
    driver = Driver(policy="least_tokens").up(dp=2, chunk=CHUNK)
    (made,) = driver.arrive("r", 9000)
    driver.wait(100.0)
    assert driver.scheduler.prefill["p0"].watchdog.fires
    driver.report("p0", 1 - made.prefill_rank, kind="heartbeat", rids=["r"])
    driver.tell(RequestEnded(rid="r", outcome="aborted"))
    assert [list(rank.prompts) for rank in driver.scheduler.prefill["p0"].ranks] == [[], []]
