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
    """The pause of one instance: its usual length and whether one is on. Times are seconds on the
    scheduler's clock."""

    def __init__(self) -> None:
        self.mean_s = 0.005
        """Smoothed length of a pause, in seconds."""
        self.learned = 0
        """Number of pauses learned from."""
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
        """Record that a rank reported, after this pass, that it found nothing to launch."""
        self._rested_id = max(self._rested_id, forward_id)
        self.end()

    def rested_after(self, forward_id: int) -> bool:
        """Whether a rank reported, after this pass, that it had nothing to launch."""
        return self._rested_id >= forward_id

    def forget_ids(self) -> None:
        """Forget the forward id of the last rest, because ids start again, and end the pause."""
        self._rested_id = -1
        self.end()

    def observe(self, pause_s: float) -> None:
        """Learn from a launch ``pause_s`` after the last end that only the engine delayed."""
        self.learned += 1
        share = max(_LEAST_SHARE, 1 / self.learned)
        self.mean_s += share * (pause_s - self.mean_s)
