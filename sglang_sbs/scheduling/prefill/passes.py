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
"""Limit on passes of an instance that are launched and not ended. SGLang has two, or one per
pipeline stage."""


@dataclass(slots=True)
class Pass:
    """A forward pass assumed to be running or queued on the device."""

    start_s: float
    end_s: float
    """Predicted end, on the scheduler's clock like ``start_s``."""
    tokens: list[int]
    """Extend tokens per DP rank."""
    forward_id: int | None
    """Number of the pass in EndForward; None: presumed, not reported."""
    requests: dict[str, PrefillRequest] = field(default_factory=dict)
    """Requests presumed to complete in it, by id; empty for reported passes."""
    queued: list[int] = field(default_factory=list)
    """Tokens presumed taken from each rank's reported queue; empty for reported passes."""
    pairs: list[float] = field(default_factory=list)
    """Attention pairs (:func:`.attention_pairs`) per DP rank."""


class Passes(list[Pass]):
    """Running and queued passes of one instance; each starts when the one before it ends."""

    def __init__(self, model: ForwardModel) -> None:
        super().__init__()
        self.model = model
        self.pause = EnginePause()
        self.free_since_s = -math.inf
        """End of the last ended pass; minus infinity before the first."""
        self.ended = 0
        """Number of ended passes whose forward time was learned."""

    def with_id(self, forward_id: int) -> Pass | None:
        return next((running for running in self if running.forward_id == forward_id), None)

    @property
    def reported(self) -> bool:
        """Whether the launch of any of these passes was reported, not presumed."""
        return any(running.forward_id is not None for running in self)

    def presumed(self, rid: str) -> PrefillRequest | None:
        """Return a request presumed to complete in one of these passes; None: it is in none."""
        return next((running.requests[rid] for running in self if rid in running.requests), None)

    def drop(self, rid: str) -> None:
        """Remove a request from the pass that it is presumed in. If that pass has no other request,
        it ends by time (:attr:`ends_by_time_s`)."""
        for running in self:
            running.requests.pop(rid, None)

    def resize(self, dp_size: int) -> None:
        for running in self:
            for of_ranks in (running.tokens, running.queued, running.pairs):
                if of_ranks:
                    del of_ranks[dp_size:]
                    of_ranks.extend([0] * (dp_size - len(of_ranks)))

    def accept(self, rids: Sequence[str], here: Collection[str], lost: int) -> int:
        """Remove requests that a rank accepted from the presumed passes: ``rids``, and for ``lost``
        acceptances with unknown ids the oldest ones at the rank (``here``). Returns how many of
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
        """Keep only ``rest`` of the passes. The first of them starts at ``end_s``, when the pass
        before it ended; times of the others follow."""
        self[:] = rest
        self.free_since_s = end_s
        for running in self:
            running.start_s = end_s
            running.end_s = end_s = end_s + self.model.predict_s(running.tokens, running.pairs)
