"""Report of a trial, for ``GET /trial``, the dashboard and the metrics."""

from __future__ import annotations

import math

import msgspec

from sglang_sbs.console.plain_words import counted
from sglang_sbs.trial.slots import Arm
from sglang_sbs.trial.trial import ALPHA, ARMS, Cause, Trial

FEW_PASSES = 300
"""Passes per slot below which the report adds a warning. A baseline that degrades slowly looks
better than it is in short slots."""


class ArmReport(msgspec.Struct, kw_only=True):
    """Figures of one of a trial's two policies; null: unknown."""

    policy: str
    slots: int
    requests: int
    """Number of counted requests that were answered."""
    mean_ttft_s: float | None
    p50_ttft_s: float | None
    p99_ttft_s: float | None
    refused: int
    unanswered: int


class TrialReport(msgspec.Struct, kw_only=True):
    """State and result of the running trial, or of the last one."""

    running: bool
    text: str
    """The verdict so far, as a sentence."""
    policy: str
    baseline: str
    now: str | None
    """Side that has the present slot: ``policy`` or ``baseline``; null after the last slot."""
    slot: int
    slots: int
    slot_s: float
    slot_left_s: float | None
    passes_per_slot: int | None
    warning: str
    ratio: float | None
    """Mean TTFT of the policy divided by that of the baseline, adjusted for the tokens that
    arrived; null: no verdict yet."""
    low: float | None
    high: float | None
    confidence: float
    """Confidence of the interval, valid over all looks."""
    pairs: int
    arms: dict[str, ArmReport]
    """Figures by ``policy`` and ``baseline``."""
    ratio_by_third: list[float | None]
    """Ratio of mean TTFTs, not adjusted, for requests that arrived in each third of a slot. The
    first third does not count in the verdict."""
    seed: int
    cause: Cause | None
    ended: str
    began_at: float
    """Unix time of the start in seconds; ``ended_at`` is that of the end."""
    ended_at: float | None = None


def report_of(trial: Trial, now_s: float, pass_s: float, began_at: float) -> TrialReport:
    """Return the report of a trial. ``pass_s``: mean time of a pass, 0 if it is not known;
    ``began_at``: Unix time of the start."""
    spec, slot, verdict, ended = trial.spec, trial.current, trial.verdict, trial.ended
    passes = round(spec.slot_s / pass_s) if pass_s > 0 else None
    return TrialReport(
        running=ended is None,
        text=in_words(trial),
        policy=trial.policies[0],
        baseline=trial.policies[1],
        now=None if slot is None else ARMS[slot.arm],
        slot=trial.done,
        slots=spec.slots,
        slot_s=spec.slot_s,
        slot_left_s=None if slot is None else round(max(0.0, trial.wake_s - now_s), 1),
        passes_per_slot=passes,
        warning=_warning(passes),
        ratio=None if verdict is None else _rounded(verdict.ratio),
        low=None if verdict is None else _rounded(verdict.low),
        high=None if verdict is None else _rounded(verdict.high),
        confidence=1 - ALPHA,
        pairs=len(trial.pairs),
        arms={
            name: _arm(policy, arm)
            for name, policy, arm in zip(ARMS, trial.policies, trial.arms, strict=True)
        },
        ratio_by_third=[_third(trial.arms, third) for third in range(3)],
        seed=trial.seed,
        cause=None if ended is None else ended.cause,
        ended="" if ended is None else ended.text,
        began_at=began_at,
    )


def _arm(policy: str, arm: Arm) -> ArmReport:
    return ArmReport(
        policy=policy,
        slots=arm.slots,
        requests=arm.requests,
        mean_ttft_s=_rounded(arm.ttft_s / arm.requests) if arm.requests else None,
        p50_ttft_s=_rounded(arm.quantile_s(0.5)),
        p99_ttft_s=_rounded(arm.quantile_s(0.99)),
        refused=arm.refused,
        unanswered=arm.unanswered,
    )


def _third(arms: tuple[Arm, Arm], third: int) -> float | None:
    (ours, our_s), (theirs, their_s) = (arm.thirds[third] for arm in arms)
    if not ours or not theirs or their_s <= 0:
        return None
    return _rounded((our_s / ours) / (their_s / theirs))


def _warning(passes: int | None) -> str:
    if passes is None or passes >= FEW_PASSES:
        return ""
    return (
        f"a slot has only about {passes} passes: with fewer than {FEW_PASSES} the queues of one "
        "slot affect the next, and a baseline that becomes slow late looks faster than it is"
    )


def in_words(trial: Trial) -> str:
    """Return the state of a trial in a sentence. Its ratio is ``0.78x (0.71 to 0.86)``, or ``0.78x
    (no interval yet)`` while the interval is infinite."""
    policy, baseline = trial.policies
    verdict, ended = trial.verdict, trial.ended
    slots = f"after {counted(trial.done, 'slot')}"
    if verdict is None:
        text = f"no verdict yet {slots}"
    else:
        ratio = verdict.words() + ("" if math.isfinite(verdict.high) else " (no interval yet)")
        text = f"{policy} has {ratio} the mean TTFT of {baseline} {slots}"
    if ended is None:
        return f"trial of {policy} against {baseline}: {text}"
    return f"trial of {policy} against {baseline}, ended: {text}; {ended.text}"


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)
