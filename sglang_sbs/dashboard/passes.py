"""Prefill passes as the engines report them, and the bubbles between them.

Without a barrier each rank makes passes of its own. Times are seconds of the scheduler's clock.

A *bubble* is time between two passes of an instance. It matters only if there was something to do:
``waste_s`` is how much of it passed while requests waited in the router's queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_sbs.wire import EndForward

_SETTLE_S = 0.1
"""Engines that do not gather the tokens of all ranks tell them one by one: wait so long for all."""


@dataclass(slots=True)
class PassRecord:
    instance: str
    start_s: float
    end_s: float
    tokens: list[int | None]
    """Extend tokens per DP rank; None: the rank had no part in it (there is no barrier)."""
    gap_s: float = 0.0
    """Between the end of the pass before and this start; 0 for the first one seen."""
    waste_s: float = 0.0
    """Of the gap: requests waited in the router meanwhile."""
    whole: bool = False
    """The tokens of all ranks are known."""
    heard_s: float = 0.0


@dataclass(slots=True)
class _Instance:
    boot_id: str = ""
    last_id: int = -1
    ended_s: float | None = None
    waited_at_end_s: float = 0.0
    launch_id: int = -1
    launched_s: float = 0.0
    waited_at_launch_s: float = 0.0
    launch_tokens: list[int | None] = field(default_factory=list)
    last: PassRecord | None = None

    def ended(
        self, name: str, tokens: list[int | None], report: EndForward, now_s: float, waited_s: float
    ) -> PassRecord | None:
        """The pass that has ended; none if it was idle, or another rank has told of it."""
        if report.forward_id == self.last_id:
            last = self.last
            if last is not None and not last.whole and report.dp_rank < len(last.tokens):
                last.tokens[report.dp_rank] = report.extend_tokens
            return None
        self.last_id = report.forward_id
        if report.forward_s <= 0 or not any(tokens):
            return None  # the ranks only kept each other company
        end_s = now_s - report.age_s
        start_s = end_s - report.forward_s
        gathered = report.tokens_per_rank
        whole = None in tokens or (gathered is not None and len(gathered) == len(tokens))
        record = PassRecord(name, start_s, end_s, tokens, whole=whole, heard_s=now_s)
        if self.ended_s is not None:
            record.gap_s = max(0.0, start_s - self.ended_s)
            if self.launch_id == report.forward_id:
                waste_s = self.waited_at_launch_s - self.waited_at_end_s
                record.waste_s = min(record.gap_s, max(0.0, waste_s))
        self.ended_s, self.waited_at_end_s, self.last = end_s, waited_s, record
        return record


class PassHistory:
    """Feed it every EndForward of prefill ranks; take finished passes from it."""

    def __init__(self) -> None:
        self._instances: dict[tuple[str, int | None], _Instance] = {}
        """By name; without a barrier by name and DP rank."""
        self._unsettled: list[PassRecord] = []

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
        """``waited_s``: for how long in all requests have waited in the router until now."""
        key = instance, None if barrier else report.dp_rank
        known = self._instances.get(key)
        if known is None or report.boot_id != known.boot_id:
            known = self._instances[key] = _Instance(boot_id=report.boot_id)
        if report.kind == "launch":
            if report.forward_id > max(known.launch_id, known.last_id):
                known.launch_id = report.forward_id
                known.launched_s = now_s - report.age_s
                known.waited_at_launch_s = waited_s
                known.launch_tokens = _tokens(report, dp_size, barrier)
        elif report.kind == "forward" and report.forward_id >= known.last_id:
            tokens = _tokens(report, dp_size, barrier)
            record = known.ended(instance, tokens, report, now_s, waited_s)
            if record is not None:
                self._unsettled.append(record)

    def running(self, instance: str) -> list[tuple[float, list[int | None]]]:
        """Start and tokens per rank of the passes that run, as reported; with a barrier there is
        one at most."""
        return [
            (known.launched_s, known.launch_tokens)
            for (name, _), known in self._instances.items()
            if name == instance and known.launch_id > known.last_id
        ]

    def last_end_s(self, instance: str, rank: int) -> float | None:
        known = self._instances.get((instance, None)) or self._instances.get((instance, rank))
        return known.ended_s if known is not None else None

    def take(self, now_s: float) -> list[PassRecord]:
        """Passes that ended since the last call and are known in full, oldest first."""
        ready = [p for p in self._unsettled if p.whole or now_s - p.heard_s >= _SETTLE_S]
        if ready:
            self._unsettled = [p for p in self._unsettled if p not in ready]
        return ready


def _tokens(report: EndForward, dp_size: int, barrier: bool) -> list[int | None]:
    """Of every rank if the engine gathers them, else of this one."""
    gathered = report.tokens_per_rank
    if barrier and gathered is not None and len(gathered) == dp_size:
        return list(gathered)
    tokens: list[int | None] = [0 if barrier else None] * dp_size
    if 0 <= report.dp_rank < dp_size:
        tokens[report.dp_rank] = report.extend_tokens
    return tokens
