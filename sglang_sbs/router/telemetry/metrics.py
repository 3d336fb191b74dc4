"""Prometheus metrics: ``smg_*`` as sglang_router's dashboards expect them, and our own ``sbs_*``.
State kept elsewhere is read at scrapes, so it costs nothing per event."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Multiset
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry, Summary, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase

from sglang_sbs.router.errors import LegFailure
from sglang_sbs.router.metric_families import Made, gauge, total
from sglang_sbs.router.telemetry.counting import Counter, Gauge, Histogram
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.scheduling.events import Dispatch, Outcome, Refuse
from sglang_sbs.scheduling.explained.timelines import Timeline
from sglang_sbs.scheduling.queue.priority import PriorityClass
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.balance import active_ranks, max_over_mean

_DURATION_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0),
    *(45.0, 60.0, 90.0, 120.0, 180.0, 240.0),
)
_HOLD_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 2.0, 5.0, 10.0, 60.0),
)
_PART_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0),
)
_AGE_BOUNDS_S = (30, 60, 180, 300, 600, 1200, 3600, 7200, 14400, 28800, 86400)
"""Bounds of the age buckets of requests in flight, as in sglang_router."""
_GANG_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_HIT_ERROR_BUCKETS = (
    *(-16384.0, -4096.0, -1024.0, -256.0, -64.0, -1.0),
    *(0.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0),
)
_MOST_TOKENS = 10_000_000
"""Largest plausible number of output tokens of one request; a larger report counts as this."""
_SHARE_BUCKETS = tuple(step / 10 for step in range(1, 11))


_STOCK = {"router_type": "http", "backend_type": "pd", "connection_mode": "http"}
_STOCK_LABELS = " ".join(_STOCK)
"""Names of the labels that sglang_router's metrics have, separated by spaces; ``_STOCK`` has its
values for PD over HTTP, which are constant here."""

_Buckets = tuple[float, ...]
_K = TypeVar("_K")
_M = TypeVar("_M", bound=MetricWrapperBase)


def _declared(
    kind: type[_K], name: str, text: str, labels: str = "", buckets: _Buckets | None = None
) -> _K:
    """Declare a metric, of which every :class:`RouterMetrics` creates its own. ``labels`` are
    separated by spaces; a histogram without ``buckets`` gets those for durations."""
    more = {"buckets": buckets} if buckets else {}
    return cast(_K, partial(cast(Any, kind), name, text, labels.split(), **more))


_counter = partial(_declared, Counter)
_gauge = partial(_declared, Gauge)
_summary = partial(_declared, Summary)
_histogram = partial(_declared, Histogram)


class RouterMetrics:
    # fmt: off
    # The serving port
    http_requests = _counter("smg_http_requests_total",
        "Requests by method and path", "method path")
    http_responses = _counter("smg_http_responses_total",
        "Responses by status and error code", "status_code error_code")
    http_seconds = _histogram("smg_http_request_duration_seconds",
        "Time until the response is complete", "method path")
    http_active = _gauge("smg_http_connections_active", "Requests being served")
    malformed = _counter("sbs_http_malformed_total", "Requests that were not valid HTTP")
    _rate_limit = _counter("smg_http_rate_limit_total",
        "Decisions of --max-concurrent-requests", "result")

    # Inference requests, and their legs
    _requests = _counter("smg_router_requests_total",
        "Inference requests", f"{_STOCK_LABELS} model endpoint streaming")
    _request_seconds = _histogram("smg_router_request_duration_seconds",
        "Duration of inference requests", f"{_STOCK_LABELS} model endpoint")
    _request_errors = _counter("smg_router_request_errors_total",
        "Failed inference requests", f"{_STOCK_LABELS} model endpoint error_type")
    ttft_seconds = _histogram("smg_pd_ttft_seconds",
        "Time from submission to decode's first byte, per attempt")
    prefill_seconds = _histogram("smg_pd_prefill_duration_seconds",
        "Time from submission to prefill's response, per attempt")
    leg_failures = _counter("smg_worker_errors_total",
        "Failed legs", "worker_type connection_mode worker error_type")
    _retries = _counter("smg_worker_retries_total",
        "Attempts after the first", "worker_type endpoint")
    _retries_exhausted = _counter("smg_worker_retries_exhausted_total",
        "Requests that failed on their last attempt", "worker_type endpoint")
    _backoff_seconds = _summary("smg_worker_retry_backoff_seconds",
        "Pause before an attempt was repeated", "attempt")
    hold_seconds = _histogram("sbs_hold_seconds",
        "Time from arrival at the scheduler to dispatch", buckets=_HOLD_BUCKETS)
    class_ttft_seconds = _histogram("sbs_class_ttft_seconds",
        "Time to decode's first byte, per attempt, by class of priority", "class")
    _class_hold_seconds = _histogram("sbs_class_hold_seconds",
        "Time from arrival to dispatch, by class of priority", "class", _HOLD_BUCKETS)
    _part_seconds = _histogram("sbs_ttft_part_seconds",
        "Parts of the time to the first byte, per attempt that had one", "part", _PART_BUCKETS)
    slo = _counter("sbs_slo_total", "First bytes of requests with x-sgl-ttft-slo-ms", "result")

    # Decisions of the scheduler and their results
    gang_size = _histogram("sbs_gang_size",
        "Requests dispatched together to one prefill instance", buckets=_GANG_BUCKETS)
    dispatches = _counter("sbs_dispatches_total", "Dispatched legs", "worker_type worker dp_rank")
    refusals = _counter("sbs_refusals_total",
        "Requests refused by the scheduler or the admission limit", "cause")
    limited = _counter("sbs_refusals_by_role_total",
        "Requests refused for overload, by the role without capacity", "role")
    attempts = _counter("sbs_attempts_total", "Ended attempts", "outcome")
    aborts = _counter("sbs_aborts_total", "POST /abort_request sent to engines")
    broken_streams = _counter("sbs_broken_streams_total",
        "Streams that ended in an error event", "code")

    # Reports from engines: passes, prompt lengths, caches
    chunk_utilisation = _histogram("sbs_chunk_utilisation",
        "Extend tokens of a pass over C_chunk, per rank", buckets=_SHARE_BUCKETS)
    active_ranks = _histogram("sbs_active_ranks_share",
        "Ranks with tokens in a pass over all ranks", buckets=_SHARE_BUCKETS)
    active_rank_count = _histogram("sbs_active_ranks",
        "Ranks with tokens in a pass", buckets=_GANG_BUCKETS)
    max_over_mean = _histogram("sbs_rank_tokens_max_over_mean",
        "Tokens of the heaviest rank of a pass over the mean of its ranks",
        buckets=(1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0))
    batch_fill = _histogram("sbs_batch_fill",
        "Tokens of a pass over C_chunk of all its ranks", buckets=_SHARE_BUCKETS)
    forward_seconds = _histogram("sbs_forward_seconds", "T_fwd of prefill passes", "worker")
    length_error = _histogram("sbs_prompt_length_error",
        "Size of the relative error of estimated prompt lengths",
        buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0))
    prompt_tokens = _counter("sbs_prefix_prompt_tokens_total",
        "Prompt tokens of requests that prefill answered")
    completion_tokens = _counter("sbs_completion_tokens_total",
        "Output tokens of ended attempts, as reported by decode")
    predicted_tokens = _counter("sbs_prefix_predicted_tokens_total",
        "Prompt tokens expected to be cached: L_hit at dispatch")
    reported_tokens = _counter("sbs_prefix_reported_tokens_total",
        "Prompt tokens found in the cache, as reported by prefill")
    hit_error = _histogram("sbs_prefix_hit_error_tokens",
        "Reported minus predicted cached tokens, per request; below 0 is a stale hit",
        buckets=_HIT_ERROR_BUCKETS)
    # fmt: on

    def __init__(
        self,
        duration_buckets: _Buckets | None = None,
        policy: str = "sbs",
        knows: Callable[[str], bool] = lambda worker_url: True,
    ) -> None:
        """Create all metrics. ``knows`` returns whether a worker with that URL exists; others get
        no series, because with service discovery every pod has a URL and its series would be
        exported forever."""
        self.policy = policy
        """Name of the policy in force."""
        self._knows = knows
        self.registry = CollectorRegistry()
        durations = {"buckets": duration_buckets or _DURATION_BUCKETS}
        for name, declared in vars(RouterMetrics).items():
            if isinstance(declared, partial):
                more = (durations if declared.func is Histogram else {}) | declared.keywords
                setattr(self, name, declared(registry=self.registry, **more))
        self._began_s: dict[float, int] = {}
        """Number of requests being served, by the time at which they began."""
        self.collect_with(self._age_families)
        self._gang = (-1, 0)
        self._of_workers: dict[str, dict[tuple[Any, ...], Any]] = {}
        """Series by worker URL, then by metric and label values."""
        # Looking up labels costs more than counting, so those of hot paths are kept.
        self._http = cache(self._http_series)
        self._responses = cache(self.http_responses.labels)
        self._admitted = cache(self._rate_limit.labels)
        self._served = cache(self._served_series)
        self._attempts = cache(self.attempts.labels)
        self._parts = cache(self._part_seconds.labels)
        self._class_ttft = cache(self.class_ttft_seconds.labels)
        self._class_hold = cache(self._class_hold_seconds.labels)
        self._dispatched: Multiset[str] = Multiset()
        """Number of dispatches by policy."""

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def collect_with(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self.registry.register(Made(collect))

    def forget(self, worker_url: str) -> None:
        """Remove the series of a worker; if it is added again they begin at 0."""
        for metric, labels in self._of_workers.pop(worker_url, {}):
            metric.remove(*labels)

    def _of_worker(self, metric: _M, worker_url: str, *labels: str | int) -> _M | None:
        """Return the series of ``metric`` with ``labels`` (all of them, in its order), cached
        because a lookup costs more than counting. ``None`` if the worker is unknown."""
        own = self._of_workers.get(worker_url)
        if own is None:
            if not self._knows(worker_url):
                return None
            own = self._of_workers[worker_url] = {}
        series: _M | None = own.get((metric, labels))
        if series is None:
            series = own[metric, labels] = metric.labels(*labels)
        return series

    # The scheduler ----------------------------------------------------------------------------

    def on_decided(self, command: Dispatch | Refuse) -> None:
        if isinstance(command, Refuse):
            self.refusals.labels(command.cause).inc()
            if command.limit is not None:
                self.limited.labels(command.limit).inc()
            return
        self._dispatched[self.policy] += 1
        self.hold_seconds.observe(command.held_s)
        for role, worker, rank in (
            ("prefill", command.prefill, command.prefill_rank),
            ("decode", command.decode, command.decode_rank),
        ):
            if legs := self._of_worker(self.dispatches, worker, role, worker, rank):
                legs.inc()
        batch, size = self._gang
        if command.batch == batch:
            self._gang = (batch, size + 1)
        else:
            if size:
                self.gang_size.observe(size)
            self._gang = (command.batch, 1)

    def selections(self, model: str) -> CounterMetricFamily:
        """Return the counter of chosen workers under sglang_router's name. A dispatch counts once
        per role, because it chooses both workers."""
        labels = ("worker_type", "connection_mode", "model", "policy")
        chosen = {
            (role, "http", model, policy): count
            for policy, count in ({self.policy: 0} | self._dispatched).items()
            for role in ("prefill", "decode")
        }
        return total("smg_worker_selection", "Workers chosen", chosen, *labels)

    # The HTTP surface -------------------------------------------------------------------------

    def on_http_started(self, method: str, path: str, now_s: float) -> Histogram:
        """Count a request; return the histogram for its duration."""
        self._began_s[now_s] = self._began_s.get(now_s, 0) + 1
        requests, seconds = self._http(method, path)
        requests.inc()
        self.http_active.inc()
        return seconds

    def _http_series(self, method: str, path: str) -> tuple[Counter, Histogram]:
        return self.http_requests.labels(method, path), self.http_seconds.labels(method, path)

    def on_http_ended(self, status: int, error_code: str, began_s: float) -> None:
        """Count a response; ``began_s``: the ``now_s`` given to :meth:`on_http_started`."""
        others = self._began_s.pop(began_s) - 1
        if others:
            self._began_s[began_s] = others
        self.http_active.dec()
        self._responses(status, error_code).inc()

    def _age_families(self) -> Iterator[Metric]:
        counts = [0] * (len(_AGE_BOUNDS_S) + 1)
        now_s = time.monotonic()
        for began_s, requests in self._began_s.items():
            counts[bisect_left(_AGE_BOUNDS_S, now_s - began_s)] += requests
        bounds = ["0", *map(str, _AGE_BOUNDS_S), "+Inf"]
        ages = dict(zip(pairwise(bounds), counts, strict=True))
        name, about = "smg_http_inflight_request_age_count", "Requests being served, by age in s"
        yield gauge(name, about, ages, "gt", "le")

    def door(self, allowed: bool) -> None:
        self._admitted("allowed" if allowed else "rejected").inc()
        if not allowed:
            self.refusals.labels("front_door").inc()

    # Inference --------------------------------------------------------------------------------

    # ``endpoint`` is a RouteKind, as in sglang_router's label of that name.

    def served(self, endpoint: str, model: str, streaming: bool, seconds: float) -> None:
        requests, durations = self._served(endpoint, model, streaming)
        requests.inc()
        durations.observe(seconds)

    def _served_series(
        self, endpoint: str, model: str, streaming: bool
    ) -> tuple[Counter, Histogram]:
        labels = (*_STOCK.values(), model, endpoint)
        requests = self._requests.labels(*labels, str(streaming).lower())
        return requests, self._request_seconds.labels(*labels)

    def request_failed(self, endpoint: str, model: str, code: str) -> None:
        self._request_errors.labels(*_STOCK.values(), model, endpoint, code).inc()

    def retried(self, failure: LegFailure, endpoint: str) -> None:
        self._retries.labels(failure.leg, endpoint).inc()

    def backs_off(self, attempt: int, seconds: float) -> None:
        self._backoff_seconds.labels(str(attempt)).observe(seconds)

    def gave_up(self, failure: LegFailure, endpoint: str) -> None:
        self._retries_exhausted.labels(failure.leg, endpoint).inc()

    # Others -----------------------------------------------------------------------------------

    def on_attempt_ended(self, outcome: Outcome) -> None:
        self._attempts(outcome).inc()

    def leg_failed(self, failure: LegFailure) -> None:
        labels = (failure.leg, "http", failure.worker, failure.code)
        if failures := self._of_worker(self.leg_failures, failure.worker, *labels):
            failures.inc()

    def record_held(self, priority: PriorityClass, seconds: float) -> None:
        self._class_hold(priority).observe(seconds)

    def first_byte(self, priority: PriorityClass, seconds: float, slo_s: float | None) -> None:
        """Count decode's first byte, ``seconds`` after the attempt's submission. ``slo_s``: the
        client's TTFT target; ``None``: none."""
        self.ttft_seconds.observe(seconds)
        self._class_ttft(priority).observe(seconds)
        if slo_s is not None:
            self.slo.labels("met" if seconds <= slo_s else "missed").inc()

    def request_over(self, timeline: Timeline) -> dict[str, float] | None:
        """Count an ended attempt's output tokens and the parts of its TTFT, which are returned in
        seconds; ``None`` if it had no first byte."""
        self.completion_tokens.inc(min(max(0, timeline.completion_tokens or 0), _MOST_TOKENS))
        if timeline.client is None or timeline.client.first_byte_s is None:
            return None
        parts = timeline.parts()
        for part, seconds in parts.items():
            self._parts(part).observe(seconds)
        return parts

    def prefix_found(self, prompt_tokens: int, predicted_tokens: int, reported_tokens: int) -> None:
        """Count a prompt's tokens, and those cached at prefill as predicted and as reported."""
        self.prompt_tokens.inc(max(0, prompt_tokens))
        self.predicted_tokens.inc(max(0, predicted_tokens))
        self.reported_tokens.inc(max(0, reported_tokens))
        self.hit_error.observe(reported_tokens - predicted_tokens)

    def on_forward_ended(self, worker_url: str, chunk_tokens: int, report: EndForward) -> None:
        """Count one pass of one prefill rank; other reports are ignored. ``chunk_tokens``: the
        rank's chunk, 0 if unknown."""
        if report.kind != "forward" or report.role != "prefill":
            return
        if report.extend_tokens > 0 and chunk_tokens > 0:
            self.chunk_utilisation.observe(min(1.0, report.extend_tokens / chunk_tokens))
        if report.dp_rank == 0:
            if passes := self._of_worker(self.forward_seconds, worker_url, worker_url):
                passes.observe(report.forward_s)
            if report.tokens_per_rank and any(report.tokens_per_rank):
                busy, ranks = active_ranks(report.tokens_per_rank), len(report.tokens_per_rank)
                self.active_ranks.observe(busy / ranks)
                self.active_rank_count.observe(busy)
                self.max_over_mean.observe(max_over_mean(report.tokens_per_rank))
                if chunk_tokens > 0:
                    filled = sum(report.tokens_per_rank) / (chunk_tokens * ranks)
                    self.batch_fill.observe(min(1.0, filled))


