"""Announced prompt lengths, corrected by the counts of engines. Must not depend on who announced
them.

Lengths that nobody has counted may all be wrong in the same direction. If they are twice too high,
DP ranks look full that are half empty. Engines name the true length of each request that a rank
takes in (EndForward, ``accepted``) or answers. Announced lengths are scaled by the ratio of both
over the last requests, which is kept apart for counted and for estimated lengths. Where engines
count what was announced, the ratio is exactly one.
"""

from __future__ import annotations

from sglang_sbs.scheduling.request import Request

_KEEP = 0.998
"""Weight of all earlier requests at each new one, so that the last 500 count."""
_DOUBT = 5.0
"""Number of fictitious requests announced correctly, with which a ratio begins."""
_MOST = 8.0
"""Largest factor in either direction, for one request and for the ratio."""
_FORGET_S = 600.0
"""A ratio not confirmed by an engine for this long is dropped."""


class _Ratio:
    """Ratio of tokens counted by engines to tokens announced, for one source."""

    def __init__(self) -> None:
        self._told = self._counted = self._requests = 0.0
        self._heard_s = 0.0

    def learn(self, told: int, counted: int, now_s: float) -> None:
        if now_s - self._heard_s > _FORGET_S:
            self._told = self._counted = self._requests = 0.0
        self._heard_s = now_s
        counted_tokens = min(max(float(counted), told / _MOST), told * _MOST)
        self._told = _KEEP * self._told + told
        self._counted = _KEEP * self._counted + counted_tokens
        self._requests = _KEEP * self._requests + 1

    def value(self, now_s: float) -> float:
        if not self._requests or now_s - self._heard_s > _FORGET_S:
            return 1.0
        trust = self._requests / (self._requests + _DOUBT)
        return 1.0 + trust * (self._counted / self._told - 1.0)


class ToldLengths:
    """Ratios by source of the length."""

    def __init__(self) -> None:
        self._ratios = {False: _Ratio(), True: _Ratio()}

    def correct(self, request: Request, now_s: float, most: int) -> None:
        """Scale the length of a request that has just arrived, to at most ``most`` tokens (the
        capacity of a decode rank). If its KV blocks are named, they determine its length."""
        request.told_tokens = request.prompt_tokens
        if not request.blocks:
            ratio = self._ratios[request.estimated].value(now_s)
            request.resize(max(1, min(round(ratio * request.told_tokens), most)))

    def learn(self, request: Request | None, counted: int | None, now_s: float) -> None:
        """Record an engine's count of a prompt; only the first one is used."""
        if request is not None and counted and request.told_tokens:
            self._ratios[request.estimated].learn(request.told_tokens, counted, now_s)
            request.told_tokens = 0
