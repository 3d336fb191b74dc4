"""Alerts for operators, computed from one snapshot and the events of the last minute. Every alert
has a cause and advice. :mod:`.well` derives the overall state from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from sglang_sbs.console.plain_words import counted
from sglang_sbs.explain.words import longest
from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.policy_registry import reads_reports
from sglang_sbs.scheduling.snapshot import DecodeState, PrefillState, Snapshot

STALE_S = 3.0
"""Seconds without EndForward after which a DP rank counts as silent (longer if passes are long, see
:func:`stale_after_s`). Idle ranks report every second."""
STALE_PASSES = 5.0
"""Lower limit of the time until a DP rank counts as silent, in mean forward times."""
OWN_PASSES = 2.0
"""Lower limit of the time until a prefill rank counts as silent, in passes of its instance with
full chunks."""
NEAR_LIMIT = 0.8
SLOW_WAY = 0.25
"""Dispatch latency, as a share of a mean pass, above which an alert warns that batches are decided
too early."""
SLOW_WAY_S = 0.03
"""Dispatch latency in seconds below which there is no alert, however short passes are."""
BUBBLES = 0.1
"""Alert threshold: share of the time in which instances were idle while requests waited in the
router."""
MODEL_OFF = 0.25
"""Alert threshold: mean error of predicted forward times, as a share of a mean pass."""
MODEL_PASSES = 20
"""Number of passes after which a forward model has learned."""
SLOW_TTFT = 6.0
"""Alert threshold: p95 of TTFT divided by the time of the passes that the prompt itself needs."""
VERY_SLOW_TTFT = 20.0
TTFT_REQUESTS = 20
"""Smallest number of requests in the last minute for an alert about a percentile."""
DECODE_FULL = 0.9
"""Alert threshold: share of decode's KV memory, or of its request slots, that is used or
reserved."""
FAILING = 0.05
"""Alert threshold: share of attempts that failed in the last minute."""
VERY_FAILING = 0.5
FAILED_ATTEMPTS = 3
"""Smallest number of failed attempts in the last minute for an alert about their share."""
_MOST_CHARS = 400
"""Limit on the shown text of a worker's problem, which may quote the engine."""
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
        "add capacity: sglang-sbs why ID shows whether they waited for prefill or for decode",
    ),
    "flow_control": (
        "one had waited for more than --sbs-n-limit cycles",
        "add prefill capacity, or send less",
    ),
    "no_prefill": ("no prefill instance was up", "see GET /workers for the cause"),
    "no_decode": ("no decode instance was up", "see GET /workers for the cause"),
    "too_long": (
        "their prompts are longer than any engine takes",
        "have clients send less, or start engines with a longer --context-length",
    ),
    "slo": (
        "their first token could not have come in time (--sbs-refuse-missed-slo)",
        "add prefill capacity, or let clients allow more time (x-sgl-ttft-slo-ms)",
    ),
}
"""Text and advice for each cause of a refusal."""

Severity = Literal["critical", "warning"]


class Alert(msgspec.Struct, frozen=True):
    """A problem and its remedy, one sentence each; ``subject`` is a worker's URL, or empty."""

    severity: Severity
    kind: str
    subject: str
    text: str
    todo: str = ""


@dataclass(frozen=True, slots=True)
class Recent:
    """Facts that are not in the snapshot."""

    refusals: Mapping[str, int] = field(default_factory=dict)
    """Refusals in the last minute, by cause."""
    watchdog_fires: Mapping[str, int] = field(default_factory=dict)
    """Watchdog resets in the last minute, by instance."""
    problems: Sequence[tuple[str, str]] = ()
    """Problems of workers, as shown by ``GET /workers``."""
    scheduler_errors: int = 0
    """Failed events in the last minute."""
    alone: bool = False
    """This front end has lost the scheduler process."""
    bubbles: float = 0.0
    """Share of the last half minute in which instances were idle while requests waited."""
    attempts: tuple[int, int, str] = (0, 0, "")
    """``(ended, failed, instance)``: attempts that ended and that failed in the last minute, and
    the instance that most of the failed ones share (empty: none)."""
    slower: Mapping[str, float] = field(default_factory=dict)
    """Slowdown of passes (:mod:`.paces`) as a factor, by instance."""
    ttft_split_s: Mapping[str, float] = field(default_factory=dict)
    """Parts of the TTFT of the slowest requests."""
    ttft_requests: int = 0
    """Number of requests answered by prefill in the last minute."""
    ttft_p95_s: float = 0.0
    ttft_p95_passes: float = 0.0
    """p95 of TTFT divided by the time of the passes that the prompt itself needs."""
    load: float = 0.0
    """Uncached prompt tokens divided by the throughput with full chunks."""


