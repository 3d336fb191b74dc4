"""Whether a prefill worker runs requests on the DP ranks that the router names.

An engine may take the named rank as a hint only and choose by its own load (sglang #35964). No flag
or answer tells so, but EndForward does: the first rank that accepts a request is another one. A
request that moves later (sglang #37401) is accepted by the named rank first.
"""

from __future__ import annotations

# SGLang fault: rank-is-a-hint
WINDOW = 50
"""Requests that are looked at, the last ones."""
MOST_ELSEWHERE = 10
"""More than this many of them on other ranks: the rank is a hint."""
AS_A_HINT = (
    "it takes the DP rank that the router names as a hint only: {elsewhere} of the last {window} "
    "requests were accepted by other ranks. No rank is named to it any more until it restarts"
)


class ServedRanks:
    """The last requests of one worker, by its EndForward."""

    __slots__ = ("_elsewhere",)

    def __init__(self) -> None:
        self._elsewhere: dict[str, bool] = {}
        """Whether another rank than the named one accepted it, by rid; oldest first."""

    def accepted(self, rid: str, named_rank: int, rank: int) -> None:
        """A rank says that it accepted a request."""
        if rank == named_rank:
            # Also after another one did: messages of two ranks have no order.
            self._elsewhere[rid] = False
        else:
            self._elsewhere.setdefault(rid, True)
        if len(self._elsewhere) > WINDOW:
            del self._elsewhere[next(iter(self._elsewhere))]

    @property
    def problem(self) -> str:
        """What is wrong, in words; empty: nothing is, as far as can be told."""
        elsewhere = sum(self._elsewhere.values())
        if len(self._elsewhere) < WINDOW or elsewhere <= MOST_ELSEWHERE:
            return ""
        return AS_A_HINT.format(elsewhere=elsewhere, window=WINDOW)
