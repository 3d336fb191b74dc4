"""From samples and EndForward messages to the figures of one run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from benchmarks.demo.load import Latency, Sample
from benchmarks.demo.passes import ForwardPass, PassBuilder, PassStatistics, pass_statistics
from benchmarks.listener import ReceivedMessage, engine_clocks

KV_STEP_S = 0.1
_LEAST_GAPS = 3


class KvBand(msgspec.Struct, frozen=True):
    mean_tokens: float
    """Per rank."""
    sigma_tokens: float
    """Mean over time of the standard deviation over ranks: half the width of the band."""


class Engines(msgspec.Struct, frozen=True):
    passes: PassStatistics
    own_gap_ms: float
    """Median pause before a pass when the engine already had work for it. NaN: seen too rarely."""
    bubble_beyond_share: float
    """Share of time in pauses of less than half the pass that follows, beyond ``own_gap_ms`` each.
    Longer ones are a lack of requests and in ``passes.idle_share`` only. NaN: ``own_gap_ms`` is."""
    kv: KvBand


class Answers(msgspec.Struct, frozen=True):
    completed: int
    failed: int
    errors: list[str]
    ttft_ms: Latency
    tpot_ms: Latency
    e2e_ms: Latency
    goodput_qps: float
    """Requests per second of load that were answered within the SLO."""


def answers(
    samples: Sequence[Sample], slo_ttft_s: float, slo_tpot_s: float, load_s: float
) -> Answers:
    """Figures of a load that was sent over ``load_s`` seconds."""
    done = [sample for sample in samples if sample.completed]
    within = sum(
        sample.ttft_s <= slo_ttft_s and not _tpot_s(sample) > slo_tpot_s for sample in done
    )
    return Answers(
        completed=len(done),
        failed=len(samples) - len(done),
        errors=sorted({sample.error[:300] for sample in samples if sample.error})[:3],
        ttft_ms=Latency.of([sample.ttft_s for sample in done]),
        tpot_ms=Latency.of([_tpot_s(sample) for sample in done if sample.output_tokens > 1]),
        e2e_ms=Latency.of([sample.e2e_s for sample in done]),
        goodput_qps=within / load_s,
    )


def _tpot_s(sample: Sample) -> float:
    """Seconds per output token after the first; NaN with only one."""
    if sample.output_tokens < 2:
        return math.nan
    return (sample.e2e_s - sample.ttft_s) / (sample.output_tokens - 1)


def engines(
    received: Sequence[ReceivedMessage], names: Mapping[str, str], begin_s: float, load_s: float
) -> Engines:
    """Figures of a load that was sent over ``load_s`` from ``begin_s`` on.

    ``names``: ``boot_id`` -> ``p0``, ``d0``. Messages of others are ignored. The first and the last
    tenth of the load are left out: filling and emptying say nothing about a policy.
    """
    received = [message for message in received if message.report.boot_id in names]
    clocks = engine_clocks(received)
    builder = PassBuilder()
    passes: list[ForwardPass] = []
    chunk_tokens = 0
    left: set[tuple[str, int]] = set()
    kv: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for message in received:
        report = message.report
        name = names[report.boot_id]
        if report.role == "decode":
            for rank in range(report.dp_size):  # one that says nothing has nothing
                kv.setdefault((name, rank), [])
            kv[name, report.dp_rank].append((message.at_s - begin_s, report.kv_tokens))
            continue
        chunk_tokens = report.chunk_tokens or chunk_tokens
        if report.kind == "forward" and (
            report.inflight_tokens or report.waiting_tokens or report.chunk_remainder_tokens
        ):
            left.add((name, report.forward_id))
        end_s = report.end_s + clocks.get(report.boot_id, 0.0) - begin_s
        # The nodes of an instance have boot ids of their own, and passes together.
        found = builder.add(name, replace(report, boot_id=name), end_s)
        if found is not None and found.end_s > 0:
            passes.append(found)
    window_s = (0.1 * load_s, 0.9 * load_s)
    own_ms, beyond = _gaps(passes, left, window_s)
    series = _kv_series(kv, load_s)
    return Engines(
        passes=pass_statistics(passes, chunk_tokens, window_s),
        own_gap_ms=own_ms,
        bubble_beyond_share=beyond,
        kv=_band([ranks for at_s, ranks in series if window_s[0] <= at_s <= window_s[1]]),
    )


def computed_tokens(received: Iterable[ReceivedMessage], names: Mapping[str, str]) -> int:
    """Prompt tokens of all passes that were launched, without what caches had."""
    return sum(
        message.report.extend_tokens
        for message in received
        if message.report.kind == "launch"
        and message.report.role == "prefill"
        and message.report.boot_id in names
    )


def _gaps(
    passes: Sequence[ForwardPass], left: set[tuple[str, int]], window_s: tuple[float, float]
) -> tuple[float, float]:
    """The engine's own pause (ms), and the share of time in short pauses beyond it.

    Left out: the first and last tenth of the load, and pauses of half the following pass or longer.
    NaN with fewer than three pauses that began with work left: the engine's own is not known.
    """
    own_s: list[float] = []
    short_s: list[float] = []
    span_s = 0.0
    for instance in {a_pass.instance for a_pass in passes}:
        mine = sorted(
            (
                a_pass
                for a_pass in passes
                if a_pass.instance == instance
                and window_s[0] <= a_pass.start_s
                and a_pass.end_s <= window_s[1]
            ),
            key=lambda a_pass: a_pass.start_s,
        )
        if not mine:
            continue
        span_s += mine[-1].end_s - mine[0].start_s
        for before, after in pairwise(mine):
            gap_s = max(0.0, after.start_s - before.end_s)
            if (instance, before.forward_id) in left:
                own_s.append(gap_s)
            # A longer pause is a lack of requests: it is in idle_share.
            if gap_s < 0.5 * (after.end_s - after.start_s):
                short_s.append(gap_s)
    if len(own_s) < _LEAST_GAPS or span_s <= 0:
        return math.nan, math.nan
    own = statistics.median(own_s)
    return 1e3 * own, sum(max(0.0, gap_s - own) for gap_s in short_s) / span_s


def _kv_series(
    kv: Mapping[tuple[str, int], Sequence[tuple[float, int]]], load_s: float
) -> list[tuple[float, list[int]]]:
    """All ranks at the same moments: what each said last."""
    ranks = sorted(kv)
    said = {rank: iter(kv[rank]) for rank in ranks}
    following = {rank: next(said[rank], None) for rank in ranks}
    latest = dict.fromkeys(ranks, 0)
    series = []
    for step in range(int(load_s / KV_STEP_S) + 1):
        at_s = step * KV_STEP_S
        for rank in ranks:
            while (message := following[rank]) is not None and message[0] <= at_s:
                latest[rank] = message[1]
                following[rank] = next(said[rank], None)
        series.append((round(at_s, 3), [latest[rank] for rank in ranks]))
    return series


def _band(moments: Sequence[Sequence[int]]) -> KvBand:
    moments = [ranks for ranks in moments if ranks]
    if not moments:
        return KvBand(math.nan, math.nan)
    return KvBand(
        mean_tokens=statistics.fmean(statistics.fmean(ranks) for ranks in moments),
        sigma_tokens=statistics.fmean(statistics.pstdev(ranks) for ranks in moments),
    )
