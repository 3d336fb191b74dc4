"""Is all well? One answer from a snapshot: green, amber or red, the cause, and what to do."""

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
"""Causes before their consequences, among alerts that are equally severe."""


class Wellness(msgspec.Struct, frozen=True):
    """The line at the head of the dashboard and of ``sglang-sbs top``."""

    level: Level
    cause: str
    """In words; with green, what runs."""
    todo: str
    """What to do about it; empty with green."""
    kind: str = ""
    """The alert that it is about, with its ``subject``."""
    subject: str = ""
    more: int = 0
    """Further alerts."""


def is_all_well(snapshot: Snapshot, alerts: Sequence[Alert]) -> Wellness:
    """``alerts``: what :func:`.find_alerts` made of the same snapshot."""
    if not alerts:
        return Wellness("green", _running(snapshot), "")
    first = min(alerts, key=lambda one: (one.severity != "critical", _place(one.kind)))
    return Wellness(
        "red" if first.severity == "critical" else "amber",
        first.text,
        first.todo,
        first.kind,
        first.subject,
        len(alerts) - 1,
    )


def _place(kind: str) -> int:
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def _running(snapshot: Snapshot) -> str:
    """Changes rarely, so that the line is calm."""
    up = sum(one.up for one in snapshot.prefill), sum(one.up for one in snapshot.decode)
    busy = snapshot.in_flight_requests or snapshot.queue_requests
    return f"{up[0]} prefill and {up[1]} decode instances are up, {'busy' if busy else 'idle'}"
