"""A block in shared storage is a hit on every rank of the instances that read it."""

from __future__ import annotations

from sglang_sbs.scheduling.prefix.index import PrefixIndex

PAGE = 10
BLOCKS = [1, 2, 3, 4]


def index(**shares: bool) -> PrefixIndex:
    prefix = PrefixIndex()
    for name, storage in shares.items():
        prefix.up(name, dp_size=2, block_tokens=PAGE, source="events", shares_storage=storage)
    return prefix


def test_a_hit_everywhere_and_what_must_be_fetched_for_it() -> None:
    prefix = index(p0=True, p1=True, alone=False)
    prefix.stored("p0", 1, BLOCKS[:3])
    hits = prefix.find(BLOCKS, PAGE, 100)
    assert hits.by_instance == {"p0": [30, 30], "p1": [30, 30]}
    assert hits.to_fetch == {"p0": [30, 0], "p1": [30, 30]}
    assert hits.best_tokens == 30


def test_storage_keeps_what_ranks_evict() -> None:
    prefix = index(p0=True)
    prefix.stored("p0", 0, BLOCKS)
    prefix.removed("p0", 0, BLOCKS[2:])
    hits = prefix.find(BLOCKS, PAGE, 100)
    assert (hits.by_instance, hits.to_fetch) == ({"p0": [40, 40]}, {"p0": [20, 40]})


def test_what_comes_from_an_instance_without_it_is_not_there() -> None:
    prefix = index(p0=True, alone=False)
    prefix.stored("alone", 0, BLOCKS)
    hits = prefix.find(BLOCKS, PAGE, 100)
    assert (hits.by_instance, hits.to_fetch) == ({"alone": [40, 0]}, {})


def test_an_instance_that_is_down_gets_nothing_from_it() -> None:
    prefix = index(p0=True, p1=True)
    prefix.stored("p0", 0, BLOCKS)
    prefix.down("p0")
    assert prefix.find(BLOCKS, PAGE, 100).by_instance == {"p1": [40, 40]}


def test_pages_of_another_size_are_not_found() -> None:
    prefix = index(p0=True)
    prefix.up("wide", dp_size=2, block_tokens=2 * PAGE, source="events", shares_storage=True)
    prefix.stored("p0", 0, BLOCKS)
    assert list(prefix.find(BLOCKS, PAGE, 100).by_instance) == ["p0"]


def test_a_longer_stored_prefix_is_a_change_for_waiting_requests() -> None:
    prefix = index(p0=True)
    prefix.stored("p0", 0, BLOCKS[:2])
    version = prefix.changes.version
    prefix.stored("p0", 0, BLOCKS)
    assert prefix.changes.version > version


def test_instances_without_kv_events_write_what_was_sent_there() -> None:
    prefix = PrefixIndex()
    for name in ("p0", "p1"):
        prefix.up(name, dp_size=1, block_tokens=PAGE, source="approximate", shares_storage=True)
    prefix.sent("r0", "p0", 0, BLOCKS, PAGE, visible_s=1.0)
    assert not prefix.find(BLOCKS, PAGE, 100).by_instance
    prefix.advance(1.0)
    assert prefix.find(BLOCKS, PAGE, 100).to_fetch == {"p0": [0], "p1": [40]}


def test_an_instance_that_got_no_request_yet_can_fetch_blocks_of_several_pages() -> None:
    prefix = PrefixIndex()
    for name in ("p0", "p1"):
        prefix.up(name, dp_size=1, block_tokens=PAGE, source="approximate", shares_storage=True)
    prefix.sent("a", "p0", 0, BLOCKS, 2 * PAGE, visible_s=0.0)
    prefix.advance(0.0)
    assert prefix.find(BLOCKS, 2 * PAGE, 100).to_fetch == {"p0": [0], "p1": [80]}
