"""Refusals, failed attempts, watchdog resets and failed events of the last minute. Sans-I/O;
bounded."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

RECENT_S = 60.0
_MOST = 2_000
_MOSTLY = 0.8
"""Share of the failed attempts on one instance from which that instance is named."""


class Troubles:
    """Counts recent troubles; each kind is dropped a minute after its last occurrence."""

    def __init__(self, errors: Callable[[], int]) -> None:
        """``errors``: returns the number of events that have failed in the scheduler."""
        self._errors = errors
        self._known_errors = errors()
        self._known_fires: dict[str, int] = {}
        self._refusals: deque[tuple[float, str]] = deque(maxlen=_MOST)
        self._fires: deque[tuple[float, str]] = deque(maxlen=_MOST)
        self._failed: deque[tuple[float, str]] = deque(maxlen=_MOST)
        self._attempts: deque[tuple[float, tuple[str, str] | None]] = deque(maxlen=_MOST)
        """Time of each end, with the prefill and decode instance of failed attempts."""

    def on_refused(self, cause: str, now_s: float) -> None:
        self._refusals.append((now_s, cause))

    def on_attempt_ended(self, failed_on: tuple[str, str] | None, now_s: float) -> None:
        """Record the end of an attempt. ``failed_on``: the prefill and decode instance; None: it
        succeeded."""
        self._attempts.append((now_s, failed_on))

    def attempts(self, now_s: float) -> tuple[int, int, str]:
        """Return the number of attempts that ended in the last minute, the number that failed, and
        the instance that most of the failed ones share; empty: none."""
        recent = [failed_on for at_s, failed_on in self._attempts if now_s - at_s <= RECENT_S]
        failed = [attempt for attempt in recent if attempt is not None]
        named = Counter(name for pair in failed for name in pair)
        suspects = [name for name, count in named.items() if count >= _MOSTLY * len(failed)]
        return len(recent), len(failed), suspects[0] if len(suspects) == 1 else ""

    def look(self, fires: Iterable[tuple[str, str, int]], now_s: float) -> None:
        """Count the troubles since the last call. ``fires``: id and worker of each prefill
        instance, and the number of its watchdog resets so far."""
        errors = self._errors()
        _add(self._failed, "", errors - self._known_errors, now_s)
        self._known_errors = errors
        for name, worker, count in fires:
            _add(self._fires, worker, count - self._known_fires.get(name, count), now_s)
            self._known_fires[name] = count

    def refusals(self, now_s: float) -> Counter[str]:
        """Refusals by cause."""
        return _recent(self._refusals, now_s)

    def fires(self, now_s: float) -> Counter[str]:
        """Watchdog resets by worker."""
        return _recent(self._fires, now_s)

    def failed(self, now_s: float) -> int:
        return _recent(self._failed, now_s).total()


def _add(kept: deque[tuple[float, str]], name: str, count: int, now_s: float) -> None:
    kept.extend((now_s, name) for _ in range(min(count, _MOST)))


def _recent(kept: Iterable[tuple[float, str]], now_s: float) -> Counter[str]:
    return Counter(name for at_s, name in kept if now_s - at_s <= RECENT_S)
