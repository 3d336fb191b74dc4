"""An observation's report of passes and waits, and its words."""

from __future__ import annotations

import pytest
from observed import Rank, hear_three_requests

from sglang_sbs.observe.recorder import TrafficRecorder
from sglang_sbs.observe.traffic import LEAST_PASSES, Traffic
from sglang_sbs.wire.endforward import Accepted, Started


def observing() -> tuple[TrafficRecorder, Traffic]:
    traffic = Traffic()
    return TrafficRecorder(traffic.on_request, traffic.on_pass), traffic


def test_three_requests_in_numbers() -> None:
    recorder, traffic = observing()
    hear_three_requests(recorder)
    assert list(traffic.prompts) == [1500, 300, 200]
    assert traffic.cached_tokens == 100
    assert list(traffic.waits_s) == pytest.approx([0.01, 0.006, 0.11])
    assert list(traffic.prefills_s) == pytest.approx([0.206, 0.42, 0.31])
    assert traffic.passes == 2
    # 1,024 and 300 tokens, then 576 and none: means of 662 and 288.
    assert traffic.unevenness == pytest.approx((1024 + 576) / (662 + 288))
    assert (traffic.active_ranks, traffic.ranks) == (3, 4)
    assert list(traffic.gaps_s) == pytest.approx([0.01])
    assert traffic.idle_share == pytest.approx(0.01 / 0.41)


def passes(rank_tokens: tuple[int, ...], *, count: int = LEAST_PASSES, **fixed) -> Traffic:
    recorder, traffic = observing()
    ranks = [Rank(recorder, number, **fixed) for number in range(len(rank_tokens))]
    for number in range(count):
        start_s = 10.0 + number
        for rank, tokens in zip(ranks, rank_tokens, strict=True):
            rank.pass_(number, start_s, start_s + 0.5, tokens)
    return traffic


@pytest.mark.parametrize(
    ("traffic", "verdict"),
    [
        (passes((1000, 500)), "Passes are uneven: the fullest DP rank computed 1.33x the mean"),
        (passes((1000, 990)), "Passes are even"),
        (passes((1000, 500), count=3), "Too few passes to judge (3)"),
        (passes((1000, 500), barrier=False), "No DP ranks share passes"),
        (passes((1000,), dp_size=1), "No DP ranks share passes"),
    ],
    ids=["uneven", "even", "few", "no barrier", "one rank"],
)
def test_the_verdict_comes_from_passes_that_ranks_share(traffic: Traffic, verdict: str) -> None:
    assert traffic.verdict().startswith(verdict)


def test_ranks_without_a_barrier_each_make_passes_of_their_own() -> None:
    traffic = passes((1000, 500), count=4, barrier=False)
    assert (traffic.passes, traffic.shared_passes) == (8, 0)
    assert traffic.idle_share == pytest.approx(1.5 / 3.5)
    assert "ranks active" not in traffic.progress()


def test_a_pass_of_which_a_message_was_lost_or_without_tokens_does_not_count() -> None:
    recorder, traffic = observing()
    ranks = [Rank(recorder, 0), Rank(recorder, 1)]
    ranks[0].pass_(1, 1.0, 1.1, 100)
    for rank in ranks:
        rank.pass_(2, 2.0, 2.1, 0)
    assert traffic.passes == 0


def test_the_progress_line_has_what_there_is() -> None:
    recorder, traffic = observing()
    assert traffic.progress() == "0 requests"
    rank = Rank(recorder, 0, dp_size=1)
    rank.say(1.0, accepted=[Accepted("r", 10, 1.0)])
    assert traffic.progress() == "1 request"
    rank.pass_(1, 1.02, 1.12, 10, started=[Started("r")], finished=["r"])
    assert traffic.progress() == "1 request, waited 20 (p99 20) ms, idle 0%"


def test_the_progress_line_fits_a_terminal_and_shared_passes_have_their_evenness() -> None:
    recorder, traffic = observing()
    hear_three_requests(recorder)
    line = traffic.progress()
    assert line == "3 requests, 1.5/2 ranks, max/mean 1.68, waited 10 (p99 110) ms, idle 2%"
    assert len("10:00 of 10:00: ") + len(line) <= 90
