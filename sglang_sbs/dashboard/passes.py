"""Prefill passes as reported by the engines, and the bubbles between them.

Without a barrier each rank runs its own passes. Times are seconds of the scheduler's clock.

A *bubble* is time between two passes of an instance. It is a loss only if work was available:
``waste_s`` is the part of the bubble in which requests waited in the router's queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_sbs.wire import EndForward

_SETTLE_S = 0.1
"""Seconds to wait for the reports of all ranks of a pass, on engines that do not gather the tokens
of all ranks."""


@dataclass(slots=True)
class ShownPass:
    instance: str
    start_s: float
    end_s: float
    tokens: list[int | None]
    """Extend tokens per DP rank; None: the rank took no part (without a barrier)."""
    gap_s: float = 0.0
    """Time between the end of the previous pass and this start; 0 for the first pass seen."""
    waste_s: float = 0.0
    """Part of the gap in which requests waited in the router."""
    whole: bool = False
    """True: the tokens of all ranks are known."""
    received_s: float = 0.0
    """When the first report of its end arrived."""


@dataclass(slots=True)
class _Instance:
    boots: dict[int, str] = field(default_factory=dict)
    """Boot id by DP rank. Each node of an engine has its own, so only a rank's second one shows a
    restart."""
    last_id: int = -1
    ended_s: float | None = None
    waited_at_end_s: float = 0.0
    launch_id: int = -1
    launched_s: float = 0.0
    waited_at_launch_s: float = 0.0
    launch_tokens: list[int | None] = field(default_factory=list)
    last: ShownPass | None = None

    def on_ended(
        self, name: str, tokens: list[int | None], report: EndForward, now_s: float, waited_s: float
    ) -> ShownPass | None:
        """Record the end of a pass; returns None if it was idle or already reported by another
        rank."""
        if report.forward_id == self.last_id:
            last = self.last
            if last is not None and not last.whole and report.dp_rank < len(last.tokens):
                last.tokens[report.dp_rank] = report.extend_tokens
            return None
        self.last_id = report.forward_id
        if report.forward_s <= 0 or not any(tokens):
            return None  # all ranks were idle
        end_s = now_s - report.age_s
        start_s = end_s - report.forward_s
        gathered = report.tokens_per_rank
        whole = None in tokens or (gathered is not None and len(gathered) == len(tokens))
        record = ShownPass(name, start_s, end_s, tokens, whole=whole, received_s=now_s)
        if self.ended_s is not None:
            record.gap_s = max(0.0, start_s - self.ended_s)
            if self.launch_id == report.forward_id:
                waste_s = self.waited_at_launch_s - self.waited_at_end_s
                record.waste_s = min(record.gap_s, max(0.0, waste_s))
        self.ended_s, self.waited_at_end_s, self.last = end_s, waited_s, record
        return record


class PassHistory:
    """Keeps the recent prefill passes. Pass every EndForward of prefill ranks to :meth:`on_report`,
    and take the finished passes."""

    def __init__(self) -> None:
        self._instances: dict[tuple[str, int | None], _Instance] = {}
        """State by instance name; without a barrier by name and DP rank."""
        self._unsettled: list[ShownPass] = []

    def on_report(
        self,
        instance: str,
        dp_size: int,
        report: EndForward,
        now_s: float,
        waited_s: float,
        *,
        barrier: bool = True,
    ) -> None:
        """Record a report. ``waited_s``: total time for which requests have waited in the
        router."""
        key = instance, None if barrier else report.dp_rank
        known = self._instances.get(key)
        if known is None or known.boots.get(report.dp_rank, report.boot_id) != report.boot_id:
            known = self._instances[key] = _Instance()
        known.boots[report.dp_rank] = report.boot_id
        if report.kind == "launch":
            if report.forward_id > max(known.launch_id, known.last_id):
                known.launch_id = report.forward_id
                known.launched_s = now_s - report.age_s
                known.waited_at_launch_s = waited_s
                known.launch_tokens = _tokens(report, dp_size, barrier)
        elif report.kind == "forward" and report.forward_id >= known.last_id:
            tokens = _tokens(report, dp_size, barrier)
            record = known.on_ended(instance, tokens, report, now_s, waited_s)
            if record is not None:
                self._unsettled.append(record)

    def running(self, instance: str) -> list[tuple[float, list[int | None]]]:
        """Return ``(start, tokens per rank)`` of the running passes as reported; at most one with a
        barrier."""
        return [
            (known.launched_s, known.launch_tokens)
            for (name, _), known in self._instances.items()
            if name == instance and known.launch_id > known.last_id
        ]

    def last_end_s(self, instance: str, rank: int) -> float | None:
        known = self._instances.get((instance, None)) or self._instances.get((instance, rank))
        return known.ended_s if known is not None else None

    def take(self, now_s: float) -> list[ShownPass]:
        """Return the complete passes that ended since the last call, oldest first."""
        ready = [p for p in self._unsettled if p.whole or now_s - p.received_s >= _SETTLE_S]
        if ready:
            self._unsettled = [p for p in self._unsettled if p not in ready]
        return ready


def _tokens(report: EndForward, dp_size: int, barrier: bool) -> list[int | None]:
    """Return the extend tokens by DP rank: of all ranks if the engine gathers them, otherwise only
    of the reporting one."""
    gathered = report.tokens_per_rank
    if barrier and gathered is not None and len(gathered) == dp_size:
        return list(gathered)
    tokens: list[int | None] = [0 if barrier else None] * dp_size
    if 0 <= report.dp_rank < dp_size:
        tokens[report.dp_rank] = report.extend_tokens
    return tokens