def build_info(version: str, policy: str, trigger: str) -> Metric:
    """Return a gauge of 1 whose labels are version, policy and trigger; it distinguishes the sides
    of an A/B test."""
    of = (version, policy, trigger if policy == "sbs" else "immediate")
    about = "1; version of sglang-sbs, and the policy in force"
    return gauge("sbs_build_info", about, {of: 1}, "version", "policy", "trigger")


# fmt: off
_OF_QUEUE = (
    ("sbs_queue_requests", "Requests waiting in the scheduler", "queue_requests"),
    ("sbs_queue_tokens", "Their prompt tokens", "queue_tokens"),
    ("sbs_in_flight_requests", "Dispatched and not ended", "in_flight_requests"),
    ("sbs_oldest_wait_seconds", "Age of the longest waiting request", "oldest_wait_s"),
    ("sbs_interval_seconds", "I_opt, the dispatch interval", "interval_s"),
    ("sbs_mean_forward_seconds", "Mean T_fwd, outliers left out", "mean_forward_s"),
    ("sbs_latency_seconds", "L_net, dispatch to runnable", "latency_s"),
    ("sbs_throttled", "1 while flow control refuses", "throttled"),
    ("sbs_holding", "0 while batches arrive split, so requests leave at once", "holding"),
    ("sbs_prefix_index_blocks", "KV blocks in the prefix index", "prefix_blocks"),
    ("sbs_lead_seconds", "How long before a pass's end batches are dispatched", "lead_s"),
    ("sbs_queue_tenants", "Tenants with requests waiting, if several", "queue_tenants"),
)
_OF_INSTANCES = (
    (gauge, "sbs_instance_ready", "1 if it may take a batch now", "ready"),
    (gauge, "sbs_lead_error_seconds", "Size of the error of predicted pass ends",
        "prediction_error_s"),
    (gauge, "sbs_predicted_free_seconds", "Until it can launch again, as predicted",
        "predicted_free_in_s"),
    (total, "sbs_watchdog_fires", "State resets after silence", "watchdog_fires"),
)
# fmt: on


