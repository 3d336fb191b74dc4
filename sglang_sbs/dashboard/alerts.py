"""What somebody on call should look at, from one snapshot and what happened in the last minute.
Every text says what is wrong and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from sglang_sbs.plain_words import counted
from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.policy_names import facts_of
from sglang_sbs.scheduling.snapshot import DecodeState, PrefillState, Snapshot

STALE_S = 3.0
"""EndForward is sent with every pass, and every second while idle."""
STALE_PASSES = 5.0
"""Where passes are long: so many mean forward times."""
NEAR_LIMIT = 0.8
_FALLBACK = {
    "load_poll": "load polls",
    "http": "the engine's own answers",
    "interval": "fixed intervals",
}

Severity = Literal["critical", "warning"]


class Alert(msgspec.Struct, frozen=True):
    """One line for people; ``subject`` is a worker's URL, or empty."""

    severity: Severity
    kind: str
    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class Recent:
    """What the snapshot does not tell."""

    refusals: Mapping[str, int] = field(default_factory=dict)
    """Within the last minute, by cause."""
    watchdog_fires: Mapping[str, int] = field(default_factory=dict)
    """Within the last minute, by instance."""
    problems: Sequence[tuple[str, str]] = ()
    """Of workers, as ``GET /workers`` shows them."""
    scheduler_errors: int = 0
    alone: bool = False
    """This front end is without the scheduler process."""


def find_alerts(snapshot: Snapshot, config: SchedulerConfig, recent: Recent) -> list[Alert]:
    """Most severe first."""
    return sorted(_alerts(snapshot, config, recent), key=lambda alert: alert.severity != "critical")


def _alerts(snapshot: Snapshot, config: SchedulerConfig, recent: Recent) -> Iterator[Alert]:
    if recent.alone:
        text = (
            "this front end is without the scheduler process and places requests at once: "
            "see whether that process runs"
        )
        yield Alert("critical", "alone", "", text)
    yield from _cluster(snapshot)
    yield from _queue(snapshot, config)
    for cause, count in sorted(recent.refusals.items()):
        requests = counted(count, "request")
        yield Alert("warning", "refused", "", f"{requests} refused in 60 s: {cause}")
    stale_s = max(STALE_S, STALE_PASSES * snapshot.mean_forward_s)
    feedback = facts_of(snapshot.policy).reads_reports
    for prefill in snapshot.prefill:
        yield from _prefill(prefill, recent.watchdog_fires.get(prefill.instance, 0), feedback)
        yield from _stale(prefill, stale_s)
    for decode in snapshot.decode:
        yield from _stale(decode, stale_s)
    for subject, text in recent.problems:
        yield Alert("warning", "problem", subject, text)
    if recent.scheduler_errors:
        failed = f"the scheduler failed on {counted(recent.scheduler_errors, 'event')}"
        text = f"{failed}: a defect; the router's log has the cause"
        yield Alert("critical", "scheduler_errors", "", text)


def _cluster(snapshot: Snapshot) -> Iterator[Alert]:
    for role, instances in (("prefill", snapshot.prefill), ("decode", snapshot.decode)):
        if not any(one.up for one in instances):
            text = f"no {role} instance is up: every request is refused"
            yield Alert("critical", f"no_{role}", "", text)
            continue
        for name in (one.instance for one in instances if not one.up):
            yield Alert("critical", "down", name, f"this {role} instance is down")


def _queue(snapshot: Snapshot, config: SchedulerConfig) -> Iterator[Alert]:
    if snapshot.policy == "sbs" and not snapshot.holding:
        text = (
            "holding is off: batches do not arrive whole at the engines, so requests leave at "
            "once; give the router's and the engines' hosts more CPU"
        )
        yield Alert("warning", "not_holding", "", text)
    if snapshot.throttled:
        text = (
            "flow control refuses new requests: one has waited more than "
            f"{config.n_limit} scheduling cycles (--sbs-n-limit); add prefill capacity"
        )
        yield Alert("critical", "throttled", "", text)
    for held, limit, what in (
        (snapshot.queue_requests, config.max_queue_requests, "request"),
        (snapshot.queue_tokens, config.max_queue_tokens, "prompt token"),
    ):
        if limit and held >= NEAR_LIMIT * limit:
            text = f"waiting: {counted(held, what)} of {limit:,}; further ones will be refused"
            yield Alert("warning", "queue", "", text)


def _prefill(prefill: PrefillState, fires: int, feedback: bool) -> Iterator[Alert]:
    if fires:
        text = (
            f"the watchdog reset its state {counted(fires, 'time')} in 60 s: it took "
            "work and fell silent; see the engine's log and its path to --sbs-endforward-bind"
        )
        yield Alert("critical", "watchdog", prefill.instance, text)
    if prefill.up and feedback and prefill.tier in _FALLBACK:
        text = (
            f"no EndForward: its readiness rests on {_FALLBACK[prefill.tier]}; install the plugin "
            "or set SGLANG_SBS_ROUTERS on the engine"
        )
        yield Alert("warning", "fallback", prefill.instance, text)


def _stale(instance: PrefillState | DecodeState, stale_s: float) -> Iterator[Alert]:
    ages = [rank.age_s for rank in instance.ranks if rank.age_s is not None]
    silent = [age_s for age_s in ages if age_s > stale_s]
    if instance.up and silent:
        text = (
            f"{len(silent)} of {len(instance.ranks)} DP ranks sent no EndForward for up to "
            f"{max(silent):.0f} s: hung, or the network between"
        )
        yield Alert("warning", "stale", instance.instance, text)
