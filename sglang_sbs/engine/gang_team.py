"""Roles of the processes of one DP rank while a batch is held.

In every turn SGLang takes the minimum of the handshake states that the processes of a DP rank
report (``poll_and_all_reduce``, ``disaggregation/utils.py``). So the first process (attention TP
and CP rank 0) can decide for all: it reports a held request as still in the handshake, and the
request stays in the queue of every process. The other processes report to the first one when a
batch's handshakes are over. On several hosts they report nothing, and the first process uses only
its own handshakes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_sbs.engine.gang_board import Board, Word

_IN_HANDSHAKE = 1
"""Value of ``KVPoll.Bootstrapping`` (``disaggregation/base/conn.py``)."""


class OnlyProcess:
    """Strategy for the only process of a DP rank: SGLang does not see the requests that it
    holds."""

    is_alone = True

    def __init__(self, board: Board | None = None) -> None:
        """``board``: connects the processes of this DP rank; closed if they are unreachable."""
        self.board = board or Board()

    def may_hold(self, queue: Any, req: Any) -> bool:
        """Return whether the request may be held. A rank with several processes cannot hold a
        request that SGLang starts before its handshake is over."""
        return self.is_alone or not starts_in_handshake(queue, req)

    def is_ready(self, _tag: int) -> bool:
        """Return whether the handshakes of a batch are over in the other processes of this DP
        rank."""
        return True

    @contextmanager
    def keep_back(self, queue: Any, held: list[Any]) -> Iterator[None]:
        """Context manager that hides held requests while SGLang takes ready ones out of
        ``queue``."""
        rids = {req.rid for req in held}
        queue.queue = [req for req in queue.queue if req.rid not in rids]
        try:
            yield
        finally:
            queue.queue = held + queue.queue


class FirstProcess(OnlyProcess):
    """Strategy for the process that decides for all processes of its DP rank."""

    is_alone = False

    def __init__(self, board: Board, processes: int) -> None:
        super().__init__(board)
        self._others = processes - 1

    def is_ready(self, tag: int) -> bool:
        if not self.board.is_open:
            return True
        ready = (
            sum(word.ready_turn > 0 for word in self.board.words_of(tag).values()) >= self._others
        )
        if ready:
            self.board.waited(tag)
        return ready

    @contextmanager
    def keep_back(self, _queue: Any, held: list[Any]) -> Iterator[None]:
        """Context manager that reports requests as still in the handshake, which holds them in all
        processes of the DP rank. Failed handshakes are reported as failed."""
        senders = [req.disagg_kv_sender for req in held]
        try:
            for sender in senders:
                sender.poll = lambda poll=sender.poll: min(int(poll()), _IN_HANDSHAKE)
            yield
        finally:
            for sender in senders:
                vars(sender).pop("poll", None)


class OtherProcess(OnlyProcess):
    """Strategy for a process that reports to the first process of its DP rank, which decides."""

    is_alone = False

    def report(self, tag: int, word: Word, is_ready: bool, turn: int) -> None:
        """Report that all of a batch has arrived, and whether its handshakes are over in this
        process."""
        if is_ready or not word.arrived:
            word.arrived, word.ready_turn = True, turn if is_ready else 0
            self.board.publish(tag, word)


def in_handshake(queue: Any, req: Any) -> bool:
    """Return whether the request waits for decode to accept it. False for a failed request, so that
    SGLang can remove it."""
    waits = int(req.disagg_kv_sender.poll()) == _IN_HANDSHAKE
    return waits and not starts_in_handshake(queue, req)


def starts_in_handshake(queue: Any, req: Any) -> bool:
    """Return whether SGLang does not wait for the handshake (``--optimistic-prefill-attempts``)."""
    optimistic = getattr(queue, "can_prefill_before_bootstrap", None)
    return optimistic is not None and bool(optimistic(req))
