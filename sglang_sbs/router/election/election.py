"""What a scheduler process knows of the others, however it is decided who leads, and what an
election needs of the service that keeps the lock."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol

from sglang_sbs.router.election.candidate import Record


class Election(ABC):
    """Which of several schedulers leads."""

    def __init__(self) -> None:
        self._lead: Callable[[int], None] = lambda _term: None
        self._follow: Callable[[], None] = lambda: None
        self.term: int | None = None
        """In which this process leads, as was said last."""

    @abstractmethod
    async def run(self, lead: Callable[[int], None], follow: Callable[[], None]) -> None:
        """Until cancelled, which gives the lead away.

        ``lead(term)``: this process schedules from now on; every term is higher than the one
        before. ``follow()``: it must not any more; where a lead ends by the clock, the first
        :meth:`leads` after that says it, which is to be asked all the time. Raises: ValueError,
        there is no way to the store at all (no kubeconfig, no service account)."""

    @property
    @abstractmethod
    def leader(self) -> str | None:
        """Who is known to lead: its address."""

    def leads(self) -> bool:
        """Whether this process leads at this moment, by the clock: ask before every decision. A
        process that was stopped may run other callbacks before ``follow`` is said; this says it
        then."""
        self._look()
        return self.term is not None

    @abstractmethod
    def exceed(self, term: int) -> None:
        """A front end has followed another leader of this term: a lead in it or below it ends."""

    @abstractmethod
    def _term_now(self) -> int | None:
        """In which this process leads, by the clock."""

    def _look(self) -> None:
        """Say in which term this process leads, if that is news."""
        term = self._term_now()
        if term == self.term:
            return
        if self.term is not None:
            self.term = None
            self._follow()
        if term is not None:
            self.term = term
            self._lead(term)


class Refused(Exception):
    """A write named a version that is no more."""


class StoreError(Exception):
    """No answer, or none that can be used. What the words say is shown to the operator."""


@contextlib.contextmanager
def understood(where: str) -> Iterator[None]:
    """What does not look as it should there is the store's fault. Raises: StoreError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise StoreError(f"not what was expected in {where}: {error!r}") from error


class LockStore(Protocol):
    """One lock. Every method but ``close`` raises :class:`StoreError`."""

    async def open(self) -> None:
        """Raises: ValueError, there is no way to the store at all."""

    async def read(self) -> Record:
        """The lock as it is; a :class:`Record` without a holder if there is none."""

    async def take(self, seen: Record, holder: str, term: int) -> Record:
        """Write a new holder over what was seen. Raises: Refused."""

    async def renew(self, mine: Record) -> Record:
        """The holder lives. Raises: Refused, it is not the holder any more."""

    async def release(self, mine: Record) -> None:
        """Nobody holds it from now on. Raises: Refused."""

    async def close(self) -> None:
        """Nothing is asked afterwards."""
