"""The batch gate: holds the requests of a batch until all can start, on all DP ranks at once.

How
---
The bootstrap room of each request encodes how many requests of the batch go to this rank, and how
many ranks get requests of it (:mod:`sglang_sbs.wire.gangs`). Requests of an incomplete batch stay
in the handshake queue (``PrefillBootstrapQueue``, ``disaggregation/prefill.py``), where SGLang's
own code finds and aborts them. The event loop continues meanwhile. A wait inside the loop would
block the other ranks at the next collective operation.

Each turn of the loop ends in a collective operation, so a turn has the same number on all ranks. A
rank's words of one turn reach the others before the next turn: on one host over sockets
(:mod:`.gang_board`), on several hosts inside that operation (:mod:`.gang_gather`). The latter needs
SGLang 0.5.22; with earlier releases an engine on several hosts holds nothing. A rank reports when
its part is ready. One turn after the last of these reports, all ranks start the batch. If a DP rank
has several processes, these agree among themselves first (:mod:`.gang_team`).

Most batches arrive while a pass runs. On one host, the thread that receives from decode reports to
the other ranks when the handshakes of a part are over. If all ranks did so before the pass ended,
all start the batch in their first look at the queue after it, without another message. This
shortcut is off if a DP rank has several processes. It is also off on a device without overlap
scheduling, where idle ranks look at the queue before the pass ends.

How long
--------
The limits count only time in which a part of the batch could have started:

- Handshakes with decode, which may have no room: ``gate_ms``.
- Requests that have not arrived: ``gate_ms``, or longer where recent requests took longer, at most
  ``ARRIVAL_SHARE`` times ``gate_ms``.

Requests outside the batch are held only if the router sent them after the batch for the same pass.
One of them alone would start a pass, and the batch would miss it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sglang_sbs.engine import collect
from sglang_sbs.engine.config import DEFAULT_GATE_MS
from sglang_sbs.engine.gang_board import MOST_RANKS, Board, SocketBoard, Word
from sglang_sbs.engine.gang_gather import GatherBoard
from sglang_sbs.engine.gang_team import FirstProcess, OnlyProcess, OtherProcess, in_handshake
from sglang_sbs.engine.recent_errors import RecentErrors
from sglang_sbs.engine.room_status import TAKEN_IN
from sglang_sbs.wire.endforward import GATE_ALONE, GATE_ERRORS, GATE_UNSUPPORTED
from sglang_sbs.wire.gangs import GangPart, is_sized, part_of_room

logger = logging.getLogger(__name__)

ARRIVAL_SHARE = 5
_PATIENCE = 4
"""Longest wait for requests that have not arrived, as a multiple of the recent arrival span (time
from the first to the last request of a batch)."""
_FORGETTING = 0.9
"""Factor by which each new batch reduces the remembered arrival span of earlier batches."""
MOST_TURN_S = 0.005
"""Limit, in seconds, on the counted time of one turn, because the turn may contain a forward pass,
during which nothing could start."""
MOST_MISSED = 1
"""Passes that may start without a held batch; after that it starts incomplete. Turns are rare while
passes run, so the time limit alone would take long to expire."""
FIRST_TURN = 1
MAX_ERRORS = 3
MOST_UNAGREED_TURNS = 3
"""A rank that gave up waiting starts alone after this many turns without agreement."""
_MOST_GANGS = 64
"""Number of batches whose state is kept. Batches in the handshake queue are kept in any case."""
_MOST_INCOMPLETE = 8
Original = Callable[..., Any]


@dataclass(slots=True)
class _HeldBatch:
    part: GangPart
    """This rank's part; ``members`` 0: only requests that follow the batch have been seen so
    far."""
    first_pass: int = 0
    """Number of passes started before the batch was first seen."""
    seen: set[str] = field(default_factory=set)
    word: Word = field(default_factory=Word)
    """The state reported to the other ranks."""
    handshake_s: float = 0.0
    """Seconds waited after the whole batch had arrived, on all ranks."""
    arrival_s: float = 0.0
    """Seconds waited before the whole batch had arrived."""
    span_s: float = 0.0
    """Seconds from the first request seen here until the whole batch had arrived."""
    came: bool = False
    """True: the whole batch has arrived, on all ranks."""
    free: bool = False
    """True: the batch is no longer held, even if some of its requests have not arrived."""


class GangHold:
    """The batch gate of one scheduler process."""

    def __init__(
        self,
        gate_ms: float | None,
        boot_id: str,
        *,
        gather: GatherBoard,
        clock: Callable[[], float] = time.monotonic,
        open_board: Callable[..., Board] = SocketBoard,
    ) -> None:
        """``gate_ms``: 0 holds nothing; None selects ``DEFAULT_GATE_MS``."""
        self._limit_s = (DEFAULT_GATE_MS if gate_ms is None else gate_ms) / 1e3
        self._boot_id = boot_id
        self._clock = clock
        self._open_board = open_board
        self._gather = gather
        self._ranks = Board()
        """Exchanges words about batches with the other DP ranks. Never opened without a barrier, or
        if one host has more than ``MOST_RANKS`` ranks."""
        self._team = OnlyProcess()
        self._attached = False
        self._off = self._limit_s == 0
        self._is_supported = True
        self._errors = RecentErrors(MAX_ERRORS)
        self._turn = self._result_turn = FIRST_TURN
        """Number of the current turn; ``_result_turn``: latest turn in which a pass ended before
        the look at the queue."""
        self._taken_turn = FIRST_TURN
        """Next turn that looks at the queue; a handshake that ends now counts from that turn on."""
        self._taken: dict[int, set[int]] = {}
        """Bootstrap rooms that decode has accepted, by tag of the batch. Only the thread that
        receives from decode uses it."""
        self._looks = 0  # at the queue
        self._turn_s = clock()
        self._last_turn_s = 0.0  # how long the turn before this one counts
        self._gangs: dict[int, _HeldBatch] = {}  # by tag
        self._passes = 0  # that were started so far
        self._usual_span_s = 0.0
        self._incomplete: list[_HeldBatch] = []
        """Batches that started without some of their requests, which had not arrived."""

    def fault(self) -> str:
        """Return the fault of the gate as a value of ``EndForward.gang_gate``; empty: none."""
        if self._errors.too_many:
            return GATE_ERRORS
        if not self._is_supported:
            return GATE_UNSUPPORTED
        return GATE_ALONE if self._ranks.failed or self._team.board.failed else ""

    def before_next_batch(self, _scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
        """Hook before ``Scheduler.get_next_disagg_prefill_batch_to_run``: once in every turn."""
        self._turn += 1
        self._taken_turn = self._turn

    def around_process_batch_result(
        self, original: Original, scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Hook around ``Scheduler.process_batch_result``. With ``copy_done`` all ranks have
        completed the pass; on CPU this holds as well, because it computes before this call."""
        done = getattr(result, "copy_done", None)
        if done is not None and not self._off:
            done.synchronize()
        if done is not None or getattr(scheduler, "device", "") == "cpu":
            self._result_turn, self._taken_turn = self._turn, self._turn + 1
        return original(scheduler, batch, result, *args, **kwargs)

    def after_update_status(self, _result: Any, _manager: Any, room: Any, status: Any) -> None:
        """Hook after ``CommonKVManager.update_status``, in the thread that receives from decode."""
        heeds = self._team.is_alone and self._ranks.is_open and not self._off
        if not heeds or status != TAKEN_IN:
            return
        with suppress(Exception):  # an exception would end SGLang's thread
            part = part_of_room(room)
            if part.members == 0 or part.ranks < 2:
                return
            rooms = self._taken.setdefault(part.tag, set())
            rooms.add(room)
            if len(rooms) == part.members:
                self._ranks.publish_later(part.tag, Word(taken_turn=self._taken_turn))
            while len(self._taken) > _MOST_GANGS:
                del self._taken[next(iter(self._taken))]

    def around_pop_bootstrapped(
        self, original: Original, queue: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Hook around ``PrefillBootstrapQueue.pop_bootstrapped``."""
        held: list[Any] = []
        if not self._off:
            try:
                held = self._held(queue)
            except Exception:
                self._failed()
        if not held:
            return original(queue, *args, **kwargs)
        with self._team.keep_back(queue, held):
            return original(queue, *args, **kwargs)

    def _held(self, queue: Any) -> list[Any]:
        """Return the requests in the queue that SGLang must not start in this turn."""
        self._begin_look(queue)
        if self._turn == FIRST_TURN and self._looks > 1:
            return []  # turns are not counted here, so requests would be held forever
        held = []
        for tag, reqs in self._in_queue(queue).items():
            gang = self._gangs[tag]
            has_part = gang.part.members > 0
            if isinstance(self._team, OtherProcess):
                if has_part:
                    self._report(self._team, queue, gang, reqs)
            elif not (self._may_start(queue, gang, reqs) if has_part else self._may_follow(gang)):
                held += reqs
        return held

    def _begin_look(self, queue: Any) -> None:
        now_s = self._clock()
        self._last_turn_s, self._turn_s = min(now_s - self._turn_s, MOST_TURN_S), now_s
        if not self._attached:
            try:
                self._attach(queue.scheduler)
            except Exception:
                self._ranks.failed = True
                raise
        self._looks += 1
        self._passes = int(getattr(queue.scheduler, "forward_ct", 0))
        self._ranks.listen()
        self._team.board.listen()

    def _in_queue(self, queue: Any) -> dict[int, list[Any]]:
        """Return the queue's requests by tag of their batch, and register new batches."""
        here: dict[int, list[Any]] = {}
        for req in () if self._off else queue.queue:
            part = part_of_room(req.bootstrap_room) if describes_batch(req) else None
            if part is None or (part.members == 1 and part.ranks == 1):
                continue
            if not self._team.may_hold(queue, req):
                continue
            here.setdefault(part.tag, []).append(req)
            gang = self._gangs.get(part.tag)
            if gang is None or (part.members and not gang.part.members):
                # This rank's part of the batch also decides for the requests that follow it.
                gang = self._gangs[part.tag] = _HeldBatch(part, first_pass=self._passes)
            if part.members > 0:
                gang.seen.add(req.rid)
        if len(self._gangs) > _MOST_GANGS:
            gone = [tag for tag in self._gangs if tag not in here]
            for tag in gone[: len(self._gangs) - _MOST_GANGS]:
                del self._gangs[tag]
        self._learn_of_late_ones()
        return here

    def _may_follow(self, gang: _HeldBatch) -> bool:
        """Return whether requests may start that follow a batch without a part for this rank. They
        start in the same turn as the batch, and wait at most for a handshake and one pass."""
        if gang.free or gang.part.ranks == 1 or not self._ranks.is_open:
            return True  # a batch on one rank is not reported to other ranks
        gang.arrival_s += self._last_turn_s
        gang.free = self._agreed(gang) or gang.arrival_s >= self._limit_s or self._missed(gang)
        return gang.free

    def _missed(self, gang: _HeldBatch) -> bool:
        return self._passes - gang.first_pass > MOST_MISSED

    def _report(
        self, team: OtherProcess, queue: Any, gang: _HeldBatch, reqs: Sequence[Any]
    ) -> None:
        """Report to the deciding process when the batch has arrived, and when it is ready here."""
        if not gang.word.ready_turn and len(gang.seen) >= gang.part.members:
            ready = not any(in_handshake(queue, req) for req in reqs)
            team.report(gang.part.tag, gang.word, ready, self._turn)

    def _may_start(self, queue: Any, gang: _HeldBatch, reqs: Sequence[Any]) -> bool:
        word = gang.word
        changed = not word.arrived and len(gang.seen) >= gang.part.members
        word.arrived |= changed
        alone = gang.part.ranks == 1
        if gang.free:
            if changed and not alone:  # ranks that started without it find that it was not lost
                self._ranks.publish(gang.part.tag, word)
            return True
        waiting = sum(in_handshake(queue, req) for req in reqs)
        if not gang.came:
            gang.span_s += self._last_turn_s
            gang.came = self._has_come(gang)
            if gang.came:
                self._record_span(gang.span_s)
        is_ready = word.arrived and not waiting
        if is_ready and not word.ready_turn and self._team.is_ready(gang.part.tag):
            word.ready_turn, changed = self._turn, True
        if not word.gave_up_turn and waiting < len(reqs) and self._waited_enough(gang):
            word.gave_up_turn, changed = self._turn, True
        if changed and not alone:  # once per turn, because few messages fit into a socket
            self._ranks.publish(gang.part.tag, word)
        gang.free = self._agreed(gang) or 0 < word.gave_up_turn < self._turn - MOST_UNAGREED_TURNS
        if gang.free and not alone:
            self._ranks.waited(gang.part.tag)
        return gang.free

    def _agreed(self, gang: _HeldBatch) -> bool:
        """Return whether all ranks start the batch in this turn."""
        after_pass = self._result_turn == self._turn
        return self._ranks.agreed(gang.part, self._turn, gang.word) or (
            after_pass and self._ranks.taken_in(gang.part, self._turn)
        )

    def _waited_enough(self, gang: _HeldBatch) -> bool:
        if gang.came:
            gang.handshake_s += self._last_turn_s
        else:
            gang.arrival_s += self._last_turn_s
        patience_s = max(self._limit_s, _PATIENCE * self._usual_span_s)
        most_s = min(patience_s, ARRIVAL_SHARE * self._limit_s)
        late = gang.handshake_s >= self._limit_s or gang.arrival_s >= most_s
        enough = late or self._missed(gang)
        if enough:
            logger.debug("batch %d starts incomplete", gang.part.tag)
            if not gang.came:
                self._incomplete = [*self._incomplete, gang][-_MOST_INCOMPLETE:]
            if gang.word.arrived:  # the rank's other processes receive the same requests
                self._team.board.waited(gang.part.tag)
        return enough

    def _has_come(self, gang: _HeldBatch) -> bool:
        return len(gang.seen) >= gang.part.members and self._ranks.all_arrived(gang.part)

    def _record_span(self, span_s: float) -> None:
        self._usual_span_s = max(span_s, _FORGETTING * self._usual_span_s)

    def _learn_of_late_ones(self) -> None:
        """Increase the waiting time if requests arrive after their batch has started, because such
        requests were late and not lost."""
        for gang in [gang for gang in self._incomplete if self._has_come(gang)]:
            self._incomplete.remove(gang)
            self._record_span(ARRIVAL_SHARE * self._limit_s)

    def _attach(self, scheduler: Any) -> None:
        """Choose the strategies on first use, because the rank of this process is not known
        earlier."""
        self._attached = True
        place = collect.read_placement(scheduler)
        if place.processes < 1 or place.stages != 1 or place.hosts < 1:
            self._off = True
            return
        over_hosts = place.barrier and place.hosts > 1
        if over_hosts and not self._gather.is_possible():
            self._off, self._is_supported = True, False
            if place.dp_rank == place.number == 0:
                logger.warning("no batch gate over several hosts before SGLang 0.5.22")
            return
        name = f"sglang-sbs.{os.getuid()}.{self._boot_id}"
        self._team = self._open_team(scheduler, place, name)
        if isinstance(self._team, OtherProcess) or not place.barrier:
            return
        if over_hosts:
            self._ranks = self._gather
            self._gather.open()
        elif place.dp_size <= MOST_RANKS:
            self._ranks = self._open_board(name, place.dp_rank, place.dp_size)

    def _open_team(self, scheduler: Any, place: collect.ProcessPosition, name: str) -> OnlyProcess:
        if place.processes == 1:
            return OnlyProcess()
        board = Board()
        apart = collect.rank_is_on_several_hosts(scheduler, place)
        if place.processes <= MOST_RANKS and not apart:
            peers = "the other processes of this DP rank"
            name = f"{name}.of.{place.dp_rank}"
            board = self._open_board(name, place.number, place.processes, peers)
        return FirstProcess(board, place.processes) if place.number == 0 else OtherProcess(board)

    def _failed(self) -> None:
        """Handle an exception of the gate, after which SGLang continues as if no request were
        held."""
        self._errors.add(self._clock())
        if self._errors.count == 1:
            logger.warning("batch gate: first error; batches may start incomplete", exc_info=True)
        if self._errors.too_many:
            self._off = True
            self._ranks.close()
            self._team.board.close()


def describes_batch(req: Any) -> bool:
    """Return whether the request's bootstrap room encodes its batch
    (:mod:`sglang_sbs.wire.gangs`)."""
    return is_sized(str(req.rid)) and isinstance(req.bootstrap_room, int)
