"""The most that clients and engines may say, before it is sent on or kept."""

from __future__ import annotations

from sglang_sbs.scheduling.events import MAX_BLOCKS, MAX_COUNT, MAX_SESSION_CHARS

__all__ = ["MAX_BLOCKS", "MAX_COUNT", "MAX_SESSION_CHARS", "clamped_count"]


def clamped_count(value: int) -> int:
    """A number that an engine or a client gave, as a count that may be sent on."""
    return min(max(0, value), MAX_COUNT)
