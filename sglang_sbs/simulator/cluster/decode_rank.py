"""KV and slots of a decode DP rank as a prefill cluster sees them: who has to wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sglang_sbs.simulator.cluster.outcome import RequestRecord


@dataclass(slots=True)
class DecodeRank:
    """KV and slots of one decode DP rank; admits first come first served."""

    free_tokens: float
    free_slots: float
    output_tokens: int
    """Reserved for each request beside its prompt."""
    waiting: deque[tuple[str, RequestRecord]] = field(default_factory=deque)

    def admit(self) -> list[str]:
        """Reserve for those at the head of the queue that fit now."""
        admitted = []
        while (
            self.waiting
            and self.free_slots >= 1
            and self.free_tokens >= self.waiting[0][1].prompt_tokens + self.output_tokens
        ):
            rid, record = self.waiting.popleft()
            self.free_slots -= 1
            self.free_tokens -= record.prompt_tokens + self.output_tokens
            record.reserved = True
            admitted.append(rid)
        return admitted

    def release(self, rid: str, record: RequestRecord) -> None:
        """The attempt is over, whether it was admitted, waits, or is still on its way."""
        if record.reserved:
            record.reserved = False
            self.free_slots += 1
            self.free_tokens += record.prompt_tokens + self.output_tokens
        else:
            self.waiting = deque(entry for entry in self.waiting if entry[0] != rid)
