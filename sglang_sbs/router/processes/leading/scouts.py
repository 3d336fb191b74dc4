"""Asks schedulers again and again how they stand, over a line to each.

Owns those lines and the last answers. Must not know what is concluded from them: whom a front end
follows (:mod:`.scheduler_choice`), whether a scheduler leads (:mod:`.fixed_order`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_sbs.router.processes.leading.line import Line
from sglang_sbs.router.processes.messages import FromScheduler, Look, Standing

logger = logging.getLogger(__name__)

Dial = Callable[[str, Callable[[FromScheduler], None]], Line]
"""To an endpoint. May raise; then it has left nothing open."""


@dataclass(slots=True)
class _Seen:
    standing: Standing
    at_s: float


class Scouts:
    """One line per endpoint, made when it can be. Must be used from one event loop only."""

    def __init__(self, endpoints: Sequence[str], dial: Dial, now: Callable[[], float]) -> None:
        """``now``: the clock of the loop, in seconds."""
        self.endpoints = tuple(endpoints)
        self._dial = dial
        self._now = now
        self._lines: dict[str, Line] = {}
        self._seen: dict[str, _Seen] = {}
        self._failed: set[str] = set()

    def ask(self, look: Look) -> None:
        """Everybody; the answers come in time, or not."""
        for endpoint in self.endpoints:
            line = self._lines.get(endpoint) or self._new(endpoint)
            if line is not None:
                line.drain()
                line.tell(look)

    def standing(self, endpoint: str, within_s: float) -> Standing | None:
        """As last heard, if that is no longer ago."""
        seen = self._seen.get(endpoint)
        if seen is None or self._now() - seen.at_s > within_s:
            return None
        return seen.standing

    def forgive(self, stalled_s: float) -> None:
        """This process has heard nobody for so long: that is not their silence."""
        for seen in self._seen.values():
            seen.at_s += stalled_s

    def close(self) -> None:
        """No answers any more."""
        lines, self._lines = self._lines, {}
        for line in lines.values():
            line.close()

    def _new(self, endpoint: str) -> Line | None:
        def take(message: FromScheduler) -> None:
            if isinstance(message, Standing):
                self._seen[endpoint] = _Seen(message, self._now())

        try:
            line = self._lines[endpoint] = self._dial(endpoint, take)
        except Exception as error:  # no descriptors are left: tried again with the next question
            if endpoint not in self._failed:
                self._failed.add(endpoint)
                logger.warning("cannot ask the scheduler at %s how it stands: %s", endpoint, error)
            return None
        self._failed.discard(endpoint)
        return line
