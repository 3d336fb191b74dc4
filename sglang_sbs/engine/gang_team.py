"""How the processes of one DP rank hold a batch back: one strategy per role of a process.

SGLang takes the minimum of what the processes of a DP rank report of a handshake, in a collective
operation of every turn (``poll_and_all_reduce``, ``disaggregation/utils.py``). So the first process
(attention TP and CP rank 0) decides for all of them. It reports a request that is held as still in
the handshake, and the request stays in the queue of every process. The others only tell the first
one when a batch's handshakes are over with them, too. Where they are on several hosts they do not,
and the first one goes by its own handshakes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_sbs.engine.gang_board import Board, Word

_IN_HANDSHAKE = 1
"""``KVPoll.Bootstrapping`` (``disaggregation/base/conn.py``)."""


class OnlyProcess:
    """A DP rank that is one process: SGLang does not get to see what it holds."""

    is_alone = True

    def __init__(self, board: Board | None = None) -> None:
        """``board``: of the processes of this DP rank; closed where they cannot be heard."""
        self.board = board or Board()

    def may_hold(self, queue: Any, req: Any) -> bool:
        """Not what SGLang starts without its handshake, where held requests are kept by it."""
        return self.is_alone or not starts_in_handshake(queue, req)

    def is_ready(self, _tag: int) -> bool:
        """Whether a batch's handshakes are over with the other processes of this DP rank."""
        return True

    @contextmanager
    def keep_back(self, queue: Any, held: list[Any]) -> Iterator[None]:
        """While SGLang takes what is ready out of ``queue``."""
        rids = {req.rid for req in held}
        queue.queue = [req for req in queue.queue if req.rid not in rids]
        try:
            yield
        finally:
            queue.queue = held + queue.queue


class FirstProcess(OnlyProcess):
    """It decides for all processes of its DP rank."""

    is_alone = False

    def __init__(self, board: Board, processes: int) -> None:
        super().__init__(board)
        self._others = processes - 1

    def is_ready(self, tag: int) -> bool:
        if not self.board.is_open:
            return True
        ready = sum(word.ready_turn > 0 for word in self.board.heard(tag).values()) >= self._others
        if ready:
            self.board.waited(tag)
        return ready

    @contextmanager
    def keep_back(self, _queue: Any, held: list[Any]) -> Iterator[None]:
        """In the handshake still: in all processes of the DP rank, unless they failed in one."""
        senders = [req.disagg_kv_sender for req in held]
        try:
            for sender in senders:
                sender.poll = lambda poll=sender.poll: min(int(poll()), _IN_HANDSHAKE)
            yield
        finally:
            for sender in senders:
                vars(sender).pop("poll", None)


class OtherProcess(OnlyProcess):
    """It reports to the first process of its DP rank, and holds nothing."""

    is_alone = False

    def report(self, tag: int, word: Word, is_ready: bool, turn: int) -> None:
        """All of a batch is there, and whether its handshakes are over with this process."""
        if is_ready or not word.arrived:
            word.arrived, word.ready_turn = True, turn if is_ready else 0
            self.board.say(tag, word)


def in_handshake(queue: Any, req: Any) -> bool:
    """Decode has not taken it in; a failed one is out of it, for SGLang to deal with."""
    waits = int(req.disagg_kv_sender.poll()) == _IN_HANDSHAKE
    return waits and not starts_in_handshake(queue, req)


def starts_in_handshake(queue: Any, req: Any) -> bool:
    """Whether SGLang would not wait for the handshake (``--optimistic-prefill-attempts``)."""
    optimistic = getattr(queue, "can_prefill_before_bootstrap", None)
    return optimistic is not None and bool(optimistic(req))
