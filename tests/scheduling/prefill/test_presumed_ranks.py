"""One rank's message tells of all ranks: presumed, then confirmed, counted or contradicted."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_engine import PrefillEngine

from sglang_sbs.scheduling import InstanceUp
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.prefill.rank import PrefillRank
from sglang_sbs.scheduling.prefill.requests import PrefillRequest, Sent

CHUNK = 1000
LATENCY_S = 0.005


class Rig:
    """One instance's books next to a ground-truth engine; the test delivers its messages."""

    def __init__(self, dp: int = 2) -> None:
        up = InstanceUp(instance="p0", role="prefill", dp_size=dp, chunk_tokens=CHUNK)
        self.books = PrefillInstance(up, t_default_s=0.1, default_chunk_tokens=CHUNK)
        self.engine = PrefillEngine("p0", dp, CHUNK)
        self.now_s = 10.0
        self.hear(*[self.engine.message(d, "idle") for d in range(dp)])

    def send(
        self, rid: str, rank: int, tokens: int, *, arrives: bool = True, later_s: float = 0.001
    ) -> None:
        self.now_s += later_s
        self.books.on_dispatched(rid, rank, tokens, self.now_s)
        if arrives:
            self.engine.accept(rid, rank, tokens)

    def hear(self, *messages):
        """Report the messages, and return the result of the last one."""
        for message in messages:
            self.now_s += 0.001
            learned = self.books.on_report(message, self.now_s)
        return learned

    def launch(self):
        self.now_s += 0.01
        return self.engine.launch()

    def finish(self):
        self.now_s += self.engine.forward_s
        return self.engine.finish()[1]

    def state(self, rank: int) -> tuple[list[str], int]:
        """Requests in flight, and tokens believed to be queued."""
        books = self.books.ranks[rank]
        return list(books.flight.requests), books.queued_tokens


def test_a_launch_message_of_one_rank_takes_the_requests_of_the_others_out_of_flight():
    rig = Rig()
    rig.send("a", 0, 300)
    rig.send("b", 1, 500)
    assert rig.books.ranks.has_flight
    rig.hear(rig.launch()[0])
    assert not rig.books.ranks.has_flight
    assert rig.books.ranks.c_avail() == [CHUNK, CHUNK]


def test_the_end_of_an_unreported_launch_lands_all_ranks():
    rig = Rig()
    rig.send("a", 0, 300)
    rig.send("b", 1, 500)
    rig.launch()
    rig.hear(rig.finish()[0])
    assert not rig.books.ranks.has_flight
    assert not rig.books.launching


def test_a_message_without_the_tokens_of_the_others_says_nothing_of_them():
    rig = Rig()
    rig.send("a", 0, 300)
    rig.send("b", 1, 500)
    rig.hear(msgspec.structs.replace(rig.launch()[0], tokens_per_rank=None))
    assert rig.state(0) == ([], 0)
    assert rig.state(1) == (["b"], 0)
    assert "1 requests, 1 of them in flight, tokens 500 in flight + 0 queued" in repr(rig.books)


def test_the_ranks_own_message_confirms_and_its_samples_are_those_without_any_presumption():
    learned = {}
    for first in (0, 1):
        rig = Rig()
        rig.send("a", 0, 300)
        rig.send("b", 1, 500, later_s=0)
        rig.send("late", 1, 50, arrives=False, later_s=0)
        messages = rig.launch()
        seen = {}
        for message in (messages[first], messages[1 - first]):
            rig.now_s = 11.0
            seen[message.dp_rank] = rig.books.on_report(message, rig.now_s)
        latencies = [latency_s for each in seen.values() for latency_s in each.latencies_s]
        assert len(latencies) == 1, "of the batch, by whoever tells first"
        for each in seen.values():
            each.latencies_s, each.requests = [], []
        learned[first] = seen[1]
        assert rig.state(1) == (["late"], 0)
        assert not rig.books.ranks[1].presumed
    assert learned[0] == learned[1]
    assert learned[0].split_share == 0.5


