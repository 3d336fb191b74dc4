"""The trial itself: slots, what counts, and how it ends. Time is a number here."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from sglang_sbs.scheduling.events import PrefillDone, Refuse, RequestArrived, RequestEnded
from sglang_sbs.scheduling.policy_registry import Policy
from sglang_sbs.trial.report import report_of
from sglang_sbs.trial.spec import TrialSpec
from sglang_sbs.trial.trial import Ended, Switch, Trial

TtftOf = Callable[[str, random.Random], float]


class Rig:
    """A trial with requests every 0.1 s; ``ttft_s`` says how long one waits under a policy."""

    def __init__(self, spec: TrialSpec, ttft_s: TtftOf, seed: int = 1) -> None:
        self.trial = Trial(spec, "sbs", seed)
        self.ttft_s = ttft_s
        self.rng = random.Random(seed)
        self.now_s = 100.0
        self.policy: Policy = "sbs"
        self.history: list[tuple[float, Policy]] = []
        self.count = 0
        self.due: list[tuple[float, str]] = []
        self.take(self.trial.begin(self.now_s))

    def take(self, steps: list[Switch | Ended]) -> None:
        for step in steps:
            if isinstance(step, Switch):
                self.policy = step.policy
                self.history.append((self.now_s, step.policy))

    def step(self) -> None:
        self.now_s += 0.1
        for due_s, rid in [entry for entry in self.due if entry[0] <= self.now_s]:
            self.trial.observe(PrefillDone(rid=rid), [], due_s)
            self.due.remove((due_s, rid))
        self.arrive()
        self.take(self.trial.advance(self.now_s))

    def arrive(self) -> None:
        rid = f"r{self.count}"
        self.count += 1
        tokens = self.rng.randint(10, 2000)
        self.trial.observe(RequestArrived(rid=rid, prompt_tokens=tokens), [], self.now_s)
        waits_s = self.ttft_s(self.policy, self.rng) * (1 + tokens / 2000)
        self.due.append((self.now_s + waits_s, rid))

    def run(self, most_s: float = 1e4) -> Ended:
        until_s = self.now_s + most_s
        while self.trial.ended is None and self.now_s < until_s:
            self.step()
        assert self.trial.ended is not None
        return self.trial.ended


def noisy(sbs_s: float = 0.5, baseline_s: float = 0.5) -> TtftOf:
    mean_s = {"sbs": sbs_s, "eta": baseline_s}
    return lambda policy, rng: mean_s[policy] * rng.uniform(0.5, 1.5)


def spec(**more: object) -> TrialSpec:
    return TrialSpec("eta", **({"slot_s": 12.0, "slots": 20, "width": 0.0} | more))  # type: ignore[arg-type]


def test_slots_alternate_in_pairs_in_an_order_that_the_seed_draws() -> None:
    orders = set()
    for seed in range(8):
        rig = Rig(spec(slots=6), noisy(), seed)
        rig.run()
        slots = [policy for _, policy in rig.history][:6]
        assert [set(slots[at : at + 2]) for at in (0, 2, 4)] == [{"sbs", "eta"}] * 3
        begins = [at_s for at_s, _ in rig.history[:6]]
        for begin, other in pairwise(begins):
            assert other - begin == pytest.approx(12.0, abs=0.2)
        orders.add(tuple(slots))
        again = Rig(spec(slots=6), noisy(), seed)
        again.run()
        assert [policy for _, policy in again.history][:6] == slots
    assert len(orders) > 3


def test_a_large_difference_is_certain_soon_and_the_first_policy_comes_back() -> None:
    rig = Rig(spec(), noisy(0.4, 0.6))
    ended = rig.run()
    assert ended.cause == "certain"
    assert ended.text == "sbs has the lower mean TTFT"
    verdict = rig.trial.verdict
    assert verdict is not None
    assert verdict.low < 2 / 3 < verdict.high < 1
    assert rig.trial.done <= 10
    assert rig.policy == "sbs"


@pytest.mark.parametrize(
    ("winner", "sbs_s", "left_with"),
    [(False, 0.6, "sbs"), (True, 0.6, "eta"), (True, 0.27, "sbs")],
)
def test_the_winner_stays_only_if_that_is_wanted(
    winner: bool, sbs_s: float, left_with: str
) -> None:
    rig = Rig(spec(winner=winner), noisy(sbs_s, 0.4))
    assert rig.run().cause == "certain"
    assert rig.policy == left_with


def test_without_a_difference_it_ends_narrow_or_after_the_last_slot() -> None:
    rig = Rig(spec(width=0.5), noisy())
    assert rig.run().cause == "narrow"
    rig = Rig(spec(slots=8), noisy())
    ended = rig.run()
    assert (ended.cause, rig.trial.done, rig.policy) == ("slots", 8, "sbs")
    assert ended.text == "no difference is certain after 8 slots"


def test_the_first_third_of_a_slot_does_not_count() -> None:
    """The other policy's leftovers are slow there, and change nothing."""
    rig = Rig(spec(slots=6), noisy())
    slots = rig.trial
    rig.ttft_s = lambda policy, rng: (
        (5.0 if slots.current and slots.current.place_of(rig.now_s) < 1 / 3 else 0.5)
        * (1.0 if policy == "sbs" else 1.5)
    )
    rig.run()
    report = report_of(slots, rig.now_s, 0.0, 0.0)
    assert report.arms["policy"].mean_ttft_s == pytest.approx(0.75, rel=0.1)
    assert report.ratio is not None
    assert report.ratio == pytest.approx(2 / 3, rel=0.02)
    assert [round(ratio or 0, 1) for ratio in report.ratio_by_third] == [0.7, 0.7, 0.7]