def find_alerts(snapshot: Snapshot, config: SchedulerConfig, recent: Recent) -> list[Alert]:
    """Return the alerts, most severe first."""
    return sorted(_alerts(snapshot, config, recent), key=lambda alert: alert.severity != "critical")


def _alerts(snapshot: Snapshot, config: SchedulerConfig, recent: Recent) -> Iterator[Alert]:
    if recent.alone:
        yield Alert(
            "critical",
            "alone",
            "",
            "this front end is without the scheduler process and places requests at once",
            "see whether the scheduler process runs, and its log",
        )
    yield from _cluster(snapshot, recent)
    yield from _queue(snapshot, config)
    yield from _refused(recent.refusals)
    yield from _failing(recent)
    feedback = reads_reports(snapshot.policy)
    for prefill in snapshot.prefill:
        yield from _prefill(prefill, recent.watchdog_fires.get(prefill.instance, 0), feedback)
        yield from _model(prefill, snapshot.mean_forward_s)
        yield from _slower(prefill, recent.slower.get(prefill.instance))
        yield from _stale(prefill, stale_after_s(snapshot, prefill))
    for decode in snapshot.decode:
        yield from _stale(decode, stale_after_s(snapshot))
    yield from _decode(snapshot.decode)
    yield from _speed(snapshot, recent)
    down = {state.instance for state in snapshot.prefill if not state.up}
    down |= {state.instance for state in snapshot.decode if not state.up}
    for subject, text in recent.problems:
        if subject in down:
            continue  # it is the reason why the worker is down, or irrelevant meanwhile
        todo = "GET /workers lists all of its problems; run sglang-sbs doctor for advice"
        yield Alert("warning", "problem", subject, text[:_MOST_CHARS], todo)
    if recent.scheduler_errors:
        events = counted(recent.scheduler_errors, "event")
        failed = f"the scheduler failed on {events} in the last minute: a defect of this software"
        todo = "the router's log has the traceback: report it"
        yield Alert("critical", "scheduler_errors", "", failed, todo)


def stale_after_s(snapshot: Snapshot, prefill: PrefillState | None = None) -> float:
    """Seconds without EndForward after which a DP rank is silent. A prefill rank sends nothing
    during a pass, however slow its instance is."""
    own_s = 0.0 if prefill is None else OWN_PASSES * prefill.full_pass_s
    return max(STALE_S, STALE_PASSES * snapshot.mean_forward_s, own_s)


def _cluster(snapshot: Snapshot, recent: Recent) -> Iterator[Alert]:
    for role, instances in (("prefill", snapshot.prefill), ("decode", snapshot.decode)):
        if not any(state.up for state in instances):
            text = f"no {role} instance is up: requests get 503 after --sbs-outage-hold-secs"
            todo = "see GET /workers for the cause, or run sglang-sbs doctor"
            yield Alert("critical", f"no_{role}", "", text, todo)
            continue
        for state in (state for state in instances if state.drained):
            text = f"this {role} instance is drained: it takes no new requests"
            todo = "when it may serve again: POST /workers/{id}/undrain"
            yield Alert("warning", "drained", state.instance, text, todo)
        for name in (state.instance for state in instances if not (state.up or state.drained)):
            todo = "see its log; requests go to the others meanwhile"
            why = next((f": {text}" for url, text in recent.problems if url == name), "")
            text = f"this {role} instance is down{why}"
            yield Alert("critical", "down", name, text[:_MOST_CHARS], todo)


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
        yield Alert("critical", "throttled", "", text, "add prefill capacity, or send less")
    for held, limit, what in (
        (snapshot.queue_requests, config.max_queue_requests, "request"),
        (snapshot.queue_tokens, config.max_queue_tokens, "prompt token"),
    ):
        if limit and held >= NEAR_LIMIT * limit:
            text = f"waiting: {counted(held, what)} of {limit:,}; further ones will be refused"
            yield Alert("warning", "queue", "", text, "add prefill capacity, or send less")


