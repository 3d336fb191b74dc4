"""Steps that must be taken, however often it takes."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

Step = Callable[[], None]


class Undone:
    """In the order given; one that raises is left for the next try, and the others do not wait for
    it. Each cause is logged once, until everything is done."""

    def __init__(self, what: str) -> None:
        """``what`` they are for, in the log."""
        self._what = what
        self._steps: list[Step] = []
        self._logged: set[str] = set()

    def begin(self, *steps: Step) -> None:
        """These instead of what was left. Raises nothing."""
        self._steps = list(steps)
        self.carry_on()

    def add(self, step: Step) -> None:
        """For the next try, if it is not left anyway."""
        if step not in self._steps:
            self._steps.append(step)

    def clear(self) -> None:
        self._steps.clear()
        self._logged.clear()

    def carry_on(self) -> None:
        """Try what is left. Raises nothing."""
        steps, self._steps = self._steps, []
        for step in steps:
            try:
                step()
            except Exception as error:
                self._steps.append(step)
                if repr(error) not in self._logged:
                    self._logged.add(repr(error))
                    logger.exception("%s: a step failed, trying again", self._what)
        if not self._steps:
            self._logged.clear()
