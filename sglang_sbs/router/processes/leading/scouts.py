"""Polls scheduler processes for their state, over one connection each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sglang_sbs.router.processes.messages import FromScheduler, Look, Standing, ToScheduler

logger = logging.getLogger(__name__)


class Line(Protocol):
    """Connection to a scheduler process, as far as this package uses it. Implemented by
    :class:`~sglang_sbs.router.processes.sockets.FrontEndSocket`."""

    def send_message(self, message: ToScheduler) -> bool:
        """Send a message; return False if no scheduler accepts it."""

    def drain(self) -> None:
        """Handle received messages."""

    def close(self, linger_ms: int = 0) -> None:
        """Close the connection. ``linger_ms``: how long unsent messages may still be sent."""


Dial = Callable[[str, Callable[[FromScheduler], None]], Line]
"""Opens a connection to an endpoint; the callback gets its messages. An error leaves nothing
open."""


@dataclass(eq=False)
class Scouts:
    """Polls the schedulers at ``endpoints``. Connects at the first poll and retries at each later
    one. Use only from one event loop."""

    endpoints: Sequence[str]
    dial: Dial
    _lines: dict[str, Line] = field(default_factory=dict)
    _seen: dict[str, tuple[Standing, float]] = field(default_factory=dict)
    """Last answer by endpoint, and when it arrived (seconds of the event loop's clock)."""
    _failed: set[str] = field(default_factory=set)

    def ask(self, look: Look) -> None:
        """Send ``look`` to all endpoints. Answers arrive later, if at all (:meth:`standing`)."""
        for endpoint in self.endpoints:
            line = self._lines.get(endpoint) or self._new(endpoint)
            if line is not None:
                line.drain()
                line.send_message(look)

    def standing(self, endpoint: str, within_s: float) -> Standing | None:
        standing, at_s = self._seen.get(endpoint, (None, 0.0))
        return standing if asyncio.get_running_loop().time() - at_s <= within_s else None

    def leaders(self, within_s: float) -> dict[str, int]:
        """Return the term of each scheduler, by endpoint, that answered within the last
        ``within_s`` seconds that it is active."""
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
