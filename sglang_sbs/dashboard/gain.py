"""The gain of the policy that runs over immediate dispatch, with an interval. Sans-I/O; bounded.

The gain is a ratio of mean TTFTs over the same requests: the shadow of what was really done over
the shadow of a baseline (:mod:`.ttft`). Both are modelled, so that an error of the model largely
cancels. Requests of one minute are one batch: the interval is that of a ratio of batch means (95 %,
Student's t), because neighbouring requests share passes and are not independent."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_sbs.trial.ratios import NO_GAIN, Circumstances, Part, Ratio, ratio_of_means, why_no_gain

MINUTE_S = 60.0
KEPT_MINUTES = 60
"""Minutes of the trend."""
WINDOW_MINUTES = 15
"""Minutes that the ratio and its interval are of."""
LEAST_MINUTES = 3
"""Whole minutes with requests before there is a ratio."""
MOST_OFF = 0.25
"""Relative error of the model from which on there is no ratio, and the page shows no bars."""
HEADLINE = "round_robin"
"""The baseline of the one number: the default of sglang_router."""
MODELLED, MEASURED = "modelled", "measured"


@dataclass(slots=True)
class _Minute:
    number: int
    requests: int = 0
    sums_s: dict[str, float] = field(default_factory=dict)
    """TTFT by figure."""


class Gain:
    """Feed it every request that is compared; ask for a ``summary``."""

    def __init__(self) -> None:
        self._minutes: deque[_Minute] = deque(maxlen=KEPT_MINUTES + 1)
        """The last one is not over."""
        self._first = 0
        """The first whole minute under the policy that runs now."""

    def policy_changed(self, now_s: float) -> None:
        """Begin the ratio anew with the next minute: the old requests had another policy."""
        self._first = int(now_s // MINUTE_S) + 1

    def add(self, now_s: float, figures_s: Mapping[str, float]) -> None:
        """TTFTs of one request, by figure: measured, modelled and every baseline."""
        number = int(now_s // MINUTE_S)
        if not self._minutes or self._minutes[-1].number != number:
            self._minutes.append(_Minute(number))
        minute = self._minutes[-1]
        minute.requests += 1
        for name, seconds in figures_s.items():
            minute.sums_s[name] = minute.sums_s.get(name, 0.0) + seconds

    def drop_minute(self, now_s: float) -> None:
        """The requests of this minute do not count: the shadows lost touch."""
        if self._minutes and self._minutes[-1].number == int(now_s // MINUTE_S):
            self._minutes.pop()

    def _whole(self, now_s: float, most: int) -> list[_Minute]:
        number = int(now_s // MINUTE_S)
        return [one for one in self._minutes if number - most <= one.number < number]

    def _window(self, now_s: float) -> list[_Minute]:
        """The minutes that the ratio is of."""
        return [one for one in self._whole(now_s, WINDOW_MINUTES) if one.number >= self._first]

    def off(self, now_s: float) -> float | None:
        """Relative error of the model for what was really done; None: no whole minute."""
        minutes = self._window(now_s)
        measured_s = sum(one.sums_s[MEASURED] for one in minutes)
        if not measured_s > 0:
            return None
        return sum(one.sums_s[MODELLED] for one in minutes) / measured_s - 1

    def ratios(self, now_s: float) -> dict[str, Ratio]:
        """Return the ratio to each baseline; none with too few minutes or a model that is off."""
        minutes = self._window(now_s)
        off = self.off(now_s)
        if len(minutes) < LEAST_MINUTES or off is None or abs(off) > MOST_OFF:
            return {}
        return {name: _ratio(minutes, name) for name in _baselines(minutes)}

    def summary(self, now_s: float, circumstances: Circumstances) -> dict[str, Any]:
        """For people and programs; ``why`` says why there is no ratio, or no gain."""
        minutes, ratios = self._window(now_s), self.ratios(now_s)
        off = self.off(now_s)
        whole = self._whole(now_s, KEPT_MINUTES)
        number = int(now_s // MINUTE_S)
        return {
            "headline": HEADLINE,
            "baselines": {
                name: {key: round(value, 4) for key, value in one._asdict().items()}
                for name, one in ratios.items()
            },
            "minutes": len(minutes),
            "requests": sum(one.requests for one in minutes),
            "model_off": None if off is None else round(off, 4),
            "load": round(circumstances.load, 3),
            "trend": _trend(minutes) if ratios else "",
            "trail": [
                [one.number - number, round(one.sums_s[MODELLED] / one.sums_s[HEADLINE], 4)]
                for one in whole
            ],
            "why": self._why(now_s, ratios, circumstances),
        }

    def _why(self, now_s: float, ratios: dict[str, Ratio], about: Circumstances) -> str:
        if ratios:
            one = ratios["eta"]
            return "" if one.high < NO_GAIN else why_no_gain(about)
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
    """For the line of a minute; empty: nothing is known."""
    shown = [
        f"{one.ratio:.2f}x of {name} ({one.low:.2f} to {one.high:.2f})"
        for name in (HEADLINE, "eta")
        if (one := ratios.get(name)) is not None
    ]
    return f"gain: mean TTFT {', '.join(shown)}" if shown else ""


def by_bound(ratios: Mapping[str, Ratio]) -> dict[tuple[str, str], float]:
    """Values of ``sbs_gain_ratio{baseline,bound}``."""
    return {
        (name, bound): value
        for name, one in ratios.items()
        for bound, value in one._asdict().items()
    }


def _baselines(minutes: list[_Minute]) -> list[str]:
    return [name for name in minutes[0].sums_s if name not in (MODELLED, MEASURED)]


def _ratio(minutes: list[_Minute], baseline: str) -> Ratio:
    return ratio_of_means(_parts(minutes, MODELLED), _parts(minutes, baseline))


def _parts(minutes: list[_Minute], figure: str) -> list[Part]:
    return [(one.sums_s[figure], one.requests) for one in minutes]


def _trend(minutes: list[_Minute]) -> str:
    """The last third against the rest, each with its interval; ``steady`` where these overlap."""
    size = len(minutes) // 3
    if size < LEAST_MINUTES:
        return "steady"
    before, last = _ratio(minutes[:-size], HEADLINE), _ratio(minutes[-size:], HEADLINE)
    if last.high < before.low:
        return "growing"
    return "shrinking" if last.low > before.high else "steady"
