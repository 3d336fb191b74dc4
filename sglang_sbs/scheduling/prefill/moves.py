"""Follows requests that the engine moved to another DP rank than the one they were dispatched to.

SGLang may move a queued prefill to another rank after the router dispatched it (DP waiting-queue
migration, sglang #37401), or treat the router's choice as a hint only (sglang #35964). EndForward
then names the request on a rank that the router did not choose, and the report is accepted.

The message that names a request is its acceptance by the new rank, so the request is entered there
as accepted. At the old rank it is removed from wherever it was counted: in flight, in a presumed
pass, or in the reported queue. The rank's last message may still count it in that queue; its next
message settles that. Messages of two ranks have no order. If the old rank's acceptance was not
received before the move, it is *owed*: when it comes, by name or as a lost id, it moves nothing
back and accepts no other request. A move gives no latency sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang_sbs.scheduling.prefill.rank import PrefillRank
from sglang_sbs.wire import EndForward

if TYPE_CHECKING:
    from sglang_sbs.scheduling.prefill.instance import PrefillInstance

# SGLang fault: queued-work-moves, rank-is-a-hint
_MOST_OWED = 1024
"""Limit on owed acceptances: a rank that treats the choice as a hint never sends them."""


class Stray(NamedTuple):
    """A request that a DP rank names while it is assumed at another one."""

    rid: str
    source: PrefillInstance
    """Instance at which the request is assumed. It differs from the one whose rank names it only
    where each rank is an instance (``lone_ranks``)."""
    rank: int
    """DP rank of ``source`` at which the request is assumed."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt cached on the rank that names it (L_hit)."""


class Moves:
    """Moves requests between ranks of one prefill instance, and keeps owed acceptances."""

    __slots__ = ("_owed",)

    def __init__(self) -> None:
        self._owed: dict[str, int] = {}
        """DP rank that each moved request left before its acceptance there was received, by request
        id; oldest first."""

    def follow(
        self, ranks: Sequence[PrefillRank], index: int, strays: Sequence[Stray]
    ) -> list[str]:
        """Enter ``strays`` at the DP rank ``index``, which names them, and remove them from their
        assumed places. Returns the ids of the moved requests."""
        target = ranks[index]
        moved = [stray for stray in strays if self._owed.get(stray.rid) != index]
        for stray in moved:
            old_tokens = _leave(stray)
            if old_tokens is None:
                continue  # forgotten meanwhile, so not counted anywhere
            target.add(stray.rid, stray.prompt_tokens, stray.cached_tokens)
            stray.source.ranks[stray.rank].received_tokens -= old_tokens
        return [stray.rid for stray in moved]

    def settle(self, report: EndForward, lost: int) -> int:
        """Settle acceptances that the reporting rank owed for moved requests. ``lost``: number of
        acceptances in lost messages of the rank. Returns how many of these belong to requests still
        assumed there."""
        if not self._owed:
            return lost
        for rid in report.rids:
            if self._owed.get(rid) == report.dp_rank:
                del self._owed[rid]
        owed = [rid for rid, rank in self._owed.items() if rank == report.dp_rank][:lost]
        for rid in owed:
            del self._owed[rid]
        return lost - len(owed)

    def owes(self, rid: str, rank: int) -> None:
        self._owed[rid] = rank
        if len(self._owed) > _MOST_OWED:
            del self._owed[next(iter(self._owed))]

    def on_ended(self, rid: str) -> None:
        self._owed.pop(rid, None)

    def clear(self) -> None:
        self._owed.clear()


def _leave(stray: Stray) -> int | None:
    """Remove a request from its assumed place. Returns its uncached tokens there; None if it was
    forgotten."""
    rid, source = stray.rid, stray.source
    rank = source.ranks[stray.rank]
    if rid not in rank.requests:
        rank.prompts.pop(rid, None)
        return None
    tokens, prompt = rank.requests[rid].tokens, rank.prompts.get(rid)
    unreported = rid in rank.flight or rid in rank.presumed
    unreported = unreported or source.passes.presumed(rid) is not None
    others_tokens = _waiting_tokens(rank) - (prompt.left_tokens if prompt else 0)
    if not unreported and rank.queued_tokens >= max(0, others_tokens) + tokens:
        # The rank's last message is from before the move; otherwise it would report less. Before
        # the request is dropped, as the instance then looks for work that is left.
        rank.queued_tokens -= tokens
    source.dropped(rid, stray.rank)
    rank.presumed.pop(rid, None)
    rank.taken = []  # some may have moved to another rank
    if unreported:
        source.moves.owes(rid, stray.rank)
    return tokens


def _waiting_tokens(rank: PrefillRank) -> int:
    """Return the tokens of accepted requests not computed by any pass, by the router's own
    accounting."""
    prompts = sum([prompt.left_tokens for prompt in rank.prompts.values()])
    return max(0, prompts - rank.flight.total)
