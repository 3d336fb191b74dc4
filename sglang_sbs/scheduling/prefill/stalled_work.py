"""Detects work at a prefill DP rank that no forward pass takes.

A rank whose KV pool is full, whose KV transfers do not end, or that is paused looks free, because
nothing runs there. But SGLang cannot form a batch (``NO_TOKEN`` in ``schedule_policy.py``; sglang
#38478), and new requests only lengthen its queue."""

from __future__ import annotations

from sglang_sbs.wire import EndForward

# SGLang fault: pool-full-looks-idle
LEAST_S = 1.0
"""Seconds without a pass after which waiting work is stalled; :data:`PASSES` apply if longer. An
idle rank sends a heartbeat once a second."""
PASSES = 3.0


class StalledWork:
    """Whether the waiting work of one rank is stalled. :meth:`observe` needs every EndForward of
    the rank."""

    __slots__ = ("_since_s", "cause")

    def __init__(self) -> None:
        self.cause = ""
        """Why no pass takes the waiting work, in words; empty if it is not stalled."""
        self._since_s: float | None = None

    def clear(self) -> None:
        self.cause = ""
        self._since_s = None

    def observe(self, report: EndForward, now_s: float) -> None:
        computes = report.kind in ("launch", "forward") and report.extend_tokens > 0
        waits = report.waiting_requests > 0 or report.chunk_remainder_tokens > 0
        if computes or not waits or report.inflight_passes > 0:
            self.clear()
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s >= max(LEAST_S, PASSES * report.forward_s):
            self.cause = cause_of(report)


def cause_of(report: EndForward) -> str:
    """Return the probable reason, in words, why no pass takes a rank's waiting requests, from its
    report."""
    used, capacity = report.kv_tokens, report.kv_capacity_tokens
    wanted = report.waiting_tokens / max(1, report.waiting_requests)
    full = capacity > 0 and capacity - used < wanted
    waiting = f"{report.waiting_requests} requests wait on DP rank {report.dp_rank}"
    if full and report.kv_transfer_requests:
        return (
            f"{waiting}: its KV pool is full ({used} of {capacity} tokens) while "
            f"{report.kv_transfer_requests} KV transfers to decode have not ended"
        )
    if full:
        return f"{waiting}: its KV pool is full ({used} of {capacity} tokens)"
    if report.kv_transfer_requests:
        number = report.kv_transfer_requests
        return f"{waiting}: no pass takes them; {number} KV transfers to decode have not ended"
    return f"{waiting}: no pass takes them; the engine is paused or holds them back"
