"""Reads the work of engines from a router's event log."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec

from sglang_sbs.scheduling import Dispatch, ForwardEnded
from sglang_sbs.scheduling.eventlog import read_event_log
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.balance import active_ranks, max_over_mean

_GAP_SHARE = 0.5
"""A pause longer than this share of a pass is a lack of requests, not the engine's own gap."""


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One prefill pass; times in seconds of the router's clock."""

    instance: str
    start_s: float
    end_s: float
    tokens: tuple[int, ...]
    """Extend tokens per DP rank; of the one that made it, where each makes passes of its own."""
    forward_id: int = field(default=0, compare=False)

    @property
    def active_ranks(self) -> int:
        return active_ranks(self.tokens)


@dataclass(slots=True)
class EngineRecord:
    """Everything a router's event log says about the engines, by instance name."""

    prefill_ranks: Counter[str] = field(default_factory=Counter)
    """Requests dispatched, by ``p0/0``."""
    decode_ranks: Counter[str] = field(default_factory=Counter)
    endforward: Counter[str] = field(default_factory=Counter)
    """EndForward messages of kind ``forward``, by rank, prefill and decode."""
    pairs: dict[str, tuple[str, str]] = field(default_factory=dict)
    passes: list[ForwardPass] = field(default_factory=list)
    chunk_tokens: int = 0


class PassBuilder:
    """Puts the reports of all DP ranks about a prefill pass together, where they share it."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str, int], list[int]] = {}
        self._seen: set[tuple[str, str, int]] = set()

    def add(self, instance: str, report: EndForward, end_s: float) -> ForwardPass | None:
        """The pass, at the first report of its end; ``end_s`` on the receiver's clock."""
        if report.role != "prefill":
            return None
        rank, ranks = report.dp_rank, report.dp_size
        if not report.barrier:
            instance, rank, ranks = f"{instance}/{rank}", 0, 1
        key = (instance, report.boot_id, report.forward_id)
        if report.kind == "launch":
            tokens = self._open.setdefault(key, [0] * ranks)
            tokens[rank] = report.extend_tokens
        if report.kind != "forward":
            return None
        tokens = self._open.pop(key, [])
        if key in self._seen or not any(tokens):
            return None
        self._seen.add(key)
        start_s = end_s - report.forward_s
        return ForwardPass(instance, start_s, end_s, tuple(tokens), report.forward_id)


class PassStatistics(msgspec.Struct, frozen=True):
    """Over all prefill instances, between the first launch and the last end of each."""

    passes: int
    tokens_per_pass: float
    chunk_utilization: float
    """Share of the token capacity of the passes that was used."""
    active_ranks: float
    """Mean share of DP ranks with tokens in a pass."""
    idle_share: float
    """Share of time with no pass on the device."""
    gap_ms_p50: float
    """Pause before a pass that follows another without running out of requests."""
    bubble_share: float
    """Share of time lost in those pauses."""
    active_rank_count: float = math.nan
    """Mean number of DP ranks with tokens in a pass."""
    max_over_mean: float = math.nan
    """Tokens of the heaviest rank over the mean of all ranks, mean over passes."""


def read_engines(log: Path, names: Mapping[str, str]) -> EngineRecord:
    """Read an event log; ``names`` maps worker URLs to short names (``p0``)."""
    record = EngineRecord()
    builder = PassBuilder()
    for entry in read_event_log(log):
        for command in entry.commands:
            if isinstance(command, Dispatch):
                prefill = f"{names[command.prefill]}/{command.prefill_rank}"
                decode = f"{names[command.decode]}/{command.decode_rank}"
                record.prefill_ranks[prefill] += 1
                record.decode_ranks[decode] += 1
                record.pairs[command.rid] = (prefill, decode)
        if not isinstance(entry.event, ForwardEnded):
            continue
        report = entry.event.report
        name = names[entry.event.instance]
        if report.kind == "forward":
            record.endforward[f"{name}/{report.dp_rank}"] += 1
            if report.role == "prefill":
                record.chunk_tokens = report.chunk_tokens or record.chunk_tokens
        a_pass = builder.add(name, report, entry.now_s - report.age_s)
        if a_pass is not None:
            record.passes.append(a_pass)
    return record


def pass_statistics(
    passes: Iterable[ForwardPass],
    chunk_tokens: int,
    window_s: tuple[float, float] = (-math.inf, math.inf),
) -> PassStatistics:
    """Summarise the passes that lie wholly in ``window_s``."""
    by_instance: dict[str, list[ForwardPass]] = {}
    for a_pass in passes:
        if window_s[0] <= a_pass.start_s and a_pass.end_s <= window_s[1]:
            by_instance.setdefault(a_pass.instance, []).append(a_pass)
    inside = [a_pass for ones in by_instance.values() for a_pass in ones]
    if not inside:
        return PassStatistics(0, *[math.nan] * 6)
    span_s = busy_s = 0.0
    gaps_s: list[float] = []
    for ones in by_instance.values():
        ones.sort(key=lambda a_pass: a_pass.start_s)
        span_s += ones[-1].end_s - ones[0].start_s
        busy_s += sum(a_pass.end_s - a_pass.start_s for a_pass in ones)
        for before, after in pairwise(ones):
            gap_s = max(0.0, after.start_s - before.end_s)
            if gap_s < _GAP_SHARE * (after.end_s - after.start_s):
                gaps_s.append(gap_s)
    return PassStatistics(
        passes=len(inside),
        tokens_per_pass=statistics.mean(sum(a_pass.tokens) for a_pass in inside),
        chunk_utilization=statistics.mean(
            sum(a_pass.tokens) / (len(a_pass.tokens) * chunk_tokens or math.nan)
            for a_pass in inside
        ),
        active_ranks=statistics.mean(a_pass.active_ranks / len(a_pass.tokens) for a_pass in inside),
        idle_share=1 - busy_s / span_s if span_s > 0 else math.nan,
        gap_ms_p50=1e3 * statistics.median(gaps_s) if gaps_s else math.nan,
        bubble_share=sum(gaps_s) / span_s if span_s > 0 else math.nan,
        active_rank_count=statistics.fmean(a_pass.active_ranks for a_pass in inside),
        max_over_mean=statistics.fmean(max_over_mean(a_pass.tokens) for a_pass in inside),
    )
