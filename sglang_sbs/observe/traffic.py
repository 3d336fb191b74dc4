"""Summarizes an observation: how full and how even passes are, and how long requests wait for them.
Sans-I/O."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import TypeVar

from sglang_sbs.console.plain_words import counted
from sglang_sbs.observe.recorder import ObservedRequest
from sglang_sbs.wire import EndForward

_N = TypeVar("_N", int, float)
_MOST_VALUES = 1_000_000
_RECENT = 2_000
"""Number of latest requests whose waits a progress line summarizes."""
_MAX_OPEN_PASSES = 4096
_LEAST_GAP_S = 1e-3
LEAST_PASSES = 30
"""Smallest number of passes for a statement about evenness."""
EVEN = 1.1
"""Largest ratio of the heaviest rank's tokens to the mean up to which passes count as even."""


@dataclass(slots=True)
class _SeenPass:
    tokens: dict[int, int] = field(default_factory=dict)
    """Tokens by DP rank."""
    start_s: float = 0.0
    end_s: float = 0.0


@dataclass(slots=True)
class _Busy:
    """Passes of a unit that runs them one after the other: an instance, or an unsynchronized
    rank."""

    first_s: float
    end_s: float
    passes_s: float = 0.0


class Traffic:
    """Figures of an observation, fed by the callbacks of a :class:`~.recorder.Recorder`."""

    def __init__(self) -> None:
        self.prompts: deque[int] = deque(maxlen=_MOST_VALUES)
        self.cached_tokens = 0
        self.waits_s: deque[float] = deque(maxlen=_MOST_VALUES)
        """Seconds from each request's arrival to the start of its first pass."""
        self.prefills_s: deque[float] = deque(maxlen=_MOST_VALUES)
        """Seconds from each request's arrival to the end of its last prefill pass."""
        self.gaps_s: deque[float] = deque(maxlen=_MOST_VALUES)
        """Seconds between consecutive passes."""
        self.passes = 0
        self.passes_s = 0.0
        self.shared_passes = 0
        """Number of passes run by several DP ranks together."""
        self.active_ranks = 0
        self.ranks = 0
        self.most_tokens = 0.0
        self.mean_tokens = 0.0
        """Sum over the shared passes of the mean tokens per rank."""
        self._open: OrderedDict[tuple[str, int], _SeenPass] = OrderedDict()
        self._busy: dict[tuple[str, int], _Busy] = {}

    def on_request(self, request: ObservedRequest) -> None:
        if request.prefill_s is not None:
            self.prefills_s.append(request.prefill_s)
        elif request.waited_s is not None:
            self.waits_s.append(request.waited_s)
            self.cached_tokens += request.cached_tokens or 0
        else:
            self.prompts.append(request.prompt_tokens)

    def on_pass(self, name: str, report: EndForward, end_s: float) -> None:
        """Add a rank's part of a pass. A pass counts once all ranks have reported it; without a
        barrier each rank's part is a pass."""
        shared = report.barrier and report.dp_size > 1
        rank = -1 if shared else report.dp_rank
        key = (f"{name} {rank}", report.forward_id)
        a_pass = self._open.pop(key, None) or _SeenPass()
        a_pass.tokens[report.dp_rank] = report.extend_tokens
        a_pass.start_s, a_pass.end_s = end_s - report.forward_s, end_s
        if shared and len(a_pass.tokens) < report.dp_size:
            self._open[key] = a_pass
            if len(self._open) > _MAX_OPEN_PASSES:
                self._open.popitem(last=False)
        elif any(a_pass.tokens.values()):
            self._count((name, rank), a_pass, report.dp_size if shared else 1)

    def _count(self, place: tuple[str, int], a_pass: _SeenPass, ranks: int) -> None:
        self.passes += 1
        self.passes_s += a_pass.end_s - a_pass.start_s
        busy = self._busy.setdefault(place, _Busy(a_pass.start_s, a_pass.start_s))
        if a_pass.start_s - busy.end_s > _LEAST_GAP_S:
            self.gaps_s.append(a_pass.start_s - busy.end_s)
        busy.passes_s += a_pass.end_s - a_pass.start_s
        busy.end_s = max(busy.end_s, a_pass.end_s)
        if ranks > 1:
            tokens = a_pass.tokens.values()
            self.shared_passes += 1
            self.active_ranks += sum(number > 0 for number in tokens)
            self.ranks += ranks
            self.most_tokens += max(tokens)
            self.mean_tokens += sum(tokens) / ranks

    @property
    def unevenness(self) -> float:
        """Tokens of the fullest rank over the mean of all ranks; 1 without shared passes."""
        return self.most_tokens / self.mean_tokens if self.mean_tokens else 1.0

    @property
    def idle_share(self) -> float:
        """Share of the time between first and last pass in which an instance was idle."""
        span_s = sum(busy.end_s - busy.first_s for busy in self._busy.values())
        passes_s = sum(busy.passes_s for busy in self._busy.values())
        return max(0.0, 1 - passes_s / span_s) if span_s > 0 else 0.0

    def progress(self) -> str:
        parts = [counted(len(self.prompts), "request")]
        if self.shared_passes:
            active, ranks = self._ranks()
            parts.append(f"{active:.1f}/{ranks:.3g} ranks, max/mean {self.unevenness:.2f}")
        if self.waits_s:
            p50_ms, p99_ms = _quantiles_ms(islice(reversed(self.waits_s), _RECENT))
            parts.append(f"waited {p50_ms:,.0f} (p99 {p99_ms:,.0f}) ms")
        if self.passes:
            parts.append(f"idle {self.idle_share:.0%}")
        return ", ".join(parts)

    def verdict(self) -> str:
        """Return one or two sentences on how well the passes are used."""
        waits = ""
        if self.waits_s:
            waits = f"Requests waited {_both(self.waits_s)} for their first pass, "
            waits += f"and instances were idle {self.idle_share:.0%} of the time."
        if self.passes < LEAST_PASSES:
            return f"Too few passes to judge ({self.passes}). {waits}"
        if not self.shared_passes:
            return f"No DP ranks share passes here, so only waiting can be shortened. {waits}"
        ratio = self.unevenness
        fullest = f"the fullest DP rank computed {ratio:.2f}x the mean"
        if ratio <= EVEN:
            return f"Passes are even ({fullest}), so only waiting can be shortened. {waits}"
        empty = 1 - 1 / ratio
        return (
            f"Passes are uneven: {fullest}, so {empty:.0%} of what the ranks could have computed "
            f"in the same passes stayed empty. {waits}"
        )

    def lines(self, took_s: float) -> Iterator[str]:
        """Yield the figures, one topic per line; ``took_s`` is the duration of the observation."""
        if self.prompts:
            rate = len(self.prompts) / took_s if took_s > 0 else 0.0
            tokens, p99 = sum(self.prompts), _at(sorted(self.prompts), 0.99)
            yield (
                f"requests    {len(self.prompts):,} ({rate:.1f}/s), prompts of "
                f"{fmean(self.prompts):,.0f} tokens in the mean, p99 {p99:,}, "
                f"{self.cached_tokens / tokens if tokens else 0:.0%} cached"
            )
        if self.waits_s:
            yield f"waited      {_both(self.waits_s)}, from arrival in the engine to the first pass"
        if self.prefills_s:
            yield f"prefill     {_both(self.prefills_s)}, from arrival to the end of the last pass"
        if self.passes:
            mean_ms = 1e3 * self.passes_s / self.passes
            shared = ""
            if self.shared_passes:
                active, ranks = self._ranks()
                shared = f", {active:.1f} of {ranks:.3g} ranks active"
                shared += f", tokens max/mean {self.unevenness:.2f}"
            yield f"passes      {self.passes:,}, mean {mean_ms:,.0f} ms{shared}"
        if self.gaps_s:
            yield (
                f"idle        {self.idle_share:.0%} of the time, {len(self.gaps_s):,} gaps: "
                f"{_both(self.gaps_s)}, longest {max(self.gaps_s):.2f} s"
            )

    def _ranks(self) -> tuple[float, float]:
        """Return the number of ranks with tokens, and of all ranks, in the mean shared pass."""
        return self.active_ranks / self.shared_passes, self.ranks / self.shared_passes


def _at(ordered: Sequence[_N], share: float) -> _N:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _quantiles_ms(values_s: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values_s)
    return 1e3 * _at(ordered, 0.5), 1e3 * _at(ordered, 0.99)


def _both(values_s: Iterable[float]) -> str:
    p50_ms, p99_ms = _quantiles_ms(values_s)
    return f"p50 {p50_ms:,.0f} ms, p99 {p99_ms:,.0f} ms"
