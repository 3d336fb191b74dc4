"""Alerts of the last hour with their start and end. Sans-I/O and bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sglang_sbs.dashboard.health.alerts import Alert

KEPT_S = 3600.0
AGAIN_S = 60.0
"""Seconds within which an alert that returns continues its former entry, so that a flickering alert
is one entry."""
MOST_KEPT = 200

_Key = tuple[str, str, str]


class PastAlert(msgspec.Struct):
    """One alert with start and end. Times are on the scheduler's clock."""

    alert: Alert
    began_s: float
    seen_s: float
    """Last time when the alert was active, seconds of the scheduler's clock."""
    times: int = 1
    over: bool = False


class AlertHistory:
    """Stores alerts with their start and end. Call :meth:`update` about once a second with the
    active alerts."""

    def __init__(self) -> None:
        self._kept: list[PastAlert] = []
        """Alerts in order of their starts."""
        self._last: dict[_Key, PastAlert] = {}
        self.changes = 0
        """Counter that increases when the result of :meth:`over` changes."""

    def update(self, now_s: float, alerts: Sequence[Alert]) -> None:
        present = {_key(alert): alert for alert in alerts}
        for key, alert in present.items():
            known = self._last.get(key)
            if known is None or (known.over and now_s - known.seen_s > AGAIN_S):
                self._begin(key, alert, now_s)
            else:
                self._goes_on(known, alert, now_s)
        for key, past in self._last.items():
            if not past.over and key not in present:
                past.over = True
                self.changes += 1
        for past in [past for past in self._kept if past.over and now_s - past.seen_s > KEPT_S]:
            self._drop(past)

    def since_s(self, alert: Alert, now_s: float) -> float:
        """Return the start of an alert that is active at ``now_s``."""
        known = self._last.get(_key(alert))
        return now_s if known is None or known.over else known.began_s

    def over(self) -> list[dict[str, Any]]:
        """Return the alerts that have ended, the latest end first."""
        ended = sorted((past for past in self._kept if past.over), key=lambda past: -past.seen_s)
        return [
            msgspec.structs.asdict(past.alert)
            | {
                "began_s": round(past.began_s, 1),
                "ended_s": round(past.seen_s, 1),
                "times": past.times,
            }
            for past in ended
        ]

    def _begin(self, key: _Key, alert: Alert, now_s: float) -> None:
        if len(self._kept) >= MOST_KEPT:
            oldest = next((past for past in self._kept if past.over), None)
            if oldest is None:
                return  # all kept alerts are active
            self._drop(oldest)
        self._last[key] = past = PastAlert(alert, now_s, now_s)
        self._kept.append(past)

    def _goes_on(self, known: PastAlert, alert: Alert, now_s: float) -> None:
        known.seen_s = now_s
        if known.over:
            known.over = False
            known.times += 1
            self.changes += 1
        # The text contains figures: those of the most severe moment are kept.
        if known.alert.severity == "warning" or alert.severity == "critical":
            known.alert = alert

    def _drop(self, past: PastAlert) -> None:
        self._kept.remove(past)
        key = _key(past.alert)
        if self._last.get(key) is past:
            del self._last[key]
        self.changes += 1


def _key(alert: Alert) -> _Key:
    """Identifies an alert over time. The text, with its changing figures, is part of the key only
    for problems, because a worker may have several of them."""
    return alert.kind, alert.subject, alert.text if alert.kind == "problem" else ""
