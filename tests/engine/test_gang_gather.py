"""Gangs of an engine on several hosts: words ride on what SGLang gathers in every turn."""

from __future__ import annotations

import random
from typing import Any

import pytest
from gang_fakes import (
    GATE_MS,
    READY,
    TURN_S,
    WAITING,
    Clock,
    Hearsay,
    Hosts,
    Rank,
    Req,
    SyncInfo,
    gathered,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sbs.engine.gang_board import Word
from sglang_sbs.engine.gang_gather import MOST_TURNS_ALONE, PAIRS_BITS, Columns, GatherBoard
from sglang_sbs.engine.gang_hold import ARRIVAL_SHARE, MOST_UNAGREED_TURNS
from sglang_sbs.wire.endforward import GATE_ALONE
from sglang_sbs.wire.gangs import SIZED_RID_PREFIX, TAG_BITS, GangPart

GATE_TURNS = round(GATE_MS / 1e3 / TURN_S)
LAST_TAG = (1 << TAG_BITS) - 1


def boards(count: int) -> list[GatherBoard]:
    made = [GatherBoard(lambda: SyncInfo.COLUMNS) for _ in range(count)]
    for board in made:
        board.open()
    return made


def infos(count: int, *, vote: bool = True) -> list[SyncInfo]:
    return [SyncInfo(1000 + number, vote) for number in range(count)]


# What rides on the row ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    [Word(arrived=True), Word(ready_turn=9, arrived=True), Word(gave_up_turn=4), Word(3, True, 4)],
)
@pytest.mark.parametrize("tag", [0, 1, 77_777, LAST_TAG])
def test_all_ranks_get_a_word_their_own_among_them(tag: int, word: Word) -> None:
    first, second, third = ranks = boards(3)
    second.publish(tag, word)
    assert second.words_of(tag) == {}
    gathered(infos(3), ranks)
    expected = Word(int(word.ready_turn > 0), word.arrived, int(word.gave_up_turn > 0))
    assert all(rank.is_open for rank in ranks)
    assert first.words_of(tag) == second.words_of(tag) == third.words_of(tag) == {1: expected}


def test_sglang_sees_what_it_would_see_without() -> None:
    ranks, seen = boards(2), [SyncInfo(5, True), SyncInfo(1 << 60, True)]
    ranks[0].publish(LAST_TAG, Word(1, True, 1))
    gathered(seen, ranks)
    for info, pairs in zip(seen, (5, 1 << 60), strict=True):
        assert info.attention_pairs == pairs
        assert info.can_run_draft_cuda_graph is True
        assert info.global_attention_pairs == [5, (1 << PAIRS_BITS) - 1]


@pytest.mark.parametrize("votes", [(True, False), (False, True), (False, False)])
def test_a_vote_that_is_no_stays_no(votes: tuple[bool, bool]) -> None:
    ranks, seen = boards(2), [SyncInfo(0, vote) for vote in votes]
    for tag in range(5):
        ranks[0].publish(tag, Word(arrived=True))
    gathered(seen, ranks)
    assert [info.can_run_draft_cuda_graph for info in seen] == [False, False]


@pytest.mark.parametrize(("vote", "room"), [(True, 3), (False, 1)])
def test_words_without_room_come_later_for_all_alike(vote: bool, room: int) -> None:
    ranks = boards(2)
    for tag in range(7):
        ranks[0].publish(tag, Word(ready_turn=1, arrived=True))
    for count in (room, 2 * room):
        gathered(infos(2, vote=vote), ranks)
        for rank in ranks:
            assert [tag for tag in range(7) if rank.words_of(tag)] == list(range(count))


def test_a_rank_of_another_role_or_before_it_is_open_says_nothing() -> None:
    board = GatherBoard(lambda: SyncInfo.COLUMNS)
    assert gathered(infos(2), [board, None]) == gathered(infos(2), [None, None])


def test_numbers_of_one_host_are_bounded() -> None:
    (board,) = boards(1)
    for tag in range(1000):
        board.publish(tag, Word(arrived=True))
    assert len(board._unsent) == 64
    for _ in range(30):
        gathered(infos(1), [board])
    assert board._unsent == {}


