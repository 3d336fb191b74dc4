"""The times by which KV events are followed, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KvTimes:
    turn_s: float = 0.002
    """Messages of one rank, and what they say, take the event loop for this long at a time."""
    subscribed_s: float = 0.2
    """Delay from a connection to the first replay; by then the publisher knows of the
    subscription."""
    replay_silence_s: float = 3.0
    """Longest pause between two messages of a replay, and before the first."""
    patience_s: float = 10.0
    """After this long without a connection to some rank, the instance is taken to publish
    nothing."""
    keep_s: float = 60.0
    """An instance that is not used is followed this much longer."""
    tick_s: float = 0.5
