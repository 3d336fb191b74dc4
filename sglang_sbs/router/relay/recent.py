"""Remembers the last client requests, found by any of their ids, for the access log, the line per
minute and ``sglang-sbs why``. Bounded."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from sglang_sbs.router.errors import RouterError
from sglang_sbs.scheduling.events import MAX_REQUEST_ID_CHARS, ClientSide
from sglang_sbs.scheduling.explained.stories import ClientAttempt, Story

MOST_KEPT = 4096
MOST_ATTEMPTS = 32
"""Limit on attempts, and on ids, remembered per request; it may have thousands of units."""
_MOST_SAMPLES = 20_000
"""Limit on the TTFT samples, and on the hold samples, kept per minute."""


class RecentRequest(msgspec.Struct, eq=False, gc=False):
    """Record of one client request, created when it is planned."""

    request_id: str
    """The client's, like ``ids`` cut at ``MAX_REQUEST_ID_CHARS``: 4,096 requests with 33 ids of
    their longest size would take 700 MiB."""
    kind: str
    began_s: float
    """Arrival on the monotonic clock, in seconds, like all times except ``began_unix_s``."""
    began_unix_s: float
    units: int
    ids: tuple[str, ...]
    """The client's own ids, and that of a merged response."""
    sent: tuple[ClientAttempt, ...] = ()
    submitted_s: float | None = None
    """Time when its first attempt was submitted to the scheduler."""
    first_byte_s: float | None = None
    held_s: float | None = None
    """Seconds that the attempt dispatched last was held in the scheduler."""
    status: int | None = None
    seconds: float | None = None
    forgotten: bool = False
    """Newer requests took its place: no id finds it, and further ids are not recorded."""

    def client_side(self, submitted_s: float, first_byte_s: float | None) -> ClientSide:
        """Return an attempt's times that only the front end measures. ``submitted_s`` and
        ``first_byte_s`` (``None``: there was none): monotonic clock."""
        first_s = submitted_s if self.submitted_s is None else self.submitted_s
        return ClientSide(
            self.request_id,
            max(0.0, first_s - self.began_s),
            max(0.0, submitted_s - first_s),
            None if first_byte_s is None else max(0.0, first_byte_s - submitted_s),
        )

    def story(self) -> Story:
        return Story(
            request_id=self.request_id,
            kind=self.kind,
            began_unix_s=self.began_unix_s,
            units=self.units,
            status=self.status,
            seconds=self.seconds,
            other_ids=list(self.ids),
            sent=list(self.sent),
        )


class RecentRequests:
    """The last ``MOST_KEPT`` client requests, found by any of their ids. Use only from one event
    loop."""

    def __init__(self) -> None:
        self._kept: deque[RecentRequest] = deque()
        self._by_id: dict[str, RecentRequest] = {}
        self.minute = Minute()

    def begin(
        self, request_id: str, kind: str, began_s: float, units: int, ids: Sequence[str]
    ) -> RecentRequest:
        kept_ids = tuple(map(_cut, ids[:MOST_ATTEMPTS]))
        request = RecentRequest(_cut(request_id), kind, began_s, time.time(), units, kept_ids)
        self._kept.append(request)
        if len(self._kept) > MOST_KEPT:
            self._forget(self._kept.popleft())
        for name in (request.request_id, *request.ids):
            self._by_id[name] = request
        return request

    def on_submitted(self, request: RecentRequest, rid: str, unit: int, now_s: float) -> None:
        if request.submitted_s is None:
            request.submitted_s = now_s
        if len(request.sent) < MOST_ATTEMPTS:
            request.sent = (*request.sent, ClientAttempt(rid, unit))
            self._find_by(rid, request)

    def record_id(self, request: RecentRequest, name: str) -> None:
        """Record the id that the router made for a merged response."""
        request.ids = (*request.ids, _cut(name))
        self._find_by(_cut(name), request)

    def record_held(self, request: RecentRequest, held_s: float) -> None:
        request.held_s = held_s
        self.minute.add(self.minute.held_s, held_s)

    def first_byte(self, request: RecentRequest, now_s: float) -> None:
        """Record the first byte of any of the request's units; later calls do nothing."""
        if request.first_byte_s is None:
            request.first_byte_s = now_s
            self.minute.add(self.minute.ttft_s, now_s - request.began_s)

    def on_attempt_ended(self, request: RecentRequest, rid: str, outcome: str) -> None:
        for attempt in reversed(request.sent):
            if attempt.rid == rid:
                attempt.outcome = outcome
                return

    def on_attempt_failed(self, request: RecentRequest, unit: int, failure: RouterError) -> None:
        """Record the failure of the last attempt at that unit."""
        for attempt in reversed(request.sent):
            if attempt.unit == unit:
                attempt.failure = f"{failure.code}: {failure}"[:512]
                return

    def find(self, name: str) -> RecentRequest | None:
        return self._by_id.get(_cut(name))

    def story(self, name: str) -> Story | None:
        request = self.find(name)
        return None if request is None else request.story()

    def _find_by(self, name: str, request: RecentRequest) -> None:
        if not request.forgotten:  # it may have waited longer than thousands of others
            self._by_id[name] = request

    def _forget(self, request: RecentRequest) -> None:
        request.forgotten = True
        for name in (request.request_id, *request.ids, *(attempt.rid for attempt in request.sent)):
            if self._by_id.get(name) is request:
                del self._by_id[name]


def _cut(name: str) -> str:
    return name[:MAX_REQUEST_ID_CHARS]


class Minute:
    """Counts and samples for the log line of each minute."""

    def __init__(self) -> None:
        self.requests = 0
        self.ttft_s: list[float] = []
        self.held_s: list[float] = []
        self.refused: Counter[str] = Counter()
        """Number of requests answered with an error, by code."""

    @staticmethod
    def add(samples: list[float], seconds: float) -> None:
        if len(samples) < _MOST_SAMPLES:
            samples.append(seconds)

    def take(self, gain: str = "") -> str:
        """Return the log line, with ``gain`` at its end, and start a new minute. Empty without
        requests."""
        requests, ttft_s, held_s, refused = self.requests, self.ttft_s, self.held_s, self.refused
        self.__init__()  # type: ignore[misc]
        if not requests:
            return ""
        parts = [f"last minute: {requests:,} request{'' if requests == 1 else 's'}"]
        if ttft_s:
            parts.append(f"TTFT p50 {_at(ttft_s, 0.5)}, p99 {_at(ttft_s, 0.99)}")
        if held_s:
            parts.append(f"held p50 {_at(held_s, 0.5)}, p95 {_at(held_s, 0.95)}")
        causes = ", ".join(f"{count:,} {code}" for code, count in refused.most_common(8))
        parts.append(f"refused or failed: {causes}" if causes else "none refused")
        return "; ".join([*parts, gain] if gain else parts)


def _at(samples: list[float], share: float) -> str:
    samples.sort()
    seconds = samples[min(len(samples) - 1, int(share * len(samples)))]
    return f"{1e3 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
