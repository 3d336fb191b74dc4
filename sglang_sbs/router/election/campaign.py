"""Runs the election of this process: sends a candidate's requests to the store with the lock.
:meth:`Campaign.leads` always checks the clock and never relies on a timer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable

from sglang_sbs.router.election.candidate import Candidate, ElectionTimes, Read, Renew, Sleep, Take
from sglang_sbs.router.election.election import Election, LockStore, OutdatedWrite, StoreError

logger = logging.getLogger(__name__)

_RELEASE_S = 1.0
_MARK = "#"
"""Separates the address of a holder from a random suffix, which distinguishes successive processes
at one address."""


def boot_clock() -> float:
    """Return the seconds since the machine booted, including sleep. This clock cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Campaign(Election):
    def __init__(self, store: LockStore, identity: str, times: ElectionTimes) -> None:
        """Create a campaign; ``identity`` is the address by which others reach this process."""
        super().__init__()
        self._store = store
        self._times = times
        self._clock = boot_clock
        self._candidate = Candidate(f"{identity}{_MARK}{secrets.token_hex(4)}", times)
        self._sooner = asyncio.Event()
        self.complaint = ""
        """Why the store is unavailable; empty if it is available."""

    async def run(self, lead: Callable[[int], None], follow: Callable[[], None]) -> None:
        self._lead, self._follow = lead, follow
        try:
            await self._store.open()
            while True:
                await self._step()
                self._look()
        finally:
            await self._leave()

    @property
    def leader(self) -> str | None:
        holder = self._candidate.leader_at(self._clock())
        return holder.rpartition(_MARK)[0] or holder if holder else None

    def exceed(self, term: int) -> None:
        self._candidate.exceed(term, self._clock())
        self._sooner.set()
        self._look()

    async def _step(self) -> None:
        store, candidate, asked_s = self._store, self._candidate, self._clock()
        step = candidate.next_step(asked_s)
        if isinstance(step, Sleep):
            self._sooner.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._sooner.wait(), step.for_s)
            return
        try:
            async with asyncio.timeout(self._times.ask_s):
                match step:
                    case Read():
                        candidate.observed(await store.read(), self._clock())
                    case Take():
                        record = await store.take(step.seen, candidate.holder, step.term)
                        candidate.on_taken(record, asked_s, self._clock())
                    case Renew():
                        record = await store.renew(step.mine)
                        candidate.renewed(record, asked_s, self._clock())
        except OutdatedWrite:
            candidate.on_refused(self._clock())
        except StoreError as error:
            self._failed(str(error), asked_s)
        except TimeoutError:
            self._failed(f"no response within {self._times.ask_s:g} s", asked_s)
        else:
            if self.complaint:
                logger.info("election: the store responds again")
            self.complaint = ""

    def _failed(self, text: str, asked_s: float) -> None:
        self._candidate.unreachable(asked_s, self._clock())
        if text != self.complaint:
            self.complaint = text
            logger.warning("election: the store is unavailable: %s", text)

    def _term_now(self) -> int | None:
        return self._candidate.term_at(self._clock())

    async def _leave(self) -> None:
        """Stop leading, then release the lock so that another candidate can lead at once."""
        mine = self._candidate.resign()
        self._look()
        try:
            if mine is not None:
                async with asyncio.timeout(_RELEASE_S):
                    await self._store.release(mine)
        except (OutdatedWrite, StoreError, TimeoutError) as error:
            logger.info("election: the lock was not released: %s", error or "no response")
        finally:
            await self._store.close()
