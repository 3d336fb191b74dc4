"""Tables and lines of faults: of engines, and of schedulers and front ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.chaos.ha.run import HaResult
from benchmarks.chaos.run import FaultResult

Columns = Mapping[str, Callable[[Any], str]]
_LEFT = ("fault", "errors")


def _errors(result: FaultResult | HaResult) -> str:
    return "\n".join(f"{count} x {label}" for label, count in sorted(result.errors.items()))


def _streams(result: FaultResult) -> str:
    return "{running}: {answered}/{error}/{cut_off}".format(**result.streams)


def _seconds(value: float | None, missing: str) -> str:
    return missing if value is None else f"{value:.1f}"


def _ttft(mean_s: float, worst_s: float) -> str:
    return f"{1e3 * mean_s:.0f} ({1e3 * worst_s:.0f})"


OF_ENGINES: Columns = {
    "fault": lambda result: result.fault,
    "accepted": lambda result: str(result.accepted),
    "answered": lambda result: str(result.answered),
    "errors": _errors,
    "cut off": lambda result: str(result.cut_off),
    "unanswered": lambda result: str(result.unanswered),
    "streams then: ended/error/cut": _streams,
    "lasted s": lambda result: f"{result.fault_s:.1f}",
    "recovered s": lambda result: _seconds(result.recovery_s, "no"),
    "TTFT ms before (worst)": lambda result: _ttft(
        result.ttft_before_s, result.ttft_worst_before_s
    ),
    "during (worst)": lambda result: _ttft(result.ttft_during_s, result.ttft_worst_s),
    "left over": lambda result: str(sum(result.left_over.values())),
}
OF_SCHEDULERS: Columns = {
    "fault": lambda result: result.fault,
    "requests": lambda result: str(result.requests),
    "lost": lambda result: str(result.lost),
    "longest pause s": lambda result: f"{result.longest_pause_s:.2f}",
    "before s": lambda result: f"{result.longest_before_s:.2f}",
    "asked again": lambda result: str(result.repeated),
    "taken over after s": lambda result: _seconds(result.takeover_s, ""),
    "as before after s": lambda result: _seconds(result.recovery_s, "no"),
    "left over": lambda result: str(sum(result.left_over.values())),
    "errors": _errors,
}


def table(columns: Columns, results: Sequence[Any]) -> Table:
    """A row per fault."""
    made = Table(title="what clients saw")
    for name in columns:
        made.add_column(name, justify="left" if name in _LEFT else "right")
    for result in results:
        made.add_row(*(cell(result) for cell in columns.values()))
    return made


def outcome(result: FaultResult | HaResult) -> str:
    if isinstance(result, HaResult):
        return (
            f"{result.lost} of {result.requests} lost, longest pause {result.longest_pause_s:.1f} s"
        )
    parts = [f"{result.answered} of {result.accepted} answered"]
    parts += [f"{count} x {label}" for label, count in sorted(result.errors.items())]
    if result.cut_off:
        parts.append(f"{result.cut_off} cut off")
    if result.unanswered:
        parts.append(f"{result.unanswered} unanswered")
    if result.left_over:
        parts.append(f"left over: {result.left_over}")
    return ", ".join(parts)
