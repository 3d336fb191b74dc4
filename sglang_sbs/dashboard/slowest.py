"""The slowest requests of the last minutes, each with its cause in one line. Sans-I/O and
bounded."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappush, heapreplace
from typing import Any

from sglang_sbs.explain.words import in_a_line
from sglang_sbs.scheduling.explained.decisions import Why
from sglang_sbs.scheduling.explained.timelines import Timeline

WINDOW_S = 300.0
SHOWN = 8
_SLOT_S = 10.0
"""Seconds per time slot; the slowest requests are kept by slot, so that old ones expire in
order."""
_AGAIN_S = 1.0


@dataclass(slots=True, eq=False)
class _Slow:
    ttft_s: float
    ended_s: float
    timeline: Timeline
    parts_s: Mapping[str, float]
    shown: dict[str, Any] | None = None

    def __lt__(self, other: _Slow) -> bool:
        return self.ttft_s < other.ttft_s


class Slowest:
    """Keeps the slowest recent requests. Add every request that had a first token, then read
    ``summary``."""

    def __init__(self, why: Callable[[str, float], Why | None]) -> None:
        """``why`` returns the reasons of a request, like :meth:`.Scheduler.why`. It is called for
        only a few requests per second."""
        self._why = why
        self._slots: deque[tuple[int, list[_Slow]]] = deque(maxlen=int(WINDOW_S / _SLOT_S) + 1)
        """Heaps of slow requests by time slot, the least slow request first."""
        self._made_s = -math.inf
        self._summary: list[dict[str, Any]] = []

    def add(
        self, now_s: float, timeline: Timeline, ttft_s: float, parts_s: Mapping[str, float]
    ) -> None:
        number = int(now_s // _SLOT_S)
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append((number, []))
        slot = self._slots[-1][1]
        if len(slot) == SHOWN and ttft_s <= slot[0].ttft_s:
            return
        slow = _Slow(ttft_s, now_s, timeline, parts_s)
        if len(slot) < SHOWN:
            heappush(slot, slow)
        else:
            heapreplace(slot, slow)

    def summary(self, now_s: float) -> list[dict[str, Any]]:
        """Return the slowest requests in order. Call it at least once a second, because reasons are
        forgotten."""
        if now_s >= self._made_s + _AGAIN_S:
            self._made_s = now_s
            recent = [
                slow for _, slot in self._slots for slow in slot if now_s - slow.ended_s <= WINDOW_S
            ]
            recent.sort(key=lambda slow: -slow.ttft_s)
            self._summary = [self._shown(slow, now_s) for slow in recent[:SHOWN]]
        return self._summary

    def _shown(self, slow: _Slow, now_s: float) -> dict[str, Any]:
        if slow.shown is None:
            timeline, decision = slow.timeline, slow.timeline.decision
            cached = 0 if decision is None else decision.cached_tokens
            why = self._why(timeline.rid, now_s)
            client = timeline.client
            slow.shown = {
                "rid": timeline.rid,
                "request_id": "" if client is None else client.request_id,
                "ended_s": round(slow.ended_s, 1),
                "ttft_s": round(slow.ttft_s, 4),
                "prompt_tokens": timeline.prompt_tokens,
                "prefill": "" if decision is None else decision.prefill,
                "prefill_rank": None if decision is None else decision.prefill_rank,
                "why": in_a_line(slow.parts_s, why, max(1, timeline.prompt_tokens - cached)),
            }
        return slow.shown
