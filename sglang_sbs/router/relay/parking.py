"""Parks decode requests that must not be aborted yet because their KV may still be on its way.

When an SGLang decode engine aborts a request, or its client closes the connection, it frees the
request's KV pages. Without deferred release (before SGLang 0.5.21) it does so even while prefill
may still be writing to them. The next request that gets the pages then answers from another
request's KV, with status 200 (sglang #24527, #27372, #32564, #35049, #38961).

So the decode request of a pair that ends early stays *parked*: its connection stays open and is
drained, no abort is sent, and the scheduler keeps counting it until no more KV can be written. That
is known when

- its first byte arrives: decode starts only once the KV has arrived;
- prefill responds with 200: all KV was sent;
- prefill never accepted the request (a status of 4xx before its abort, or a refused connection), so
  none will be sent;
- the engine's own transfer timeout has passed since prefill's request ended in another way. Its
  HTTP response alone proves nothing: the transfer worker may still be writing."""

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
"""Mooncake's limit on one transfer (``MC_TRANSFER_TIMEOUT``), also the longest wait of SGLang's own
deferred release."""
UNANSWERED_S = 300.0
"""Longest wait for prefill's response. Decode gives up by itself after the same time without KV
(``SGLANG_DISAGGREGATION_WAITING_TIMEOUT``)."""
MOST_PARKED = 4096
"""Limit on parked requests; above it new requests are refused. Aborting early is unsafe, and each
parked request holds a connection and KV of its decode engine."""


class Parking:
    """The parked decode requests of this process; releases each when it is safe."""

    def __init__(self, transfer_timeout_s: float = TRANSFER_TIMEOUT_S) -> None:
        self._transfer_timeout_s = transfer_timeout_s
        self._parked: dict[Pair, tuple[asyncio.TimerHandle, Callable[[], None]]] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.parked_total = 0
        """Number of decode requests parked so far."""

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def full(self) -> bool:
        return len(self._parked) >= MOST_PARKED

    def by_worker(self) -> dict[str, int]:
        """Number of parked decode requests by worker URL; workers without any are omitted."""
        return dict(Counter(pair.decode for pair in self._parked))

    def park(self, pair: Pair, released: Callable[[], None]) -> None:
        """Park the decode request of ``pair``; ``released`` is called once when it ends."""
        pair.forget()
        limit_s = self._limit_s(pair) if pair.prefill_over else UNANSWERED_S
        self._empty.clear()
        self.parked_total += 1
        pair.placement.decode.parked += 1
        self._parked[pair] = self._timer(pair, limit_s), released

    def limit(self, pair: Pair) -> None:
        """Release a parked request after the transfer timeout at the latest, because prefill's
        request ended without proof that all KV was sent, or decode's connection is lost."""
        if pair in self._parked:
            timer, released = self._parked[pair]
            timer.cancel()
            self._parked[pair] = self._timer(pair, self._limit_s(pair)), released

    def engine_lost(self, worker: Worker) -> None:
        """Release or limit the requests of an engine that no longer responds, or has restarted."""
        for pair in list(self._parked):
            if pair.placement.decode is worker and pair.decode_call.over:
                self.release(pair)  # the engine and its pages are gone
            elif pair.placement.prefill is worker:
                self.limit(pair)

    def _limit_s(self, pair: Pair) -> float:
        """Return the transfer timeout in seconds: the router's, or the one that the prefill
        engine's plugin reports if it is longer."""
        sbs = pair.placement.prefill.known.sbs
        return max(self._transfer_timeout_s, sbs.transfer_timeout_s if sbs is not None else 0)

    def release(self, pair: Pair) -> None:
        """Abort a decode request to which no more KV can be written, and stop counting it. It may
        be about to be parked, and is not parked then."""
        pair.abort_decode()
        parked = self._parked.pop(pair, None)
        if parked is None:
            return
        timer, released = parked
        timer.cancel()
        pair.placement.decode.parked -= 1
        if not self._parked:
            self._empty.set()
        released()

    async def drain(self) -> None:
        """Wait at shutdown until all are released, at most the transfer timeout."""
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
