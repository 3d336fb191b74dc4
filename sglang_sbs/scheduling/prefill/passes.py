"""Forward passes that are believed to be running or queued on a prefill instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Pass:
    """A forward pass believed to be running or queued on the device."""

    start_s: float
    end_s: float
    """Predicted."""
    tokens: list[int]
    """Extend tokens per DP rank."""
    forward_id: int | None
    """None: presumed, not reported."""
    rids: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Requests presumed to complete in it: their rank, and when they were sent."""
    queued: list[int] = field(default_factory=list)
    """What it was presumed to take from the reported queue of each rank, tokens."""
    pairs: list[float] = field(default_factory=list)
    """Attention pairs per DP rank."""


def with_id(passes: Sequence[Pass], forward_id: int) -> Pass | None:
    return next((one for one in passes if one.forward_id == forward_id), None)


def accepted(passes: Sequence[Pass], rids: Sequence[str], rank: int, lost: int) -> int:
    """A rank has said that it has these requests, and so many more whose ids were lost: the oldest
    that are presumed to be there. Returns how many of these are left."""
    presumed = [running.rids for running in passes if running.forward_id is None]
    if not presumed:
        return lost
    here = [rid for of_pass in presumed for rid, (at, _) in of_pass.items() if at == rank]
    unnamed = [rid for rid in here if rid not in rids][:lost]
    for of_pass in presumed:
        for rid in (*rids, *unnamed):
            of_pass.pop(rid, None)
    return lost - len(unnamed)
