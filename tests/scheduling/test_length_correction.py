"""Submitted prompt lengths are scaled by what engines count."""

from __future__ import annotations

import pytest
from driver import Driver

from sglang_sbs.scheduling import PrefillDone, RequestEnded
from sglang_sbs.wire.endforward import Accepted


class CountingCluster:
    """Prefill instances; an engine counts ``factor`` times what was submitted."""

    def __init__(self, prefill: int = 1, policy: str = "sbs") -> None:
        self.it = Driver(policy=policy).up(prefill=prefill, dp=1, chunk=100_000, decode_dp=1)
        self._number = 0

    def send(self, tokens: int = 1000, count: int = 1, factor: float = 1.0, liar="", **more):
        """``liar``: the only engine that counts so."""
        for _ in range(count):
            rid, sent = self._arrive(tokens, **more)
            engine = sent.prefill
            counted = round((factor if liar in ("", engine) else 1.0) * tokens)
            accepted = [Accepted(rid, counted)]
            self.it.report(engine, dp=1, kind="heartbeat", rids=[rid], accepted=accepted)
            self._end(rid)

    def believed(self, tokens: int = 1000, **more) -> int:
        """Return the length that the scheduler assumes for a new request."""
        rid, _ = self._arrive(tokens, **more)
        found = self.it.scheduler._requests[rid].prompt_tokens
        self._end(rid)
        return found

    def _arrive(self, tokens: int, **more):
        self._number += 1
        rid = f"r{self._number}"
        sent = self.it.arrive(rid, tokens, **more) or self.it.wait(1.0)
        return rid, sent[0]

    def _end(self, rid: str) -> None:
        self.it.tell(PrefillDone(rid=rid))
        self.it.tell(RequestEnded(rid=rid, outcome="completed"))


def test_where_engines_count_the_same_nothing_changes():
    cluster = CountingCluster()
    for tokens in (1, 7, 333, 98_765):
        cluster.send(tokens, count=20, estimated=True)
        assert cluster.believed(tokens, estimated=True) == tokens


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_lengths_that_are_wrong_in_one_direction_are_scaled(factor: float):
    cluster = CountingCluster()
    cluster.send(count=100, factor=factor, estimated=True)
    assert cluster.believed(estimated=True) == pytest.approx(1000 * factor, rel=0.06)
    assert cluster.believed(estimated=False) == 1000  # counted ones are another source


def test_answers_are_believed_where_no_report_names_the_length():
    it = Driver().up(prefill=1, dp=1, chunk=100_000)
    for number in range(100):
        it.arrive(f"r{number}", 1000, estimated=True)
        it.wait(1.0)
        for _ in range(2):  # the second one changes nothing
            it.tell(PrefillDone(rid=f"r{number}", prompt_tokens=500))
    it.arrive("new", 1000, estimated=True)
    assert it.scheduler._requests["new"].prompt_tokens == pytest.approx(500, rel=0.06)


def test_it_follows_when_the_truth_changes_and_is_forgotten_in_silence():
    cluster = CountingCluster()
    cluster.send(count=200, factor=0.5, estimated=True)
    cluster.send(count=1500, factor=1.0, estimated=True)
    assert cluster.believed(estimated=True) == pytest.approx(1000, rel=0.02)
    cluster.send(count=400, factor=0.5, estimated=True)
    assert cluster.believed(estimated=True) < 800
    cluster.it.now_s += 601.0
    assert cluster.believed(estimated=True) == 1000


@pytest.mark.parametrize(("counted", "most"), [(1 << 40, 8.0), (1, 0.25)])
def test_no_engine_can_move_it_further_than_it_may(counted: int, most: float):
    cluster = CountingCluster()
    cluster.send(count=300, factor=counted / 1000, estimated=True)
    believed = cluster.believed(estimated=True)
    assert 1000 / 8 <= believed <= 8000
    assert believed <= most * 1000


def test_one_request_in_a_hundred_is_no_ratio():
    cluster = CountingCluster()
    cluster.send(count=99, estimated=True)
    cluster.send(factor=1 << 20, estimated=True)
    assert cluster.believed(estimated=True) < 1100


def test_a_prompt_whose_blocks_are_named_keeps_its_length():
    cluster = CountingCluster()
    cluster.send(count=100, factor=0.5, estimated=True)
    blocks = list(range(1, 100))
    assert cluster.believed(1000, estimated=True, blocks=blocks, block_tokens=10) == 1000


def test_no_length_is_scaled_beyond_what_a_decode_rank_holds():
    cluster = CountingCluster()
    cluster.it.up(prefill=0, decode_dp=1, kv_capacity_tokens=1500)
    cluster.send(count=100, factor=2.0, estimated=True)
    assert cluster.believed(estimated=True) == 1500


def test_of_several_engines_one_that_counts_wrongly_changes_nothing():
    for engines in 2, 3, 4:
        cluster = CountingCluster(engines, "round_robin")
        cluster.send(count=200, factor=1e6, liar="p0")
        assert cluster.believed() == 1000
        cluster.send(count=400, factor=2.0)  # and where all of them agree, it is believed
        assert cluster.believed() > 1500


def test_a_long_prompt_weighs_no_more_than_a_short_one():
    cluster = CountingCluster()
    cluster.send(20_000, count=20, factor=4.0, estimated=True)
    cluster.send(500, count=180, estimated=True)
    assert cluster.believed(500, estimated=True) < 600


def test_only_the_engine_that_has_a_request_counts_it():
    cluster = CountingCluster(2)
    for _ in range(100):
        rid, sent = cluster._arrive(1000)
        other = "p1" if sent.prefill == "p0" else "p0"
        for engine in other, "d0":
            cluster.it.report(engine, dp=1, kind="heartbeat", accepted=[Accepted(rid, 1 << 40)])
        cluster._end(rid)
    assert cluster.believed() == 1000
