"""Decode in steps: DP ranks behind a barrier, one token per request and step.

The closed-loop decode experiment of the paper (section 5.2.2). The scheduler it drives is the
router's own, and so is what it sees: a prefill instance is busy with one pass of ``batch_steps``
decode steps after another, requests arrive as others finish, and a policy that holds requests sends
them as one gang shortly before the pass ends. A request joins its decode rank when the pass that
takes it in is launched, so that nothing but the choice of decode ranks differs between policies.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from sglang_sbs.scheduling import Scheduler, SchedulerConfig, events
from sglang_sbs.simulator.cluster.cost import PassCost
from sglang_sbs.simulator.cluster.engine import SimulatedPrefill
from sglang_sbs.simulator.cluster.spec import ClusterSpec, InstanceSpec
from sglang_sbs.wire import EndForward

_SAMPLE_STEPS = 5
_PREFILL, _DECODE = "p", "d"
_PREFILL_CHUNK_TOKENS = 1 << 40
"""Whatever was sent fits the next pass."""


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """T_step = fixed_ms + request_ms * max_d(B_d) + token_ms * max_d(K_d), fitted to measured
    kernels (DeepSeek-V3, EP32, H100)."""

    fixed_ms: float = 24.6
    request_ms: float = 0.195
    token_ms: float = 2.7e-5


REQUESTS_PER_RANK = 35


class DecodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The experiment: ``concurrency`` requests at all times over ``ranks`` ranks."""

    ranks: int = 32
    concurrency: int = 32 * REQUESTS_PER_RANK
    steps: int = 12000
    warm_up_steps: int = 3000
    batch_steps: int = 8
    """A prefill pass takes so many decode steps; what it took in joins decode together."""
    input_mean: float = 1200.0
    input_cv: float = 3.5
    output_mean: float = 1000.0
    output_cv: float = 1.5
    longest: int = 32768
    cost: StepCost = StepCost()
    report_steps: int = 2
    """Every rank reports its state after so many steps."""
    seed: int = 0


@dataclass(slots=True)
class DecodeOutcome:
    kv: list[tuple[float, list[int]]] = field(default_factory=list)
    running_max: list[int] = field(default_factory=list)
    tokens: int = 0
    completed: int = 0
    time_s: float = 0.0
    balanced_s: float = 0.0
    """What the same steps would have taken with B and K equal on all ranks."""

    def band(self) -> tuple[list[float], list[float]]:
        """Of each sample: the mean and the standard deviation of K over the ranks."""
        samples = [kv for _, kv in self.kv]
        return [statistics.fmean(kv) for kv in samples], [statistics.pstdev(kv) for kv in samples]

    def row(self) -> dict[str, float]:
        """KV band (mean -/+ one standard deviation over ranks), peak, CV and throughput, also what
        it would be with the same requests in perfect balance: no placement can do better."""
        mean, sd = map(statistics.mean, self.band())
        return {
            "kv_sigma_low": mean - sd,
            "kv_sigma_high": mean + sd,
            "kv_cv": sd / mean,
            "kv_peak": max(max(kv) for _, kv in self.kv),
            "batch_max": statistics.mean(self.running_max),
            "tokens_per_s": self.tokens / self.time_s,
            "balanced_tokens_per_s": self.tokens / self.balanced_s,
        }


@dataclass(slots=True)
class _Rank:
    running: int = 0
    kv_tokens: int = 0
    seq: int = 0
    accepted: list[str] = field(default_factory=list)
    accepted_total: int = 0


