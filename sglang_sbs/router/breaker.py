"""Circuit breaker of one worker: consecutive failures open it, time and successes close it.

Owns the breaker's state machine. Must not know workers, clocks or sockets (callers pass ``now_s``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]


@dataclass(frozen=True)
class BreakerConfig:
    enabled: bool = True
    failure_threshold: int = 10
    success_threshold: int = 3
    timeout_s: float = 60.0


class Breaker:
    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self.state: BreakerState = "closed"
        self.opened_at_s = 0.0
        self._failures = 0
        self._successes = 0

    def failed(self, now_s: float, *, may_open: bool) -> bool:
        """Count a failure; True if it opened the breaker.

        ``may_open`` is False for the last usable worker of its role: sending to a doubtful worker
        beats refusing everything.
        """
        self._failures += 1
        self._successes = 0
        if not self._config.enabled or self.state == "open" or not may_open:
            return False
        if self.state == "half_open" or self._failures >= self._config.failure_threshold:
            self.state = "open"
            self.opened_at_s = now_s
            return True
        return False

    def succeeded(self) -> None:
        self._failures = 0
        if self.state == "half_open":
            self._successes += 1
            if self._successes >= self._config.success_threshold:
                self.state = "closed"

    def try_half_open(self, now_s: float) -> bool:
        """True if the timeout of an open breaker just ran out: let traffic probe the worker."""
        if self.state != "open" or now_s < self.opened_at_s + self._config.timeout_s:
            return False
        self.state = "half_open"
        self._successes = 0
        return True

    def reset(self) -> None:
        self.state = "closed"
        self._failures = self._successes = 0
