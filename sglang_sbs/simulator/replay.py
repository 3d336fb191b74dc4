"""Re-runs the event log of a real router (:mod:`sglang_sbs.scheduling.eventlog`) and compares every
decision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_sbs.scheduling import Scheduler
from sglang_sbs.scheduling.eventlog import read_event_log


@dataclass(slots=True)
class ReplayResult:
    events: int = 0
    commands: int = 0
    difference: str = ""
    """The first difference; empty if there is none."""
    torn_bytes: int = 0
    """Size of an incomplete last record."""


def replay(path: Path) -> ReplayResult:
    """Feed the recorded events to a fresh scheduler of the recorded configuration. Raises: OSError,
    ValueError: the log cannot be read."""
    scheduler: Scheduler | None = None
    result = ReplayResult()

    def torn(size: int) -> None:
        result.torn_bytes = size

    for record in read_event_log(path, torn):
        if record.observed:
            raise ValueError(
                f"{path} is of `sglang-sbs observe`: it has no decisions to compare. Simulate its "
                f"arrivals with `sglang-sbs simulate trace:{path}`"
            )
        if record.event is None:
            scheduler = Scheduler(record.config)
            continue
        if scheduler is None:
            raise ValueError(f"{path} does not start with a configuration")
        result.events += 1
        commands = scheduler.handle(record.event, record.now_s)
        result.commands += len(commands)
        if commands != record.commands:
            result.difference = f"{record.event}: now {commands}, recorded {record.commands}"
            break
    return result