def test_tokens_that_happened_to_arrive_are_no_difference() -> None:
    """TTFT follows the tokens of a slot, which differ; the policies do not."""

    def run(seed: int) -> tuple[float, float]:
        rig = Rig(spec(slots=6), lambda _policy, _rng: 0.5, seed)
        size = random.Random(seed)

        def arrive() -> None:
            slot = rig.trial.current
            heavy = 1.0 if slot is None else 1.0 + 0.5 * (hash(round(slot.begin_s)) % 7) / 7
            tokens = round(heavy * size.randint(500, 1500))
            rid = f"r{rig.count}"
            rig.count += 1
            rig.trial.observe(RequestArrived(rid=rid, prompt_tokens=tokens), [], rig.now_s)
            rig.due.append((rig.now_s + tokens / 2000, rid))

        rig.arrive = arrive  # type: ignore[method-assign]
        rig.run()
        pairs, by = rig.trial.pairs, rig.trial._adjustment.coefficients
        raw = max(abs(pair.difference) for pair in pairs)
        return raw, max(abs(pair.adjusted(by)) for pair in pairs)

    raws, adjusted = zip(*(run(seed) for seed in range(4)), strict=True)
    assert max(raws) > 0.1
    assert max(adjusted) < 0.25 * max(raws)


@pytest.mark.parametrize("seed", range(3))
def test_clients_that_wait_for_answers_hide_no_difference(seed: int) -> None:
    """Each of 16 clients sends again once it has an answer, and now and then all answers are slow,
    so few tokens arrive when TTFT is long."""
    rig = Rig(spec(slot_s=24.0, slots=8), lambda _policy, _rng: 0.0, seed)
    slow = {turn: 2.0 ** random.Random(f"{seed} {turn}").uniform(-1, 1) for turn in range(999)}

    def arrive() -> None:
        while len(rig.due) < 16:
            rig.count += 1
            event = RequestArrived(rid=f"r{rig.count}", prompt_tokens=rig.rng.randint(500, 1500))
            rig.trial.observe(event, [], rig.now_s)
            waits_s = (0.6 if rig.policy == "sbs" else 1.0) * slow[int(rig.now_s / 3)]
            rig.due.append((rig.now_s + waits_s * rig.rng.uniform(0.8, 1.2), event.rid))

    rig.arrive = arrive  # type: ignore[method-assign]
    rig.run()
    verdict = rig.trial.verdict
    assert verdict is not None
    assert verdict.low < 0.6 < verdict.high
    assert verdict.ratio < 0.75