def test_the_ranks_own_message_contradicts():
    rig = Rig()
    rig.send("a", 0, 300)
    rig.send("not there yet", 1, 100, arrives=False)
    rig.send("b", 1, 100)
    messages = rig.launch()
    rig.hear(messages[0])
    assert rig.state(1) == (["b"], 0), "the oldest was presumed"
    rig.hear(messages[1])
    assert rig.state(1) == (["not there yet"], 0)
    assert [request.rid for request in rig.books.ranks[1].flight] == ["not there yet"]


def test_a_lost_message_is_confirmed_by_the_counter_and_takes_nothing_younger_with_it():
    rig = Rig()
    rig.send("a", 0, 300)
    rig.send("b", 1, 500)
    rig.hear(rig.launch()[0])
    rig.send("next", 1, 200, arrives=False)
    rig.hear(rig.finish()[1])
    assert rig.state(1) == (["next"], 0)
    assert not rig.books.ranks[1].presumed


def test_an_answered_request_is_what_the_counter_means_not_one_that_was_sent_after_it():
    rig = Rig()
    rig.send("a", 0, 300)
    rig.send("b", 1, 500)
    rig.hear(rig.launch()[0])
    ended = rig.finish()
    rig.books.on_prefilled("b", 1, rig.now_s)
    rig.send("next", 1, 200, arrives=False)
    rig.hear(ended[1])
    assert rig.state(1) == (["next"], 0)


def test_what_a_full_pass_leaves_of_a_prompt_waits_in_the_queue_until_a_later_pass_has_it():
    rig = Rig()
    rig.send("a", 0, 100)
    rig.send("long", 1, 2300)
    for left in (1300, 300, 0):
        rig.hear(rig.launch()[0])
        assert rig.state(1) == ([], left)
        rig.hear(rig.finish()[0])
        assert rig.state(1) == ([], left)


def test_a_message_from_before_the_pass_is_taken_and_the_pass_presumed_again():
    rig = Rig()
    rig.send("a", 0, 100)
    rig.send("long", 1, 1300)
    rig.hear(*rig.launch())
    rig.send("b", 1, 200)
    ended = rig.finish()
    rig.hear(ended[0])
    launched = rig.launch()
    rig.hear(launched[0])
    assert rig.state(1) == ([], 0)
    rig.hear(ended[1])
    assert rig.state(1) == ([], 0), "that said 300 queued, and b was not in its queue"
    rig.hear(launched[1])
    assert rig.state(1) == ([], 0)


@pytest.mark.parametrize("known", [True, False])
def test_presumed_again_a_pass_does_not_take_others_in_place_of_a_request_that_ended(known):
    rig = Rig()
    rig.send("x", 0, 100)
    rig.hear(*rig.launch())
    rig.send("b", 1, 200, arrives=known)
    rig.send("too late", 1, 200, arrives=False)
    ended = rig.finish()
    rig.hear(ended[0])
    if not known:  # to the message about the end
        rig.engine.accept("b", 1, 200)
    rig.hear(rig.launch()[0])
    assert rig.state(1) == (["too late"], 0)
    rig.books.on_prefilled("b", 1, rig.now_s)
    rig.hear(ended[1])
    assert rig.state(1) == (["too late"], 0)
    rig.hear(*rig.finish())
    assert rig.state(1) == (["too late"], 0)
    assert not rig.books.ranks[1].presumed


def test_a_rank_that_never_reports_takes_no_memory():
    rig = Rig()
    for i in range(300):
        rig.send(f"r{i}", 1, 400)
        rig.hear(rig.launch()[0])
        rig.books.on_prefilled(f"r{i}", 1, rig.now_s)
        rig.hear(rig.finish()[0])
        assert rig.state(1) == ([], 0)
    rank = rig.books.ranks[1]
    assert len(rank.presumed) + len(rank.presumed_passes) < 50


def send(rank: PrefillRank, rid: str, tokens: int, at_s: float) -> None:
    request = PrefillRequest.of(rid, tokens)
    request.sent = Sent(at_s)
    rank.flight.add(request)


