"""The dispatch lead: what it converges to."""

from __future__ import annotations

import random

import pytest

from sglang_sbs.scheduling.policies.adaptive.dispatch_lead import DispatchLead
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.observation import Observation

LATENCY_S = 0.02
PASS_S = 0.3


def observe(
    lead: DispatchLead, *, landed=(), idled=(), left_behind=(), split=None, load=0.5, now_s=0.0
) -> None:
    seen = Observation(
        landed_s=list(landed),
        idled_s=list(idled),
        left_behind_s=list(left_behind),
        split_share=split,
    )
    lead.observe(seen, now_s, ranks=8, load=load, latency_s=LATENCY_S, pass_s=PASS_S)


def late_share(load: float, seed: int) -> float:
    """Passes end early or late by a normal error; a batch sent one lead ahead is late for it when
    the pass was shorter than predicted by more than the lead covers."""
    rng = random.Random(seed)
    lead = DispatchLead()
    late = 0
    for step in range(8000):
        sent_ahead_s = lead.lead_s(LATENCY_S)
        until_end_s = sent_ahead_s + rng.gauss(0, 0.05)
        if until_end_s < LATENCY_S:
            observe(lead, idled=[sent_ahead_s], load=load)
            late += step >= 4000
        else:
            observe(lead, landed=[min(until_end_s, 2 * sent_ahead_s)], load=load)
    return late / 4000


@pytest.mark.parametrize("load", [0.5, 0.8, 0.95])
def test_the_share_of_late_batches_is_what_they_cost(load: float):
    assert late_share(load, seed=1) == pytest.approx((1 - load) / (2 - load), abs=0.05)


def test_never_shorter_than_the_latency_and_never_most_of_a_pass():
    lead = DispatchLead()
    assert lead.lead_s(LATENCY_S) == pytest.approx(LATENCY_S + TUNING.lead_margin_s)
    for _ in range(1000):
        observe(lead, landed=[0.03])
    assert lead.lead_s(LATENCY_S) == pytest.approx(LATENCY_S + TUNING.lead_margin_s)
    assert lead.lead_s(0.05) == pytest.approx(0.05 + TUNING.lead_margin_s)
    for _ in range(1000):
        observe(lead, left_behind=[lead.lead_s(LATENCY_S)])
    assert lead.lead_s(LATENCY_S) == pytest.approx(PASS_S)


def test_a_request_left_behind_weighs_more_than_one_that_found_the_instance_idle():
    idled, left_behind = DispatchLead(), DispatchLead()
    for _ in range(100):
        for lead, how in ((idled, "idled"), (left_behind, "left_behind")):
            ahead_s = lead.lead_s(LATENCY_S)
            for index in range(10):
                if index:
                    observe(lead, landed=[ahead_s])
                else:
                    observe(lead, **{how: [ahead_s]})
    assert idled.lead_s(LATENCY_S) == pytest.approx(LATENCY_S + TUNING.lead_margin_s)
    assert left_behind.lead_s(LATENCY_S) > LATENCY_S + 3 * TUNING.lead_margin_s


def test_what_was_sent_long_before_or_after_says_nothing():
    lead = DispatchLead()
    for _ in range(500):
        observe(lead, landed=[10 * LATENCY_S], idled=[0.001], left_behind=[0.001])
    assert lead.lead_s(LATENCY_S) == pytest.approx(LATENCY_S + TUNING.lead_margin_s)


def test_split_batches_are_forgotten_where_nobody_sees_any_more_of_them():
    lead = DispatchLead()
    assert lead.whole == 1
    for _ in range(200):
        observe(lead, split=0.8)
    assert lead.whole == 0
    observe(lead, now_s=4 * TUNING.split_forget_s)
    assert lead.whole > 0.7


def test_a_lead_that_rose_with_the_latency_falls_with_it():
    """A minute of slow network leaves nothing behind: nobody came late in it."""
    lead = DispatchLead()
    seen = Observation(landed_s=[0.2])
    for _ in range(500):
        lead.observe(seen, 0.0, ranks=8, load=0.5, latency_s=10 * LATENCY_S, pass_s=PASS_S)
    assert lead.lead_s(10 * LATENCY_S) == pytest.approx(10 * LATENCY_S + TUNING.lead_margin_s)
    assert lead.lead_s(LATENCY_S) == pytest.approx(LATENCY_S + TUNING.lead_margin_s)


def split(lead: DispatchLead, batches: int) -> float:
    for _ in range(batches):
        observe(lead, left_behind=[lead.lead_s(LATENCY_S)])
    return lead.lead_s(LATENCY_S)


def test_a_lead_from_split_batches_falls_once_none_is_split_any_more():
    lead = DispatchLead()
    busy_s = split(lead, 100)
    assert busy_s > LATENCY_S + PASS_S / 2
    for _ in range(8 * 400):  # 400 passes, 8 ranks
        observe(lead, landed=[LATENCY_S])
    assert lead.lead_s(LATENCY_S) < LATENCY_S + (busy_s - LATENCY_S) / 8


def test_a_lead_from_split_batches_stays_while_the_tolerated_share_is_split():
    lead = DispatchLead()
    busy_s = split(lead, 100)
    for _ in range(100):
        beyond_s = lead.lead_s(LATENCY_S) - LATENCY_S
        launches = int(8 * PASS_S / (TUNING.split_share * beyond_s))  # in which one is due
        for _ in range(launches - 1):
            observe(lead, landed=[LATENCY_S])
        split(lead, 1)
    assert lead.lead_s(LATENCY_S) == pytest.approx(busy_s, rel=0.1)
