"""Time to prefill's answer as measured, beside what immediate dispatch would have given.

Four figures for the same requests: *measured* (arrival at the scheduler to prefill's answer),
*modelled* (:mod:`.shadow` fed with the real placements), and two estimates of immediate dispatch by
that model. *Modelled* against *measured* is the model's error. What the model leaves out (the way
of prefill's answer) is added to all three; immediate dispatch is granted the same cached prefix,
and refused requests are in no figure. A request enters the shadows once it is known what became of
it, in the order of arrival."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sglang_sbs.dashboard.shadow import RoundRobin, Rule, ShadowCluster, Shape, least_tokens

WINDOW_S = 60.0
_MAX_SAMPLES = 2_000
_MAX_PENDING = 20_000
_UNDECIDED_S = 10.0
"""A request that waits longer enters the shadows without its fate being known."""
MODELLED = "modelled"
RULES: dict[str, str] = {
    "least_tokens": "immediate, to the DP rank with the fewest unfinished tokens",
    "round_robin": "immediate, instances and DP ranks in turn",
}


@dataclass(slots=True, eq=False)
class _Pending:
    rid: str
    arrived_s: float
    tokens: int
    latency_s: float
    decided: bool = False
    gone: bool = False
    cached_tokens: int = 0
    measured_s: float | None = None
    tail_s: float = 0.0
    done_s: dict[str, float] = field(default_factory=dict)


class TtftComparison:
    """Feed it the life of every request; ask for percentiles."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {"least_tokens": least_tokens, "round_robin": RoundRobin()}
        self._clusters = {name: ShadowCluster() for name in (*self._rules, MODELLED)}
        self._pending: dict[str, _Pending] = {}
        self._undecided: deque[_Pending] = deque()
        self._samples: deque[tuple[float, dict[str, float]]] = deque(maxlen=_MAX_SAMPLES)
        self._tails_s: deque[float] = deque([0.0], maxlen=64)

    def follow(self, shapes: dict[str, Shape], now_s: float) -> None:
        for cluster in self._clusters.values():
            cluster.follow(shapes, now_s)

    def preload(self, name: str, backlog_tokens: list[int], free_s: float) -> None:
        """What an instance is busy with when watching begins, under every rule alike."""
        for cluster in self._clusters.values():
            cluster.preload(name, backlog_tokens, free_s)

    def arrived(self, rid: str, tokens: int, now_s: float, latency_s: float) -> None:
        """The scheduler took a request; ``latency_s`` is L_net."""
        if len(self._pending) >= _MAX_PENDING:
            self._pending.pop(next(iter(self._pending))).gone = True
        pending = _Pending(rid, now_s, tokens, latency_s)
        self._pending[rid] = pending
        self._undecided.append(pending)

    def dispatched(self, rid: str, instance: str, rank: int, cached: int, now_s: float) -> None:
        """It was really placed, held or not; ``cached`` tokens are expected there."""
        pending = self._pending.get(rid)
        if pending is None:
            return
        pending.decided = True
        pending.cached_tokens = cached
        tokens, ready_s = max(1, pending.tokens - cached), now_s + pending.latency_s
        self._clusters[MODELLED].place(rid, (instance, rank), tokens, ready_s, cached)

    def prefilled(self, rid: str, now_s: float, pass_ended_s: float | None) -> None:
        """Prefill answered; the newest pass of its instance ended at ``pass_ended_s``."""
        pending = self._pending.get(rid)
        if pending is None or pending.measured_s is not None:
            return
        pending.measured_s = now_s - pending.arrived_s
        if pass_ended_s is not None:
            self._tails_s.append(max(0.0, now_s - pass_ended_s))
        pending.tail_s = median(self._tails_s)
        self._complete(pending, now_s)

    def ended(self, rid: str) -> None:
        """The request is over; without an answer of prefill it is not compared."""
        pending = self._pending.get(rid)
        if pending is not None and pending.measured_s is None:
            del self._pending[rid]
            pending.gone = not pending.decided

    def advance(self, now_s: float) -> None:
        """Let the shadows run as far as is known."""
        while self._undecided:
            head = self._undecided[0]
            if not head.decided and not head.gone and now_s - head.arrived_s < _UNDECIDED_S:
                break
            self._undecided.popleft()
            if not head.gone:
                self._enter(head, now_s)
        until_s = self._undecided[0].arrived_s if self._undecided else now_s
        for name, cluster in self._clusters.items():
            self._finished(name, cluster.advance(now_s if name == MODELLED else until_s), now_s)

    def _enter(self, pending: _Pending, now_s: float) -> None:
        tokens = max(1, pending.tokens - pending.cached_tokens)
        ready_s = pending.arrived_s + pending.latency_s
        for name, rule in self._rules.items():
            cluster = self._clusters[name]
            self._finished(name, cluster.advance(pending.arrived_s), now_s)
            if cluster.instances:
                where = rule(cluster.instances)
                cluster.place(pending.rid, where, tokens, ready_s, pending.cached_tokens)

    def _finished(self, name: str, finished: list[tuple[str, float]], now_s: float) -> None:
        for rid, at_s in finished:
            pending = self._pending.get(rid)
            if pending is not None:
                pending.done_s[name] = at_s
                self._complete(pending, now_s)

    def _complete(self, pending: _Pending, now_s: float) -> None:
        if pending.measured_s is None or len(pending.done_s) < len(self._clusters):
            return
        del self._pending[pending.rid]
        sample = {"measured": pending.measured_s}
        for name, at_s in pending.done_s.items():
            sample[name] = at_s - pending.arrived_s + pending.tail_s
        self._samples.append((now_s, sample))

    def summary(self, now_s: float) -> dict[str, Any]:
        """Percentiles over the last minute, seconds; empty figures where nothing is known yet."""
        self.advance(now_s)
        recent = [sample for at_s, sample in self._samples if now_s - at_s <= WINDOW_S]
        figures: dict[str, dict[str, float]] = {}
        for name in ("measured", MODELLED, *self._rules) if recent else ():
            ordered = sorted(sample[name] for sample in recent)
            figures[name] = {
                "mean": round(sum(ordered) / len(ordered), 4),
                "p50": round(percentile(ordered, 0.5), 4),
                "p95": round(percentile(ordered, 0.95), 4),
            }
        behind = {name: self._clusters[name].requests for name in self._rules}
        told = {"requests": len(recent), "window_s": WINDOW_S}
        return {**told, "figures": figures, "unfinished": behind}


def percentile(ordered: list[float], share: float) -> float:
    """Nearest rank, of a sorted list that is not empty."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