def test_a_second_pass_behind_the_first_is_presumed_after_it():
    rank = PrefillRank()
    for i, tokens in enumerate((1500, 300)):
        send(rank, f"r{i}", tokens, float(i))
    rank.presume(7, CHUNK, CHUNK)
    assert (list(rank.flight.requests), rank.queued_tokens) == (["r1"], 500)
    rank.presume(8, 800, CHUNK)
    assert (list(rank.flight.requests), rank.queued_tokens) == ([], 0)
    rank.presume(7, CHUNK, CHUNK)
    rank.presume(8, 800, CHUNK)
    assert (list(rank.presumed), rank.queued_tokens) == (["r0", "r1"], 0)
    # The rank speaks of the first only: the second is still presumed.
    rank.on_reported_id(7)
    assert list(rank.flight.requests) == ["r0", "r1"]
    rank.flight.pop("r0")
    rank.queued_tokens = 500
    rank.presume_again(CHUNK)
    assert (list(rank.flight.requests), list(rank.presumed), rank.queued_tokens) == ([], ["r1"], 0)


def sent_together(tokens: list[int]) -> PrefillRank:
    rank = PrefillRank()
    for i, size in enumerate(tokens):
        send(rank, f"r{i}", size, 1.0)
    return rank


@pytest.mark.parametrize(
    ("computed", "in_flight", "queued"),
    [
        (0, ["r0", "r1", "r2"], 0),
        (450, [], 0),
        (380, [], 0),  # reported lengths are off by 15 %
        (100, ["r1", "r2"], 0),
        (CHUNK, [], 0),
    ],
)
def test_lengths_that_do_not_add_up_mean_what_is_nearest(computed, in_flight, queued):
    rank = sent_together([100, 250, 100])
    rank.presume(1, computed, CHUNK)
    assert (list(rank.flight.requests), rank.queued_tokens) == (in_flight, queued)


def test_behind_a_full_pass_waits_what_was_sent_together_with_it():
    rank = sent_together([800, 700, 400])
    send(rank, "later", 60, 2.0)
    rank.presume(1, CHUNK, CHUNK)
    assert (list(rank.flight.requests), rank.queued_tokens) == (["later"], 900)


def test_what_was_sent_to_the_next_boot_is_in_no_pass_of_this_one():
    rig = Rig()
    rig.send("a", 0, 300)
    rig.send("b", 1, 300)
    launched = rig.launch()
    rig.books.down()
    rig.send("new", 1, 300, arrives=False)
    rig.hear(launched[0])
    assert rig.state(1) == (["new"], 0)


def test_what_is_sent_after_a_reset_is_in_no_pass_that_was_known_before_it():
    rig = Rig(dp=3)
    rig.send("a", 0, 300)
    rig.send("b", 2, 300)
    launched = rig.launch()
    rig.hear(launched[0])
    rig.books.reset()
    rig.send("new", 2, 300, arrives=False)
    rig.hear(launched[1])
    assert rig.state(2) == (["new"], 0)


def test_pass_numbers_of_a_new_boot_are_presumed_though_smaller():
    rig = Rig()
    rig.engine.forward_id = 900
    rig.send("a", 0, 300)
    rig.hear(*rig.launch(), *rig.finish())
    rig.books.down()
    rig.engine.start()
    rig.hear(*[rig.engine.message(d, "idle") for d in range(2)])
    rig.send("b", 0, 300)
    rig.send("c", 1, 300)
    rig.hear(rig.launch()[0])
    assert rig.state(1) == ([], 0)


def test_a_launch_received_after_the_end_of_its_pass_starts_nothing():
    rig = Rig()
    rig.send("a", 0, 300)
    launched = rig.launch()
    ended = rig.finish()
    rig.hear(ended[0], launched[1])
    assert rig.books.idle
    rig.hear(*ended[1:])
    assert all(rank.idle for rank in rig.books.ranks)


