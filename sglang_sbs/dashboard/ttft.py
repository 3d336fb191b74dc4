"""Compares the measured time to prefill's answer with an estimate for immediate dispatch.

All figures are of the same requests:

- *measured*: from arrival at the scheduler to prefill's answer;
- *modelled*: the model of :mod:`.shadow` with the real placements;
- by rule (:data:`RULES`): the same model with the placements of immediate dispatch.

The difference of *modelled* and *measured* is the model's error. The time that prefill's answer
takes to arrive is not modelled, so it is added to every modelled figure. The rules get the same
cached prefix as the real placement. Refused requests are in no figure. Requests enter the shadows
in order of arrival, each once its outcome is known.

The cost is bounded. With many requests the shadows follow one minute in three, which is enough for
a ratio with an interval. The estimates shown in between are of that minute. Alerts use *measured*
TTFTs of every request (:meth:`TtftComparison.slowness`). :meth:`TtftComparison.advance` does one
slice of the work at a time. If requests arrive faster than that, the shadows pause for a minute and
restart empty."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sglang_sbs.dashboard.gain import MEASURED, MINUTE_S, MODELLED, Gain
from sglang_sbs.dashboard.shadow import (
    Rule,
    ShadowCluster,
    ShadowRequest,
    ShadowRoundRobin,
    Shape,
    eta,
    least_tokens,
)

WINDOW_S = 60.0
_MAX_SAMPLES = 2_000
_MAX_PENDING = 20_000
_TAILS = 64
_UNDECIDED_S = 10.0
"""Seconds after arrival at which a request enters the shadow clusters although its real placement
is not known yet. Until then it holds up the requests behind it."""
SLICE_S = 0.2
"""Interval between calls of :meth:`TtftComparison.advance`."""
_SLICE_US = 4_000.0
"""Limit on the CPU time of one slice in microseconds (2 % of a core), estimated from
``_REQUEST_US`` and ``_INSTANCE_US``."""
_REQUEST_US = 40.0
"""CPU time per request in the shadows in microseconds, measured on a slow core; ``_INSTANCE_US`` is
added per instance, because the rules look at all of them."""
_INSTANCE_US = 2.5
_MOST_BEHIND = 2_000
"""Limit on the backlog of requests that could enter the shadows but have not."""
_REST_S = 60.0
MOST_EACH_MINUTE = 1_500
"""Number of requests in a minute up to which the shadows follow the next minute as well."""
PAUSED_MINUTES = 2
"""Number of minutes without shadows after a minute with more than ``MOST_EACH_MINUTE`` requests."""
_WARM_UP_S = 10.0
"""Warm-up after a pause, in seconds, because the shadows restart empty: requests that arrive in it
enter the shadows, but do not count."""
RULES: dict[str, str] = {
    "eta": "immediate, to the DP rank with the earliest predicted finish",
    "least_tokens": "immediate, to the DP rank with the fewest unfinished tokens",
    "round_robin": "immediate, instances and DP ranks in turn",
}


@dataclass(slots=True, eq=False)
class _Pending:
    rid: str
    arrived_s: float
    tokens: int
    latency_s: float
    place: tuple[str, int] | None = None
    """Real instance and DP rank; None: not known yet."""
    gone: bool = False
    cached_tokens: int = 0
    measured_s: float | None = None
    tail_s: float = 0.0
    done_s: dict[str, float] = field(default_factory=dict)


class TtftComparison:
    """Compares measured TTFTs with the shadows'. Pass it the events of every request, and read
    percentiles."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {
            "eta": eta,
            "least_tokens": least_tokens,
            "round_robin": ShadowRoundRobin(),
        }
        self._clusters = {name: ShadowCluster() for name in (*self._rules, MODELLED)}
        self._pending: dict[str, _Pending] = {}
        self._undecided: deque[_Pending] = deque()
        self._samples: deque[tuple[float, dict[str, float]]] = deque(maxlen=_MAX_SAMPLES)
        self._waits: deque[tuple[float, float, int]] = deque(maxlen=_MAX_SAMPLES)
        """See :meth:`answered`; time first."""
        self._tails_s: deque[float] = deque([0.0])
        self._ordered_tails_s = [0.0]
        self.gain = Gain()
        self.rests_until_s = -math.inf
        """The shadows are empty until this time."""
        self.overtaxed = False
        """True: the shadows pause because there were more requests than they could follow."""
        self._counts_from_s = -math.inf
        """Requests that arrived before this time do not count for the gain."""
        self._minute = 0
        self._in_minute = 0
        """Number of requests that arrived in the current minute."""
        self._stopped_s = 0.0
        """Time when the last minute before a pause ended."""
        self.begins = True
        """True: the shadows have not received the engines' backlog yet."""

    def follow(self, shapes: dict[str, Shape], now_s: float) -> None:
        for cluster in self._clusters.values():
            cluster.follow(shapes, now_s)

    def preload(self, name: str, backlog_tokens: list[int], free_s: float) -> None:
        """Set an instance's backlog at the start, equal for all rules."""
        self.begins = False
        for cluster in self._clusters.values():
            cluster.preload(name, backlog_tokens, free_s)

    def on_arrived(self, rid: str, tokens: int, now_s: float, latency_s: float) -> None:
        """Record an arrival; ``latency_s`` is L_net."""
        if now_s < self.rests_until_s:
            return
        if len(self._pending) >= _MAX_PENDING:
            self._pending.pop(next(iter(self._pending))).gone = True
        pending = _Pending(rid, now_s, tokens, latency_s)
        self._pending[rid] = pending
        self._in_minute += 1
        self._undecided.append(pending)

    def follows(self, rid: str) -> bool:
        """Return whether the request is in the shadows, or is about to enter them."""
        return rid in self._pending

    def on_dispatched(self, rid: str, instance: str, rank: int, cached: int, now_s: float) -> None:
        """Record the real placement; ``cached`` tokens are expected there."""
        pending = self._pending.get(rid)
        if pending is None:
            return
        pending.place = instance, rank
        pending.cached_tokens = cached
        tokens, ready_s = max(1, pending.tokens - cached), now_s + pending.latency_s
        self._clusters[MODELLED].place(rid, (instance, rank), tokens, ready_s, cached)

    def answered(self, waited_s: float, passes: int, now_s: float) -> None:
        """Record prefill's first response to any request: its TTFT until then, and the number of
        passes that its prompt needs."""
        self._waits.append((now_s, waited_s, passes))

    def on_prefilled(self, rid: str, now_s: float, pass_ended_s: float | None) -> None:
        """Record prefill's response; the newest pass of its instance ended at ``pass_ended_s``."""
        pending = self._pending.get(rid)
        if pending is None or pending.measured_s is not None:
            return
        pending.measured_s = now_s - pending.arrived_s
        if pass_ended_s is not None:
            self._learn_tail(max(0.0, now_s - pass_ended_s))
        ordered_s = self._ordered_tails_s
        middle = len(ordered_s) // 2
        pending.tail_s = (ordered_s[~middle] + ordered_s[middle]) / 2  # the median
        self._complete(pending, now_s)

    def _learn_tail(self, tail_s: float) -> None:
        self._tails_s.append(tail_s)
        insort(self._ordered_tails_s, tail_s)
        if len(self._tails_s) > _TAILS:
            oldest_s = self._tails_s.popleft()
            del self._ordered_tails_s[bisect_left(self._ordered_tails_s, oldest_s)]

    def on_ended(self, rid: str) -> None:
        """Record the end of a request; without a response from prefill it is not compared."""
        pending = self._pending.get(rid)
        if pending is not None and pending.measured_s is None:
            del self._pending[rid]
            pending.gone = pending.place is None

    def advance(self, now_s: float) -> None:
        """Advance the shadows as far as events are known, by at most one slice of work. Call it
        every ``SLICE_S``."""
        self._turn(now_s)
        instances = len(self._clusters[MODELLED].instances)
        left = _SLICE_US / (_REQUEST_US + _INSTANCE_US * instances)
        while self._undecided and left > 0:
            head = self._undecided[0]
            if head.place is None and not head.gone and now_s - head.arrived_s < _UNDECIDED_S:
                break
            self._undecided.popleft()
            if not head.gone:
                self._enter(head, now_s)
                left -= 1
        if left <= 0 and len(self._undecided) > _MOST_BEHIND:
            self.gain.drop_minute(now_s)
            self._rest(now_s, now_s + _REST_S, now_s + _REST_S + _WARM_UP_S, overtaxed=True)
        until_s = self._undecided[0].arrived_s if self._undecided else now_s
        for name, cluster in self._clusters.items():
            self._finished(name, cluster.advance(now_s if name == MODELLED else until_s), now_s)

    def _turn(self, now_s: float) -> None:
        """Begin a new minute. If the last one had more than ``MOST_EACH_MINUTE`` requests, feed no
        requests to the shadow clusters for ``PAUSED_MINUTES`` minutes, less a warm-up. A minute of
        which only a part was counted causes no pause."""
        minute = int(now_s // MINUTE_S)
        if minute == self._minute:
            return
        was_whole = self._counts_from_s <= self._minute * MINUTE_S
        many = self._in_minute > MOST_EACH_MINUTE
        self._minute, self._in_minute = minute, 0
        if many and was_whole:
            self._stopped_s = now_s
            self.gain.drop_minute(now_s)  # the first moments of this one
            from_s = (minute + PAUSED_MINUTES) * MINUTE_S
            self._rest(now_s, from_s - _WARM_UP_S, from_s)

    def _rest(
        self, now_s: float, until_s: float, counts_from_s: float, *, overtaxed: bool = False
    ) -> None:
        """Empty the shadows. Requests that arrive from ``until_s`` on enter them again, and those
        from ``counts_from_s`` on count."""
        self._undecided.clear()
        self._pending.clear()
        for cluster in self._clusters.values():
            cluster.empty(now_s)
        self.rests_until_s, self._counts_from_s = until_s, counts_from_s
        self.overtaxed = overtaxed
        self.begins = True

    def _enter(self, pending: _Pending, now_s: float) -> None:
        tokens = max(1, pending.tokens - pending.cached_tokens)
        ready_s = pending.arrived_s + pending.latency_s
        asked = ShadowRequest(tokens, pending.arrived_s, pending.latency_s)
        for name, rule in self._rules.items():
            cluster = self._clusters[name]
            if finished := cluster.advance(pending.arrived_s):
                self._finished(name, finished, now_s)
            if cluster.instances:
                where = rule(cluster.instances, asked)
                cluster.place(pending.rid, where, tokens, ready_s, pending.cached_tokens)

    def _finished(self, name: str, finished: list[tuple[str, float]], now_s: float) -> None:
        for rid, at_s in finished:
            pending = self._pending.get(rid)
            if pending is not None:
                pending.done_s[name] = at_s
                if len(pending.done_s) == len(self._clusters):
                    self._complete(pending, now_s)

    def _complete(self, pending: _Pending, now_s: float) -> None:
        if pending.measured_s is None or len(pending.done_s) < len(self._clusters):
            return
        del self._pending[pending.rid]
        sample = {MEASURED: pending.measured_s}
        for name, at_s in pending.done_s.items():
            sample[name] = at_s - pending.arrived_s + pending.tail_s
        self._samples.append((now_s, sample))
        if pending.arrived_s >= self._counts_from_s:
            self.gain.add(now_s, sample)

    def slowness(self, now_s: float) -> tuple[int, float, float]:
        """Return the number of requests that prefill answered in the last minute, p95 of their
        TTFT, and p95 of their TTFT per pass of their prompt, in seconds."""
        recent = [(ttft_s, n) for at_s, ttft_s, n in self._waits if now_s - at_s <= WINDOW_S]
        if not recent:
            return 0, 0.0, 0.0
        ttfts_s = sorted(ttft_s for ttft_s, _ in recent)
        per_pass_s = sorted(ttft_s / n for ttft_s, n in recent)
        return len(recent), percentile(ttfts_s, 0.95), percentile(per_pass_s, 0.95)

    def summary(self, now_s: float) -> dict[str, Any]:
        """Return percentiles over the last minute in seconds, as of the last :meth:`advance`; empty
        if unknown. In a pause they are of the minute that ended ``stopped_s`` ago."""
        is_paused = now_s < self._counts_from_s and not self.overtaxed
        end_s = self._stopped_s if is_paused else now_s
        recent = [sample for at_s, sample in self._samples if 0 <= end_s - at_s <= WINDOW_S]
        figures: dict[str, dict[str, float]] = {}
        for name in (MEASURED, MODELLED, *self._rules) if recent else ():
            ordered = sorted(sample[name] for sample in recent)
            figures[name] = {
                "mean": round(sum(ordered) / len(ordered), 4),
                "p50": round(percentile(ordered, 0.5), 4),
                "p95": round(percentile(ordered, 0.95), 4),
            }
        behind = {name: self._clusters[name].requests for name in self._rules}
        return {
            "requests": len(recent),
            "window_s": WINDOW_S,
            "stopped_s": round(now_s - end_s, 1),
            "figures": figures,
            "unfinished": behind,
        }


def percentile(ordered: list[float], share: float) -> float:
    """Nearest-rank percentile of a sorted, nonempty list."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
