"""A request as seen by its client and its engines, for ``GET /requests/{id}`` and ``sglang-sbs
why``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from sglang_sbs.scheduling.explained.decisions import Why
from sglang_sbs.scheduling.explained.timelines import Timeline


class AttemptStory(msgspec.Struct, omit_defaults=True):
    """An attempt as seen by the scheduler."""

    timeline: Timeline
    why: Why | None = None
    """The reasons; None: no longer remembered."""
    now_s: float = 0.0
    """The scheduler's time when this was written."""
    parts: dict[str, float] = {}
    """See :meth:`.Timeline.parts`."""
    ttft_s: float | None = None

    def __post_init__(self) -> None:
        self.parts = self.timeline.parts()
        self.ttft_s = self.timeline.ttft_s


class ClientAttempt(msgspec.Struct, omit_defaults=True, gc=False):
    """An attempt as seen by the front end that serves the client."""

    rid: str
    unit: int = 0
    """Index of the single request within a batch or ``n``."""
    failure: str = ""
    """Reason of its failure."""
    outcome: str = ""
    """Outcome; empty while it runs."""


class Story(msgspec.Struct, omit_defaults=True):
    """One request of a client."""

    request_id: str = ""
    """``x-request-id``."""
    kind: str = ""
    """``generate``, ``chat`` or ``completion``."""
    began_unix_s: float | None = None
    units: int = 1
    status: int | None = None
    """HTTP status; None: not answered yet."""
    seconds: float | None = None
    """Time until the end of its answer."""
    other_ids: list[str] = []
    """Other ids known to the client."""
    sent: list[ClientAttempt] = []
    """Attempts in order; for a batch only the first ones."""
    attempts: list[AttemptStory] = []
    """The same attempts as seen by the scheduler."""


def with_attempts(
    name: str, known: Story | None, attempts: Callable[[Sequence[str]], list[AttemptStory]]
) -> Story | None:
    """Add the scheduler's attempts. ``known``: the front end's record of the request; None: it has
    no record, so ``name`` can only be a rid."""
    if known is None:
        found = attempts([name])
        return Story(attempts=found) if found else None
    known.attempts = attempts([attempt.rid for attempt in known.sent])
    return known
