"""Judges the overall state from a snapshot: green, amber or red, its cause, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from sglang_sbs.dashboard.health.alerts import Alert
from sglang_sbs.scheduling.snapshot import Snapshot

Level = Literal["green", "amber", "red"]

_ORDER = (
    *("alone", "no_prefill", "no_decode", "down", "scheduler_errors", "stalled", "watchdog"),
    *("failing", "throttled", "slow_prefill", "decode_full", "fallback", "stale", "not_holding"),
    *("slow_way", "bubbles", "cost_model", "slow_ttft", "queue", "refused", "problem", "drained"),
)
"""All kinds of alerts, causes before their consequences: orders equally severe alerts."""


class Wellness(msgspec.Struct, frozen=True):
    """The first line of the dashboard and of ``sglang-sbs top``."""

    level: Level
    cause: str
    """Cause of the level; if it is green, what is running."""
    todo: str
    """The recommended action; empty if the level is green."""
    kind: str = ""
    """Kind of the alert that the state is based on, with its ``subject``."""
    subject: str = ""
    more: int = 0


def is_all_well(snapshot: Snapshot, alerts: Sequence[Alert]) -> Wellness:
    """Return the state. ``alerts``: those that :func:`.find_alerts` returned for the same
    snapshot."""
    if not alerts:
        return Wellness("green", _running(snapshot), "")
    first = min(alerts, key=lambda alert: (alert.severity != "critical", _ORDER.index(alert.kind)))
    return Wellness(
        "red" if first.severity == "critical" else "amber",
        first.text,
        first.todo,
        first.kind,
        first.subject,
        len(alerts) - 1,
    )


def _running(snapshot: Snapshot) -> str:
    """Summarize the running instances. The text changes rarely, so that the line is calm."""
    up = sum(state.up for state in snapshot.prefill), sum(state.up for state in snapshot.decode)
    busy = snapshot.in_flight_requests or snapshot.queue_requests
    return f"{up[0]} prefill and {up[1]} decode instances are up, {'busy' if busy else 'idle'}"
