"""Detects prefill instances whose forward passes have become slower. Sans-I/O and bounded."""

from __future__ import annotations

from collections.abc import Mapping

SLOWER = 2.0
"""Factor over the usual pass time from which an instance counts as slow."""
_UP_S = 3600.0
_DOWN_S = 60.0
"""Time constant, in seconds, with which the usual pass time follows faster passes (``_UP_S``:
slower ones)."""


class Paces:
    """Compares each prefill instance's full pass with its usual one. Call :meth:`look` about once a
    second."""

    def __init__(self) -> None:
        self._usual_s: dict[str, float] = {}
        self._looked_s = 0.0

    def look(self, full_pass_s: Mapping[str, float], now_s: float) -> dict[str, float]:
        """Return the slowdown factor of the instances that have become slow. ``full_pass_s``:
        duration of a pass with full chunks, by instance."""
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        usual_s = {}
        for name, pass_s in full_pass_s.items():
            known_s = self._usual_s.get(name, pass_s)
            takes_s = _UP_S if pass_s > known_s else _DOWN_S
            usual_s[name] = known_s + (pass_s - known_s) * min(1.0, elapsed_s / takes_s)
        self._usual_s = usual_s
        factors = {name: pass_s / usual_s[name] for name, pass_s in full_pass_s.items()}
        return {name: factor for name, factor in factors.items() if factor >= SLOWER}
