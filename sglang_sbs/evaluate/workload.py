"""Turns a recorded run into input for the simulator: arrivals, recorded placements, the fitted
cluster, and measured times. Simulates nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from sglang_sbs.evaluate.fitting.calibration import (
    LEAST_PASSES,
    Calibration,
    FitErrors,
    calibrate,
    fit_cost,
    predict_s,
    usable_passes,
    with_jitter,
)
from sglang_sbs.evaluate.fitting.recording import RecordedPass, RecordedRequest, Recording
from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.events import InstanceUp
from sglang_sbs.scheduling.policy_registry import reads_reports
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.cluster.spec import (
    KV_CAPACITY_TOKENS,
    ClusterSpec,
    InstanceSpec,
    TopologyChange,
)
from sglang_sbs.simulator.workloads.scenario import NETWORK, full_chunk_tokens_per_s

LEAST_REQUESTS = 100
"""Smallest number of measured requests; fewer give no p99 and hardly a mean."""
_WARM_UP_S = 10.0
_WARM_UP_SHARE = 0.1
"""Largest share of the log that is warm-up (at most ``_WARM_UP_S``), in which requests do not
count: engines may have had work before the log began."""
_NOTED_SHARE = 0.01
_OUTPUT_TOKENS = 200


class TooLittle(ValueError):
    """The log is too short or incomplete for an evaluation; the message has the reason."""


class RecordedPlacement(msgspec.Struct, frozen=True):
    """Where and when a recorded request was sent. ``at_s``: seconds from the first arrival."""

    at_s: float
    instance: str
    rank: int
    decode_rank: int
    batch: int


@dataclass(slots=True)
class Workload:
    """One recorded run; lists are in order of arrival with one entry per request."""

    arrivals: list[Arrival]
    placements: list[RecordedPlacement]
    measured_s: list[float]
    """Measured TTFT in seconds; NaN: not measured, or in the warm-up."""
    after_s: list[float]
    """Seconds from the end of the prompt to the first byte, which no prefill policy changes. They
    are added to modelled times."""
    spec: ClusterSpec
    config: SchedulerConfig
    """Settings of the recorded router."""
    policies: list[str]
    """Policies of the recorded router."""
    observed: bool
    """True if ``sglang-sbs observe`` wrote the log, so another router decided."""
    until_first_byte: bool
    """True if TTFT ends with the first byte at the router; False: with the end of the prompt."""
    calibration: Calibration
    errors: FitErrors
    load: float
    """Load as a share of what full chunks would compute."""
    seconds: float
    """Seconds from the first counted arrival to the last."""
    notes: list[str] = field(default_factory=list)
    passes: Sequence[RecordedPass] = ()

    @property
    def reacting(self) -> str:
        """Name of the recorded policy if it is ours and times dispatches by the engines' reports.
        In the model its scheduler decides again, because recorded times would not follow simulated
        passes. Empty: recorded placements are repeated."""
        ran = self.config.policy
        known = not self.observed and len(self.policies) == 1
        return ran if known and reads_reports(ran) else ""

    @property
    def counted(self) -> list[int]:
        return [i for i, value in enumerate(self.measured_s) if not math.isnan(value)]


def workload_of(recording: Recording) -> Workload:
    """Return the workload of a recorded run, with a cluster fitted to the one it ran on.

    Raises: TooLittle: too few requests or passes, or a part of the record is missing. CostError: a
    cost cannot be fitted to the passes."""
    every = list(recording.requests.values())
    sent = [r for r in every if r.dispatch is not None]
    if len(sent) < LEAST_REQUESTS:
        raise TooLittle(f"has {len(sent)} requests that were sent; {LEAST_REQUESTS} are needed")
    usable = usable_passes(recording.passes)
    if len(usable) < LEAST_PASSES:
        raise TooLittle(f"has {len(usable)} whole passes; {LEAST_PASSES} are needed")
    cost, errors = fit_cost(usable)
    cost, jitter = with_jitter(cost, usable)
    fitted = msgspec.structs.replace(calibrate([recording], cost), pass_jitter=jitter)
    seen = sum(not math.isnan(r.first_token_s) for r in sent)
    to_first_byte = not recording.observed and seen > len(sent) / 2
    builder = _Builder(recording, sent, fitted, to_first_byte)
    start_s, last_s = sent[0].arrived_s, sent[-1].arrived_s
    warm_s = start_s + min(_WARM_UP_S, _WARM_UP_SHARE * (last_s - start_s))
    arrivals, spec = builder.arrivals(), builder.spec()
    measured_s = [builder.measured_s(r) if r.arrived_s >= warm_s else math.nan for r in sent]
    seconds = last_s - warm_s
    span_s = max(1e-9, last_s - start_s)
    computed = sum(a.prompt_tokens - builder.hit(r) for a, r in zip(arrivals, sent, strict=True))
    work = Workload(
        arrivals=arrivals,
        placements=builder.placements(),
        measured_s=measured_s,
        after_s=[builder.after_s(r) for r in sent],
        spec=spec,
        config=recording.config,
        policies=["another router"] if recording.observed else recording.policies,
        observed=recording.observed,
        until_first_byte=to_first_byte,
        calibration=fitted,
        errors=errors,
        load=computed / max(1.0, _full_chunk_tokens(spec, span_s)),
        seconds=seconds,
        passes=recording.passes,
    )
    if len(work.counted) < LEAST_REQUESTS:
        raise TooLittle(
            f"has {len(work.counted)} requests with a measured time to the first token after the "
            f"warm-up of {warm_s - start_s:.1f} s; {LEAST_REQUESTS} are needed"
        )
    work.notes = [*_notes(recording, every, sent), *builder.notes]
    return work


def _full_chunk_tokens(spec: ClusterSpec, span_s: float) -> float:
    """Return the tokens that full chunks would compute in the first ``span_s`` seconds on the
    instances that are up."""
    replace = msgspec.structs.replace
    return sum(
        full_chunk_tokens_per_s(replace(spec, instances=(instance,), changes=()))
        * spec.up_s(name, 0.0, span_s)
        for name, instance in spec.prefill
    )


@dataclass(slots=True)
class _Builder:
    """Builds the parts of a workload; ``requests`` are those that were sent to an engine."""

    recording: Recording
    requests: list[RecordedRequest]
    fitted: Calibration
    to_first_byte: bool
    names: dict[str, str] = field(init=False)
    """Names of the simulated prefill instances by those of the recorded ones."""
    block_tokens: int = field(init=False)
    """Tokens per named block; 0: prompts have no block names, so simulated prompts exclude the
    tokens that were cached."""
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        up = {event.instance for event in self.recording.prefill}
        if lost := {r.dispatch.prefill for r in self.requests if r.dispatch is not None} - up:
            raise TooLittle(f"has requests sent to {min(lost)}, but no record of that instance")
        self.names = {event.instance: f"p{i}" for i, event in enumerate(self.recording.prefill)}
        sizes = {r.arrival.block_tokens for r in self.requests if r.arrival.blocks}
        self.block_tokens = sizes.pop() if len(sizes) == 1 else 0

    def hit(self, request: RecordedRequest) -> int:
        """Return how many tokens of the simulated prompt were cached in the recorded run."""
        return (request.cached_tokens or 0) if self.block_tokens else 0

    def arrivals(self) -> list[Arrival]:
        return [self._arrival(r) for r in self.requests]

    def _arrival(self, request: RecordedRequest) -> Arrival:
        at_s = request.arrived_s - self.requests[0].arrived_s
        tokens = request.prompt_tokens
        if not self.block_tokens:
            tokens -= request.cached_tokens or 0
        recorded = request.arrival
        output = request.completion_tokens or recorded.max_new_tokens or _OUTPUT_TOKENS
        blocks = tuple(recorded.blocks) if self.block_tokens else ()
        # An additional page would be a block of tokens that the prompt does not have.
        blocks = blocks[: tokens // self.block_tokens] if blocks else ()
        more = recorded.session, recorded.priority, recorded.tenant
        return Arrival(at_s, max(1, tokens), output, blocks, *more)

    def placements(self) -> list[RecordedPlacement]:
        first, offsets = 0, {}
        for up in self.recording.decode:
            offsets[up.instance], first = first, first + up.dp_size
        start_s = self.requests[0].arrived_s
        out = []
        for r in self.requests:
            sent = r.dispatch
            assert sent is not None
            decode_rank = (offsets.get(sent.decode, 0) + max(0, sent.decode_rank)) % max(1, first)
            at_s, name = r.dispatched_s - start_s, self.names[sent.prefill]
            out.append(RecordedPlacement(at_s, name, sent.prefill_rank, decode_rank, sent.batch))
        return out

    def measured_s(self, request: RecordedRequest) -> float:
        if self.to_first_byte:
            return request.ttft_s
        a_pass = request.last_pass
        return math.nan if a_pass is None else a_pass.end_s - request.arrived_s

    def after_s(self, request: RecordedRequest) -> float:
        if not self.to_first_byte:
            return 0.0
        a_pass = request.last_pass
        after_s = math.nan if a_pass is None else request.first_token_s - a_pass.end_s
        return self.fitted.first_token_s if math.isnan(after_s) else max(0.0, after_s)

    def spec(self) -> ClusterSpec:
        ups, decode, fitted = self.recording.prefill, self.recording.decode, self.fitted
        sizes = {(up.charged_page or up.page_size, up.prefill_max_requests) for up in ups}
        page_size, most = max(sizes)
        if len(sizes) > 1:
            self.notes.append("prefill instances differ in page size or requests per pass")
        ended = [r.completion_tokens for r in self.requests if r.completion_tokens]
        asked = {r.arrival.max_new_tokens for r in self.requests}
        longest = max(r.prompt_tokens for r in self.requests)
        room = min((up.kv_capacity_tokens for up in ups), default=0) or KV_CAPACITY_TOKENS
        return ClusterSpec(
            cost=fitted.cost,
            instances=tuple(map(self._instance, ups)),
            changes=self._changes(),
            page_size=page_size,
            prefill_max_requests=most,
            captured_tokens=ups[0].captured_tokens,
            overlap=any(up.overlap for up in ups)
            or any(a_pass.inflight for a_pass in self.recording.passes),
            block_tokens=self.block_tokens,
            kv_capacity_tokens=max(room, longest),
            prefix_source=ups[0].prefix_source,
            decode_dp_size=sum(up.dp_size for up in decode) or 1,
            decode_kv_capacity_tokens=min((up.kv_capacity_tokens for up in decode), default=0),
            decode_max_running_requests=min((up.max_running_requests for up in decode), default=0),
            max_new_tokens=asked.pop() if len(asked) == 1 else None,
            output_tokens=round(statistics.fmean(ended)) if ended else _OUTPUT_TOKENS,
            dispatch_latency_s=fitted.dispatch_latency_s,
            gang_jitter=fitted.gang_jitter,
            dispatch_jitter=fitted.dispatch_jitter,
            gang_gate_s=NETWORK["gang_gate_s"],
            prepare_s=fitted.prepare_s,
            launch_gap_s=fitted.launch_gap_s,
            first_token_s=fitted.first_token_s if self.to_first_byte else 0.0,
            feedback_latency_s=fitted.feedback_latency_s,
            decode_s=fitted.decode_s,
            pass_jitter=fitted.pass_jitter,
        )

    def _instance(self, up: InstanceUp) -> InstanceSpec:
        chunk_tokens = up.chunk_tokens or self.recording.config.default_chunk_tokens
        return InstanceSpec(
            dp_size=up.dp_size, chunk_tokens=chunk_tokens, recorded=self._factors(up.instance)
        )

    def _factors(self, instance: str) -> tuple[tuple[float, float], ...]:
        """Return start (seconds from the first arrival) and measured over predicted time of each of
        the instance's passes, by start. Simulated passes are slowed down by these factors."""
        cost, start_s = self.fitted.cost, self.requests[0].arrived_s
        mine = [
            a_pass for a_pass in usable_passes(self.recording.passes) if a_pass.instance == instance
        ]
        pairs = [(a_pass, predict_s(cost, a_pass)) for a_pass in mine]
        return tuple(
            sorted(
                (a_pass.end_s - a_pass.forward_s - start_s, a_pass.forward_s / predicted_s)
                for a_pass, predicted_s in pairs
                if predicted_s > 0
            )
        )

    def _changes(self) -> tuple[TopologyChange, ...]:
        """Return the prefill instances added or removed from the first arrival to the last, and
        when."""
        start_s, last_s = self.requests[0].arrived_s, self.requests[-1].arrived_s
        changes = [
            TopologyChange(at_s - start_s, "up" if up else "drain", self.names[name])
            for at_s, name, up in self.recording.changes
            if start_s < at_s < last_s
        ]
        if changes:
            self.notes.append(f"prefill instances came or went {len(changes)} times")
        return tuple(changes)