@pytest.mark.parametrize("over", [False, True])
def test_a_launch_received_after_the_end_of_its_pass_does_not_show_who_was_late(over: bool):
    rig = Rig()
    rig.send("a", 0, 300)
    rig.send("b", 1, 300, later_s=0)
    rig.send("late", 1, 300, arrives=False, later_s=0)
    launched = rig.launch()
    ended = rig.finish()
    if over:
        rig.hear(ended[0])
    rig.now_s += 0.05
    learned = rig.hear(launched[1])
    assert (learned.split_share is not None) is not over
    assert bool(learned.latencies_s) is not over


@pytest.mark.parametrize("fetches", [False, True])
def test_how_long_a_rank_fetches_from_storage_is_no_latency(fetches: bool):
    rig = Rig()
    rig.books.on_dispatched("a", 0, 300, rig.now_s, fetches=fetches)
    rig.engine.accept("a", 0, 300)
    rig.now_s += 1.0
    assert bool(rig.hear(rig.launch()[0]).latencies_s) is not fetches


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2500)), max_size=4),
            st.integers(1, 7),
            st.integers(0, 7),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_one_message_of_any_rank_per_pass_keeps_the_books_of_all(passes):
    rig = Rig(dp=3)
    sent = 0
    for requests, launches, ends in passes:
        for rank, tokens in requests:
            rig.send(f"r{sent}", rank, tokens)
            sent += 1
        if not rig.engine.has_work:
            continue
        for messages, received in ((rig.launch(), launches), (rig.finish(), ends)):
            # Idle messages follow the ends; they arrive from the same ranks.
            got = [message for message in messages if received >> message.dp_rank & 1]
            if got:
                rig.hear(*got)
            backlogs = [rank.backlog_tokens for rank in rig.books.ranks]
            assert backlogs == [rank.queued_tokens for rank in rig.engine.ranks]
    while rig.engine.has_work:
        rig.hear(*rig.launch(), *rig.finish())
    rig.hear(*[rig.engine.message(d, "heartbeat") for d in range(3)])
    assert rig.books.idle
    assert not any(rank.presumed or rank.presumed_passes for rank in rig.books.ranks)


def test_what_was_predicted_with_another_chunk_and_page_is_predicted_again():
    rig = Rig()
    rig.send("a", 0, 900, arrives=False)
    before_s, charged, room = (
        rig.books.next_pass_s(),
        rig.books.ranks.charged_tokens,
        rig.books.ranks.has_room,
    )
    assert (charged, room) == (900, True)
    up = InstanceUp(instance="p0", role="prefill", dp_size=2, chunk_tokens=512, page_size=256)
    rig.books.set_limits(up)
    assert rig.books.next_pass_s() < before_s
    assert rig.books.ranks.charged_tokens == 1024
    rig.books.set_limits(msgspec.structs.replace(up, chunk_tokens=CHUNK, page_size=1))
    assert rig.books.next_pass_s() == before_s
    assert rig.books.ranks.charged_tokens == 900


@pytest.mark.parametrize("arrives", [True, False])
def test_idle_heartbeats_put_a_presumed_pass_back_in_flight_until_it_is_given_up(arrives):
    rig = Rig()
    rig.send("a", 0, 300, arrives=False)
    rig.now_s += 1.0
    rig.books.advance(rig.now_s, LATENCY_S)
    assert rig.books.passes  # its launch is overdue, so it is presumed
    rig.hear(*[rig.engine.message(d, "heartbeat") for d in range(2)])
    assert rig.state(0) == (["a"], 0)
    assert not rig.books.idle
    if arrives:
        rig.engine.accept("a", 0, 300)
        rig.hear(*rig.launch(), *rig.finish())
    for _ in range(3):  # of a request that is lost on its way no heartbeat ever tells
        rig.now_s += 1.0
        rig.books.advance(rig.now_s, LATENCY_S)
        rig.hear(*[rig.engine.message(d, "heartbeat") for d in range(2)])
    assert rig.state(0) == ([], 0)
    assert rig.books.idle
