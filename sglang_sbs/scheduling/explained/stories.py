"""A request from its client's side to its engines, as ``GET /requests/{id}`` answers and
``sglang-sbs why`` shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from sglang_sbs.scheduling.explained.decisions import Why
from sglang_sbs.scheduling.explained.timelines import Timeline


class AttemptStory(msgspec.Struct, omit_defaults=True):
    """One attempt, as the scheduler knows it."""

    timeline: Timeline
    why: Why | None = None
    """None: the reasons are forgotten."""
    now_s: float = 0.0
    """The scheduler's clock when this was written."""
    parts: dict[str, float] = {}
    """See :meth:`.Timeline.parts`."""
    ttft_s: float | None = None

    def __post_init__(self) -> None:
        self.parts = self.timeline.parts()
        self.ttft_s = self.timeline.ttft_s


class ClientAttempt(msgspec.Struct, omit_defaults=True, gc=False):
    """One attempt, as the front end that serves the client knows it."""

    rid: str
    unit: int = 0
    """Which of the single requests that a batch or ``n`` was split into."""
    failure: str = ""
    """Why it failed."""
    outcome: str = ""
    """Empty: it is not over."""


class Story(msgspec.Struct, omit_defaults=True):
    """One request of a client."""

    request_id: str = ""
    """``x-request-id``."""
    kind: str = ""
    """``generate``, ``chat`` or ``completion``."""
    began_unix_s: float | None = None
    units: int = 1
    status: int | None = None
    """None: it is not answered yet."""
    seconds: float | None = None
    """Until the end of its answer."""
    other_ids: list[str] = []
    """Under which the client knows it as well."""
    sent: list[ClientAttempt] = []
    """All attempts in order, of a batch the first ones."""
    attempts: list[AttemptStory] = []
    """What the scheduler knows of them."""


def with_attempts(
    name: str, known: Story | None, attempts: Callable[[Sequence[str]], list[AttemptStory]]
) -> Story | None:
    """Add what the scheduler knows. ``known``: what the front end remembers of that request; None:
    nothing, so ``name`` can only be a rid."""
    if known is None:
        found = attempts([name])
        return Story(attempts=found) if found else None
    known.attempts = attempts([attempt.rid for attempt in known.sent])
    return known