def _notes(
    recording: Recording, every: Sequence[RecordedRequest], sent: Sequence[RecordedRequest]
) -> list[str]:
    notes = []
    if len(recording.policies) > 1:
        named = ", ".join(recording.policies)
        notes.append(f"the router changed its policy: {named}; ratios are to all of it together")
    if len(every) - len(sent) > _NOTED_SHARE * len(every):
        number = len(every) - len(sent)
        notes.append(f"{number:,} requests were never sent to an engine and are left out")
    retried = sum(1 for r in sent if r.arrival.exclude)
    if retried > _NOTED_SHARE * len(sent):
        notes.append(f"{retried:,} of the requests are retries after a failure")
    unseen = sum(r.last_pass is None for r in sent)
    if unseen > _NOTED_SHARE * len(sent):
        notes.append(f"of {unseen:,} requests the log has no pass that ended their prompt")
    in_passes = sum(sum(a_pass.tokens) for a_pass in recording.passes)
    known = sum(r.prompt_tokens - (r.cached_tokens or 0) for r in sent)
    if in_passes > (1 + 3 * _NOTED_SHARE) * known:
        share = 1 - known / in_passes
        notes.append(
            f"{share:.0%} of the tokens in the passes belong to no request of this log: other "
            "traffic reaches these engines"
        )
    return notes
