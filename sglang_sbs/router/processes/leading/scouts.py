"""Asks schedulers again and again how they stand, over a line to each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sglang_sbs.router.processes.messages import FromScheduler, Look, Standing, ToScheduler

logger = logging.getLogger(__name__)


class Line(Protocol):
    """One session with a scheduler process, as who speaks through it sees it:
    :class:`~sglang_sbs.router.processes.sockets.FrontEndSocket`."""

    def tell(self, message: ToScheduler) -> bool:
        """False if no scheduler takes it."""

    def drain(self) -> None:
        """Take what has arrived."""

    def close(self, linger_ms: int = 0) -> None:
        """``linger_ms``: how long what was told last may take to leave."""


Dial = Callable[[str, Callable[[FromScheduler], None]], Line]
"""To an endpoint. May raise; then it has left nothing open."""


@dataclass(eq=False)
class Scouts:
    """One line per endpoint, made when it can be. Must be used from one event loop only."""

    endpoints: Sequence[str]
    dial: Dial
    _lines: dict[str, Line] = field(default_factory=dict)
    _seen: dict[str, tuple[Standing, float]] = field(default_factory=dict)
    """The last answer of each, and when it came."""
    _failed: set[str] = field(default_factory=set)

    def ask(self, look: Look) -> None:
        """Everybody; the answers come in time, or not."""
        for endpoint in self.endpoints:
            line = self._lines.get(endpoint) or self._new(endpoint)
            if line is not None:
                line.drain()
                line.tell(look)

    def standing(self, endpoint: str, within_s: float) -> Standing | None:
        standing, at_s = self._seen.get(endpoint, (None, 0.0))
        return standing if asyncio.get_running_loop().time() - at_s <= within_s else None

    def leaders(self, within_s: float) -> dict[str, int]:
        """Who says that it leads, and in which term."""
        said = {endpoint: self.standing(endpoint, within_s) for endpoint in self.endpoints}
        return {endpoint: one.term for endpoint, one in said.items() if one and one.active}

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
        except Exception as error:  # no descriptors are left: tried again with the next question
            if endpoint not in self._failed:
                self._failed.add(endpoint)
                logger.warning("cannot ask the scheduler at %s how it stands: %s", endpoint, error)
            return None
        self._failed.discard(endpoint)
        return line
