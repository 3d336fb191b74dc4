"""The engine's own pause between the end of a pass and the next launch.

Between two passes SGLang's scheduler loop processes results, accepts requests and forms the batch.
A loop that then finds nothing to launch reports ``idle`` (``engine/hooks.py``, hook on
``Scheduler.on_idle``). A launch without such a report since the last end was therefore delayed by
the engine alone, whenever its requests were sent, and until that report an engine is busy, not
idle."""

from __future__ import annotations

import math

_LEAST_SHARE = 0.1
"""Weight of a sample in the smoothed pause; the first samples are a plain mean."""


class EnginePause:
    """Learned per instance. Times are seconds on the scheduler's clock."""

    def __init__(self) -> None:
        self.mean_s = 0.005
        """Smoothed pause."""
        self.learned = 0
        """Number of samples."""
        self.until_s = -math.inf
        """Predicted end of the present pause; minus infinity without one."""
        self._rested_id = -1

    @property
    def on(self) -> bool:
        """Whether the engine is between two passes, not idle."""
        return self.until_s > -math.inf

    def begin(self, end_s: float) -> None:
        """Begin a pause: a pass ended at ``end_s`` with no other queued behind it."""
        self.until_s = end_s + self.mean_s

    def end(self) -> None:
        """End the pause: the engine launched, reported idleness, or the time has passed."""
        self.until_s = -math.inf

    def rests(self, forward_id: int) -> None:
        """A rank found nothing to launch after this pass."""
        self._rested_id = max(self._rested_id, forward_id)
        self.end()

    def rested_after(self, forward_id: int) -> bool:
        """Whether a rank reported, after this pass, that it had nothing to launch."""
        return self._rested_id >= forward_id

    def forget_ids(self) -> None:
        """The engine restarted, so forward ids start anew."""
        self._rested_id = -1
        self.end()

    def observe(self, pause_s: float) -> None:
        """Learn from a launch ``pause_s`` after the last end that nothing else delayed."""
        self.learned += 1
        share = max(_LEAST_SHARE, 1 / self.learned)
        self.mean_s += share * (pause_s - self.mean_s)
