"""Gain of the policy in force over immediate dispatch, with an interval. Sans-I/O and bounded.

The gain is a ratio of mean TTFTs over the same requests: a model of the real placements over a
model of a baseline's placements (:mod:`.ttft`). Both are modelled, so an error of the model largely
cancels. The interval is that of a ratio of batch means (95 %, Student's t). The requests of one
minute are one batch, because neighbouring requests share passes and are not independent."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_sbs.trial.ratios import NO_GAIN, Circumstances, Part, Ratio, ratio_of_means, why_no_gain

MINUTE_S = 60.0
KEPT_MINUTES = 60
"""Length of the trend in minutes."""
WINDOW_MINUTES = 15
"""Minutes used for the ratio and its interval."""
LEAST_MINUTES = 3
"""Number of whole minutes with requests needed for a ratio."""
MOST_OFF = 0.25
"""Relative error of the model above which no ratio is computed and the page shows no bars."""
HEADLINE = "round_robin"
"""Baseline of the headline figure: the default of sglang_router."""
MODELLED, MEASURED = "modelled", "measured"


@dataclass(slots=True)
class _Minute:
    number: int
    requests: int = 0
    sums_s: dict[str, float] = field(default_factory=dict)
    """Sum of TTFTs in seconds, by figure (measured, modelled, each baseline)."""


class Gain:
    """Computes the gain over each baseline. Add every compared request, then read ``summary``."""

    def __init__(self) -> None:
        self._minutes: deque[_Minute] = deque(maxlen=KEPT_MINUTES + 1)
        """Sums of the last ``KEPT_MINUTES`` minutes; the last one is in progress."""
        self._first = 0
        """Number of the first whole minute under the policy in force."""

    def policy_changed(self, now_s: float) -> None:
        """Restart the ratio with the next minute, because earlier requests had another policy."""
        self._first = int(now_s // MINUTE_S) + 1

    def add(self, now_s: float, figures_s: Mapping[str, float]) -> None:
        """Add the TTFTs of a request by figure: measured, modelled and every baseline."""
        number = int(now_s // MINUTE_S)
        if not self._minutes or self._minutes[-1].number != number:
            self._minutes.append(_Minute(number))
        minute = self._minutes[-1]
        minute.requests += 1
        for name, seconds in figures_s.items():
            minute.sums_s[name] = minute.sums_s.get(name, 0.0) + seconds

    def drop_minute(self, now_s: float) -> None:
        """Discard the current minute, in which the models do not follow the cluster."""
        if self._minutes and self._minutes[-1].number == int(now_s // MINUTE_S):
            self._minutes.pop()

    def _whole(self, now_s: float, most: int) -> list[_Minute]:
        number = int(now_s // MINUTE_S)
        return [minute for minute in self._minutes if number - most <= minute.number < number]

    def _window(self, now_s: float) -> list[_Minute]:
        return [
            minute for minute in self._whole(now_s, WINDOW_MINUTES) if minute.number >= self._first
        ]

    def off(self, now_s: float) -> float | None:
        """Return the relative error of the modelled mean TTFT with the real placements, modelled /
        measured - 1. None: the window has no whole minute."""
        minutes = self._window(now_s)
        measured_s = sum(minute.sums_s[MEASURED] for minute in minutes)
        if not measured_s > 0:
            return None
        return sum(minute.sums_s[MODELLED] for minute in minutes) / measured_s - 1

    def ratios(self, now_s: float) -> dict[str, Ratio]:
        """Return the ratio of mean TTFTs to each baseline; empty with too few minutes or an
        inaccurate model."""
        minutes = self._window(now_s)
        off = self.off(now_s)
        if len(minutes) < LEAST_MINUTES or off is None or abs(off) > MOST_OFF:
            return {}
        return {name: _ratio(minutes, name) for name in _baselines(minutes)}

    def summary(self, now_s: float, circumstances: Circumstances) -> dict[str, Any]:
        """Summary for people and programs; ``why`` explains a missing ratio or gain."""
        minutes, ratios = self._window(now_s), self.ratios(now_s)
        off = self.off(now_s)
        whole = self._whole(now_s, KEPT_MINUTES)
        number = int(now_s // MINUTE_S)
        return {
            "headline": HEADLINE,
            "baselines": {
                name: {key: round(value, 4) for key, value in ratio._asdict().items()}
                for name, ratio in ratios.items()
            },
            "minutes": len(minutes),
            "requests": sum(minute.requests for minute in minutes),
            "model_off": None if off is None else round(off, 4),
            "load": round(circumstances.load, 3),
            "trend": _trend(minutes) if ratios else "",
            "trail": [
                [
                    minute.number - number,
                    round(minute.sums_s[MODELLED] / minute.sums_s[HEADLINE], 4),
                ]
                for minute in whole
            ],
            "why": self._why(now_s, ratios, circumstances),
        }

    def _why(self, now_s: float, ratios: dict[str, Ratio], about: Circumstances) -> str:
        if ratios:
            ratio = ratios["eta"]
            return "" if ratio.high < NO_GAIN else why_no_gain(about)
        if about.overtaxed:
            return "no estimate: there are too many requests to follow at a bounded cost"
        off = self.off(now_s)
        minutes = len(self._window(now_s))
        if off is None or minutes < LEAST_MINUTES:
            return f"not known yet: {minutes} of {LEAST_MINUTES} whole minutes with requests"
        return (
            f"no estimate: the model is off by {off:+.0%} for what was really done; decode, KV "
            "transfer or a busy host may be what requests wait for"
        )


def in_words(ratios: Mapping[str, Ratio]) -> str:
    """Format the ratios to ``HEADLINE`` and ``eta`` for the log line of a minute; empty if neither
    is known."""
    shown = [
        f"{ratio.ratio:.2f}x of {name} ({ratio.low:.2f} to {ratio.high:.2f})"
        for name in (HEADLINE, "eta")
        if (ratio := ratios.get(name)) is not None
    ]
    return f"gain: mean TTFT {', '.join(shown)}" if shown else ""


def by_bound(ratios: Mapping[str, Ratio]) -> dict[tuple[str, str], float]:
    """Return values of ``sbs_gain_ratio{baseline,bound}``."""
    return {
        (name, bound): value
        for name, ratio in ratios.items()
        for bound, value in ratio._asdict().items()
    }


def _baselines(minutes: list[_Minute]) -> list[str]:
    return [name for name in minutes[0].sums_s if name not in (MODELLED, MEASURED)]


def _ratio(minutes: list[_Minute], baseline: str) -> Ratio:
    return ratio_of_means(_parts(minutes, MODELLED), _parts(minutes, baseline))


def _parts(minutes: list[_Minute], figure: str) -> list[Part]:
    return [(minute.sums_s[figure], minute.requests) for minute in minutes]


def _trend(minutes: list[_Minute]) -> str:
    """Compare the last third of the minutes with the rest, each with its interval; ``steady`` if
    the intervals overlap."""
    size = len(minutes) // 3
    if size < LEAST_MINUTES:
        return "steady"
    before, last = _ratio(minutes[:-size], HEADLINE), _ratio(minutes[-size:], HEADLINE)
    if last.high < before.low:
        return "growing"
    return "shrinking" if last.low > before.high else "steady"
