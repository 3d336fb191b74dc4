"""Holds requests for a limited time while a role has no instance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sglang_sbs.scheduling.decode.instance import DecodeInstance
from sglang_sbs.scheduling.explained.decisions import note
from sglang_sbs.scheduling.prefill.instance import Instances
from sglang_sbs.scheduling.queue.flow_control import Refusal
from sglang_sbs.scheduling.reasons import WaitReason
from sglang_sbs.scheduling.request import Request


class Outage:
    """Tracks whether a role has no running instance, and until when requests wait for one.

    An outage begins when a role loses its last instance and ends when both roles have one again.
    The time of holding counts from its beginning, so requests that arrive after that time are
    refused at once. No request is held before both roles had an instance for the first time,
    because an instance may never come."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._missing: WaitReason | None = WaitReason.NO_PREFILL
        self.until_s = -math.inf
        """Time until which requests are held, after which they are refused; infinity: no outage."""

    def on_topology_change(
        self,
        prefill: Instances,
        decode: Sequence[DecodeInstance],
        waiting: Iterable[Request],
        now_s: float,
    ) -> None:
        """Record a change of the instances. ``prefill``, ``decode``: those that are up.
        ``waiting``: the queue."""
        before = self._missing
        self._missing = None if decode else WaitReason.NO_DECODE
        if not prefill:
            self._missing = WaitReason.NO_PREFILL
        if self._missing is None:
            self.until_s = math.inf
        elif before is None:
            self.until_s = now_s + self._hold_s
        if self._missing is not before:
            self.note(waiting, now_s)

    def note(self, waiting: Iterable[Request], now_s: float) -> None:
        """Record that requests wait for the end of the outage, if there is one."""
        if self._missing is not None:
            for request in waiting:
                note(request, self._missing, now_s)

    def refusal(self, now_s: float) -> Refusal | None:
        """Return the reason for refusing requests once the outage has lasted too long; None: it may
        still end."""
        if self._missing is None or now_s < self.until_s:
            return None
        if self._missing is WaitReason.NO_PREFILL:
            return "no_prefill", "no prefill instance is up"
        return "no_decode", "no decode instance is up"
