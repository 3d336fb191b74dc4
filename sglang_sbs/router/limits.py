"""Limits on values from clients and engines, applied before they are passed on or stored."""

from __future__ import annotations

from sglang_sbs.scheduling.events import MAX_BLOCKS, MAX_COUNT, MAX_SESSION_CHARS

__all__ = ["MAX_BLOCKS", "MAX_COUNT", "MAX_SESSION_CHARS", "clamped_count"]


def clamped_count(value: int) -> int:
    """Clamp a number from an engine or a client to 0..``MAX_COUNT``."""
    return min(max(0, value), MAX_COUNT)
