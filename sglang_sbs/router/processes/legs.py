"""Legs in flight at each worker, over all front ends."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_sbs.router.workers.registry import Registry


@dataclass(slots=True)
class Placed:
    """Where a request went; empty while it waits."""

    prefill: str = ""
    decode: str = ""
    prefill_open: bool = False
    """Prefill has not answered yet."""


class Legs:
    """Counted at the workers themselves; one that is gone counts nothing."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def dispatched(self, placed: Placed) -> None:
        """One more request was sent to both."""
        for url in (placed.prefill, placed.decode):
            worker = self._registry.get(url)
            if worker is not None:
                worker.dispatches += 1

    def count(self, placed: Placed, step: int) -> None:
        """One more of each that is open, or one less."""
        prefill, decode = self._registry.get(placed.prefill), self._registry.get(placed.decode)
        if prefill is not None and placed.prefill_open:
            prefill.active = max(0, prefill.active + step)
        if decode is not None:
            decode.active = max(0, decode.active + step)

    def prefill_over(self, placed: Placed) -> None:
        prefill = self._registry.get(placed.prefill)
        if placed.prefill_open and prefill is not None:
            prefill.active = max(0, prefill.active - 1)
        placed.prefill_open = False