# Gangs ----------------------------------------------------------------------------------------


def test_a_gang_starts_on_all_hosts_in_the_turn_after_its_last_rank_was_ready() -> None:
    hosts, part = Hosts(3), GangPart(1, 1, 3)
    for rid, rank in zip("ab", hosts.ranks, strict=False):
        rank.queue.queue.append(Req(rid, part))
    assert [hosts.turn() for _ in range(4)] == [[[], [], []]] * 4
    late = Req("c", part, WAITING)
    hosts.ranks[2].queue.queue.append(late)
    assert hosts.turn() == [[], [], []]
    late.state = READY
    assert hosts.turn() == [[], [], []]
    assert hosts.turn() == [["a"], ["b"], ["c"]]


def test_a_follower_on_a_host_without_a_part_starts_with_the_batch() -> None:
    hosts, part = Hosts(3), GangPart(1, 1, 2)
    hosts.ranks[0].queue.queue.append(Req("a", part))
    hosts.ranks[2].queue.queue.append(Req("f", GangPart(1, 0, 2)))
    assert [hosts.turn() for _ in range(3)] == [[[], [], []]] * 3
    hosts.ranks[1].queue.queue.append(Req("b", part))
    assert hosts.turn() == [[], [], []]
    assert hosts.turn() == [["a"], ["b"], ["f"]]


def test_a_rank_without_the_plugin_is_waited_for_by_nobody() -> None:
    hosts = Hosts(3, without=[1])
    for _ in range(MOST_TURNS_ALONE + 2):
        hosts.turn()
    for rid, rank in zip("abc", hosts.ranks, strict=True):
        rank.queue.queue.append(Req(rid, GangPart(1, 1, 3)))
    assert hosts.turn() == [["a"], ["b"], ["c"]]
    assert hosts.infos[1].global_attention_pairs == [1000, 1001, 1002]
    assert [hosts.ranks[number].hold.fault() for number in (0, 2)] == [GATE_ALONE] * 2


def test_a_rank_that_opens_its_board_some_turns_later_is_waited_for() -> None:
    """After a switch of role, which not all have to see in the same turn."""
    hosts, late = Hosts(3), Hosts(3, without=[1])
    late.ranks[:] = hosts.ranks
    for _ in range(MOST_TURNS_ALONE):
        late.turn()
    for rid, rank in zip("abc", hosts.ranks, strict=True):
        rank.queue.queue.append(Req(rid, GangPart(1, 1, 3)))
    assert hosts.turn() == [[], [], []]
    assert hosts.turn() == [["a"], ["b"], ["c"]]
    assert all(rank.hold._ranks.is_open for rank in hosts.ranks)


def test_where_one_turns_off_all_do_in_the_same_turn() -> None:
    hosts = Hosts(3)
    hosts.turn()
    for number in (0, 2):
        hosts.ranks[number].queue.queue.append(Req(str(number), GangPart(1, 1, 3)))
    assert hosts.turn() == [[], [], []]
    hosts.ranks[1].hold._ranks.close()
    assert hosts.turn() == [[], [], []]
    assert hosts.turn() == [["0"], [], ["2"]]
    assert not any(rank.hold._ranks.is_open for rank in hosts.ranks)


def test_numbers_that_cannot_be_read_turn_it_off_on_all() -> None:
    hosts = Hosts(2)
    hosts.turn()
    hosts.ranks[0].gather._columns = Columns(99, 99)
    for _ in range(3):
        hosts.turn()
    assert not any(rank.hold._ranks.is_open for rank in hosts.ranks)


def test_ranks_that_take_part_are_no_silence_however_often_their_requests_are_lost() -> None:
    hosts = Hosts(2)
    for tag in range(8):
        hosts.ranks[0].queue.queue.append(Req(f"lost {tag}", GangPart(tag, 1, 2)))
        while not any(hosts.turn()):
            pass
    assert all(rank.hold._ranks.is_open for rank in hosts.ranks)


