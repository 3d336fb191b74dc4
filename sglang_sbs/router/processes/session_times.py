"""Times of a session between a front end and the scheduler, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SessionTimes:
    beat_s: float = 0.1
    """Interval of the heartbeats that both sides send."""
    cluster_s: float = 1.0
    """Longest interval at which the scheduler sends the state of all workers."""
    lost_s: float = 0.5
    """A front end ends the session after this long without a message from the scheduler."""
    longest_lost_s: float = 2.0
    """Largest value to which ``lost_s`` grows for a scheduler that proved to be only slow. A new
    session gives a slow scheduler extra work, so with the short limit it would be lost again."""
    forgiven_s: float = 60.0
    """Time without a lost session after which a limit grown beyond ``lost_s`` returns to it."""
    silent_s: float = 3.0
    """The scheduler ends a front end's session after this long without a message. Longer than
    ``lost_s``, so that a front end without a session can come back and report its requests."""
    call_s: float = 5.0
    """Longest wait of a front end for the scheduler's answer."""
    answer_s: float = 1.0
    """Longest wait of the scheduler for a front end's answer."""

    def __post_init__(self) -> None:
        """Check the times. Raises: ValueError, ``lost_s`` is not longer than ``stalled_s``: a pause
        of the front end itself would count as silence of the scheduler."""
        if self.lost_s <= self.stalled_s:
            raise ValueError(f"lost_s {self.lost_s} is not more than {self.stalled_s}")

    @property
    def stalled_s(self) -> float:
        """Pause of a front end's event loop after which the scheduler's silence does not count."""
        return 3 * self.beat_s
