"""The vocabulary of explanations: why a batch could leave, what decided a request's place, and what
a request waits for. :mod:`.explained.decisions` records them."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from sglang_sbs.scheduling.events import InstanceId

MOST_WAITS = 12
"""Reasons kept per request, the first ones: two that alternate would make a long list."""


class Opening(StrEnum):
    """Why a batch could leave for an instance at this moment."""

    IDLE = "idle"
    ABOUT_TO_END = "about_to_end"
    """Its running pass ends within the dispatch lead."""
    JOINS = "joins"
    """A batch is on its way there, and this one can still reach the same pass."""
    FULL_AHEAD = "full_ahead"
    """More requests wait than all earlier passes can hold, so sending early costs nothing."""
    AHEAD = "ahead"
    """The engine launches a pass ahead (overlap scheduling), and the next one would have a gap."""
    FAR_AWAY = "far_away"
    """Delivery takes a pass or more, so holding gains nothing."""
    AT_ONCE = "at_once"
    """The policy does not hold requests."""
    INTERVAL = "interval"
    """The dispatch interval was over (``--sbs-trigger paper``)."""


class Term(StrEnum):
    """The criterion that decided a request's place."""

    ONLY_ONE = "only_one"
    """There was one instance to choose from."""
    SOONEST = "soonest"
    """Its pass starts first."""
    CACHED = "cached"
    """More of the prompt is in its cache than on instances that start sooner."""
    LEAST_COST = "least_cost"
    """Its own completion time plus the delay of others is smallest there."""
    OVERDUE = "overdue"
    """It has waited for the longest hold, so it goes to the first instance that can take it."""
    FIRST_OPEN = "first_open"
    """Instances that start sooner could not take it then."""
    RULE = "rule"
    """The rule of a policy without predictions."""


class WaitReason(StrEnum):
    """The reason why a request waits."""

    NOT_YET = "not_yet"
    """No instance is about to be ready."""
    NO_DECODE_ROOM = "no_decode_room"
    """No decode rank has room for it."""
    BETTER_ELSEWHERE = "better_elsewhere"
    """Another instance is predicted to cost less, though it is not ready yet."""
    PREFIX_COMING = "prefix_coming"
    """A rank is computing a part of its prompt for another request."""
    SHARE_FULL = "share_full"
    """A batch left without it: the instance's share of the queue was complete."""
    DOES_NOT_FIT = "does_not_fit"
    """A batch left without it: no rank had room for all of it."""
    EXCLUDED = "excluded"
    """It failed on the instance that was ready, and others may still become available."""
    NO_PREFILL = "no_prefill"
    """No prefill instance is up, but one may return soon."""
    NO_DECODE = "no_decode"
    """No decode instance is up, but one may return soon."""


class Waited(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A reason for waiting and its beginning."""

    reason: WaitReason
    at_s: float
    """The scheduler's clock."""
    instance: InstanceId = ""
    """The instance that was expected to be ready first, or the better one."""
    until_s: float | None = None
    """Time when the instance was expected to be ready, or the prefix to be cached."""
    gain_s: float | None = None
    """Predicted saving at the better instance; None: none, or unknown."""
