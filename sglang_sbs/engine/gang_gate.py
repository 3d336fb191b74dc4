"""Waits a moment for the rest of a gang before SGLang forms a prefill batch.

For engines on which :mod:`.gang_hold` does not work, and for requests of older routers. Waited for
are those of a holding router (``GANG_RID_PREFIX``) that are still in the handshake with decode.

Why
---
The requests of a batch that SBS sends are ready within some 20 ms of each other: each waits for
decode to take it in, which happens once per decode pass. SGLang launches on the first that is
ready. Under overlap scheduling the rest follows at once, in a pass of its own that shuts out what
comes meanwhile: 0.17 to 0.24 s on the CPU cluster, where a full one takes 0.61 s. Waiting is cheap
in comparison, and other DP ranks need no telling: they wait at the barrier in front of every pass.

While a pass runs and this rank has nothing to put behind it, it does not wait. A request is waited
for only so often in its life, so one that decode has no room for costs a single wait.

The wait is counted in polls, not measured in time: ``PrefillBootstrapQueue.pop_bootstrapped``
(``disaggregation/prefill.py``) is a collective operation of the processes of a DP rank (attention
TP and CP), and all of them must poll equally often. They see the same queues and the same answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sglang_sbs.engine.collect import rank_processes
from sglang_sbs.wire.endforward import GANG_RID_PREFIX

logger = logging.getLogger(__name__)

POLL_S = 0.001
DEFAULT_GATE_MS = 40.0
"""Where nobody chose: the way of the leg at decode, and a pass there."""


class GangGate:
    """The gate of one scheduler process."""

    def __init__(
        self,
        gate_ms: float | None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        elsewhere: Callable[[Any], bool] = lambda _req: False,
    ) -> None:
        """``gate_ms``: for how long a request is waited for at most, in polls of a millisecond; 0:
        never. None: ``DEFAULT_GATE_MS`` where a DP rank is one process, else never, as one node
        without the plugin would leave the others polling alone. ``elsewhere``: whether a request is
        waited for by somebody else."""
        self._gate_ms = gate_ms
        self._sleep = sleep
        self._elsewhere = elsewhere
        self._most: int | None = None
        """Polls per request; None: not known before the first call."""
        self._polled: dict[str, int] = {}
        """How often each request in the handshake was waited for."""

    def before_next_batch(self, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
        """Before ``Scheduler.get_next_disagg_prefill_batch_to_run``."""
        if self._most is None:
            self._most = self._polls(scheduler)
        if not self._most:
            return
        queue = scheduler.disagg_prefill_bootstrap_queue
        if not queue.queue:
            self._polled.clear()
            return
        running = len(getattr(scheduler, "result_queue", ())) > 0
        chunked = getattr(scheduler, "chunked_req", None)
        if running and not scheduler.waiting_queue and chunked is None:
            return
        mine = [
            req.rid
            for req in queue.queue
            if req.rid.startswith(GANG_RID_PREFIX) and not self._elsewhere(req)
        ]
        self._polled = {rid: self._polled.get(rid, 0) for rid in mine}
        while young := self._young(queue.queue, self._most):
            self._sleep(POLL_S)
            for rid in young:
                self._polled[rid] += 1
            scheduler.waiting_queue.extend(queue.pop_bootstrapped())

    def _young(self, queue: Any, most: int) -> list[str]:
        """Those in the handshake that may be waited for once more."""
        return [req.rid for req in queue if self._polled.get(req.rid, most) < most]

    def _polls(self, scheduler: Any) -> int:
        ranks = rank_processes(scheduler)
        gate_ms = self._gate_ms
        if gate_ms is None:
            gate_ms = DEFAULT_GATE_MS if ranks.of_rank == 1 else 0.0
        if ranks.pipeline > 1:  # its stages agree on what is ready in a way of their own
            gate_ms = 0.0
        logger.debug("gang gate: %g ms", gate_ms)
        return round(gate_ms / 1e3 / POLL_S)
