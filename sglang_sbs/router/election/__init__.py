"""Which of several schedulers schedules: a lock in a Kubernetes Lease or in etcd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sglang_sbs.router.election.candidate import ElectionTimes
from sglang_sbs.router.election.urls import parse_election

__all__ = ["Election", "ElectionTimes", "parse_election"]


class Election(Protocol):
    """What a scheduler process knows of the others."""

    async def run(self, lead: Callable[[int], None], follow: Callable[[], None]) -> None:
        """Until cancelled, which releases the lock.

        ``lead(term)``: this process schedules from now on, in that term; every term is higher than
        the one before. ``follow()``: it must not any more. That is said before the lock could be
        another's, also when the store is out of reach.

        Raises:
            ValueError: there is no way to the store at all (no kubeconfig, no service account).
        """

    @property
    def leader(self) -> str | None:
        """Who is known to lead: its identity, i.e. its address."""

    def leads(self) -> bool:
        """Whether this process leads at this moment, by the clock: ask before every decision.

        A process that was stopped and goes on may run other callbacks before the one that would
        say ``follow``; this calls it then.
        """

    def exceed(self, term: int) -> None:
        """A front end has followed another leader of this term: a lead in it or below it ends."""
