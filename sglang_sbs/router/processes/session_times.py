"""The times by which a session between a front end and the scheduler lives, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SessionTimes:
    beat_s: float = 0.1
    """Both sides send a heartbeat this often."""
    cluster_s: float = 1.0
    """The scheduler sends all workers at least this often."""
    lost_s: float = 0.5
    """A front end gives a scheduler up after this long without a message ..."""
    longest_lost_s: float = 2.0
    """... and after up to this long once it was only slow. Being given up and found again costs it
    more than it had to do before, so it would be given up again."""
    forgiven_s: float = 60.0
    """A scheduler that was not given up for this long is given ``lost_s`` again."""
    silent_s: float = 3.0
    """The scheduler takes a front end for dead after this long without a message. Longer than
    ``lost_s``: the front end serves by itself meanwhile, and announces what it did when it is
    back."""
    call_s: float = 5.0
    """A front end waits this long for the scheduler's answer."""
    answer_s: float = 1.0
    """The scheduler waits this long for a front end's answer."""

    def __post_init__(self) -> None:
        """Raises: ValueError, a pause of the front end would count as the scheduler's silence."""
        if self.lost_s <= self.stalled_s:
            raise ValueError(f"lost_s {self.lost_s} is not more than {self.stalled_s}")

    @property
    def stalled_s(self) -> float:
        """After a pause of its own this long, silence tells a front end nothing."""
        return 3 * self.beat_s
