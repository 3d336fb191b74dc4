"""Holds the requests of a gang back until all of it can start, on all DP ranks at once.

How
---
Each request says how many of its gang come to this rank, and to how many ranks it goes
(:mod:`sglang_sbs.wire.gangs`). A request of a gang that is not complete stays in the handshake
queue (``PrefillBootstrapQueue``, ``disaggregation/prefill.py``), where SGLang's own code finds and
aborts it. The event loop runs on meanwhile: a wait inside it would keep the other ranks from their
sockets at the next collective operation.

Each turn of the loop ends in a collective operation, so it has the same number on all ranks, and
what a rank says in one has reached the others before the next: on one host over sockets
(:mod:`.gang_board`), on several inside that operation (:mod:`.gang_gather`). A rank says when its
part is ready. In the turn after the last said so, all let the gang go.

Mostly a gang comes while a pass runs. The thread that hears from decode tells the other ranks of
one host when the handshakes of a part are over. If all did so before the pass ended, all let the
gang go in their first look after it, without a word more. Not where a DP rank is several processes,
nor on a device without overlap scheduling, where idle ranks look before the end.

Several processes per DP rank
-----------------------------
Its first process (attention TP and CP rank 0) decides for all of them. SGLang takes the minimum of
what they report of a handshake, in a collective operation of every turn (``poll_and_all_reduce``,
``disaggregation/utils.py``). So the first one reports a request that is held as still in the
handshake, and it stays in the queue of all. The others only tell the first one when a gang's
handshakes are over with them, too; where they are on several hosts it goes by its own.

How long
--------
Counted is the time in which a part of the gang could have started. A gang waits ``gate_ms`` for
handshakes with decode, which may have no room. It waits as long for requests that are still on
their way, and longer where they usually take longer (``ARRIVAL_SHARE`` times as long at most).
Others are never held, but for those that were sent after a gang, to be in the same pass: one of
them alone would start a pass, and the gang miss it.

Over several hosts with SGLang before 0.5.22
--------------------------------------------
There ranks cannot tell each other anything. A rank polls the handshakes of what has come to it
within its turn, and the others wait for it at the barrier. It does not while a pass runs and it has
nothing to put behind it. Each poll is a collective operation of the processes of a DP rank, so
polls are counted, not timed: all processes see the same and poll equally often. With several of
them it polls only where the variable is set, as a node without the plugin would leave the others
polling alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from sglang_sbs.engine import collect
from sglang_sbs.engine.config import DEFAULT_GATE_MS
from sglang_sbs.engine.gang_board import MOST_RANKS, Board, SocketBoard, Word
from sglang_sbs.engine.gang_gather import GatherBoard
from sglang_sbs.engine.room_status import TAKEN_IN
from sglang_sbs.wire.endforward import GATE_ALONE, GATE_ERRORS
from sglang_sbs.wire.gangs import GangPart, is_sized, part_of_room

logger = logging.getLogger(__name__)

POLL_S = 0.001
ARRIVAL_SHARE = 5
_PATIENCE = 4
"""Requests on their way are waited for so many times as long as they took of late at most ..."""
_FORGETTING = 0.9
"""... where each gang makes what was before count for less."""
MOST_TURN_S = 0.005
"""A turn counts no longer: it may have been a forward pass, during which nothing could start."""
MOST_MISSED = 1
"""So many passes may start without a gang; then it goes with what it has. Turns are rare while
passes run, and its time would take long to pass."""
FIRST_TURN = 1
MAX_ERRORS = 3
MOST_UNHEARD_TURNS = 3
"""Who gave up goes after so many, whether or not the others could be told in the meantime."""
_MOST_GANGS = 64
"""Remembered beside those in the handshake queue, of which there may be more."""
_MOST_INCOMPLETE = 8
_IN_HANDSHAKE = 1
"""``KVPoll.Bootstrapping`` (``disaggregation/base/conn.py``)."""

Original = Callable[..., Any]


@dataclass(slots=True)
class _Gang:
    part: GangPart
    """``members`` 0: this rank has no part of it so far, only requests that follow it."""
    first_pass: int = 0
    """Passes that were started before it was seen."""
    seen: set[str] = field(default_factory=set)
    word: Word = field(default_factory=Word)
    """What the other ranks were told."""
    handshake_s: float = 0.0
    """Waited since all had come, on all ranks."""
    arrival_s: float = 0.0
    """Waited before."""
    span_s: float = 0.0
    """Since its first request was seen here, until all had come."""
    came: bool = False
    """All of it is there, on all ranks."""
    free: bool = False
    """Not held any more, whatever is still to come of it."""


class GangHold:
    """Of one scheduler process."""

    def __init__(
        self,
        gate_ms: float | None,
        boot_id: str,
        *,
        gather: GatherBoard,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        open_board: Callable[..., Board] = SocketBoard,
    ) -> None:
        """``gate_ms``: 0: hold nothing; None: ``DEFAULT_GATE_MS``."""
        self._is_set = gate_ms is not None
        self._limit_s = (DEFAULT_GATE_MS if gate_ms is None else gate_ms) / 1e3
        self._boot_id = boot_id
        self._clock, self._sleep = clock, sleep
        self._open_board = open_board
        self._gather = gather
        self._ranks = Board()
        """Open where this rank shares a barrier with other DP ranks."""
        self._team = Board()
        """Open where it has other processes."""
        self._processes = 1  # of this DP rank
        self._decides = True  # for all of them
        self._attached = False
        self._off = self._limit_s == 0
        self._errors = 0
        self._turn = self._result_turn = FIRST_TURN
        """``_result_turn``: in which a pass had its result before the look at the queue."""
        self._taken_turn = FIRST_TURN
        """The first whose look counts on what decode takes in now."""
        self._taken: dict[int, set[int]] = {}
        """Rooms of each gang here that decode has taken in. Of the thread that hears of it."""
        self._looks = 0  # at the queue
        self._turn_s = clock()
        self._last_turn_s = 0.0  # how long the turn before this one counts
        self._gangs: dict[int, _Gang] = {}  # by tag
        self._passes = 0  # that were started so far
        self._usual_span_s = 0.0
        self._incomplete: list[_Gang] = []
        """Those that started without requests that had not come."""
        self._most_polls = 0
        """Per request, where ranks are polled for within a turn."""
        self._polled: dict[str, int] = {}
        """How often each request in the handshake was waited for so."""

    def fault(self) -> str:
        """``EndForward.gang_gate``."""
        if self._errors >= MAX_ERRORS:
            return GATE_ERRORS
        return GATE_ALONE if self._ranks.failed or self._team.failed else ""

    def before_next_batch(self, _scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
        """Before ``Scheduler.get_next_disagg_prefill_batch_to_run``: once in every turn."""
        self._turn += 1
        self._taken_turn = self._turn

    def around_process_batch_result(
        self, original: Original, scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Around ``Scheduler.process_batch_result``: with ``copy_done`` all ranks are through the
        pass, and on the CPU, which computes before it gets here."""
        done = getattr(result, "copy_done", None)
        if done is not None and not self._off:
            done.synchronize()
        if done is not None or getattr(scheduler, "device", "") == "cpu":
            self._result_turn, self._taken_turn = self._turn, self._turn + 1
        return original(scheduler, batch, result, *args, **kwargs)

    def after_update_status(self, _result: Any, _manager: Any, room: Any, status: Any) -> None:
        """After ``CommonKVManager.update_status``, in the thread that hears from decode."""
        if self._off or self._processes > 1 or status != TAKEN_IN or not self._ranks.is_open:
            return
        with suppress(Exception):  # it would end SGLang's thread
            part = part_of_room(room)
            if part.members == 0 or part.ranks < 2:
                return
            rooms = self._taken.setdefault(part.tag, set())
            rooms.add(room)
            if len(rooms) == part.members:
                self._ranks.tell(part.tag, Word(taken_turn=self._taken_turn))
            while len(self._taken) > _MOST_GANGS:
                del self._taken[next(iter(self._taken))]

    def around_pop_bootstrapped(
        self, original: Original, queue: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Around ``PrefillBootstrapQueue.pop_bootstrapped``."""
        held: list[Any] = []
        if not self._off:
            try:
                held = self._held(queue)
            except Exception:
                self._failed()
        if self._most_polls:
            return self._polled_for(original, queue)
        if not held:
            return original(queue, *args, **kwargs)
        with _out_of_sight(queue, held) if self._processes == 1 else _in_handshake_still(held):
            return original(queue, *args, **kwargs)

    def _polled_for(self, original: Original, queue: Any) -> list[Any]:
        """What is through its handshake, and what gets there while it is waited for."""
        ready: list[Any] = original(queue)
        scheduler, most = queue.scheduler, self._most_polls
        following = ready or scheduler.waiting_queue or scheduler.chunked_req is not None
        if len(getattr(scheduler, "result_queue", ())) > 0 and not following:
            return ready
        polled = {req.rid: self._polled.get(req.rid, 0) for req in queue.queue if was_told(req)}
        while young := [req.rid for req in queue.queue if polled.get(req.rid, most) < most]:
            self._sleep(POLL_S)
            for rid in young:
                polled[rid] += 1
            ready += original(queue)
        self._polled = polled
        return ready

    def _held(self, queue: Any) -> list[Any]:
        now_s = self._clock()
        self._last_turn_s, self._turn_s = min(now_s - self._turn_s, MOST_TURN_S), now_s
        if not self._attached:
            try:
                self._attach(queue.scheduler)
            except Exception:
                self._ranks.failed = True
                raise
        self._looks += 1
        if self._turn == FIRST_TURN and self._looks > 1:
            return []  # nothing counts turns here: what is held would be held for ever
        self._passes = int(getattr(queue.scheduler, "forward_ct", 0))
        self._ranks.listen()
        self._team.listen()
        here: dict[int, list[Any]] = {}
        for req in () if self._off else queue.queue:
            part = part_of_room(req.bootstrap_room) if was_told(req) else None
            if part is None or (part.members == 1 and part.ranks == 1):
                continue
            if self._processes > 1 and _starts_in_handshake(queue, req):
                continue
            here.setdefault(part.tag, []).append(req)
            gang = self._gangs.get(part.tag)
            if gang is None or (part.members and not gang.part.members):
                # A part of the gang decides for those that follow it, too.
                gang = self._gangs[part.tag] = _Gang(part, first_pass=self._passes)
            if part.members > 0:
                gang.seen.add(req.rid)
        if len(self._gangs) > _MOST_GANGS:
            gone = [tag for tag in self._gangs if tag not in here]
            for tag in gone[: len(self._gangs) - _MOST_GANGS]:
                del self._gangs[tag]
        self._learn_of_late_ones()
        held = []
        for tag, reqs in here.items():
            gang = self._gangs[tag]
            has_part = gang.part.members > 0
            if not self._decides:
                if has_part:
                    self._report(queue, gang, reqs)
            elif not (self._may_start(queue, gang, reqs) if has_part else self._may_follow(gang)):
                held += reqs
        return held

    def _may_follow(self, gang: _Gang) -> bool:
        """Whether those may start that follow a gang of which this rank has no part: in the turn in
        which it starts. They wait as long as a handshake at most, and for one pass."""
        if gang.free or gang.part.ranks == 1 or not self._ranks.is_open:
            return True  # a gang of one rank tells the others nothing
        gang.arrival_s += self._last_turn_s
        gang.free = (
            self._agreed(gang.part)
            or self._taken_in(gang.part)
            or gang.arrival_s >= self._limit_s
            or self._missed(gang)
        )
        return gang.free

    def _missed(self, gang: _Gang) -> bool:
        return self._passes - gang.first_pass > MOST_MISSED

    def _report(self, queue: Any, gang: _Gang, reqs: Sequence[Any]) -> None:
        """Tell the process that decides when all of a gang is there, and when it is ready here."""
        word = gang.word
        if word.ready_turn or len(gang.seen) < gang.part.members:
            return
        ready = not any(_in_handshake(queue, req) for req in reqs)
        if ready or not word.arrived:
            word.arrived, word.ready_turn = True, self._turn if ready else 0
            self._team.say(gang.part.tag, word)

    def _may_start(self, queue: Any, gang: _Gang, reqs: Sequence[Any]) -> bool:
        word = gang.word
        says = not word.arrived and len(gang.seen) >= gang.part.members
        word.arrived |= says
        alone = gang.part.ranks == 1
        if gang.free:
            if says and not alone:  # whoever went without it learns that it was late, not lost
                self._ranks.say(gang.part.tag, word)
            return True
        in_handshake = sum(_in_handshake(queue, req) for req in reqs)
        if not gang.came:
            gang.span_s += self._last_turn_s
            gang.came = self._has_come(gang)
            if gang.came:
                self._took(gang.span_s)
        if not word.ready_turn and word.arrived and not in_handshake and self._team_ready(gang):
            word.ready_turn, says = self._turn, True
        if not word.gave_up_turn and in_handshake < len(reqs) and self._waited_enough(gang):
            word.gave_up_turn, says = self._turn, True
        if says and not alone:  # once in a turn: few messages fit into a socket
            self._ranks.say(gang.part.tag, word)
        gang.free = (
            self._agreed(gang.part, word)
            or self._taken_in(gang.part)
            or 0 < word.gave_up_turn < self._turn - MOST_UNHEARD_TURNS
        )
        if gang.free and not alone:
            self._ranks.waited(gang.part.tag)
        return gang.free

    def _team_ready(self, gang: _Gang) -> bool:
        """Whether its handshakes are over with the other processes of this DP rank, too."""
        if not self._team.is_open:
            return True
        heard = self._team.heard(gang.part.tag).values()
        ready = sum(one.ready_turn > 0 for one in heard) >= self._processes - 1
        if ready:
            self._team.waited(gang.part.tag)
        return ready

    def _agreed(self, part: GangPart, *mine: Word) -> bool:
        """Whether all were ready in an earlier turn, or one had given up waiting. What is said in a
        turn is heard by all before the next begins, so all ranks conclude the same."""
        if part.ranks == 1 or not self._ranks.is_open:
            return any(word.ready_turn or word.gave_up_turn for word in mine)
        words = self._ranks.heard(part.tag).values()
        if any(0 < word.gave_up_turn < self._turn for word in words):
            return True
        return sum(0 < word.ready_turn < self._turn for word in words) >= part.ranks

    def _taken_in(self, part: GangPart) -> bool:
        """Whether decode had taken all of it in, on all ranks, before the pass ended whose result
        this turn has. Each rank has heard it of all since then, unless it is late by all that is
        done between the two. Requests that are still on their way to prefill are not waited for."""
        if self._result_turn != self._turn:
            return False
        turns = [word.taken_turn for word in self._ranks.heard(part.tag).values()]
        return sum(0 < turn <= self._turn for turn in turns) >= part.ranks

    def _waited_enough(self, gang: _Gang) -> bool:
        if gang.came:
            gang.handshake_s += self._last_turn_s
        else:
            gang.arrival_s += self._last_turn_s
        patience_s = max(self._limit_s, _PATIENCE * self._usual_span_s)
        most_s = min(patience_s, ARRIVAL_SHARE * self._limit_s)
        late = gang.handshake_s >= self._limit_s or gang.arrival_s >= most_s
        enough = late or self._missed(gang)
        if enough:
            logger.debug("gang %d starts without the rest of it", gang.part.tag)
            if not gang.came:
                self._incomplete = [*self._incomplete, gang][-_MOST_INCOMPLETE:]
            if gang.word.arrived:  # with the others, too: they get what this process gets
                self._team.waited(gang.part.tag)
        return enough

    def _has_come(self, gang: _Gang) -> bool:
        if len(gang.seen) < gang.part.members:
            return False
        if gang.part.ranks == 1 or not self._ranks.is_open:
            return True
        heard = self._ranks.heard(gang.part.tag).values()
        return sum(one.arrived for one in heard) >= gang.part.ranks

    def _took(self, span_s: float) -> None:
        self._usual_span_s = max(span_s, _FORGETTING * self._usual_span_s)

    def _learn_of_late_ones(self) -> None:
        """What came after its gang had started was late, not lost: wait longer from now on."""
        for gang in [gang for gang in self._incomplete if self._has_come(gang)]:
            self._incomplete.remove(gang)
            self._took(ARRIVAL_SHARE * self._limit_s)

    def _attach(self, scheduler: Any) -> None:
        """Set up on first use: only now is the rank of this process known."""
        self._attached = True
        one = collect.read_placement(scheduler)
        deaf = one.hosts > 1 and one.barrier and not self._gather.is_possible()
        if one.processes < 1 or one.stages != 1 or one.hosts < 1 or deaf:
            self._off = True
            if deaf and one.stages == 1 and (one.processes == 1 or self._is_set):
                self._most_polls = round(self._limit_s / POLL_S)
            return
        rank, number, self._processes = one.dp_rank, one.number, one.processes
        self._decides = number == 0
        name = f"sglang-sbs.{os.getuid()}.{self._boot_id}"
        apart = collect.rank_is_on_several_hosts(scheduler, one)
        if 1 < one.processes <= MOST_RANKS and not apart:
            whom = "the other processes of this DP rank"
            self._team = self._open_board(f"{name}.of.{rank}", number, one.processes, whom)
        if not self._decides or not one.barrier:
            return
        if one.hosts > 1:
            self._ranks = self._gather
            self._gather.open()
        elif one.dp_size <= MOST_RANKS:
            self._ranks = self._open_board(name, rank, one.dp_size)

    def _failed(self) -> None:
        """Called while handling an exception of ours: SGLang goes on as if nothing was held."""
        self._errors += 1
        if self._errors == 1:
            logger.warning("gangs are not held together: first error", exc_info=True)
        if self._errors >= MAX_ERRORS:
            self._off = True
            self._ranks.close()
            self._team.close()


def was_told(req: Any) -> bool:
    """Whether its router told what it was sent with."""
    return is_sized(str(req.rid)) and isinstance(req.bootstrap_room, int)


@contextmanager
def _out_of_sight(queue: Any, held: list[Any]) -> Iterator[None]:
    """SGLang does not get to see them."""
    rids = {req.rid for req in held}
    queue.queue = [req for req in queue.queue if req.rid not in rids]
    try:
        yield
    finally:
        queue.queue = held + queue.queue


@contextmanager
def _in_handshake_still(held: list[Any]) -> Iterator[None]:
    """To SGLang they are, in all processes of the DP rank, unless they failed in one."""
    senders = [req.disagg_kv_sender for req in held]
    try:
        for sender in senders:
            sender.poll = lambda poll=sender.poll: min(int(poll()), _IN_HANDSHAKE)
        yield
    finally:
        for sender in senders:
            vars(sender).pop("poll", None)


def _in_handshake(queue: Any, req: Any) -> bool:
    """Decode has not taken it in; a failed one is out of it, for SGLang to deal with."""
    waits = int(req.disagg_kv_sender.poll()) == _IN_HANDSHAKE
    return waits and not _starts_in_handshake(queue, req)


def _starts_in_handshake(queue: Any, req: Any) -> bool:
    """Whether SGLang would not wait for the handshake (``--optimistic-prefill-attempts``)."""
    optimistic = getattr(queue, "can_prefill_before_bootstrap", None)
    return optimistic is not None and bool(optimistic(req))
