"""A request as seen by its client and its engines, for ``GET /requests/{id}`` and ``sglang-sbs
why``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from sglang_sbs.scheduling.explained.decisions import Why
from sglang_sbs.scheduling.explained.timelines import Timeline


class AttemptStory(msgspec.Struct, omit_defaults=True):
    """An attempt to serve a request, as seen by the scheduler."""

    timeline: Timeline
    why: Why | None = None
    """Reasons for the request's waits and its place; None: no longer remembered."""
    now_s: float = 0.0
    """The scheduler's time when this record was made."""
    parts: dict[str, float] = {}
    """Seconds spent in each part of the TTFT (:meth:`.Timeline.parts`)."""
    ttft_s: float | None = None

    def __post_init__(self) -> None:
        self.parts = self.timeline.parts()
        self.ttft_s = self.timeline.ttft_s


class ClientAttempt(msgspec.Struct, omit_defaults=True, gc=False):
    """An attempt to serve a request, as seen by the front end that serves the client."""

    rid: str
    unit: int = 0
    """Index of the single request, if the client's request has several (a batch, or ``n``)."""
    failure: str = ""
    """Reason of the attempt's failure; empty: it did not fail."""
    outcome: str = ""
    """``completed``, ``failed`` or ``aborted``; empty while the attempt runs."""


class Story(msgspec.Struct, omit_defaults=True):
    """One request of a client, with all attempts to serve it."""

    request_id: str = ""
    """The request's ``x-request-id``."""
    kind: str = ""
    """``generate``, ``chat`` or ``completion``."""
    began_unix_s: float | None = None
    units: int = 1
    status: int | None = None
    """HTTP status; None: not answered yet."""
    seconds: float | None = None
    """Time until the end of the answer; None: it has not ended."""
    other_ids: list[str] = []
    """Other ids by which the client may know the request."""
    sent: list[ClientAttempt] = []
    """Attempts in order, as seen by the front end; of a large batch only the first ones."""
    attempts: list[AttemptStory] = []
    """The same attempts as seen by the scheduler."""


def with_attempts(
    name: str, known: Story | None, attempts: Callable[[Sequence[str]], list[AttemptStory]]
) -> Story | None:
    """Return ``known``, the front end's record of a request, with the scheduler's view of its
    attempts, which ``attempts`` finds by rid. Without ``known``, ``name`` can only be a rid. None:
    the request is unknown."""
    if known is None:
        found = attempts([name])
        return Story(attempts=found) if found else None
    known.attempts = attempts([attempt.rid for attempt in known.sent])
    return known