def _refused(refusals: Mapping[str, int]) -> Iterator[Alert]:
    """Yield one alert for all causes of refusals, the most frequent first."""
    ordered = sorted(refusals.items(), key=lambda item: (-item[1], item[0]))
    if not ordered:
        return
    reasons = [
        f"{_REFUSED.get(cause, (cause, ''))[0]}{f' ({count:,})' if len(ordered) > 1 else ''}"
        for cause, count in ordered
    ]
    total = counted(sum(refusals.values()), "request")
    text = f"{total} refused in the last minute: {', '.join(reasons)}"
    todo = _REFUSED.get(ordered[0][0], ("", "add capacity, or send less"))[1]
    yield Alert("warning", "refused", "", text, todo)


def _prefill(prefill: PrefillState, fires: int, feedback: bool) -> Iterator[Alert]:
    if fires:
        text = (
            f"it took work and fell silent: the watchdog reset its state {counted(fires, 'time')} "
            "in the last minute"
        )
        todo = (
            "see whether it hangs or has become slow (the engine's log), and its path to "
            "--sbs-endforward-bind"
        )
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
    """Yield an alert if decode as a whole is full: placement avoids a single full rank."""
    up = [state for state in instances if state.up]
    for what, used, most in (
        (
            "its KV memory is used or reserved",
            sum(rank.kv_tokens for state in up for rank in state.ranks),
            [state.kv_capacity_tokens * len(state.ranks) for state in up],
        ),
        (
            "its request slots (--max-running-requests) are taken",
            sum(rank.running for state in up for rank in state.ranks),
            [state.max_running * len(state.ranks) for state in up],
        ),
    ):
        if up and all(most) and used >= DECODE_FULL * sum(most):
            text = f"decode is full: {min(1.0, used / sum(most)):.0%} of {what}"
            todo = "add decode instances, or lower max_new_tokens: prefill waits for room there"
            yield Alert("warning", "decode_full", "", text, todo)
            return


def _failing(recent: Recent) -> Iterator[Alert]:
    ended, failed, suspect = recent.attempts
    if failed < FAILED_ATTEMPTS or failed < FAILING * ended:
        return
    text = f"{failed:,} of {counted(ended, 'attempt')} at requests failed in the last minute"
    todo = "the router's log has the engine and the error of each; sglang-sbs doctor checks engines"
    if suspect:
        text = f"{text}, most of them here"
        todo = "see its log; POST /workers/{id}/drain keeps new requests away from it"
    severe: Severity = "critical" if failed >= VERY_FAILING * ended else "warning"
    yield Alert(severe, "failing", suspect, text, todo)


def _slower(prefill: PrefillState, factor: float | None) -> Iterator[Alert]:
    if factor is not None:
        text = (
            f"its forward passes take {factor:.1f} times as long as usual: "
            f"{prefill.full_pass_s:.2f} s with full chunks"
        )
        todo = (
            "see whether its GPUs are throttled or shared, or its hosts short of CPU; POST "
            "/workers/{id}/drain keeps new requests away from it"
        )
        yield Alert("warning", "slow_prefill", prefill.instance, text, todo)


def _speed(snapshot: Snapshot, recent: Recent) -> Iterator[Alert]:
    latency_s, pass_s = snapshot.latency_s, snapshot.mean_forward_s
    passes = sum(state.passes for state in snapshot.prefill)
    if passes >= MODEL_PASSES and latency_s > max(SLOW_WAY_S, SLOW_WAY * pass_s):
        text = (
            f"requests take {1e3 * latency_s:.0f} ms to reach an engine (dispatch latency, L_net), "
            f"{latency_s / pass_s:.0%} of a pass"
        )
        yield Alert("warning", "slow_way", "", text, f"{_CPU}, or look at the network between them")
    if recent.bubbles > BUBBLES:
        text = (
            f"bubbles: for {recent.bubbles:.0%} of the last half minute instances ran no pass "
            "though requests waited here"
        )
        todo = "look at the dispatch latency (L_net) and the age of reports; the doctor checks both"
        yield Alert("warning", "bubbles", "", text, todo)
    if recent.ttft_requests >= TTFT_REQUESTS and recent.ttft_p95_passes > SLOW_TTFT:
        text = (
            f"TTFT is slow: p95 {recent.ttft_p95_s:.1f} s, {recent.ttft_p95_passes:.0f} times "
            "the passes that the prompts need"
        )
        if part := longest(recent.ttft_split_s):
            text += f", most of it {part}"
        todo = "the dashboard lists the slowest requests; sglang-sbs why ID explains each"
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
