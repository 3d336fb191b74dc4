"""Circuit breaker of one worker: consecutive failures open it, time and successes close it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

from sglang_sbs.router.options.config import BreakerConfig

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self.state: BreakerState = "closed"
        self.transitions: Counter[tuple[BreakerState, BreakerState]] = Counter()
        self.opened_at_s = 0.0
        self._failures = 0
        self._successes = 0
        self._failed_s = -math.inf

    @property
    def consecutive(self) -> tuple[int, int]:
        return self._failures, self._successes

    def failed(self, now_s: float, *, may_open: bool) -> bool:
        """Count a failure; return True if it opened the breaker. ``may_open`` is False for the last
        usable worker of its role, because a doubtful worker is better than rejecting everything."""
        if now_s - self._failed_s > self._config.window_s:
            self._failures = 0
        self._failed_s = now_s
        self._failures += 1
        self._successes = 0
        if not self._config.enabled or self.state == "open" or not may_open:
            return False
        if self.state == "half_open" or self._failures >= self._config.failure_threshold:
            self._become("open")
            self.opened_at_s = now_s
            return True
        return False

    def succeeded(self) -> None:
        self._failures = 0
        if self.state == "half_open":
            self._successes += 1
            if self._successes >= self._config.success_threshold:
                self._become("closed")

    def try_half_open(self, now_s: float) -> bool:
        """Half-open the breaker and return True if its timeout has expired: traffic may probe."""
        if self.state != "open" or now_s < self.opened_at_s + self._config.timeout_s:
            return False
        return self.let_in()

    def let_in(self) -> bool:
        """Half-open an open breaker; return False if it is not open. Called before its timeout if
        no other worker of the role is left."""
        if self.state != "open":
            return False
        self._become("half_open")
        self._successes = 0
        return True

    def follow(self, state: BreakerState, now_s: float) -> None:
        """Copy the state of a breaker kept by another process."""
        if state == self.state:
            return
        self.reset()
        self.state = state
        self.opened_at_s = now_s

    def _become(self, state: BreakerState) -> None:
        if state != self.state:
            self.transitions[self.state, state] += 1
            self.state = state

    def reset(self) -> None:
        self._become("closed")
        self._failures = self._successes = 0


class Suspicions:
    """Decides whether a 5xx response counts against its engine if no second engine was tried. It
    does while no other engine of the role is suspected: if several fail, the requests may be the
    cause."""

    def __init__(self, window_s: float = BreakerConfig.window_s) -> None:
        self._window_s = window_s
        self._failed_s: dict[tuple[str, str], float] = {}
        """Time of the last failure, by role and engine, of engines without a success since."""

    def against(self, role: str, engine: str, now_s: float) -> bool:
        """Record a failure and return whether it counts against the engine."""
        oldest_s = now_s - self._window_s
        self._failed_s = {key: at_s for key, at_s in self._failed_s.items() if at_s >= oldest_s}
        self._failed_s[role, engine] = now_s
        return not any(key[0] == role and key[1] != engine for key in self._failed_s)

    def served(self, role: str, engine: str) -> None:
        """Clear the suspicion against an engine that has served a request."""
        if self._failed_s:
            self._failed_s.pop((role, engine), None)
