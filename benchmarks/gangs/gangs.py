"""How whole the batches of a router arrive at the engines, read from its event log.

A *gang* is what a router sends to one prefill instance in one batch. It is whole if one forward
pass starts all of it. Owns the figures. Must not know how a run is made.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sglang_sbs.evaluate.fitting.recording import clock_offsets
from sglang_sbs.scheduling import Dispatch, ForwardEnded
from sglang_sbs.scheduling.eventlog import LogRecord, read_event_log
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.endforward import Started

AIM_S = 5e-3
"""The spread that a gang is to stay under."""

Launches = Mapping[tuple[str, int, int], EndForward]
"""By instance, forward id and DP rank."""


@dataclass(frozen=True, slots=True)
class Member:
    """One request of a gang, as the engine saw it."""

    rank: int
    forward_id: int
    """The pass that started it."""
    started: Started


@dataclass(slots=True)
class Gang:
    """The requests of one batch that went to one instance."""

    instance: str
    dispatched_s: float
    """Router's clock."""
    log: str = ""
    sent: set[str] = field(default_factory=set)
    """Request ids."""
    members: dict[str, Member] = field(default_factory=dict)
    """By request id, once a pass started it."""
    offset_s: float = 0.0
    """Router's clock minus engine's."""
    followed: list[int] = field(default_factory=list)
    """Passes that started requests which were sent after it, to be in the same."""
    torn: bool = False
    """A pass left some of it behind although their rank had room, or who follows it went before."""
    overflowed: bool = False
    """A pass left some of it behind as their rank's chunk was full."""

    @property
    def known(self) -> bool:
        """It has two requests at least, and what became of all is in the log."""
        return len(self.sent) > 1 and len(self.members) == len(self.sent)

    @property
    def passes(self) -> set[tuple[str, str, int]]:
        return {(self.log, self.instance, one.forward_id) for one in self.members.values()}

    @property
    def spread_s(self) -> float:
        """Between the first and the last of its requests becoming schedulable."""
        return _span(one.started.schedulable_s for one in self.members.values())

    @property
    def arrival_spread_s(self) -> float:
        """Between the first and the last of its requests reaching their scheduler processes."""
        return _span(one.started.queued_s for one in self.members.values())

    @property
    def way_s(self) -> float:
        """From the router's decision until all of it was schedulable."""
        last_s = max(one.started.schedulable_s for one in self.members.values())
        return last_s + self.offset_s - self.dispatched_s


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What event logs say; times in milliseconds."""

    gangs: int
    """Of at least two requests."""
    requests: int
    """In them."""
    spread_p50_ms: float
    spread_p90_ms: float
    spread_p99_ms: float
    within_aim_share: float
    """Of the gangs: their spread is under ``AIM_S``."""
    arrival_spread_p50_ms: float
    arrival_spread_p90_ms: float
    way_p50_ms: float
    way_p90_ms: float
    passes: int
    """That started requests of such gangs."""
    torn: int
    """Of them, those that left some of a gang behind although there was room."""
    torn_share: float
    overflowed: int
    """Gangs that were cut by a full chunk."""


def read_gangs(path: Path, skip: int = 0) -> list[Gang]:
    """The gangs of an event log whose requests all came to a pass, without those of the first
    ``skip`` requests.

    Raises:
        OSError, ValueError: it cannot be read, or its engines do not say when requests started.
    """
    gangs = gangs_of(list(read_event_log(path)), skip, str(path))
    if not gangs:
        raise ValueError(
            f"{path} has no batch of two requests whose passes are known: it needs --policy sbs "
            "and engines with the plugin of this release"
        )
    return gangs


def gangs_of(records: Sequence[LogRecord], skip: int = 0, log: str = "") -> list[Gang]:
    """See :func:`read_gangs`."""
    gangs: dict[tuple[str, int], Gang] = {}
    owner: dict[str, Gang] = {}
    newest: dict[str, Gang] = {}
    leaders: dict[str, Gang] = {}
    """Of the requests that follow one."""
    launches: dict[tuple[str, int, int], EndForward] = {}
    dispatched = 0
    for record in records:
        for command in record.commands:
            if not isinstance(command, Dispatch):
                continue
            dispatched += 1
            if dispatched > skip:
                gang = gangs.setdefault(
                    (command.prefill, command.batch), Gang(command.prefill, record.now_s, log)
                )
                gang.sent.add(command.rid)
                owner[command.rid] = gang
                if not command.joins:
                    newest[command.prefill] = gang
                elif (leader := newest.get(command.prefill)) is not None:
                    leaders[command.rid] = leader
        event = record.event
        if isinstance(event, ForwardEnded) and event.report.role == "prefill":
            report = event.report
            if report.kind == "launch":
                launches[event.instance, report.forward_id, report.dp_rank] = report
                _note(event.instance, report, owner)
                for started in report.started:
                    if started.rid in leaders:
                        leaders[started.rid].followed.append(report.forward_id)
    offsets_s = clock_offsets(records)
    known = [gang for gang in gangs.values() if gang.known]
    for gang in known:
        gang.offset_s = offsets_s[gang.instance]
        _judge(gang, launches)
    return known


def _note(instance: str, report: EndForward, owner: Mapping[str, Gang]) -> None:
    for started in report.started:
        gang = owner.get(started.rid)
        if gang is not None and gang.instance == instance and started.schedulable_s:
            gang.members[started.rid] = Member(report.dp_rank, report.forward_id, started)


def _judge(gang: Gang, launches: Launches) -> None:
    first = min(one.forward_id for one in gang.members.values())
    left = {one.rank for one in gang.members.values() if one.forward_id != first}
    gang.torn = any(not _full(launches.get((gang.instance, first, rank))) for rank in left)
    gang.torn |= min(gang.followed, default=first) < first
    gang.overflowed = bool(left) and not gang.torn


def _full(launch: EndForward | None) -> bool:
    """Whether the rank's part of a pass had no room for another request."""
    return launch is not None and (
        launch.chunk_remainder_tokens > 0 or launch.extend_tokens >= launch.chunk_tokens
    )


def figures(gangs: Sequence[Gang]) -> Figures:
    """Of at least one gang, from one log or several."""
    spreads_s = [gang.spread_s for gang in gangs]
    arrivals_s = [gang.arrival_spread_s for gang in gangs]
    ways_s = [gang.way_s for gang in gangs]
    passes = set[tuple[str, str, int]]().union(*(gang.passes for gang in gangs))
    torn = {min(gang.passes) for gang in gangs if gang.torn}
    return Figures(
        gangs=len(gangs),
        requests=sum(len(gang.members) for gang in gangs),
        spread_p50_ms=_quantile_ms(spreads_s, 0.5),
        spread_p90_ms=_quantile_ms(spreads_s, 0.9),
        spread_p99_ms=_quantile_ms(spreads_s, 0.99),
        within_aim_share=statistics.fmean(spread_s < AIM_S for spread_s in spreads_s),
        arrival_spread_p50_ms=_quantile_ms(arrivals_s, 0.5),
        arrival_spread_p90_ms=_quantile_ms(arrivals_s, 0.9),
        way_p50_ms=_quantile_ms(ways_s, 0.5),
        way_p90_ms=_quantile_ms(ways_s, 0.9),
        passes=len(passes),
        torn=len(torn),
        torn_share=len(torn) / len(passes),
        overflowed=sum(gang.overflowed for gang in gangs),
    )


def _span(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[-1] - ordered[0] if ordered else math.nan


def _quantile_ms(values_s: Iterable[float], share: float) -> float:
    ordered = sorted(values_s)
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]
