"""Forward passes that are believed to be running or queued on a prefill instance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Sent:
    """How the requests of a batch were dispatched; each refers to it until its rank accepts it."""

    at_s: float
    to_idle: bool = False
    """Nothing ran or waited at the instance, so its next launch is due to this batch alone."""
    joins: bool = False
    """Another batch was on its way already."""
    requests: int = 1
    left_s: float = -math.inf
    """When the last of them has left: they leave one after the other."""
    has_told: bool = False
    """Its latency was taken."""

    def __post_init__(self) -> None:
        self.left_s = max(self.at_s, self.left_s)


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
    rids: dict[str, tuple[int, Sent]] = field(default_factory=dict)
    """Requests presumed to complete in it: their rank, and how they were sent."""
    queued: list[int] = field(default_factory=list)
    """What it was presumed to take from the reported queue of each rank, tokens."""
    pairs: list[float] = field(default_factory=list)
    """Attention pairs per DP rank."""


def with_id(passes: Sequence[Pass], forward_id: int) -> Pass | None:
    return next((one for one in passes if one.forward_id == forward_id), None)


def sent_of(rid: str, passes: Sequence[Pass]) -> Sent | None:
    """Of a request that is presumed to be in one of these."""
    return next((one.rids[rid][1] for one in passes if rid in one.rids), None)


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
