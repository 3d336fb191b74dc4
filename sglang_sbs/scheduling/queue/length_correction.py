"""Corrects submitted prompt lengths by the counts of engines. Must not depend on the client that
submitted a length.

Estimated lengths may all be wrong in the same direction. If they are twice too high, DP ranks that
are half empty look full. Prefill engines report the true length of each request that a rank accepts
(EndForward, ``accepted``) or answers. Submitted lengths are scaled by the ratio of true tokens to
submitted tokens, learned separately for counted and for estimated lengths. The ratio is exactly 1
if engines count what was submitted.

Any host can send a report, and a single client may send unusual prompts. So each engine's ratio is
the geometric mean over its requests, in which a long request weighs no more than a short one. The
ratio in use is the median over engines: one engine that counts wrongly does not change it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.request import Request

_KEEP = 0.998
"""Factor on the weight of all earlier requests at each new one, so that about 500 count."""
_DOUBT = 5.0
"""Number of assumed requests with a correct length, with which each ratio begins."""
_MOST = 8.0
"""Limit on the ratio of a request in either direction, and so on the ratio of an engine."""
_LEAST = 10.0
"""Number of requests from which on an engine's ratio is used."""
_FORGET_S = 600.0
"""Seconds after which the ratio of an engine that has counted nothing is dropped."""


@dataclass(slots=True)
class _Ratio:
    """Mean logarithm of counted over submitted tokens, for one engine."""

    logs: float = 0.0
    requests: float = 0.0
    counted_s: float = 0.0
    log: float = 0.0
    counts: bool = False
    """The ratio is used: the engine has counted enough requests (:data:`_LEAST`)."""


class _Ratios:
    """The ratios of all engines, for counted or for estimated lengths."""

    def __init__(self) -> None:
        self._engines: dict[InstanceId, _Ratio] = {}
        """Ratio by engine; the engine that counted last comes last."""
        self._logs: list[float] = []
        """Logarithms of the ratios that are used (``_Ratio.counts``), ascending."""
        self._due_s = math.inf
        """No engine's ratio is dropped before this time."""

    def learn(self, engine: InstanceId, submitted: int, counted: int, now_s: float) -> None:
        self._forget(now_s)
        ratio = self._engines.pop(engine, None)
        if ratio is None:
            ratio = _Ratio()
            self._due_s = min(self._due_s, now_s + _FORGET_S)
        elif ratio.counts:
            del self._logs[bisect_left(self._logs, ratio.log)]
        limited = min(max(counted / submitted, 1 / _MOST), _MOST)
        sample = 0.0 if counted == submitted else math.log(limited)
        ratio.counted_s = now_s
        ratio.logs = _KEEP * ratio.logs + sample
        ratio.requests = _KEEP * ratio.requests + 1
        ratio.log = ratio.logs / (ratio.requests + _DOUBT)
        ratio.counts = ratio.requests >= _LEAST
        self._engines[engine] = ratio
        if ratio.counts:
            insort(self._logs, ratio.log)

    def value(self, now_s: float) -> float:
        """Return the median ratio of the engines (of two in the middle, the one nearer to 1); 1.0:
        none is known."""
        self._forget(now_s)
        count = len(self._logs)
        if not count:
            return 1.0
        low, high = self._logs[(count - 1) // 2], self._logs[count // 2]
        return math.exp(low if abs(low) <= abs(high) else high)

    def _forget(self, now_s: float) -> None:
        if now_s <= self._due_s:
            return
        self._due_s = math.inf
        while self._engines:
            oldest = next(iter(self._engines))
            counted_s = self._engines[oldest].counted_s
            if now_s - counted_s <= _FORGET_S:
                self._due_s = counted_s + _FORGET_S
                return
            ratio = self._engines.pop(oldest)
            if ratio.counts:
                del self._logs[bisect_left(self._logs, ratio.log)]


class LengthCorrection:
    """Learns ratios of true to submitted prompt lengths, and corrects new lengths by them."""

    def __init__(self) -> None:
        self._ratios = {False: _Ratios(), True: _Ratios()}

    def correct(self, request: Request, now_s: float, most: int) -> None:
        """Scale the prompt length of a request that has just arrived, to at most ``most`` tokens
        (the capacity of a decode rank). A request with named KV blocks keeps its length."""
        request.submitted_tokens = request.prompt_tokens
        if not request.blocks:
            ratio = self._ratios[request.estimated].value(now_s)
            request.resize(max(1, min(round(ratio * request.submitted_tokens), most)))

    def learn(
        self, request: Request | None, engine: InstanceId, counted: int | None, now_s: float
    ) -> None:
        """Record the prompt tokens that ``engine`` counted, if it has the request's prefill. Only
        the first count is used."""
        if request is None or request.prefill is None or request.prefill[0] != engine:
            return
        if counted and request.submitted_tokens:
            self._ratios[request.estimated].learn(engine, request.submitted_tokens, counted, now_s)
            request.submitted_tokens = 0
