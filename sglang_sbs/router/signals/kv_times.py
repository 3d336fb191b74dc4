"""Times of the KV event subscriptions, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_sbs.router.signals.dialler import FOLLOW_S


@dataclass(frozen=True)
class KvTimes:
    turn_s: float = 0.002
    """Longest time on the event loop for the messages of one rank, before others get a turn."""
    subscribed_s: float = 0.2
    """Delay from a connection to the first replay; by then the publisher knows of the
    subscription."""
    replay_silence_s: float = 3.0
    """Longest pause between two messages of a replay, and before the first."""
    patience_s: float = 10.0
    """After this long without a connection to some rank, the instance counts as publishing
    nothing."""
    keep_s: float = 60.0
    """Time for which subscriptions to an instance are kept after it went down."""
    follow_s: float = FOLLOW_S
    """Interval at which a host name is resolved again while there is no connection."""
    tick_s: float = 0.5
