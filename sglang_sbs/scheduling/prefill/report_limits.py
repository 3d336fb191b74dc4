"""What a prefill instance can mean, and what of its reports is beyond that: a fault of the engine,
or of who speaks in its name. Believed, it would poison what the cluster has learned."""

from __future__ import annotations

import msgspec

from sglang_sbs.wire import EndForward

MOST_PASSES = 16
"""Launched and not ended. SGLang has two, or as many as it has pipeline stages."""
MOST_CHUNKS = 64
"""What others have queued at a rank counts for so many passes at most."""
_CREDIT = 10.0
"""Forward time that is believed of an instance nobody has watched, in default forward times."""


def within_limits(report: EndForward, most_tokens: int, dp_size: int) -> EndForward:
    """The report, with what a pass cannot hold cut off. ``most_tokens``: of one rank in one pass. A
    vector that is not of ``dp_size`` ranks is none."""
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
    """Forward time of one instance: no more than the time that passed while it was watched, and a
    little for the pass that ran when that began."""

    def __init__(self, t_default_s: float) -> None:
        self._most_s = self._credit_s = _CREDIT * t_default_s
        self._heard_s: float | None = None

    def heard(self, now_s: float) -> None:
        """The instance spoke. Time in which it did not may have been one pass."""
        since_s = 0.0 if self._heard_s is None else now_s - self._heard_s
        self._credit_s = min(self._credit_s, self._most_s) + since_s
        self._heard_s = now_s

    def spend(self, forward_s: float) -> bool:
        """A pass took so long; whether that can be."""
        if forward_s > self._credit_s:
            return False
        self._credit_s -= forward_s
        return True
