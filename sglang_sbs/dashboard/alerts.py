"""What somebody on call should look at, from one snapshot and what happened in the last minute.
Every alert has the cause in words and what to do about it. Whether all is well follows from them
(:mod:`.well`)."""

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
SLOW_WAY = 0.25
"""L_net as a share of a mean pass from which on batches are decided too early to be good."""
SLOW_WAY_S = 0.03
"""A way shorter than this is no alert, however short passes are."""
BUBBLES = 0.1
"""Share of the time in which instances ran no pass though requests waited in the router."""
MODEL_OFF = 0.25
"""Mean error of predicted forward times, as a share of a mean pass."""
MODEL_PASSES = 20
"""Passes after which a forward model has learned."""
SLOW_TTFT = 6.0
"""p95 of the TTFT over the passes that the prompt itself needs."""
VERY_SLOW_TTFT = 20.0
TTFT_REQUESTS = 20
"""Requests of the last minute that a percentile needs."""
DECODE_FULL = 0.9
"""Share of decode's KV memory that is in use or spoken for."""
_MOST_CHARS = 400
"""Of the text of a worker's problem, which may quote the engine."""
_CPU = "give the hosts of the router and of the engines more CPU"
_FALLBACK = {
    "load_poll": "load polls",
    "http": "the engine's own answers",
    "interval": "fixed intervals",
}
_REFUSED = {
    "queue_full": ("the queue was full", "add prefill capacity, or send less"),
    "deadline": (
        "they waited for longer than --sbs-queue-timeout-secs",
        "add capacity: sglang-sbs why ID says whether they waited for prefill or for decode",
    ),
    "flow_control": (
        "one had waited for more than --sbs-n-limit cycles",
        "add prefill capacity, or send less",
    ),
    "no_prefill": ("no prefill instance was up", "see GET /workers for the cause"),
    "no_decode": ("no decode instance was up", "see GET /workers for the cause"),
    "too_long": (
        "their prompts are longer than any engine takes",
        "tell the clients, or start engines with a longer --context-length",
    ),
    "slo": (
        "their first token could not have come in time (--sbs-refuse-missed-slo)",
        "add prefill capacity, or let clients allow more time (x-sgl-ttft-slo-ms)",
    ),
}
"""By cause of a refusal: in words, and what to do about it."""

Severity = Literal["critical", "warning"]


class Alert(msgspec.Struct, frozen=True):
    """Two sentences for people; ``subject`` is a worker's URL, or empty."""

    severity: Severity
    kind: str
    subject: str
    text: str
    """The cause."""
    todo: str = ""
    """The action that is advised."""


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
    """Events within the last minute."""
    alone: bool = False
    """This front end is without the scheduler process."""
    bubbles: float = 0.0
    """Share of the last half minute in which instances ran no pass though requests waited."""
    ttft_requests: int = 0
    """Within the last minute, as the next two."""
    ttft_p95_s: float = 0.0
    ttft_p95_passes: float = 0.0
    """p95 of the TTFT over the time of the passes that the prompt itself needs."""
    load: float = 0.0
    """Prompt tokens to compute over what full chunks would compute."""


def find_alerts(snapshot: Snapshot, config: SchedulerConfig, recent: Recent) -> list[Alert]:
    """Most severe first."""
    return sorted(_alerts(snapshot, config, recent), key=lambda alert: alert.severity != "critical")


