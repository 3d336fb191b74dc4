"""The most that clients and engines may say, before it is sent on or kept.

What is larger nobody can mean. Must not know who says it.
"""

from __future__ import annotations

MAX_RID_CHARS = 128
MAX_BLOCKS = 65_536
MAX_SESSION_CHARS = 256
MAX_COUNT = 1 << 40
"""Of tokens and ranks; what is larger nobody can mean."""


def clamped_count(value: int) -> int:
    """A number that an engine or a client gave, as a count that may be sent on."""
    return min(max(0, value), MAX_COUNT)
