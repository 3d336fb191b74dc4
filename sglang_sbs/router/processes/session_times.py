"""Times of a session between a front end and the scheduler, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SessionTimes:
    beat_s: float = 0.1
    """Both sides send a heartbeat this often."""
    cluster_s: float = 1.0
    """The scheduler sends all workers at least this often."""
    lost_s: float = 0.5
    """A front end ends the session after this long without a message from the scheduler."""
    longest_lost_s: float = 2.0
    """Largest value to which ``lost_s`` grows for a scheduler that proved to be only slow. A new
    session gives a slow scheduler extra work, so with the short limit it would be lost again."""
    forgiven_s: float = 60.0
    """The limit returns to ``lost_s`` after this long without a lost session."""
    silent_s: float = 3.0
    """The scheduler takes a front end for dead after this long without a message. This is longer
    than ``lost_s``, because a front end without a session serves by itself and reports its requests
    when it is back."""
    call_s: float = 5.0
    """Longest wait of a front end for the scheduler's answer."""
    answer_s: float = 1.0
    """Longest wait of the scheduler for a front end's answer."""

    def __post_init__(self) -> None:
        """Check the times. Raises: ValueError, a pause of the front end itself would count as
        silence of the scheduler."""
        if self.lost_s <= self.stalled_s:
            raise ValueError(f"lost_s {self.lost_s} is not more than {self.stalled_s}")

    @property
    def stalled_s(self) -> float:
        """After a pause of its own of this length, a front end ignores the scheduler's silence."""
        return 3 * self.beat_s
