"""Reconstructs a run on real engines from an event log: arrivals, placements, passes, and the
requests in each pass. Independent of the fits."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sglang_sbs.scheduling import (
    Dispatch,
    ForwardEnded,
    InstanceDown,
    InstanceUp,
    PolicySwitched,
    PrefillDone,
    RequestArrived,
    RequestEnded,
    SchedulerConfig,
)
from sglang_sbs.scheduling.eventlog import LogRecord, read_event_log
from sglang_sbs.wire import EndForward

_ALL_REPORTED_S = 10.0
"""Time after the start of an observed log in which each instance that is up has reported: idle
ranks report every second, and a pass is shorter than this."""
_BUCKET_S = 10.0
"""Length of the buckets of time in which the fastest message is looked for."""


@dataclass(slots=True)
class RecordedRequest:
    """One request; times in seconds of the router's clock, NaN: not in the log."""

    rid: str
    arrived_s: float
    prompt_tokens: int
    arrival: RequestArrived
    """The event as the router logged it. Its prompt length may be an estimate; ``prompt_tokens`` is
    the engine's count if known."""
    dispatched_s: float = math.nan
    dispatch: Dispatch | None = None
    """Its last dispatch, at ``dispatched_s``; None: not dispatched."""
    cached_tokens: int | None = None
    """Cached tokens reported by the engine; None if it did not report them."""
    first_token_s: float = math.nan
    """Time of decode's first byte at the router."""
    ended_s: float = math.nan
    completion_tokens: int | None = None
    first_pass: RecordedPass | None = None
    """The pass that computed the request's first tokens."""
    last_pass: RecordedPass | None = None
    """The pass that computed the last token of the prompt."""

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival at the scheduler to the first byte of decode."""
        return self.first_token_s - self.arrived_s


@dataclass(slots=True)
class RecordedPass:
    """One prefill pass; the times are those of the last rank, in seconds of the router's clock."""

    instance: str
    tokens: list[int]
    """Extend tokens per rank."""
    launch_s: float
    inflight: int
    """Number of passes on the device when this one was launched."""
    end_s: float = math.nan
    forward_s: float = math.nan
    pairs: list[float] = field(default_factory=list)
    """Causal attention pairs (query and key token) per rank; estimated for unknown requests."""
    requests: list[int] = field(default_factory=list)
    """Number of requests per rank."""
    left_over: list[bool] = field(default_factory=list)
    """Per rank: whether requests that could run did not fit into the pass."""
    previous: RecordedPass | None = None
    """The previous pass on the instance, if it is in the log."""

    @property
    def pause_s(self) -> float:
        """Seconds from the end of the previous pass to this launch; infinite if that is not
        known."""
        if self.previous is None or not self.previous.complete:
            return math.inf
        return self.launch_s - self.previous.end_s

    @property
    def complete(self) -> bool:
        return not math.isnan(self.end_s)


@dataclass(slots=True)
class Recording:
    config: SchedulerConfig
    policies: list[str] = field(default_factory=list)
    """Policies in force, in order of their first use."""
    observed: bool = False
    """True if ``sglang-sbs observe`` wrote the log: another router decided, and ``PrefillDone`` is
    the end of the prompt."""
    prefill: list[InstanceUp] = field(default_factory=list)
    decode: list[InstanceUp] = field(default_factory=list)
    changes: list[tuple[float, str, bool]] = field(default_factory=list)
    """(Router's time, prefill instance, whether it came up) for each instance added or removed."""
    requests: dict[str, RecordedRequest] = field(default_factory=dict)
    """Requests in order of arrival."""
    passes: list[RecordedPass] = field(default_factory=list)
    feedback_s: list[float] = field(default_factory=list)
    """Delay in seconds of each prefill report at the scheduler, compared with the fastest."""