def _alerts(snapshot: Snapshot, config: SchedulerConfig, recent: Recent) -> Iterator[Alert]:
    if recent.alone:
        yield Alert(
            "critical",
            "alone",
            "",
            "this front end is without the scheduler process and places requests at once",
            "see whether that process runs",
        )
    yield from _cluster(snapshot)
    yield from _queue(snapshot, config)
    yield from _refused(recent.refusals)
    stale_s = max(STALE_S, STALE_PASSES * snapshot.mean_forward_s)
    feedback = facts_of(snapshot.policy).reads_reports
    for prefill in snapshot.prefill:
        yield from _prefill(prefill, recent.watchdog_fires.get(prefill.instance, 0), feedback)
        yield from _model(prefill, snapshot.mean_forward_s)
        yield from _stale(prefill, stale_s)
    for decode in snapshot.decode:
        yield from _stale(decode, stale_s)
    yield from _decode(snapshot.decode)
    yield from _speed(snapshot, recent)
    for subject, text in recent.problems:
        yield Alert("warning", "problem", subject, text[:_MOST_CHARS])
    if recent.scheduler_errors:
        events = counted(recent.scheduler_errors, "event")
        failed = f"the scheduler failed on {events} in the last minute: a defect of this software"
        todo = "the router's log has the traceback: report it"
        yield Alert("critical", "scheduler_errors", "", failed, todo)


def _cluster(snapshot: Snapshot) -> Iterator[Alert]:
    for role, instances in (("prefill", snapshot.prefill), ("decode", snapshot.decode)):
        if not any(one.up for one in instances):
            text = f"no {role} instance is up: every request is refused"
            todo = "see GET /workers for the cause, or run sglang-sbs doctor"
            yield Alert("critical", f"no_{role}", "", text, todo)
            continue
        for one in (one for one in instances if one.drained):
            text = f"this {role} instance is drained: it takes no new requests"
            todo = "POST /workers/{id}/undrain lets them in again"
            yield Alert("warning", "drained", one.instance, text, todo)
        for name in (one.instance for one in instances if not (one.up or one.drained)):
            todo = "see its log; requests go to the others meanwhile"
            yield Alert("critical", "down", name, f"this {role} instance is down", todo)


def _queue(snapshot: Snapshot, config: SchedulerConfig) -> Iterator[Alert]:
    if snapshot.policy == "sbs" and not snapshot.holding:
        text = (
            "holding is off: batches do not arrive whole at the engines, so requests leave at once"
        )
        yield Alert("warning", "not_holding", "", text, _CPU)
    if snapshot.throttled:
        text = (
            "flow control refuses new requests: one has waited more than "
            f"{config.n_limit} scheduling cycles (--sbs-n-limit)"
        )
        yield Alert("critical", "throttled", "", text, "add prefill capacity")
    for held, limit, what in (
        (snapshot.queue_requests, config.max_queue_requests, "request"),
        (snapshot.queue_tokens, config.max_queue_tokens, "prompt token"),
    ):
        if limit and held >= NEAR_LIMIT * limit:
            text = f"waiting: {counted(held, what)} of {limit:,}; further ones will be refused"
            yield Alert("warning", "queue", "", text, "add prefill capacity, or send less")


def _refused(refusals: Mapping[str, int]) -> Iterator[Alert]:
    """One alert for all causes, the most frequent one first."""
    ordered = sorted(refusals.items(), key=lambda one: (-one[1], one[0]))
    if not ordered:
        return
    said = [
        f"{_REFUSED.get(cause, (cause, ''))[0]}{f' ({count:,})' if len(ordered) > 1 else ''}"
        for cause, count in ordered
    ]
    total = counted(sum(refusals.values()), "request")
    text = f"{total} refused in the last minute: {', '.join(said)}"
    todo = _REFUSED.get(ordered[0][0], ("", "add capacity, or send less"))[1]
    yield Alert("warning", "refused", "", text, todo)


def _prefill(prefill: PrefillState, fires: int, feedback: bool) -> Iterator[Alert]:
    if fires:
        text = (
            f"the watchdog reset its state {counted(fires, 'time')} in 60 s: it took "
            "work and fell silent"
        )
        todo = "see the engine's log and its path to --sbs-endforward-bind"
        yield Alert("critical", "watchdog", prefill.instance, text, todo)
    if prefill.up and prefill.stalled:
        text = "it has work that no pass takes, so nothing more is sent there"
        todo = "GET /workers names the cause; see the engine's log, and restart it if it hangs"
        yield Alert("critical", "stalled", prefill.instance, text, todo)
    if prefill.up and feedback and prefill.tier in _FALLBACK:
        text = f"no EndForward: its readiness rests on {_FALLBACK[prefill.tier]}"
        todo = "install the plugin or set SGLANG_SBS_ROUTERS on the engine"
        yield Alert("warning", "fallback", prefill.instance, text, todo)


