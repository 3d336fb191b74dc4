"""What clients saw, as tables and lines: of engines' faults, and of schedulers' and front ends'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.chaos.ha.run import HaResult
from benchmarks.chaos.run import FaultResult

Columns = Mapping[str, Callable[[Any], str]]
_LEFT = ("fault", "errors")


def _errors(one: FaultResult | HaResult) -> str:
    return "\n".join(f"{count} x {label}" for label, count in sorted(one.errors.items()))


def _seconds(value: float | None, missing: str) -> str:
    return missing if value is None else f"{value:.1f}"


def _ttft(mean_s: float, worst_s: float) -> str:
    return f"{1e3 * mean_s:.0f} ({1e3 * worst_s:.0f})"


OF_ENGINES: Columns = {
    "fault": lambda one: one.fault,
    "accepted": lambda one: str(one.accepted),
    "answered": lambda one: str(one.answered),
    "errors": _errors,
    "cut off": lambda one: str(one.cut_off),
    "unanswered": lambda one: str(one.unanswered),
    "streams then: ended/error/cut": lambda one: (
        f"{one.streams.running}: {one.streams.answered}/{one.streams.error}/{one.streams.cut_off}"
    ),
    "lasted s": lambda one: f"{one.fault_s:.1f}",
    "recovered s": lambda one: _seconds(one.recovery_s, "no"),
    "TTFT ms before (worst)": lambda one: _ttft(one.ttft_before_s, one.ttft_worst_before_s),
    "during (worst)": lambda one: _ttft(one.ttft_during_s, one.ttft_worst_s),
    "left over": lambda one: str(sum(one.left_over.values())),
}
OF_SCHEDULERS: Columns = {
    "fault": lambda one: one.fault,
    "requests": lambda one: str(one.requests),
    "lost": lambda one: str(one.lost),
    "longest pause s": lambda one: f"{one.longest_pause_s:.2f}",
    "before s": lambda one: f"{one.longest_before_s:.2f}",
    "asked again": lambda one: str(one.repeated),
    "taken over after s": lambda one: _seconds(one.takeover_s, ""),
    "as before after s": lambda one: _seconds(one.recovery_s, "no"),
    "left over": lambda one: str(sum(one.left_over.values())),
    "errors": _errors,
}


def table(columns: Columns, results: Sequence[Any]) -> Table:
    """A row per fault."""
    made = Table(title="what clients saw")
    for name in columns:
        made.add_column(name, justify="left" if name in _LEFT else "right")
    for one in results:
        made.add_row(*(cell(one) for cell in columns.values()))
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
