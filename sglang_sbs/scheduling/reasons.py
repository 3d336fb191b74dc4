"""The vocabulary of explanations: why a batch could leave, what decided a request's place, and what
a request waits for. :mod:`.explained.decisions` records them."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from sglang_sbs.scheduling.events import InstanceId

MOST_WAITS = 12
"""Limit on reasons kept per request, the first ones: two that alternate would make a long list."""


class Opening(StrEnum):
    """Why a batch could leave for an instance at this moment."""

    IDLE = "idle"
    ABOUT_TO_END = "about_to_end"
    """The instance's running pass ends within the dispatch lead."""
    JOINS = "joins"
    """Another batch is on its way to the instance, and this one can reach the same pass."""
    FULL_AHEAD = "full_ahead"
    """More requests wait than all earlier passes can hold, so sending early costs nothing."""
    AHEAD = "ahead"
    """Overlap scheduling: the instance's next pass is filled already, and the pass after it would
    start with a gap if its batch came later."""
    FAR_AWAY = "far_away"
    """The dispatch latency is most of a pass or more, so holding gains nothing."""
    AT_ONCE = "at_once"
    """The policy does not hold requests."""
    INTERVAL = "interval"
    """The dispatch interval was over (``--sbs-trigger paper``)."""


class Term(StrEnum):
    """The criterion that decided a request's place."""

    ONLY_ONE = "only_one"
    """There was one instance to choose from."""
    SOONEST = "soonest"
    """The instance's next pass starts first."""
    CACHED = "cached"
    """The instance has more of the prompt cached than those that start sooner."""
    LEAST_COST = "least_cost"
    """The request's completion time plus the delay of other requests is smallest there."""
    OVERDUE = "overdue"
    """The request has waited for the longest hold, so it goes to the first instance with room."""
    FIRST_OPEN = "first_open"
    """Instances that start sooner could not take the request then."""
    RULE = "rule"
    """The rule of a policy without predictions."""


class WaitReason(StrEnum):
    """Reason for which a request waits in the queue."""

    NOT_YET = "not_yet"
    """No instance is about to be ready."""
    NO_DECODE_ROOM = "no_decode_room"
    """No decode rank has room for the request."""
    BETTER_ELSEWHERE = "better_elsewhere"
    """Another instance, which is not ready yet, is predicted to cost less."""
    PREFIX_COMING = "prefix_coming"
    """A rank is computing a prefix of the request's prompt for another request."""
    SHARE_FULL = "share_full"
    """A batch left without the request: the instance's share of the queue was complete."""
    DOES_NOT_FIT = "does_not_fit"
    """A batch left without the request: no rank had room for all of it."""
    EXCLUDED = "excluded"
    """The request failed on the instance that was ready, and others may become available."""
    NO_PREFILL = "no_prefill"
    """No prefill instance is up, but one may return soon."""
    NO_DECODE = "no_decode"
    """No decode instance is up, but one may return soon."""


class Waited(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A reason for which a request waited, and since when."""

    reason: WaitReason
    at_s: float
    """Time since when it waited for this reason, on the scheduler's clock."""
    instance: InstanceId = ""
    """Instance that was expected to be ready first, or the better one; empty: none."""
    until_s: float | None = None
    """Time when the instance was expected to be ready, or the prefix to be cached."""
    gain_s: float | None = None
    """Predicted saving at the better instance, in seconds; None: none, or unknown."""
