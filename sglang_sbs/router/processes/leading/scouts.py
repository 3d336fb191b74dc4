"""Polls schedulers for their state, over one line each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sglang_sbs.router.processes.messages import FromScheduler, Look, Standing, ToScheduler

logger = logging.getLogger(__name__)


class Line(Protocol):
    """One session with a scheduler process, as its user sees it:
    :class:`~sglang_sbs.router.processes.sockets.FrontEndSocket`."""

    def tell(self, message: ToScheduler) -> bool:
        """Send a message; return False if no scheduler accepts it."""

    def drain(self) -> None:
        """Handle received messages."""

    def close(self, linger_ms: int = 0) -> None:
        """Close the line; ``linger_ms`` is the time for unsent messages."""


Dial = Callable[[str, Callable[[FromScheduler], None]], Line]
"""Opens a line to an endpoint. If it raises, nothing is left open."""


@dataclass(eq=False)
class Scouts:
    """Keeps one line per endpoint, opened when possible. Use only from one event loop."""

    endpoints: Sequence[str]
    dial: Dial
    _lines: dict[str, Line] = field(default_factory=dict)
    _seen: dict[str, tuple[Standing, float]] = field(default_factory=dict)
    """Last answer of each endpoint, and its time."""
    _failed: set[str] = field(default_factory=set)

    def ask(self, look: Look) -> None:
        """Ask all endpoints; answers arrive later, if at all."""
        for endpoint in self.endpoints:
            line = self._lines.get(endpoint) or self._new(endpoint)
            if line is not None:
                line.drain()
                line.tell(look)

    def standing(self, endpoint: str, within_s: float) -> Standing | None:
        standing, at_s = self._seen.get(endpoint, (None, 0.0))
        return standing if asyncio.get_running_loop().time() - at_s <= within_s else None

    def leaders(self, within_s: float) -> dict[str, int]:
        """Return the terms of all schedulers that report to be active."""
        answers = {endpoint: self.standing(endpoint, within_s) for endpoint in self.endpoints}
        return {
            endpoint: standing.term
            for endpoint, standing in answers.items()
            if standing and standing.active
        }

    def close(self) -> None:
        lines, self._lines = self._lines, {}
        for line in lines.values():
            line.close()

    def _new(self, endpoint: str) -> Line | None:
        def take(message: FromScheduler) -> None:
            if isinstance(message, Standing):
                self._seen[endpoint] = message, asyncio.get_running_loop().time()

        try:
            line = self._lines[endpoint] = self.dial(endpoint, take)
        except Exception as error:  # e.g. no free descriptors; retried with the next poll
            if endpoint not in self._failed:
                self._failed.add(endpoint)
                logger.warning("cannot poll the scheduler at %s: %s", endpoint, error)
            return None
        self._failed.discard(endpoint)
        return line
