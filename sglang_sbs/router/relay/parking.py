"""Decode requests that may not be aborted yet: their KV could still be on its way.

An SGLang decode engine that is told to abort a request, or whose client closes the connection,
frees the request's KV pages. Without deferred release (before SGLang 0.5.21) it does so although
prefill may still be writing to them, and the next request that gets the pages answers from
somebody else's KV, with status 200 (sglang #24527, #27372, #32564, #35049, #38961).

So the decode request of a pair that ends early stays *parked*: its connection stays open and is
drained, no abort is sent, and its place in the accounting stays taken until nothing can be written
any more. That is known when

- its first byte arrives: decode only starts once the KV is there;
- prefill answers with 200: all KV was sent;
- prefill never took the request (a status of 4xx before it was told to abort, a refused
  connection), so none will be sent;
- the engine's own transfer time-out has passed since prefill's request ended in another way. Its
  HTTP answer alone proves nothing: the transfer worker may still be writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_sbs.router.relay.pair import Pair
    from sglang_sbs.router.workers.worker import Worker

logger = logging.getLogger(__name__)

# SGLang fault: kv-freed-in-transfer
TRANSFER_TIMEOUT_S = 30.0
"""Mooncake's limit on one transfer (``MC_TRANSFER_TIMEOUT``), and what SGLang's own deferred
release waits for at most."""
UNANSWERED_S = 300.0
"""Longest wait for prefill's answer. Decode gives a request up by itself after as long without KV
(``SGLANG_DISAGGREGATION_WAITING_TIMEOUT``)."""
MOST_PARKED = 4096
"""With more parked requests new ones are refused: aborting early is not safe, and each of these
keeps a connection and KV of its decode engine."""


class Parking:
    """The parked decode requests of this process."""

    def __init__(self, transfer_timeout_s: float = TRANSFER_TIMEOUT_S) -> None:
        self._transfer_timeout_s = transfer_timeout_s
        self._parked: dict[Pair, tuple[asyncio.TimerHandle, Callable[[], None]]] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.parked_total = 0
        """Decode requests ever parked."""

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, pair: object) -> bool:
        return pair in self._parked

    @property
    def full(self) -> bool:
        return len(self._parked) >= MOST_PARKED

    def by_worker(self) -> dict[str, int]:
        """How many decode requests are parked, by worker URL; none where it is missing."""
        return dict(Counter(pair.decode for pair in self._parked))

    def park(self, pair: Pair, released: Callable[[], None]) -> None:
        """Keep the decode request of ``pair``; ``released`` is called once when it was let go."""
        pair.forget()
        limit_s = self._limit_s(pair) if pair.prefill_over else UNANSWERED_S
        self._empty.clear()
        self.parked_total += 1
        pair.placement.decode.parked += 1
        self._parked[pair] = self._timer(pair, limit_s), released

    def limit(self, pair: Pair) -> None:
        """Prefill's request ended without proof that all KV was sent, or nothing more is heard of
        decode's: from now on it waits for the transfer time-out at most."""
        if pair in self._parked:
            timer, released = self._parked[pair]
            timer.cancel()
            self._parked[pair] = self._timer(pair, self._limit_s(pair)), released

    def engine_lost(self, worker: Worker) -> None:
        """The engine answers nothing any more, or restarted."""
        for pair in list(self._parked):
            if pair.placement.decode is worker and pair.decode_call.over:
                self.release(pair)  # it is gone, and its pages with it
            elif pair.placement.prefill is worker:
                self.limit(pair)

    def _limit_s(self, pair: Pair) -> float:
        """The engine knows better where its plugin says so."""
        sbs = pair.placement.prefill.known.sbs
        return max(self._transfer_timeout_s, sbs.transfer_timeout_s if sbs is not None else 0)

    def release(self, pair: Pair) -> None:
        """Nothing is written for it any more: abort what is left, give its place back."""
        timer, released = self._parked.pop(pair)
        timer.cancel()
        pair.placement.decode.parked -= 1
        pair.abort_decode()
        if not self._parked:
            self._empty.set()
        released()

    async def drain(self) -> None:
        """At shutdown: wait for all, no longer than they may take."""
        if self._parked:
            logger.warning(
                "waiting up to %g s for %d cancelled requests whose KV may still be on its way to "
                "a decode engine without deferred release (SGLang before 0.5.21)",
                self._transfer_timeout_s,
                len(self._parked),
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._transfer_timeout_s):
                    await self._empty.wait()
        if self._parked:
            logger.error(
                "%d decode requests are closed while prefill has not answered: their engines may "
                "write KV into pages that other requests get",
                len(self._parked),
            )

    def _timer(self, pair: Pair, delay_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, self.release, pair)
