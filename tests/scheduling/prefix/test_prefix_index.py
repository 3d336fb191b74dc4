"""The prefix index against a plain model of what every rank holds."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_sbs.scheduling.prefix.index import APPROXIMATE_TTL_S, CONFIRMED_S, PrefixIndex
from sglang_sbs.scheduling.prefix.places import Hits
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.request import Request

PAGE = 16


def index(source: str = "events", *, dp: int = 2, **limits: int) -> PrefixIndex:
    out = PrefixIndex(max_blocks=limits.pop("max_blocks", 1000))
    for name in ("p0", "p1"):
        out.up(name, dp_size=dp, block_tokens=PAGE, source=source, **limits)  # type: ignore[arg-type]
    return out


def found(prefix: PrefixIndex, blocks: list[int], tokens: int | None = None) -> dict:
    tokens = len(blocks) * PAGE + 1 if tokens is None else tokens
    return prefix.find(blocks, PAGE, tokens).by_instance


class TestFind:
    def test_consecutive_leading_blocks_count(self) -> None:
        prefix = index()
        prefix.stored("p0", 1, [1, 2, 3])
        prefix.stored("p1", 0, [1])
        assert found(prefix, [1, 2, 3, 4]) == {"p0": [0, 3 * PAGE], "p1": [PAGE, 0]}
        assert prefix.find([1, 2, 3, 4], PAGE, 1000).best_tokens == 3 * PAGE
        assert found(prefix, [7, 2, 3]) == {}

    def test_the_last_token_is_always_computed(self) -> None:
        prefix = index()
        prefix.stored("p0", 0, [1, 2])
        assert found(prefix, [1, 2], 2 * PAGE) == {"p0": [PAGE, 0]}
        assert found(prefix, [1, 2], 2 * PAGE + 1) == {"p0": [2 * PAGE, 0]}
        assert found(prefix, [1], 1) == {}

    def test_another_page_size_shares_nothing(self) -> None:
        prefix = index()
        prefix.stored("p0", 0, [1, 2])
        assert prefix.find([1, 2], 2 * PAGE, 1000).best_tokens == 0
        assert prefix.find([1, 2], 0, 1000).best_tokens == 0

    def test_host_memory_counts_while_it_lasts(self) -> None:
        prefix = index()
        prefix.stored("p0", 0, [1, 2])
        prefix.stored("p0", 0, [2], tier="host")
        prefix.removed("p0", 0, [2])
        assert found(prefix, [1, 2]) == {"p0": [2 * PAGE, 0]}
        prefix.removed("p0", 0, [2], tier="host")
        assert found(prefix, [1, 2]) == {"p0": [PAGE, 0]}


class TestMembership:
    def test_down_is_not_forgotten_but_gone_is(self) -> None:
        prefix = index()
        prefix.stored("p0", 0, [1])
        prefix.down("p0")
        assert found(prefix, [1]) == {}
        prefix.up("p0", dp_size=2, block_tokens=PAGE, source="events")
        assert found(prefix, [1]) == {"p0": [PAGE, 0]}
        prefix.gone("p0")
        prefix.up("p0", dp_size=2, block_tokens=PAGE, source="events")
        assert found(prefix, [1]) == {}

    def test_what_is_cleared_while_down_stays_down(self) -> None:
        prefix = index()
        prefix.down("p0")
        prefix.clear("p0", 0)
        prefix.stored("p0", 0, [1])
        assert found(prefix, [1]) == {}
        prefix.up("p0", dp_size=2, block_tokens=PAGE, source="events")
        assert found(prefix, [1]) == {"p0": [PAGE, 0]}

    def test_a_cleared_rank_is_swept_and_its_bit_used_again(self) -> None:
        prefix = index()
        prefix.stored("p0", 0, list(range(100)))
        prefix.stored("p0", 1, [0])
        for round_ in range(50):
            prefix.clear("p0", 0)
            assert found(prefix, [0, 1]) == {"p0": [0, PAGE]}
            prefix.advance(float(round_))
            prefix.stored("p0", 0, [500])
        prefix.advance(100.0)
        prefix.advance(101.0)
        assert len(prefix) == 2
        assert max(prefix._rank_of) < 1 << 10

    @pytest.mark.parametrize("rank", [-1, 2, 99])
    def test_ranks_that_are_not_there_change_nothing(self, rank: int) -> None:
        prefix = index()
        prefix.stored("p0", rank, [1])
        prefix.removed("p0", rank, [1])
        prefix.clear("p0", rank)
        prefix.stored("unknown", 0, [1])
        assert len(prefix) == 0

    def test_a_full_table_keeps_what_many_hold(self) -> None:
        prefix = index(dp=8, max_blocks=256)
        for rank in range(8):
            prefix.stored("p0", rank, [-1, -2])
        for block in range(1000):
            prefix.stored("p0", 0, [block])
            assert len(prefix) <= 256
        assert found(prefix, [999])["p0"][0] == PAGE


class TestSent:
    def test_visible_from_the_end_of_its_pass_until_events_must_have_said_it(self) -> None:
        prefix = index()
        prefix.sent("r", "p0", 1, [1, 2], PAGE, visible_s=5.0)
        prefix.advance(4.9)
        assert found(prefix, [1, 2]) == {}
        prefix.advance(5.0)
        assert found(prefix, [1, 2]) == {"p0": [0, 2 * PAGE]}
        prefix.on_prefilled("r", 6.0)
        prefix.stored("p0", 1, [1])
        prefix.advance(6.0 + CONFIRMED_S)
        assert found(prefix, [1, 2]) == {"p0": [0, PAGE]}
        assert prefix.pending_requests == 0

    def test_an_aborted_one_leaves_nothing_unpublished(self) -> None:
        prefix = index()
        prefix.stored("p0", 0, [1])
        prefix.sent("r", "p0", 0, [1, 2], PAGE, visible_s=1.0)
        prefix.advance(1.0)
        prefix.dropped("r")
        prefix.dropped("r")
        assert found(prefix, [1, 2]) == {"p0": [PAGE, 0]}

    def test_evicted_is_evicted(self) -> None:
        prefix = index()
        prefix.sent("r", "p0", 0, [1, 2], PAGE, visible_s=1.0)
        prefix.advance(1.0)
        prefix.removed("p0", 0, [2])
        assert found(prefix, [1, 2]) == {"p0": [PAGE, 0]}

    def test_a_rank_that_was_cleared_meanwhile_does_not_get_old_claims(self) -> None:
        prefix = index()
        prefix.sent("r", "p0", 0, [1, 2], PAGE, visible_s=1.0)
        prefix.advance(1.0)
        prefix.on_prefilled("r", 1.0)
        prefix.clear("p0", 0)
        prefix.advance(1.0 + CONFIRMED_S)
        prefix.stored("p0", 0, [1])
        assert found(prefix, [1, 2]) == {"p0": [PAGE, 0]}


class TestUpcoming:
    def test_what_is_being_computed_and_how_much_of_it_is_common(self) -> None:
        prefix = index()
        prefix.sent("r", "p0", 1, [1, 2, 3], PAGE, visible_s=5.0)
        (match,) = prefix.upcoming([1, 2, 9, 10], PAGE, 1000)
        assert match == ("p0", 1, 2 * PAGE, 5.0)
        assert prefix.upcoming([2], PAGE, 1000) == ()
        assert prefix.upcoming([1, 2], PAGE, 2 * PAGE)[0].tokens == PAGE

    @pytest.mark.parametrize("how", ["visible", "prefilled", "dropped", "down", "gone"])
    def test_until_it_is_there_or_never_will_be(self, how: str) -> None:
        prefix = index()
        prefix.sent("r", "p0", 1, [1, 2, 3], PAGE, visible_s=5.0)
        before = prefix.coming.version
        match how:
            case "visible":
                prefix.advance(5.0)
            case "prefilled":
                prefix.on_prefilled("r", 4.0)
            case "dropped":
                prefix.dropped("r")
            case "down":
                prefix.down("p0")
            case _:
                prefix.gone("p0")
        assert prefix.upcoming([1, 2], PAGE, 1000) == ()
        assert prefix.coming.changed([1, 2], before)

    def test_it_changes_only_with_those_that_begin_like_it(self) -> None:
        prefix = index()
        prefix.sent("r", "p0", 1, [1, 2], PAGE, visible_s=5.0)
        before = prefix.coming.version
        prefix.sent("other", "p0", 0, [7, 8], PAGE, visible_s=6.0)
        assert not prefix.coming.changed([1, 3], before)
        prefix.sent("twin", "p1", 0, [1], PAGE, visible_s=6.0)
        assert prefix.coming.changed([1, 3], before)


class TestChanges:
    def claim(self, prefix: PrefixIndex, rid: str, blocks: list[int]) -> int:
        """Claim blocks on a rank; return the version before."""
        before = prefix.changes.version
        prefix.sent(rid, "p0", 0, blocks, PAGE, visible_s=0.0)
        prefix.advance(0.0)
        return before

    def test_a_claim_concerns_only_prompts_that_begin_alike(self) -> None:
        prefix = index("approximate")
        before = self.claim(prefix, "a", [1, 2])
        assert prefix.changes.concern([1, 9], before)
        assert not prefix.changes.concern([7, 8], before)
        assert not prefix.changes.concern([1, 9], prefix.changes.version)

    def test_events_and_instances_concern_every_prompt(self) -> None:
        prefix = index()
        before = prefix.changes.version
        prefix.stored("p0", 0, [2])
        assert prefix.changes.concern([7, 8], before)
        before = prefix.changes.version
        prefix.down("p0")
        assert prefix.changes.concern([7, 8], before)

    def test_blocks_dropped_from_a_full_table_concern_every_prompt(self) -> None:
        prefix = index("approximate", max_blocks=4)
        self.claim(prefix, "a", [1, 2, 3, 4])
        before = self.claim(prefix, "b", [8, 9])
        assert found(prefix, [1, 2, 3, 4]) == {}
        assert prefix.changes.concern([1, 2], before)

    def test_first_blocks_that_were_forgotten_count_as_changed(self) -> None:
        prefix = index("approximate", max_blocks=10_000)
        before = self.claim(prefix, "first", [1])
        for number in range(2_000):
            self.claim(prefix, f"{number}", [100 + number])
        assert prefix.changes.concern([1], before)
        assert len(prefix.changes._of_root) <= 1024

    def test_a_waiting_request_is_looked_up_again_when_its_beginning_changes(self) -> None:
        prefix = index("approximate")
        queue, asked, find = RequestQueue(prefix=prefix), [], prefix.find

        def counted(blocks: list[int], *more: int) -> Hits:
            asked.append(blocks[0])
            return find(blocks, *more)

        prefix.find = counted  # type: ignore[method-assign]
        more = {"blocks": [1, 2], "block_tokens": PAGE}
        request = Request("w", 0, 100, None, 0.0, 1e9, **more)  # type: ignore[arg-type]
        queue.add(request)
        self.claim(prefix, "other", [7, 8])
        assert list(queue.in_order()) == [request]
        assert asked == [1]
        self.claim(prefix, "twin", [1, 2, 3])
        assert list(queue.in_order()) == [request]
        assert asked == [1, 1]
        assert request.hits.best_tokens == 2 * PAGE


class TestApproximate:
    def sent(self, prefix: PrefixIndex, rid: str, blocks: list[int], now_s: float) -> None:
        prefix.sent(rid, "p0", 0, blocks, PAGE, visible_s=now_s)
        prefix.advance(now_s)
        prefix.on_prefilled(rid, now_s)

    def test_lapses_after_a_time(self) -> None:
        prefix = index("approximate")
        self.sent(prefix, "a", [1, 2], 0.0)
        assert found(prefix, [1, 2]) == {"p0": [2 * PAGE, 0]}
        self.sent(prefix, "b", [5], APPROXIMATE_TTL_S + 1)
        assert found(prefix, [1, 2]) == {}

    def test_the_oldest_leaves_go_first(self) -> None:
        prefix = index("approximate", capacity_tokens=4 * PAGE)
        self.sent(prefix, "a", [1, 2, 3], 0.0)
        self.sent(prefix, "b", [1, 7], 1.0)
        assert found(prefix, [1, 2, 3]) == {"p0": [3 * PAGE, 0]}
        self.sent(prefix, "c", [8], 2.0)
        assert found(prefix, [1, 2, 3]) == {"p0": [2 * PAGE, 0]}
        assert found(prefix, [1, 7]) == {"p0": [2 * PAGE, 0]}

    @pytest.mark.parametrize(("answered_s", "evicted"), [(0.5, [1, 2]), (2.0, [5, 6])])
    def test_a_late_answer_claims_again(self, answered_s: float, evicted: list[int]) -> None:
        prefix = index("approximate", capacity_tokens=4 * PAGE)
        prefix.sent("a", "p0", 0, [1, 2], PAGE, visible_s=0.0)
        prefix.sent("b", "p0", 0, [5, 6], PAGE, visible_s=0.1)
        prefix.advance(0.1)
        prefix.on_prefilled("a", answered_s)
        self.sent(prefix, "c", [8], answered_s)
        for blocks in ([1, 2], [5, 6]):
            left = PAGE if blocks == evicted else 2 * PAGE
            assert found(prefix, blocks) == {"p0": [left, 0]}

    def test_a_rank_that_lost_its_blocks_before_the_answer_holds_them_again(self) -> None:
        prefix = index("approximate")
        prefix.sent("a", "p0", 0, [1, 2], PAGE, visible_s=0.0)
        prefix.advance(0.0)
        prefix.clear("p0", 0)
        prefix.on_prefilled("a", 0.5)
        assert found(prefix, [1, 2]) == {"p0": [2 * PAGE, 0]}

    def test_prompts_may_come_in_blocks_of_several_pages(self) -> None:
        prefix = index("approximate", capacity_tokens=6 * PAGE)
        prefix.sent("a", "p0", 0, [1, 2, 3], 2 * PAGE, visible_s=0.0)
        prefix.advance(0.0)
        assert prefix.find([1, 2, 3], 2 * PAGE, 1000).by_instance == {"p0": [6 * PAGE, 0]}
        prefix.up("p0", dp_size=2, block_tokens=PAGE, source="approximate")
        assert prefix.find([1, 2, 3], 2 * PAGE, 1000).best_tokens == 6 * PAGE
        prefix.on_prefilled("a", 0.0, expected_tokens=0)
        prefix.up("p0", dp_size=2, block_tokens=PAGE, source="approximate", capacity_tokens=64)
        prefix.sent("b", "p0", 0, [7], 2 * PAGE, visible_s=1.0)
        prefix.advance(1.0)
        assert prefix.find([1, 2, 3], 2 * PAGE, 1000).best_tokens == 2 * PAGE, "room for two"

    def test_a_part_of_a_page_is_no_block_and_events_name_whole_pages(self) -> None:
        for source, tokens in (("approximate", PAGE + 1), ("events", 2 * PAGE)):
            prefix = index(source)
            prefix.sent("a", "p0", 0, [1, 2], tokens, visible_s=0.0)
            prefix.advance(0.0)
            assert not len(prefix), source

    def test_events_are_not_for_it(self) -> None:
        prefix = index("approximate")
        prefix.stored("p0", 0, [1])
        assert len(prefix) == 0

    def test_nothing_found_where_much_was_expected_is_a_restart(self) -> None:
        prefix = index("approximate")
        self.sent(prefix, "a", [1, 2], 0.0)
        self.sent(prefix, "other", [8, 9], 0.0)
        prefix.sent("b", "p0", 0, [1, 2, 3], PAGE, visible_s=1.0)
        prefix.on_prefilled("b", 2.0, expected_tokens=2 * PAGE, cached_tokens=0)
        assert found(prefix, [8, 9]) == {}
        assert found(prefix, [1, 2, 3]) == {"p0": [3 * PAGE, 0]}

    def test_less_than_a_block_of_several_pages_is_no_restart(self) -> None:
        prefix = index("approximate")
        for i in range(20):
            prefix.sent(f"a{i}", "p0", 0, [2 * i, 2 * i + 1], 2 * PAGE, visible_s=float(i))
            prefix.advance(float(i))
        prefix.sent("b", "p0", 0, [38, 39], 2 * PAGE, visible_s=50.0)
        prefix.on_prefilled("b", 50.0, expected_tokens=4 * PAGE, cached_tokens=PAGE)
        assert prefix.find([36, 37], 2 * PAGE, 1000).best_tokens == 4 * PAGE

    def test_less_than_expected_lowers_the_capacity(self) -> None:
        prefix = index("approximate", capacity_tokens=1000 * PAGE)
        for i in range(20):
            self.sent(prefix, f"a{i}", [10 * i, 10 * i + 1], float(i))
        prefix.sent("b", "p0", 0, [190, 191, 192], PAGE, visible_s=50.0)
        prefix.on_prefilled("b", 50.0, expected_tokens=2 * PAGE, cached_tokens=PAGE)
        assert found(prefix, [0, 1]) == {}
        assert found(prefix, [180, 181]) == {"p0": [2 * PAGE, 0]}


class Machine(RuleBasedStateMachine):
    """Events of caches that drop leaves first, under churn; the model holds plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = index(max_blocks=10_000)
        self.held: dict[tuple[str, int], set[int]] = {
            (name, rank): set() for name in ("p0", "p1") for rank in range(2)
        }
        self.now_s = 0.0

    chains = st.lists(st.sampled_from("ab"), min_size=1, max_size=8)
    places = st.tuples(st.sampled_from(["p0", "p1"]), st.integers(0, 1))

    @staticmethod
    def names(chain: list[str]) -> list[int]:
        return [hash(tuple(chain[: i + 1])) for i in range(len(chain))]

    @rule(place=places, chain=chains)
    def store(self, place: tuple[str, int], chain: list[str]) -> None:
        names = self.names(chain)
        self.prefix.stored(*place, names)
        self.held[place] |= set(names)

    @rule(place=places, chain=chains)
    def evict(self, place: tuple[str, int], chain: list[str]) -> None:
        name = self.names(chain)[-1]
        longer = [self.names([*chain, c])[-1] for c in "ab"]
        if not self.held[place] & set(longer):
            self.prefix.removed(*place, [name])
            self.held[place].discard(name)

    @rule(place=places)
    def clear(self, place: tuple[str, int]) -> None:
        self.prefix.clear(*place)
        self.held[place].clear()

    @rule()
    def time(self) -> None:
        self.now_s += 1.0
        self.prefix.advance(self.now_s)

    @rule(chain=chains)
    def ask(self, chain: list[str]) -> None:
        names = self.names(chain)
        hits = found(self.prefix, names)
        for (name, rank), held in self.held.items():
            depth = next((i for i, name in enumerate(names) if name not in held), len(names))
            assert hits.get(name, [0, 0])[rank] == depth * PAGE

    @invariant()
    def bits_are_not_used_up(self) -> None:
        assert len(self.prefix._rank_of) == 4


TestAgainstSets = Machine.TestCase
TestAgainstSets.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
