"""Decides whether decode has room for a request before its prefill is dispatched, and reserves a
rank so that small requests do not take the room a large one waits for."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from sglang_sbs.scheduling.decode.instance import DecodeInstance
from sglang_sbs.scheduling.events import InstanceId, RequestEnded
from sglang_sbs.scheduling.request import Request

RESERVE_AFTER_PASSES = 10.0
"""Age, in mean forward times, from which a refused request may reserve a rank."""
MOST_ASKED = 64
"""Number of waiting requests, oldest first, searched for a refused one to reserve a rank for."""
_OUTPUT_STEP = 0.05
"""Weight of a new answer's length in the smoothed mean."""


class ExpectedOutput:
    """Expected output length: the smoothed mean of completed answers, in tokens."""

    def __init__(self, default_tokens: int) -> None:
        self._tokens = float(default_tokens)
        self._whole_tokens = default_tokens

    def total_tokens(self, request: Request) -> int:
        expected, most = self._whole_tokens, request.max_new_tokens
        return request.prompt_tokens + (expected if most is None or expected < most else most)

    def answered_tokens(
        self, event: RequestEnded, request: Request, instances: Sequence[DecodeInstance]
    ) -> int:
        """Return the answer's length in tokens, limited to what was requested and to a decode
        rank's KV capacity."""
        most = max((instance.kv_capacity_tokens for instance in instances), default=0)
        if request.max_new_tokens is not None:
            most = min(most, request.max_new_tokens)
        return min(max(0, event.completion_tokens or 0), most)

    def learn(self, tokens: int) -> None:
        self._tokens += _OUTPUT_STEP * (tokens - self._tokens)
        self._whole_tokens = int(self._tokens)


class Reservation(NamedTuple):
    """A rank reserved for one request (``rid``) until it has room for that request."""

    rid: str
    instance: InstanceId
    rank: int


class DecodeAdmission:
    """The room of all decode ranks, and the rank reserved for a request."""

    def __init__(self, outputs: ExpectedOutput) -> None:
        self.outputs = outputs
        self._instances: Sequence[DecodeInstance] = ()
        self._room_tokens: int | None = None
        """Largest room of a rank that is not reserved, in tokens; None: must be computed again."""
        self.reserved: Reservation | None = None
        self.least_refused_tokens = math.inf
        """Smallest total length refused since :meth:`begin`."""

    def begin(self, instances: Sequence[DecodeInstance], waiting: Container[str]) -> None:
        """Begin a planning round: forget the computed room, and use ``instances`` (those that are
        up). Drops the reservation if its request is not in ``waiting`` (ids of queued requests), or
        its instance is not up."""
        self._instances = instances
        self._room_tokens = None
        self.least_refused_tokens = math.inf
        kept = self.reserved
        if kept is not None and (
            kept.rid not in waiting or all(kept.instance != instance.id for instance in instances)
        ):
            self.reserved = None

    def changed(self) -> None:
        self._room_tokens = None

    def admits(self, request: Request) -> bool:
        """Return whether some rank that may get the request has room for its total length."""
        reserved = self.reserved
        if request.exclude or (reserved is not None and reserved.rid == request.rid):
            allowed = request.allowed_on(self._instances)
            room_tokens = max([self._room(decode, request) for decode in allowed], default=0)
        else:
            if self._room_tokens is None:
                rooms = [self._room(decode, request) for decode in self._instances]
                self._room_tokens = max(rooms, default=0)
            room_tokens = self._room_tokens
        tokens = self.outputs.total_tokens(request)
        if tokens <= room_tokens:
            return True
        self.on_refused(tokens)
        return False

    def on_refused(self, tokens: float) -> None:
        """Record that a request of this total length found no rank."""
        self.least_refused_tokens = min(self.least_refused_tokens, tokens)

    def may_admit_now(self, decode: DecodeInstance) -> bool:
        """Return whether a request refused since :meth:`begin` might fit on this instance now."""
        return self.least_refused_tokens <= decode.room_tokens

    def is_open(self, request: Request, decode: DecodeInstance, rank: int) -> bool:
        """Return whether the rank is not reserved for another request."""
        kept = self.reserved
        return kept is None or kept.rid == request.rid or kept[1:] != (decode.id, rank)

    def reserve(self, waiting: Iterable[Request], before_s: float) -> None:
        """Reserve the rank with the most room for the oldest refused request, if it arrived before
        ``before_s`` and no rank is reserved. Otherwise smaller requests would take every bit of
        room that becomes free."""
        if self.reserved is not None or self.least_refused_tokens == math.inf:
            return
        for request in islice(waiting, MOST_ASKED):
            if request.arrived_s > before_s:
                return
            if self.admits(request):
                continue
            rooms = [
                (room, decode.id, rank)
                for decode in request.allowed_on(self._instances)
                for rank, room in enumerate(decode.rooms())
            ]
            if rooms:
                _, instance, rank = max(rooms)
                self.reserved = Reservation(request.rid, instance, rank)
                self._room_tokens = None
            return

    def _room(self, decode: DecodeInstance, request: Request) -> int:
        kept = self.reserved
        if kept is None or kept.instance != decode.id or kept.rid == request.rid:
            return decode.room_tokens
        rooms = [room for rank, room in enumerate(decode.rooms()) if rank != kept.rank]
        return max(rooms, default=0)
