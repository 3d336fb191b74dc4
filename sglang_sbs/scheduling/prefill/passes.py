"""Forward passes assumed to be running or queued on a prefill instance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Sent:
    """Dispatch of a batch; each of its requests refers to it until its rank accepts the request."""

    at_s: float
    to_idle: bool = False
    """The instance was idle, so its next launch is caused by this batch alone."""
    joins: bool = False
    """Another batch was already on its way."""
    requests: int = 1
    left_s: float = -math.inf
    """Time when its last request has left, as they leave one after the other."""
    has_told: bool = False
    """Its latency was sampled."""

    def __post_init__(self) -> None:
        self.left_s = max(self.at_s, self.left_s)


@dataclass(slots=True)
class Pass:
    """A forward pass assumed to be running or queued on the device."""

    start_s: float
    end_s: float
    """Predicted end."""
    tokens: list[int]
    """Extend tokens per DP rank."""
    forward_id: int | None
    """Number of the pass; None: presumed, not reported."""
    rids: dict[str, tuple[int, Sent]] = field(default_factory=dict)
    """Requests presumed to complete in it, with their rank and their batch."""
    queued: list[int] = field(default_factory=list)
    """Tokens presumed to be taken from each rank's reported queue."""
    pairs: list[float] = field(default_factory=list)
    """Attention pairs per DP rank."""


def with_id(passes: Sequence[Pass], forward_id: int) -> Pass | None:
    return next((one for one in passes if one.forward_id == forward_id), None)


def sent_of(rid: str, passes: Sequence[Pass]) -> Sent | None:
    """Return the batch of a request presumed to be in one of these."""
    return next((one.rids[rid][1] for one in passes if rid in one.rids), None)


def accepted(passes: Sequence[Pass], rids: Sequence[str], rank: int, lost: int) -> int:
    """Record that a rank has accepted these requests, and ``lost`` more with lost ids: the oldest
    presumed ones. Returns the rest of ``lost``."""
    presumed = [running.rids for running in passes if running.forward_id is None]
    if not presumed:
        return lost
    here = [rid for of_pass in presumed for rid, (at, _) in of_pass.items() if at == rank]
    unnamed = [rid for rid in here if rid not in rids][:lost]
    for of_pass in presumed:
        for rid in (*rids, *unnamed):
            of_pass.pop(rid, None)
    return lost - len(unnamed)