def test_an_arm_that_breaks_the_limit_ends_it_while_its_requests_still_wait() -> None:
    rig = Rig(spec(p99_s=3.0), noisy(0.5, 1e6))
    ended = rig.run()
    assert ended.cause == "limit"
    assert "waited longer than 3 s for their first token in a slot of eta" in ended.text
    assert rig.policy == "sbs"
    assert rig.trial.done <= 1


def test_a_limit_as_long_as_a_slot_is_kept_after_the_slot() -> None:
    slot_s = spec().slot_s
    rig = Rig(spec(p99_s=slot_s), noisy(0.5, 1e6))
    ended = rig.run()
    assert ended.cause == "limit"
    assert f"waited longer than {slot_s:g} s for their first token in a slot of eta" in ended.text
    assert rig.trial.done <= 2


def test_few_slow_requests_break_no_limit() -> None:
    def ttft_s(policy: str, rng: random.Random) -> float:
        return 4.0 if rng.random() < 0.002 else 0.2

    assert Rig(spec(p99_s=3.0, slots=6), ttft_s).run().cause == "slots"


def test_refusals_above_their_share_end_it() -> None:
    rig = Rig(spec(refused=0.1), noisy())
    while rig.policy != "eta":
        rig.step()
    begun_s = rig.now_s
    while rig.trial.ended is None:
        rig.step()
        rid = f"r{rig.count - 1}"
        refuse = Refuse(rid=rid, cause="queue_full", retry_after_s=1.0, message="full")
        rig.trial.observe(RequestArrived(rid="x" + rid, prompt_tokens=1), [], rig.now_s)
        rig.trial.observe(RequestEnded(rid="y", outcome="failed"), [refuse], rig.now_s)
    assert rig.trial.ended.cause == "limit"
    assert "were refused in a slot of eta" in rig.trial.ended.text
    assert rig.now_s - begun_s < 2.0


def test_an_arm_that_answers_nothing_ends_it() -> None:
    rig = Rig(spec(), noisy())
    rig.due = []

    def arrive() -> None:
        rid = f"r{rig.count}"
        rig.count += 1
        rig.trial.observe(RequestArrived(rid=rid, prompt_tokens=10), [], rig.now_s)
        if rig.policy == "eta":
            rig.trial.observe(RequestEnded(rid=rid, outcome="failed"), [], rig.now_s)
        else:
            rig.due.append((rig.now_s + 0.5, rid))

    rig.arrive = arrive  # type: ignore[method-assign]
    ended = rig.run()
    assert (ended.cause, ended.text) == ("limit", "eta answered no request of a slot")


def test_a_request_that_waits_for_ever_counts_as_long_as_it_has_waited() -> None:
    def ttft_s(policy: str, rng: random.Random) -> float:
        return 1e6 if policy == "eta" and rng.random() < 0.1 else 0.5

    rig = Rig(spec(slots=6), ttft_s)
    rig.run()
    mean_s = report_of(rig.trial, rig.now_s, 0.0, 0.0).arms["baseline"].mean_ttft_s
    assert mean_s is not None
    assert mean_s > 1.5
    assert not rig.trial._requests


def test_without_traffic_it_ends_without_a_verdict() -> None:
    rig = Rig(spec(slots=6), noisy())
    rig.arrive = lambda: None  # type: ignore[method-assign]
    ended = rig.run()
    assert (ended.cause, rig.trial.verdict) == ("slots", None)
    assert "too few requests" in ended.text


def test_stopped_it_ends_once_and_takes_in_no_more() -> None:
    rig = Rig(spec(), noisy())
    while rig.policy != "eta":
        rig.step()
    steps = rig.trial.stop("stopped", "enough")
    assert steps == [Switch("sbs"), Ended("stopped", "enough")]
    assert rig.trial.stop("switched", "again") == []
    rig.step()
    assert rig.trial.advance(rig.now_s + 1e6) == []
    assert not rig.trial._requests


def test_short_slots_get_a_warning_that_says_how_many_passes_they_have() -> None:
    rig = Rig(spec(), noisy())
    assert report_of(rig.trial, rig.now_s, 0.0, 0.0).warning == ""
    assert report_of(rig.trial, rig.now_s, 0.01, 0.0).warning == ""
    assert "about 60 passes" in report_of(rig.trial, rig.now_s, 0.2, 0.0).warning
