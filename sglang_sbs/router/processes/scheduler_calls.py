"""What a front end asks of its scheduler and waits for: changes of workers, aborts elsewhere.

Must not know sessions: it is given a way to tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_sbs.router.processes.calls import Calls, no_scheduler
from sglang_sbs.router.processes.messages import (
    AbortElsewhere,
    AddWorker,
    Done,
    RemoveWorker,
    ToScheduler,
    UpdateWorker,
)
from sglang_sbs.router.workers.worker import Worker

CALL_S = 5.0


class SchedulerCalls:
    """Each raises RouterError (503) if there is no scheduler, or no answer of it."""

    def __init__(self, tell: Callable[[ToScheduler], bool]) -> None:
        """``tell``: False, there is nobody to take it."""
        self._tell = tell
        self._calls: Calls[Done] = Calls()

    async def add_worker(self, url: str, role: Any, bootstrap_port: int | None) -> str:
        """Returns its id. Raises: ValueError as the registry does."""
        done = await self._call(
            lambda call: AddWorker(call=call, url=url, role=role, bootstrap_port=bootstrap_port)
        )
        return done.worker_id

    async def remove_worker(self, worker_id: str) -> None:
        """Raises: ValueError, there is none."""
        await self._call(lambda call: RemoveWorker(call=call, worker_id=worker_id))

    async def update_worker(self, worker: Worker) -> None:
        """Tell its priority, cost and labels. Raises: ValueError."""
        await self._call(
            lambda call: UpdateWorker(
                call=call,
                worker_id=worker.id,
                priority=worker.priority,
                cost=worker.cost,
                labels=worker.labels,
            )
        )

    async def abort_elsewhere(self, rid: str) -> int:
        """End requests of the other front ends; how many."""
        return (await self._call(lambda call: AbortElsewhere(call=call, rid=rid))).count

    def answered(self, done: Done) -> None:
        """By the scheduler."""
        self._calls.answered(done.call, done)

    def give_up(self) -> None:
        """It is lost: whoever waits is told so."""
        self._calls.give_up()

    async def _call(self, question: Callable[[int], ToScheduler]) -> Done:
        try:
            done = await self._calls.ask(lambda number: self._tell(question(number)), CALL_S)
        except TimeoutError:
            done = None
        if done is None:
            raise no_scheduler() from None
        if done.error:
            raise ValueError(done.error)
        return done
