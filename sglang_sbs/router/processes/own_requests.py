"""The requests of one front end that its scheduler has, wherever that is.

Owns the books from announcement until a request is refused or ended, so that another scheduler can
be told all of it. Must not know whom to tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from sglang_sbs.router.assignment.dispatcher import Assignment, lost_track
from sglang_sbs.router.errors import Refused
from sglang_sbs.scheduling.events import Dispatch, Refuse, RequestAdopted, RequestArrived


@dataclass(slots=True)
class OwnRequest:
    """``placed``: where it went; ``None`` while it waits."""

    arrival: RequestArrived
    decision: asyncio.Future[Assignment]
    placed: Dispatch | None = None
    prefilled: bool = False


class OwnRequests:
    """By rid."""

    def __init__(self) -> None:
        self._requests: dict[str, OwnRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def enter(self, arrival: RequestArrived) -> OwnRequest:
        """A new one."""
        decision: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
        request = self._requests[arrival.rid] = OwnRequest(arrival, decision)
        return request

    def prefilled(self, rid: str) -> bool:
        """Prefill has answered; whether the request is still there."""
        request = self._requests.get(rid)
        if request is not None:
            request.prefilled = True
        return request is not None

    def end(self, rid: str) -> bool:
        """Forget it; whether it was there."""
        return self._requests.pop(rid, None) is not None

    def decide(self, command: Dispatch | Refuse) -> None:
        """What the scheduler says of it; one that ended meanwhile was told to the scheduler."""
        request = self._requests.get(command.rid)
        if request is None or request.decision.done():
            return
        if isinstance(command, Dispatch):
            request.placed = command
            if request.arrival.blocks:  # nobody asks for them again, and there may be thousands
                request.arrival = msgspec.structs.replace(request.arrival, blocks=[])
            request.decision.set_result(command)
        else:
            del self._requests[command.rid]
            request.decision.set_exception(
                Refused(command.cause, command.message, command.retry_after_s)
            )

    def lose_track(self, rid: str) -> None:
        """It gets no decision any more: an error, if it waits for one."""
        request = self._requests.get(rid)
        if request is not None and not request.decision.done():
            request.decision.set_exception(lost_track())

    def undecided(self) -> Iterator[RequestArrived]:
        """Those that wait; each is looked at when its turn comes, for one may decide others."""
        for request in list(self._requests.values()):
            if not request.decision.done():
                yield request.arrival

    def placed(self) -> Iterator[RequestAdopted]:
        """Those in flight, for a scheduler that did not place them."""
        for rid, request in list(self._requests.items()):
            if request.placed is not None:
                yield RequestAdopted(
                    rid=rid,
                    prompt_tokens=request.arrival.prompt_tokens,
                    max_new_tokens=request.arrival.max_new_tokens,
                    prefill=request.placed.prefill,
                    prefill_rank=request.placed.prefill_rank,
                    decode=request.placed.decode,
                    decode_rank=request.placed.decode_rank,
                    prefilled=request.prefilled,
                )
