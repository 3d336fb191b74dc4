"""Detects prefill workers that do not run requests on the DP ranks named by the router.

An engine may treat the named rank as a hint and choose by its own load (sglang #35964). No flag or
response reveals this, but EndForward does: the first rank that accepts a request is a different
one. A request that moves later (sglang #37401) is first accepted by the named rank."""

from __future__ import annotations

# SGLang fault: rank-is-a-hint
WINDOW = 50
"""Number of recent requests considered."""
MOST_ELSEWHERE = 10
"""Requests on other ranks above which the named rank counts as a hint."""
AS_A_HINT = (
    "it treats the DP rank named by the router as a hint: {elsewhere} of the last {window} "
    "requests were accepted by other ranks. No rank is named until it restarts"
)


class ServedRanks:
    """Compares the named with the accepting DP rank of one prefill worker's last requests."""

    __slots__ = ("_elsewhere",)

    def __init__(self) -> None:
        self._elsewhere: dict[str, bool] = {}
        """Whether a rank other than the named one accepted each request, by rid, oldest first."""

    def accepted(self, rid: str, named_rank: int, rank: int) -> None:
        """Record that DP rank ``rank`` accepted a request sent with ``named_rank``."""
        if rank == named_rank:
            # This overrules another rank's message, as messages of two ranks have no order.
            self._elsewhere[rid] = False
        else:
            self._elsewhere.setdefault(rid, True)
        if len(self._elsewhere) > WINDOW:
            del self._elsewhere[next(iter(self._elsewhere))]

    @property
    def problem(self) -> str:
        """Text for users if the named rank turns out to be a hint; empty otherwise."""
        elsewhere = sum(self._elsewhere.values())
        if len(self._elsewhere) < WINDOW or elsewhere <= MOST_ELSEWHERE:
            return ""
        return AS_A_HINT.format(elsewhere=elsewhere, window=WINDOW)
