"""Forward passes assumed to be running or queued on a prefill instance."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

from sglang_sbs.scheduling.prefill.engine_pause import EnginePause
from sglang_sbs.scheduling.prefill.forward_model import ForwardModel
from sglang_sbs.scheduling.prefill.requests import PrefillRequest

MOST_PASSES = 16
"""Limit on passes launched and not ended. SGLang has two, or one per pipeline stage."""


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
    requests: dict[str, PrefillRequest] = field(default_factory=dict)
    """Requests presumed to complete in it."""
    queued: list[int] = field(default_factory=list)
    """Tokens presumed to be taken from each rank's reported queue."""
    pairs: list[float] = field(default_factory=list)
    """Attention pairs per DP rank."""


class Passes(list[Pass]):
    """The passes of one instance in their order. Each starts when the one before it ends."""

    def __init__(self, model: ForwardModel) -> None:
        super().__init__()
        self.model = model
        self.pause = EnginePause()
        self.free_since_s = -math.inf
        """End of the last pass."""
        self.ended = 0
        """Number of passes with a learned forward time."""

    def with_id(self, forward_id: int) -> Pass | None:
        return next((running for running in self if running.forward_id == forward_id), None)

    @property
    def reported(self) -> bool:
        """Whether any of them was reported."""
        return any(running.forward_id is not None for running in self)

    def presumed(self, rid: str) -> PrefillRequest | None:
        """Return a request that is presumed to complete in one of them."""
        return next((running.requests[rid] for running in self if rid in running.requests), None)

    def drop(self, rid: str) -> None:
        """Remove a request from its pass. That pass then ends by time if nothing else ends it."""
        for running in self:
            running.requests.pop(rid, None)

    def resize(self, dp_size: int) -> None:
        for running in self:
            for of_ranks in (running.tokens, running.queued, running.pairs):
                if of_ranks:
                    del of_ranks[dp_size:]
                    of_ranks.extend([0] * (dp_size - len(of_ranks)))

    def accept(self, rids: Sequence[str], here: Collection[str], lost: int) -> int:
        """Record that a rank has accepted these requests, and ``lost`` more with unknown ids. The
        oldest presumed requests at the rank (``here``) stand for the latter. Returns how many of
        ``lost`` remain."""
        presumed = [running.requests for running in self if running.forward_id is None]
        if not presumed:
            return lost
        ours = (rid for of_pass in presumed for rid in of_pass if rid in here and rid not in rids)
        unnamed = [*islice(ours, lost)]
        for of_pass in presumed:
            for rid in (*rids, *unnamed):
                of_pass.pop(rid, None)
        return lost - len(unnamed)

    @property
    def ends_by_time_s(self) -> float:
        """Predicted end of the first pass if no answer will end it, because it completes no
        request; infinity otherwise."""
        return self[0].end_s if self and not self[0].requests else math.inf

    def take_presumed(self) -> list[Pass]:
        """Remove the presumed passes, and return them."""
        presumed = [running for running in self if running.forward_id is None]
        if presumed:
            self[:] = [running for running in self if running.forward_id is not None]
        return presumed

    def end(self, rest: Sequence[Pass], end_s: float) -> None:
        """Leave ``rest`` of the passes, which start now that the one before has ended."""
        self[:] = rest
        self.free_since_s = end_s
        for running in self:
            running.start_s = end_s
            running.end_s = end_s = end_s + self.model.predict_s(running.tokens, running.pairs)