class DecodeSimulation:
    def __init__(self, spec: DecodeSpec, config: SchedulerConfig) -> None:
        self._spec = spec
        self._rng = random.Random(spec.seed)
        self._scheduler = Scheduler(config)
        self._ranks = [_Rank() for _ in range(spec.ranks)]
        self._prefill = SimulatedPrefill(
            _PREFILL,
            InstanceSpec(dp_size=1, chunk_tokens=_PREFILL_CHUNK_TOKENS),
            ClusterSpec(cost=PassCost(fixed_s=0.0)),
            rng=self._rng,
        )
        """A pass takes all that was sent before its launch."""
        self._finish: list[tuple[int, str]] = []
        self._live: dict[str, tuple[int, int, int]] = {}
        self._lengths: dict[str, tuple[int, int]] = {}
        self._arrived = 0
        self._completed = 0
        self._now_s = 0.0
        self._step = 0
        self._wake_s = math.inf
        self._placed: list[events.Dispatch] = []
        self._weights: Sequence[float] | None = None

    def run(self, skew: float = 0.0) -> DecodeOutcome:
        """Simulate.

        Args:
            skew: above 0 ranks are drawn, whatever the scheduler chose, with weights from
                ``1 - skew`` to ``1 + skew``: the persistent imbalance of hashing or sticky
                placement.
        """
        spec, cost = self._spec, self._spec.cost
        if skew:
            last = max(1, spec.ranks - 1)
            self._weights = [1 - skew + 2 * skew * i / last for i in range(spec.ranks)]
        chunk_tokens = _PREFILL_CHUNK_TOKENS
        up = events.InstanceUp(
            instance=_PREFILL, role="prefill", dp_size=1, chunk_tokens=chunk_tokens
        )
        self._tell(up)
        self._tell(events.InstanceUp(instance=_DECODE, role="decode", dp_size=spec.ranks))
        outcome = DecodeOutcome()
        completed_before = 0
        for step in range(spec.steps):
            self._step = step
            if self._wake_s <= self._now_s:
                self._wake_s = math.inf
                self._tell(events.TimerFired())
            self._arrive(spec.concurrency if step == 0 else self._finish_due(step))
            if step % spec.batch_steps == 0:
                self._next_pass(spread_ages=step == 0)
            running = [rank.running for rank in self._ranks]
            kv = [rank.kv_tokens for rank in self._ranks]
            running_max, kv_max = max(running), max(kv)
            step_ms = cost.fixed_ms + cost.request_ms * running_max + cost.token_ms * kv_max
            self._now_s += step_ms / 1e3
            if step == spec.warm_up_steps:
                completed_before = self._completed
            if step >= spec.warm_up_steps:
                own_ms = cost.request_ms * sum(running) + cost.token_ms * sum(kv)
                outcome.tokens += sum(running)
                outcome.completed = self._completed - completed_before
                outcome.time_s += step_ms / 1e3
                outcome.balanced_s += (cost.fixed_ms + own_ms / len(self._ranks)) / 1e3
                if step % _SAMPLE_STEPS == 0:
                    outcome.kv.append((self._now_s, kv))
                    outcome.running_max.append(running_max)
            for rank in self._ranks:
                rank.kv_tokens += rank.running
            if step % spec.report_steps == 0:
                self._report()
        return outcome

    def _finish_due(self, step: int) -> int:
        finished = 0
        while self._finish and self._finish[0][0] <= step:
            _, rid = heapq.heappop(self._finish)
            index, prompt, output = self._live.pop(rid)
            rank = self._ranks[index]
            rank.running -= 1
            rank.kv_tokens -= prompt + output
            self._tell(events.RequestEnded(rid=rid, outcome="completed", completion_tokens=output))
            finished += 1
        self._completed += finished
        return finished

    def _arrive(self, count: int) -> None:
        for _ in range(count):
            rid = f"r{self._arrived}"
            self._arrived += 1
            prompt = self._length(self._spec.input_mean, self._spec.input_cv)
            output = max(2, self._length(self._spec.output_mean, self._spec.output_cv))
            self._lengths[rid] = (prompt, output)
            self._tell(events.RequestArrived(rid=rid, prompt_tokens=prompt))

    def _next_pass(self, *, spread_ages: bool) -> None:
        """End the running prefill pass and launch the next with all that was sent meanwhile."""
        prefill = self._prefill
        if prefill.device:
            prefill.device[0].end_s = self._now_s  # nobody knew how long its steps would take
            ended, messages = prefill.finish()
            self._hear(messages)
            for request in ended.completed:
                self._tell(events.PrefillDone(rid=request.rid))
        for _ in range(2):  # what is sent upon the word that it is idle is launched at once
            if not prefill.device:
                launched, messages = prefill.step(self._now_s)
                prefill.waits_for(launched)
                self._hear(messages)
        placed, self._placed = self._placed, []
        for command in placed:
            self._join(command, spread_ages)

    def _join(self, command: events.Dispatch, spread_ages: bool) -> None:
        prompt, output = self._lengths.pop(command.rid)
        index = command.decode_rank
        if self._weights is not None:
            index = self._rng.choices(range(len(self._ranks)), self._weights)[0]
        age = int(self._rng.random() * output) if spread_ages else 0
        rank = self._ranks[index]
        rank.running += 1
        rank.kv_tokens += prompt + age
        rank.accepted.append(command.rid)
        rank.accepted_total += 1
        self._live[command.rid] = (index, prompt, output)
        heapq.heappush(self._finish, (self._step + output - age, command.rid))

    def _length(self, mean: float, cv: float) -> int:
        sigma = math.sqrt(math.log(1 + cv * cv))
        drawn = self._rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
        return int(min(max(drawn, 8), self._spec.longest))

    def _report(self) -> None:
        for index, rank in enumerate(self._ranks):
            message = EndForward(
                instance_id=_DECODE,
                boot_id=_DECODE,
                role="decode",
                dp_rank=index,
                dp_size=len(self._ranks),
                seq=rank.seq,
                kind="forward",
                forward_id=self._step,
                running_requests=rank.running,
                kv_tokens=rank.kv_tokens,
                accepted_requests=rank.accepted_total,
                rids=rank.accepted,
            )
            self._hear([message])
            rank.seq += 1
            rank.accepted = []

    def _hear(self, reports: Sequence[EndForward]) -> None:
        for report in reports:
            self._tell(events.ForwardEnded(instance=report.instance_id, report=report))

    def _tell(self, event: events.Event) -> None:
        for command in self._scheduler.handle(event, self._now_s):
            if isinstance(command, events.Dispatch):
                self._placed.append(command)
                self._prefill.deliver(command.rid, 0, self._lengths[command.rid][0])
            elif isinstance(command, events.WakeAt):
                self._wake_s = command.time_s
