"""What an election needs of the service that keeps the lock."""

from __future__ import annotations

from typing import Protocol

from sglang_sbs.router.election.candidate import Record


class Refused(Exception):
    """A write named a version that is no more."""


class StoreError(Exception):
    """No answer, or none that can be used. What the words say is shown to the operator."""


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