def test_a_rank_that_gave_up_starts_before_it_could_say_so() -> None:
    hosts = Hosts(2, vote=False)
    hosts.turn()
    queue = hosts.ranks[0].queue
    queue.queue += [Req(f"lost {tag}", GangPart(tag, 1, 2)) for tag in range(60)]
    for _ in range(GATE_TURNS + MOST_UNAGREED_TURNS + 3):
        hosts.turn()
    assert queue.queue == []
    assert all(rank.hold._ranks.is_open for rank in hosts.ranks), "nobody was silent"


@pytest.mark.parametrize(
    ("deployment", "opened"),
    [
        ({"ranks": 2, "attn_tp": 2, "nodes": 2}, 1),
        ({"ranks": 8, "attn_tp": 4, "nodes": 4}, 1),
        ({"ranks": 2, "attn_tp": 4, "nodes": 4}, 0),
        ({"ranks": 3, "attn_tp": 4, "nodes": 2}, 0),
    ],
    ids=["one host each", "the paper's", "two hosts each", "one on two hosts"],
)
def test_processes_of_a_rank_speak_over_sockets_where_they_are_on_one_host(
    deployment: dict[str, Any], opened: int
) -> None:
    hearsay = Hearsay()
    rank = Rank(Clock(), hearsay=hearsay, columns=SyncInfo.COLUMNS, **deployment)
    rank.turn()
    assert len(hearsay.opened) == opened
    assert rank.hold._ranks.is_open


# Whatever comes -------------------------------------------------------------------------------

BOUND_TURNS = (1 + ARRIVAL_SHARE) * GATE_TURNS + MOST_UNAGREED_TURNS + 3
_MOST_APART = GATE_TURNS // 3
_MOST_IN_ONE_COLUMN = 4
"""Gangs at the same time that can tell all they have to in time, one word in a turn."""


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    ranks=st.integers(2, 5),
    gangs=st.integers(1, 12),
    vote=st.booleans(),
    lost=st.sampled_from([0.0, 0.2]),
    off=st.one_of(st.none(), st.integers(0, 60)),
)
def test_ranks_never_start_a_gang_apart_unless_its_time_was_over(
    seed: int, ranks: int, gangs: int, vote: bool, lost: float, off: int | None
) -> None:
    """Requests come and finish their handshakes at any time; some never come; one rank may turn its
    gate off. Nothing is held longer than the bound."""
    draw = random.Random(seed)
    hosts = Hosts(ranks, vote=vote)
    hosts.turn()
    coming: list[tuple[int, int, int, Req]] = []
    gang_of: dict[str, int] = {}
    for tag in range(gangs):
        on = draw.sample(range(ranks), draw.randint(1, ranks))
        first = draw.randint(1, 40)
        for rank in on * 2:
            req = Req(f"{tag}.{rank}.{len(coming)}", GangPart(tag, 2, len(on)), WAITING)
            came = first + draw.randint(0, _MOST_APART)
            if draw.random() >= lost:
                coming.append((came, came + draw.randint(0, _MOST_APART), rank, req))
                gang_of[req.rid.removeprefix(SIZED_RID_PREFIX)] = tag
    started: dict[str, int] = {}
    for turn in range(1, 400):
        for came, ready, rank, req in coming:
            if came == turn:
                hosts.ranks[rank].queue.queue.append(req)
            if ready == turn:
                req.state = READY
        if turn == off:
            hosts.ranks[0].hold._ranks.close()
        for popped in hosts.turn():
            started |= dict.fromkeys(popped, turn)
    for _, ready, _, req in coming:
        begun = started[req.rid.removeprefix(SIZED_RID_PREFIX)]
        assert ready <= begun <= ready + BOUND_TURNS
    if off is None and not lost and (vote or gangs < _MOST_IN_ONE_COLUMN):
        begun_in = {(tag, started[name]) for name, tag in gang_of.items()}
        assert len(begun_in) == gangs, "a batch was split, though nothing was late"