def _model(prefill: PrefillState, mean_forward_s: float) -> Iterator[Alert]:
    known = prefill.up and prefill.passes >= MODEL_PASSES and mean_forward_s > 0
    if known and prefill.prediction_error_s > MODEL_OFF * mean_forward_s:
        text = (
            f"its forward times are predicted {prefill.prediction_error_s / mean_forward_s:.0%} "
            "of a pass wrong"
        )
        todo = "see whether something else uses its GPUs or CPUs, or throttles them"
        yield Alert("warning", "cost_model", prefill.instance, text, todo)


def _decode(instances: Sequence[DecodeState]) -> Iterator[Alert]:
    """Whether decode as a whole is full: a single full rank is avoided by placement."""
    known = [one for one in instances if one.up and one.kv_capacity_tokens]
    capacity = sum(one.kv_capacity_tokens * len(one.ranks) for one in known)
    used = sum(rank.kv_tokens for one in known for rank in one.ranks)
    if capacity and used >= DECODE_FULL * capacity:
        text = f"decode is full: {min(1.0, used / capacity):.0%} of its KV memory is spoken for"
        todo = "add decode instances, or lower max_new_tokens: prefill waits for room there"
        yield Alert("warning", "decode_full", "", text, todo)


def _speed(snapshot: Snapshot, recent: Recent) -> Iterator[Alert]:
    latency_s, pass_s = snapshot.latency_s, snapshot.mean_forward_s
    passes = sum(one.passes for one in snapshot.prefill)
    if passes >= MODEL_PASSES and latency_s > max(SLOW_WAY_S, SLOW_WAY * pass_s):
        text = (
            f"requests take {1e3 * latency_s:.0f} ms to reach an engine (L_net), "
            f"{latency_s / pass_s:.0%} of a pass"
        )
        yield Alert("warning", "slow_way", "", text, f"{_CPU}, or look at the network between them")
    if recent.bubbles > BUBBLES:
        text = (
            f"bubbles: for {recent.bubbles:.0%} of the last half minute instances ran no pass "
            "though requests waited here"
        )
        todo = "look at L_net and the age of EndForward; sglang-sbs doctor checks both"
        yield Alert("warning", "bubbles", "", text, todo)
    if recent.ttft_requests >= TTFT_REQUESTS and recent.ttft_p95_passes > SLOW_TTFT:
        text = (
            f"TTFT is slow: p95 {recent.ttft_p95_s:.1f} s, {recent.ttft_p95_passes:.0f} times "
            "the passes that the prompts need"
        )
        todo = "sglang-sbs why ID says what a request waited for"
        if recent.load > NEAR_LIMIT:
            todo = f"prefill is near its limit (load {recent.load:.2f}): add capacity, or send less"
        severe: Severity = "critical" if recent.ttft_p95_passes > VERY_SLOW_TTFT else "warning"
        yield Alert(severe, "slow_ttft", "", text, todo)


def _stale(instance: PrefillState | DecodeState, stale_s: float) -> Iterator[Alert]:
    ages = [rank.age_s for rank in instance.ranks if rank.age_s is not None]
    silent = [age_s for age_s in ages if age_s > stale_s]
    if instance.up and silent:
        text = (
            f"{len(silent)} of {len(instance.ranks)} DP ranks sent no EndForward for up to "
            f"{max(silent):.0f} s"
        )
        todo = "see whether they hang, and the network to --sbs-endforward-bind"
        yield Alert("warning", "stale", instance.instance, text, todo)
