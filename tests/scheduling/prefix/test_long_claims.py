"""Prompts of very many blocks are claimed some blocks at a time."""

from __future__ import annotations

import random
import sys

import pytest

from sglang_sbs.scheduling import Scheduler, SchedulerConfig
from sglang_sbs.scheduling import events as ev
from sglang_sbs.scheduling.prefix.index import CONFIRMED_S, PrefixIndex
from sglang_sbs.scheduling.prefix.tables import SLICE, BlockTable

LONG = 60_000


def index(source: str) -> PrefixIndex:
    out = PrefixIndex()
    out.up("p", dp_size=1, block_tokens=1, source=source)  # type: ignore[arg-type]
    return out


def depth(prefix: PrefixIndex, blocks: list[int]) -> int:
    return prefix.find(blocks, 1, len(blocks) + 1).best_tokens


@pytest.mark.parametrize("source", ["events", "approximate"])
class TestIndex:
    def test_a_long_prompt_is_claimed_in_parts_from_its_beginning(self, source: str) -> None:
        prefix, blocks = index(source), list(range(LONG))
        prefix.sent("a", "p", 0, blocks, 1, visible_s=1.0)
        prefix.on_prefilled("a", 2.0)
        found = [depth(prefix, blocks)]
        while prefix.claiming:
            prefix.advance(2.0)
            found.append(depth(prefix, blocks))
        steps = [after - before for before, after in zip([0, *found], found, strict=False)]
        assert max(steps) <= 4 * SLICE
        assert found[-1] == LONG

    def test_a_long_claim_is_taken_back_in_parts_from_its_end(self, source: str) -> None:
        prefix, blocks = index(source), list(range(LONG))
        prefix.sent("a", "p", 0, blocks, 1, visible_s=1.0)
        prefix.advance(1.0)
        prefix.dropped("a")  # before it was claimed as a whole
        left = []
        while prefix.claiming:
            left.append(len(prefix))
            prefix.advance(1.0)
        assert len(prefix) == 0
        assert max(b - a for a, b in zip([*left, 0][1:], left, strict=True)) <= 4 * SLICE

    def test_a_rank_that_is_cleared_meanwhile_gets_no_more(self, source: str) -> None:
        prefix, blocks = index(source), list(range(LONG))
        prefix.sent("a", "p", 0, blocks, 1, visible_s=1.0)
        prefix.on_prefilled("a", 2.0)
        assert prefix.claiming
        prefix.clear("p", 0)
        for _ in range(200):
            prefix.advance(2.0)
        assert not prefix.claiming
        assert len(prefix) == 0

    def test_what_waits_is_worked_off_faster_than_it_comes(self, source: str) -> None:
        prefix = index(source)
        waiting = []
        for number in range(100):
            blocks = list(range(number * LONG, number * LONG + LONG // 3))
            prefix.sent(str(number), "p", 0, blocks, 1, visible_s=1.0)
            prefix.on_prefilled(str(number), 2.0)
            waiting.append(len(prefix.claiming))
        assert max(waiting) < 70


def test_with_events_a_long_claim_lapses_in_parts() -> None:
    prefix, blocks = index("events"), list(range(LONG))
    prefix.sent("a", "p", 0, blocks, 1, visible_s=1.0)
    prefix.on_prefilled("a", 2.0)
    while prefix.claiming:
        prefix.advance(2.0)
    prefix.advance(2.0 + CONFIRMED_S)
    assert 0 < len(prefix) < LONG
    while prefix.claiming:
        prefix.advance(2.0 + CONFIRMED_S)
    assert len(prefix) == 0


def test_the_scheduler_asks_to_go_on() -> None:
    scheduler = Scheduler(SchedulerConfig(policy="round_robin"))
    for name, role in (("p", "prefill"), ("d", "decode")):
        up = ev.InstanceUp(instance=name, role=role, dp_size=1, prefix_source="approximate")
        scheduler.handle(up, 0.0)
    blocks = list(range(LONG))
    arrived = ev.RequestArrived(rid="a", prompt_tokens=LONG, blocks=blocks, block_tokens=1)
    out = scheduler.handle(arrived, 0.0)
    assert any(isinstance(command, ev.Dispatch) for command in out)
    out += scheduler.handle(ev.PrefillDone(rid="a"), 0.01)
    rounds = 0
    now_s = 0.01
    while scheduler.prefix.unfinished:
        wakes = [command.time_s for command in out if isinstance(command, ev.WakeAt)]
        assert now_s < wakes[-1] < 0.1, "the driver is asked to come back soon"
        now_s = wakes[-1]
        out = scheduler.handle(ev.TimerFired(), now_s)
        rounds += 1
    assert rounds > LONG // (8 * SLICE)
    hits = scheduler.prefix.prefill.find(blocks, 1, LONG + 1)
    assert hits.best_tokens == LONG


def test_what_is_due_before_the_next_part_is_not_forgotten() -> None:
    scheduler = Scheduler(SchedulerConfig(policy="sbs"))
    for name, role in (("p", "prefill"), ("d", "decode")):
        up = ev.InstanceUp(instance=name, role=role, dp_size=1, prefix_source="approximate")
        scheduler.handle(up, 0.0)
    first = ev.RequestArrived(rid="a", prompt_tokens=LONG, blocks=list(range(LONG)), block_tokens=1)
    scheduler.handle(first, 0.0)
    scheduler.handle(ev.PrefillDone(rid="a"), 0.01)
    scheduler.handle(ev.RequestArrived(rid="in front", prompt_tokens=8000), 0.01)
    second = ev.RequestArrived(rid="b", prompt_tokens=10, deadline_s=0.0115)
    out = scheduler.handle(second, 0.01)
    assert not any(isinstance(command, ev.Dispatch) for command in out)
    refused_s = None
    for _ in range(1000):  # a driver with one timer, and nothing else happens
        wakes = [command.time_s for command in out if isinstance(command, ev.WakeAt)]
        if not wakes or refused_s is not None:
            break
        out = scheduler.handle(ev.TimerFired(), wakes[-1])
        if any(isinstance(command, ev.Refuse) for command in out):
            refused_s = wakes[-1]
    assert refused_s == 0.0115


class TestTable:
    def test_it_says_what_a_dict_would(self) -> None:
        rng = random.Random(1)
        table, model = BlockTable(1_000_000), dict[int, int]()
        names = [rng.randrange(-(1 << 63), 1 << 63) for _ in range(3000)]
        for _ in range(300):
            some, bit = rng.sample(names, 40), 1 << rng.randrange(4)
            if rng.random() < 0.6:
                new, changed = table.add(some, bit)
                assert new == [block for block in some if not model.get(block)]
                assert changed == sum(not model.get(block, 0) & bit for block in some)
                model |= {block: model.get(block, 0) | bit for block in some}
            else:
                assert table.take(some, bit) == sum(bool(model.get(o, 0) & bit) for o in some)
                model |= {block: model.get(block, 0) & ~bit for block in some}
            model = {block: mask for block, mask in model.items() if mask}
            assert len(table) == len(model)
            assert sorted(table) == sorted(model)
            assert all(table.get(name) == model.get(name, 0) for name in names)

    def test_long_claims_stay_within_their_bound(self) -> None:
        table = BlockTable(200_000)
        for start in range(0, 600_000, 1000):
            table.add(range(start, start + 1000), 1)
            assert len(table) <= 200_000
        assert len(list(table)) == len(table) > 150_000
        assert table.get(599_999) == 1

    def test_growing_moves_a_small_part_of_it_at_a_time(self) -> None:
        rng = random.Random(2)
        table = BlockTable(2_000_000)
        for filled in range(0, 400_000, SLICE):
            before = [sys.getsizeof(part) for part in table._parts]
            table.add([rng.getrandbits(62) for _ in range(SLICE)], 1)
            sizes = [sys.getsizeof(part) for part in table._parts]
            grown = sum(now for was, now in zip(before, sizes, strict=True) if was != now)
            if filled > 50_000:
                assert grown < 0.25 * sum(sizes)
