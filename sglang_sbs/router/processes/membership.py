"""Set of workers in the scheduler process: clients' changes to it, and the prefill and decode
requests in flight at each worker."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from sglang_sbs.router.processes.messages import (
    AddWorker,
    Change,
    DrainWorker,
    Hello,
    RemoveWorker,
)
from sglang_sbs.router.workers.kubernetes_pods import Members, is_discovered
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import Dispatch

logger = logging.getLogger(__name__)

SETTLE_S = 3.0
"""Longest wait for the first response of each worker before front ends are served."""


@dataclass(slots=True)
class Placed:
    """URLs of the engines a request was dispatched to; empty while it waits."""

    prefill: str = ""
    decode: str = ""
    prefill_open: bool = False
    """True while the prefill request is in flight."""


class SessionMembership:
    def __init__(self, members: Members, now_s: float) -> None:
        self._registry = members.registry
        self._members = members
        self._known_of = -1
        """Latest term whose set of workers is in effect here, inherited from front ends or changed
        by clients; -1: only the workers of the command line."""
        self._new_s = now_s
        self._active: Counter[str] = Counter()
        """Requests in flight by worker URL, also of workers that were removed: one that is added
        again still has its earlier requests."""

    # Legs in flight of all front ends, counted in the workers ----------------------------------

    def on_dispatched(self, placed: Placed, command: Dispatch) -> None:
        placed.prefill, placed.decode = command.prefill, command.decode
        placed.prefill_open = True
        self.count(placed, 1)
        for url in (placed.prefill, placed.decode):
            if worker := self._registry.get(url):
                worker.dispatches += 1

    def count(self, placed: Placed, step: int) -> None:
        """Add ``step`` to the requests in flight at the decode worker, and at the prefill worker
        if its request is still in flight."""
        if placed.prefill_open:
            self._add(placed.prefill, step)
        self._add(placed.decode, step)

    def prefill_over(self, placed: Placed) -> None:
        if placed.prefill_open:
            self._add(placed.prefill, -1)
        placed.prefill_open = False

    def _add(self, url: str, step: int) -> None:
        self._active[url] = count = max(0, self._active[url] + step)
        if count == 0:
            del self._active[url]
        if worker := self._registry.get(url):
            worker.active = count

    # Which workers there are ------------------------------------------------------------------

    @property
    def looked(self) -> bool:
        """Whether every worker has responded or has a known problem."""
        return all(w.info is not None or w.problems for w in self._registry)

    def settled(self, now_s: float) -> bool:
        """Return whether every worker has been checked, or ``SETTLE_S`` has passed."""
        return self.looked or now_s > self._new_s + SETTLE_S

    def inherit(self, hello: Hello, now_s: float) -> None:
        """Replace the workers of the command line by those of the previous scheduler, as a front
        end reports them: clients may have changed them. Sets of earlier terms are ignored."""
        if hello.last_term <= self._known_of:
            return
        self._known_of = hello.last_term
        urls = {state.url for state in hello.workers}
        for worker in self._registry:
            if worker.url not in urls and not is_discovered(
                worker
            ):  # pods decide for discovered ones
                logger.warning(
                    "worker %s of the command line is removed: the previous scheduler did "
                    "not have it. POST /workers adds it",
                    worker.url,
                )
                self._members.remove_worker(worker)
        for state in hello.workers:
            port, known = state.configured_bootstrap_port, self._registry.get(state.url)
            try:
                if known is None:
                    known = self._members.add_worker(state.url, state.role, port)
                    self._new_s = now_s
            except ValueError as error:
                logger.error("cannot take over worker %s: %s", state.url, error)
                continue
            known.id, known.spelled = state.id, state.spelled
            known.priority, known.cost = state.priority, state.cost
            known.labels = state.labels | known.labels
            self._registry.drain(known, state.draining)

    def change(self, message: Change, term: int) -> Worker:
        """Apply a client's change, and return its worker. Raises: ValueError, the worker is unknown
        or cannot be added."""
        self._known_of = max(self._known_of, term)
        if isinstance(message, AddWorker):
            return self._members.add_worker(message.url, message.role, message.bootstrap_port)
        worker = self._registry.by_id(message.worker_id)
        if worker is None:
            raise ValueError(f"unknown worker {message.worker_id}")
        if isinstance(message, RemoveWorker):
            self._members.remove_worker(worker)
        elif isinstance(message, DrainWorker):
            self._registry.drain(worker, message.draining)
        else:
            worker.priority, worker.cost = message.priority, message.cost
            worker.labels = message.labels
        return worker
