"""Reads an event log into timelines, and replays it to find the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_sbs.scheduling import (
    InstanceUp,
    PolicySwitched,
    RequestArrived,
    Scheduler,
    SchedulerConfig,
)
from sglang_sbs.scheduling.eventlog import read_event_log
from sglang_sbs.scheduling.explained.stories import AttemptStory, Story
from sglang_sbs.scheduling.explained.timelines import Timeline, Timelines

MOST_REQUESTS = 1_000_000


@dataclass
class ReadLog:
    config: SchedulerConfig
    observed: bool = False
    """True: the log is from ``sglang-sbs observe``, so no scheduler of ours made the decisions."""
    began_s: float = 0.0
    ended_s: float = 0.0
    events: int = 0
    torn_bytes: int = 0
    differs_at: int = 0
    """Number of the first event for which this release decides differently; 0: none, or not
    replayed."""
    instances: dict[str, InstanceUp] = field(default_factory=dict)
    timelines: Timelines = field(default_factory=lambda: Timelines(MOST_REQUESTS))
    order: list[str] = field(default_factory=list)
    """Request ids in order of arrival."""
    scheduler: Scheduler | None = None
    switches: list[tuple[float, str]] = field(default_factory=list)
    """Time of each policy switch, and the new policy."""

    def requests(self) -> list[Timeline]:
        return [timeline for rid in self.order if (timeline := self.timelines.get(rid)) is not None]

    def refusals(self) -> Counter[str]:
        found = (timeline.refusal for timeline in self.requests())
        return Counter(refusal.cause for refusal in found if refusal is not None)

    def story(self, name: str) -> Story | None:
        """Find a request by rid or ``x-request-id``. None if the log does not have it."""
        requests = self.requests()
        mine = [each for each in requests if name in (each.rid, _request_id(each))]
        if len(mine) == 1 and (same := _request_id(mine[0])):
            mine = [each for each in requests if _request_id(each) == same]
        if not mine:
            return None
        attempts = [self._attempt(timeline) for timeline in mine]
        return Story(request_id=_request_id(mine[0]) or "", attempts=attempts)

    def _attempt(self, timeline: Timeline) -> AttemptStory:
        scheduler = self.scheduler
        why = None if scheduler is None else scheduler.why(timeline.rid, self.ended_s)
        return AttemptStory(timeline, why, self.ended_s)


def _request_id(timeline: Timeline) -> str | None:
    return None if timeline.client is None else timeline.client.request_id


def read(path: Path, *, replay: bool) -> ReadLog:
    """Read a log. ``replay``: also compute the reasons, which a log does not contain, up to the
    first event for which this release decides differently. Raises: OSError, ValueError, the log
    cannot be read."""
    log: ReadLog | None = None
    scheduler: Scheduler | None = None
    torn: list[int] = []
    for record in read_event_log(path, torn.append):
        if record.event is None:
            log = ReadLog(record.config or SchedulerConfig(), observed=record.observed)
            if replay and not record.observed:
                scheduler = log.scheduler = Scheduler(log.config, remembers=MOST_REQUESTS)
            continue
        if log is None:
            raise ValueError(f"{path} does not start with a configuration")
        log.events += 1
        log.began_s = log.began_s or record.now_s
        log.ended_s = record.now_s
        _note(log, record.event, record.now_s)
        if scheduler is not None:
            commands: Sequence[object] = scheduler.handle(record.event, record.now_s)
            if commands != record.commands:
                log.differs_at, scheduler = log.events, None
        log.timelines.observe(record.event, record.commands, record.now_s)
    if log is None:
        raise ValueError(f"{path} is empty")
    log.torn_bytes = sum(torn)
    return log


def _note(log: ReadLog, event: object, now_s: float) -> None:
    if isinstance(event, RequestArrived):
        log.order.append(event.rid)
    elif isinstance(event, InstanceUp):
        log.instances[event.instance] = event
    elif isinstance(event, PolicySwitched):
        log.switches.append((now_s, event.policy))