class _Log:
    """An event log that can be read several times and is never loaded into memory as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[LogRecord]:
        return read_event_log(self._path)


def read_recording(path: Path) -> Recording:
    """Read an event log of prefill engines with the plugin.

    Raises:
        OSError, ValueError: it cannot be read, or has no EndForward of a prefill pass.
    """
    first = next(iter(_Log(path)), None)
    if first is None or first.config is None:
        raise ValueError(f"{path} does not start with a configuration")
    try:
        return recording_of(_Log(path), first.config, first.observed)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error


def recording_of(
    records: Iterable[LogRecord], config: SchedulerConfig, observed: bool = False
) -> Recording:
    """Reconstruct the run from its records, which must be iterable more than once.

    Raises:
        ValueError: no record is an EndForward of a prefill pass; or the DP ranks of an instance
            share no barrier, so that passes of the instance cannot be reconstructed.
    """
    recording = Recording(config, [config.policy], observed=observed)
    offsets = ClockOffsets(records)
    if not offsets:
        raise ValueError("has no EndForward message of a prefill engine (no plugin?)")
    counted = {
        record.event.rid: record.event.prompt_tokens
        for record in records
        if isinstance(record.event, PrefillDone) and record.event.prompt_tokens
    }
    reader = _Reader(recording, offsets, counted)
    for record in records:
        reader.read(record)
    for rid, request in recording.requests.items():
        # If the plugin reports finished requests, a request that it did not report has not
        # finished, whatever the order of arrival suggests.
        if (
            request.dispatch is not None
            and request.dispatch.prefill in reader.reporting
            and rid not in reader.finished
        ):
            request.last_pass = None
    return recording


@dataclass(slots=True, eq=False)
class _Queued:
    """A request at a rank, accepted and not yet computed."""

    request: RecordedRequest
    computed: int = 0

    @property
    def remaining(self) -> int:
        return self.request.prompt_tokens - self.computed


class _Reader:
    def __init__(
        self,
        recording: Recording,
        offsets: ClockOffsets,
        counted: dict[str, int],
    ) -> None:
        """Create a reader that fills ``recording``. ``counted``: prompt tokens by rid, where the
        engine reported them."""
        self._recording = recording
        self._offsets = offsets
        self._counted = counted
        self._began_s = math.nan
        """Time of the first event."""
        self._passes: dict[tuple[str, int, int], RecordedPass] = {}
        """Passes by instance, start of the engine and forward id, which begins anew with it."""
        self._starts: Counter[str] = Counter()
        """Number of restarts so far, by instance."""
        self._start_of: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
        """Start of the engine in which a DP rank had each boot id, by instance and rank. Each node
        of an engine has its own id, so only a rank's next one shows a restart."""
        self._newest: dict[tuple[str, int], RecordedPass] = {}
        """Newest pass by instance and start of the engine."""
        self._queues: dict[tuple[str, int], list[_Queued]] = defaultdict(list)
        self.finished: set[str] = set()
        """Ids of requests that engines reported as finished."""
        self.reporting: set[str] = set()
        """Instances that report finished requests; older plugins do not."""

    def read(self, record: LogRecord) -> None:
        recording, requests = self._recording, self._recording.requests
        if math.isnan(self._began_s) and record.event is not None:
            self._began_s = record.now_s
        match record.event:
            case RequestArrived(rid=rid) as event:
                tokens = self._counted.get(rid, event.prompt_tokens)
                requests[rid] = RecordedRequest(rid, record.now_s, tokens, event)
            case PrefillDone(rid=rid) as event if rid in requests:
                request = requests[rid]
                if event.cached_tokens is not None:
                    request.cached_tokens = event.cached_tokens
                answered = event.prompt_tokens is None and not event.aborted
                if answered and math.isnan(request.first_token_s):
                    request.first_token_s = record.now_s
            case RequestEnded(rid=rid) as event if rid in requests:
                self._on_ended(requests[rid], event, record.now_s)
            case InstanceUp(role="prefill", barrier=False, instance=name):
                raise ValueError(f"has passes of {name}, whose DP ranks share no barrier")
            case InstanceUp() as up:
                known = recording.prefill if up.role == "prefill" else recording.decode
                is_new = all(earlier.instance != up.instance for earlier in known)
                known[:] = [earlier for earlier in known if earlier.instance != up.instance] + [up]
                self._changed(up.instance, True, record.now_s, is_new=is_new)
            case PolicySwitched(policy=policy) if policy not in recording.policies:
                recording.policies.append(policy)
            case InstanceDown(instance=name):
                self._changed(name, False, record.now_s)
            case ForwardEnded(instance=name, report=report) if report.role == "prefill":
                self._on_report(name, report, record.now_s)
        for command in record.commands:
            if isinstance(command, Dispatch) and command.rid in requests:
                requests[command.rid].dispatched_s = record.now_s
                requests[command.rid].dispatch = command

    def _on_ended(self, request: RecordedRequest, event: RequestEnded, now_s: float) -> None:
        request.ended_s = now_s
        request.completion_tokens = event.completion_tokens
        if event.client is not None and event.client.first_byte_s is not None:
            # The relay observed the first byte itself; PrefillDone may be prefill's response.
            request.first_token_s = request.arrived_s + event.client.first_byte_s

    def _changed(self, name: str, up: bool, now_s: float, *, is_new: bool = False) -> None:
        changes = self._recording.changes
        # An observer learns of the instances that are up from their next reports.
        is_late = is_new and now_s > self._began_s + _ALL_REPORTED_S
        unknown = self._recording.observed and not is_late
        before = next(
            (was_up for _, changed, was_up in reversed(changes) if changed == name), unknown
        )
        if up != before and any(event.instance == name for event in self._recording.prefill):
            changes.append((now_s, name, up))

    def _on_report(self, name: str, report: EndForward, now_s: float) -> None:
        queue, starts = self._queues[name, report.dp_rank], self._start_of[name, report.dp_rank]
        if report.boot_id not in starts:
            queue.clear()  # a restart loses them
            self._starts[name] += max(starts.values(), default=-1) == self._starts[name]
            starts[report.boot_id] = self._starts[name]
        requests = self._recording.requests
        queue += [_Queued(requests[rid]) for rid in report.rids if rid in requests]
        if report.kind not in ("launch", "forward"):
            return
        stamp_s = _stamp_s(report) + self._offsets.at(name, report.boot_id, now_s)
        self._recording.feedback_s.append(now_s - stamp_s)
        key = (name, starts[report.boot_id], report.forward_id)
        if report.kind == "launch":
            a_pass = self._passes.get(key) or self._open(key, report, stamp_s)
            if report.dp_rank >= len(a_pass.tokens):
                return  # it joined during this pass
            a_pass.launch_s = max(a_pass.launch_s, stamp_s)
            a_pass.tokens[report.dp_rank] = report.extend_tokens
            a_pass.requests[report.dp_rank] = report.batch_size
            a_pass.left_over[report.dp_rank] = report.chunk_remainder_tokens > 0
            _attribute(a_pass, report, queue)
        elif key in self._passes:
            a_pass = self._passes[key]
            a_pass.end_s = stamp_s if math.isnan(a_pass.end_s) else max(a_pass.end_s, stamp_s)
            a_pass.forward_s = report.forward_s
            self._finished(a_pass, report.finished, queue)

    def _finished(self, a_pass: RecordedPass, rids: Iterable[str], queue: list[_Queued]) -> None:
        """Record that the pass finished the requests ``rids``, as the engine reports. This
        overrides what :func:`_attribute` assumed."""
        for rid in rids:
            request = self._recording.requests.get(rid)
            if request is not None:
                self.finished.add(rid)
                self.reporting.add(a_pass.instance)
                request.first_pass = request.first_pass or a_pass
                request.last_pass = a_pass
                queue[:] = [queued for queued in queue if queued.request is not request]

    def _open(self, key: tuple[str, int, int], report: EndForward, launch_s: float) -> RecordedPass:
        name, start, _ = key
        a_pass = RecordedPass(
            name,
            [0] * report.dp_size,
            launch_s,
            report.inflight_passes,
            pairs=[0.0] * report.dp_size,
            requests=[0] * report.dp_size,
            left_over=[False] * report.dp_size,
            previous=self._newest.get((name, start)),
        )
        self._passes[key] = self._newest[name, start] = a_pass
        self._recording.passes.append(a_pass)
        return a_pass


