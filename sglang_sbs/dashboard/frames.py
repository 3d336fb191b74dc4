"""Parts of the dashboard's frames: passes, gangs and instances as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any

import msgspec

from sglang_sbs.dashboard.passes import ShownPass
from sglang_sbs.scheduling.snapshot import DecodeState, PrefillState
from sglang_sbs.wire.balance import active_ranks, max_over_mean


class Gang(msgspec.Struct):
    batch: int
    at_s: float
    prefill: str
    reason: str
    held_min_s: float
    requests: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    held_max_s: float = 0.0
    ranks: dict[int, int] = {}
    """Number of the batch's requests by prefill DP rank."""
    rids: list[str] = []
    """Ids of the first few requests of the batch."""


def prefill_shown(
    state: PrefillState, running: Iterable[tuple[float, list[int | None]]], stale_s: float
) -> dict[str, Any]:
    """Describe a prefill instance. ``running``: its running passes, from
    :meth:`.PassHistory.running`."""
    return {
        "instance": state.instance,
        "up": state.up,
        "tier": state.tier,
        "ready": state.ready,
        "free_in_s": round(state.predicted_free_in_s, 3),
        "error_s": round(state.prediction_error_s, 4),
        "passes": state.passes,
        "watchdog_fires": state.watchdog_fires,
        "chunk": state.chunk_tokens,
        "barrier": state.barrier,
        "running": [[round(at_s, 3), tokens] for at_s, tokens in running],
        "c_avail": [rank.c_avail for rank in state.ranks],
        "flight": [rank.flight_tokens for rank in state.ranks],
        "queued": [rank.queued_tokens for rank in state.ranks],
        "requests": [rank.outstanding_requests for rank in state.ranks],
        "age": [rounded(rank.age_s, 2) for rank in state.ranks],
        "stale_s": round(stale_s, 2),
    }


def pass_shown(a_pass: ShownPass) -> list[Any]:
    """Return a pass as a list: instance, start, end, preceding gap, wasted part of that gap, and
    tokens per rank."""
    return [
        a_pass.instance,
        round(a_pass.start_s, 3),
        round(a_pass.end_s, 3),
        round(a_pass.gap_s, 4),
        round(a_pass.waste_s, 4),
        a_pass.tokens,
    ]


def balance_of(passes: Iterable[ShownPass]) -> dict[str, float] | None:
    """Return the mean number of ranks with tokens per pass, the number of ranks, and the ratio of
    the heaviest rank to the mean; None without passes."""
    known = [[n for n in a_pass.tokens if n is not None] for a_pass in passes]
    if not known:
        return None
    return {
        "active_ranks": round(fmean(map(active_ranks, known)), 2),
        "ranks": round(fmean(map(len, known)), 2),
        "max_over_mean": round(fmean(max_over_mean(tokens) for tokens in known if any(tokens)), 2),
    }


def gang_shown(gang: Gang) -> dict[str, Any]:
    return msgspec.structs.asdict(gang) | {
        "at_s": round(gang.at_s, 3),
        "held_min_s": round(gang.held_min_s, 4),
        "held_max_s": round(gang.held_max_s, 4),
        "ranks": sorted(gang.ranks.items()),
    }


def decode_shown(state: DecodeState, stale_s: float) -> dict[str, Any]:
    return {
        "instance": state.instance,
        "up": state.up,
        "kv_capacity": state.kv_capacity_tokens,
        "max_running": state.max_running,
        "running": [rank.running for rank in state.ranks],
        "kv": [rank.kv_tokens for rank in state.ranks],
        "flight": [rank.flight_requests for rank in state.ranks],
        "age": [rounded(rank.age_s, 2) for rank in state.ranks],
        "stale_s": round(stale_s, 2),
    }


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
