"""Limits on a prefill instance's reports. Impossible values come from a faulty engine or a forged
sender and would corrupt everything learned."""

from __future__ import annotations

import msgspec

from sglang_sbs.wire import EndForward

MOST_PASSES = 16
"""Limit on passes launched and not ended. SGLang has two, or one per pipeline stage."""
MOST_CHUNKS = 64
"""Limit on others' queued tokens at a rank, in passes."""
_CREDIT = 10.0
"""Limit on the forward time of an instance not yet observed, in default forward times."""


def within_limits(report: EndForward, most_tokens: int, dp_size: int) -> EndForward:
    """Clamp a report to what a pass can hold; ``most_tokens`` is the limit of one rank in one pass.
    A vector without ``dp_size`` entries is dropped."""
    told = report.extend_tokens, report.inflight_passes, report.tokens_per_rank
    extend_tokens, passes = min(told[0], most_tokens), min(told[1], MOST_PASSES)
    vector = told[2] if told[2] is not None and len(told[2]) == dp_size else None
    if vector is not None:
        vector = [min(tokens, most_tokens) for tokens in vector]
    if (extend_tokens, passes, vector) == told:
        return report
    return msgspec.structs.replace(
        report, extend_tokens=extend_tokens, inflight_passes=passes, tokens_per_rank=vector
    )


class DeviceTime:
    """Limits one instance's forward times to the time that passed while it was observed, plus a
    little for the pass running at the beginning."""

    def __init__(self, t_default_s: float) -> None:
        self._most_s = self._credit_s = _CREDIT * t_default_s
        self._heard_s: float | None = None

    def heard(self, now_s: float) -> None:
        """Record a report; the time since the last one may have been a single pass."""
        since_s = 0.0 if self._heard_s is None else now_s - self._heard_s
        self._credit_s = min(self._credit_s, self._most_s) + since_s
        self._heard_s = now_s

    def spend(self, forward_s: float) -> bool:
        """Record a pass of this duration; return whether it is possible."""
        if forward_s > self._credit_s:
            return False
        self._credit_s -= forward_s
        return True