def _stamp_s(report: EndForward) -> float:
    return report.end_s if report.kind == "forward" else report.launch_s


class ClockOffsets:
    """The router's clock minus the engines' in seconds, by instance and boot id: each node of an
    engine has its own clock. The fastest message of half a minute is assumed to have taken no time;
    others also waited in the network or for the event loop. So clocks may drift."""

    def __init__(self, records: Iterable[LogRecord]) -> None:
        self._least_s: dict[tuple[str, str, int], float] = {}
        """Smallest difference by instance, boot id and number of the bucket."""
        for record in records:
            event = record.event
            if not isinstance(event, ForwardEnded) or event.report.role != "prefill":
                continue
            if event.report.kind in ("launch", "forward"):
                offset_s = record.now_s - _stamp_s(event.report)
                key = event.instance, event.report.boot_id, int(record.now_s // _BUCKET_S)
                self._least_s[key] = min(offset_s, self._least_s.get(key, math.inf))

    def __bool__(self) -> bool:
        return bool(self._least_s)

    def at(self, instance: str, boot_id: str, now_s: float) -> float:
        """Return the offset for a message of a pass that the log has at ``now_s``."""
        bucket = int(now_s // _BUCKET_S)
        around = ((instance, boot_id, bucket + step) for step in (-1, 0, 1))
        return min(self._least_s.get(key, math.inf) for key in around)


def _attribute(a_pass: RecordedPass, report: EndForward, queue: list[_Queued]) -> None:
    """Attribute the tokens of a pass to the rank's requests, first come, first served.

    A request is skipped if its tokens do not fit and it cannot have been chunked. It was then still
    in the handshake."""
    left = report.extend_tokens + report.cached_tokens
    may_cut = report.chunk_remainder_tokens > 0
    rank = report.dp_rank
    for queued in list(queue):
        if left <= 0:
            return
        # A cached prefix may be reported without its last page.
        fits = queued.remaining <= left
        if not fits and not may_cut:
            continue
        part = min(queued.remaining, left)
        a_pass.pairs[rank] += part * (queued.computed + part / 2)
        queued.request.first_pass = queued.request.first_pass or a_pass
        queued.computed += part
        left -= part
        if queued.remaining == 0:
            queued.request.last_pass = a_pass
            queue.remove(queued)
    # Treat unknown requests as if all of the rank's had equal size.
    a_pass.pairs[rank] += max(0, left) * left / 2 / max(1, report.batch_size)