def snapshot_families(snapshot: Any, workers: Registry) -> Iterator[Metric]:
    """Yield the scheduler's :class:`~sglang_sbs.scheduling.Snapshot` as metrics. Instances that are
    not in ``workers`` are skipped: the scheduler keeps them for a while."""
    for name, text, field in _OF_QUEUE:
        value = getattr(snapshot, field)
        if value is not None:
            yield gauge(name, text, value)
    about, classes = "Requests waiting, by class of priority", snapshot.queue_classes
    yield gauge("sbs_queue_class_requests", about, classes, "class")
    prefill = [state for state in snapshot.prefill if workers.get(state.instance) is not None]
    decode = [state for state in snapshot.decode if workers.get(state.instance) is not None]
    yield from _instance_families(prefill)
    yield from _rank_families(prefill, decode)


def _instance_families(prefill: Sequence[Any]) -> Iterator[Metric]:
    tiers = {(state.instance, state.tier): 1 for state in prefill}
    yield gauge("sbs_signal_tier", "1 for the signal tier in force", tiers, "worker", "tier")
    for kind, name, text, field in _OF_INSTANCES:
        values = {state.instance: getattr(state, field) for state in prefill}
        yield kind(name, text, values, "worker")


def _rank_families(prefill: Sequence[Any], decode: Sequence[Any]) -> Iterator[Metric]:
    for instances, name, text, field in (
        (prefill, "sbs_rank_c_avail_tokens", "C_avail", "c_avail"),
        (prefill, "sbs_rank_flight_tokens", "U_flight", "flight_tokens"),
        (prefill, "sbs_rank_queued_tokens", "R_queued", "queued_tokens"),
        ([*prefill, *decode], "sbs_endforward_age_seconds", "Time since its last message", "age_s"),
        (decode, "sbs_rank_running_requests", "B, own dispatches included", "running"),
        (decode, "sbs_rank_kv_tokens", "K, own dispatches included", "kv_tokens"),
    ):
        values = {
            (state.instance, str(number)): value
            for state in instances
            for number, rank in enumerate(state.ranks)
            if (value := getattr(rank, field)) is not None
        }
        yield gauge(name, text, values, "worker", "dp_rank")
