"""Interfaces of an election: :class:`Election` for the scheduler process, and :class:`LockStore`
for the service that stores the lock."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol

from sglang_sbs.router.election.candidate import Record


class Election(ABC):
    """Decides whether this process is the active one of several schedulers."""

    def __init__(self) -> None:
        self._lead: Callable[[int], None] = lambda _term: None
        self._follow: Callable[[], None] = lambda: None
        self.term: int | None = None
        """Term in which this process leads, as last reported by ``lead`` and ``follow``; ``None``
        if it does not lead."""

    @abstractmethod
    async def run(self, lead: Callable[[int], None], follow: Callable[[], None]) -> None:
        """Run until cancelled, which gives up the lead.

        ``lead(term)`` is called when this process becomes active; every term is higher than the one
        before. ``follow()`` is called when it no longer is. If a lead ends by the clock, only the
        next call of :meth:`leads` reports that, so call it before every decision. Raises:
        ValueError, no store is configured (no kubeconfig, no service account)."""

    @property
    @abstractmethod
    def leader(self) -> str | None:
        """Address of the scheduler that leads, as far as known; ``None`` without one."""

    def leads(self) -> bool:
        """Return whether this process leads now, by the clock; call it before every decision. If
        the lead has ended, ``follow`` is called first: a process that was suspended may run other
        callbacks before its timers."""
        self._look()
        return self.term is not None

    @abstractmethod
    def exceed(self, term: int) -> None:
        """End this process's lead if its term is ``term`` or lower: a front end has followed
        another leader with ``term``."""

    @abstractmethod
    def _term_now(self) -> int | None:
        """Return the term in which this process leads now, by the clock; ``None`` if it does
        not."""

    def _look(self) -> None:
        """Call ``follow`` and ``lead`` if the term in which this process leads has changed."""
        term = self._term_now()
        if term == self.term:
            return
        if self.term is not None:
            self.term = None
            self._follow()
        if term is not None:
            self.term = term
            self._lead(term)


class OutdatedWrite(Exception):
    """The store rejected a write, because the lock has changed since the version that the write
    names."""


class StoreError(Exception):
    """The store gave no usable response; the message is shown to the operator."""


@contextlib.contextmanager
def understood(where: str) -> Iterator[None]:
    """Context manager that turns the errors of parsing an unexpected response into StoreError.
    ``where`` names what was parsed."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise StoreError(f"unexpected content in {where}: {error!r}") from error


class LockStore(Protocol):
    """One lock. Every method except ``close`` raises :class:`StoreError`."""

    async def open(self) -> None:
        """Connect. Raises: ValueError, no store is configured."""

    async def read(self) -> Record:
        """Return the lock; a :class:`Record` without holder if it does not exist."""

    async def take(self, seen: Record, holder: str, term: int) -> Record:
        """Replace the lock that was read with a new holder, and return it. Raises: OutdatedWrite,
        it has changed since."""

    async def renew(self, mine: Record) -> Record:
        """Renew the lock and return it. Raises: OutdatedWrite, it has another holder."""

    async def release(self, mine: Record) -> None:
        """Free the lock. Raises: OutdatedWrite, it has another holder."""

    async def close(self) -> None:
        """Close the connection."""
