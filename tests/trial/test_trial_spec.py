"""Settings of a trial are read from the flag and from JSON, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_sbs.trial.spec import TrialSpec, parse_text, read_object


def test_everything_can_be_said_in_one_flag() -> None:
    text = "Round-Robin,slot=5m,slots=20,width=0.05,p99=1500ms,refused=1%,then=winner,seed=7"
    said = parse_text(text)
    assert said == TrialSpec("round_robin", 300.0, 20, 0.05, 1.5, 0.01, True, 7)
    assert parse_text("eta") == TrialSpec("eta")
    assert read_object({"baseline": "eta", "slot": 90, "refused": 0.02}) == TrialSpec(
        "eta", slot_s=90.0, refused=0.02
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "name the baseline"),
        ({"baseline": "etta"}, "a policy: sbs"),
        ({"baseline": None}, "a policy"),
        ({"baseline": ["eta"]}, "a policy"),
        ({"baseline": "eta", "slot": "0.5s"}, "slot=180s"),
        ({"baseline": "eta", "slot": "nan"}, "slot=180s"),
        ({"baseline": "eta", "slot": -1}, "slot=180s"),
        ({"baseline": "eta", "slot": 1e99}, "slot=180s"),
        ({"baseline": "eta", "slot": "1.2.3s"}, "slot=180s"),
        ({"baseline": "eta", "slot": True}, "slot=180s"),
        ({"baseline": "eta", "slots": 7}, "an even number from 6"),
        ({"baseline": "eta", "slots": 4}, "an even number from 6"),
        ({"baseline": "eta", "slots": "1_000_000_000"}, "an even number from 6"),
        ({"baseline": "eta", "slots": "6_6"}, "an even number from 6"),
        ({"baseline": "eta", "width": "inf."}, "width=0.1"),
        ({"baseline": "eta", "width": "inf"}, "width=0.1"),
        ({"baseline": "eta", "width": "1_0"}, "width=0.1"),
        ({"baseline": "eta", "refused": "200%"}, "refused=1%"),
        ({"baseline": "eta", "refused": 2}, "refused=1%"),
        ({"baseline": "eta", "slot": "5s", "p99": "6s"}, r"at most one slot \(5 s\)"),
        ({"baseline": "eta", "then": "stay"}, "back or winner"),
        ({"baseline": "eta", "seed": 1.5}, "a whole number"),
        ({"baseline": "eta", "seed": "9" * 5000}, "a whole number"),
        ({"baseline": "eta", "colour": "red"}, "'colour' is not one of baseline, slot"),
        ({"baseline": "x" * 100_000}, "a policy"),
    ],
)
def test_what_cannot_be_is_named_with_what_to_write(body: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        read_object(body)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("text", ["eta,slot", "eta,slot=10s,slot=20s", "eta,baseline=sbs", ""])
def test_a_flag_that_says_nothing_or_twice_the_same_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|baseline"):
        parse_text(text)
