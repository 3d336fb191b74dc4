"""Holds the requests of a gang back until all of it can start, on all DP ranks at once.

Owns which requests of the handshake queue SGLang gets to see. Works where a DP rank is one process
and the engine is on one host; elsewhere :mod:`.gang_gate` waits in its own way.

How
---
Each request says how many of its gang come to this rank, and to how many ranks it goes
(:mod:`sglang_sbs.wire.gangs`). A request of a gang that is not complete stays in the handshake
queue (``PrefillBootstrapQueue``, ``disaggregation/prefill.py``), where SGLang's own code finds and
aborts it. The event loop runs on meanwhile: that is how the rest is read from the sockets, here and
on the other ranks, which a wait inside the loop would keep from it at the next collective
operation.

Ranks run their loops in lockstep, so a turn of the loop has the same number on all. In each turn in
which a rank's part is ready it waits some milliseconds for the others' (:mod:`.gang_board`), having
told them until when. A rank that became ready after that time does not start in this turn, and
neither do those that waited for it. So all ranks let a gang go in the same turn.

How long
--------
Counted is the time in which a part of the gang could have started. A gang waits ``gate_ms`` for
handshakes with decode, which may have no room. It waits as long for requests that are still on
their way, and longer where they usually take longer (``ARRIVAL_SHARE`` times as long at most).
Requests that are not of a gang are never held, but for those that were sent after one, to be in the
same pass: they follow it. One of them alone would start a pass, and the gang miss it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_sbs.engine.collect import rank_processes, read_placement, shares_barrier
from sglang_sbs.engine.gang_board import MOST_RANKS, Board, SocketBoard, Word
from sglang_sbs.engine.gang_gate import DEFAULT_GATE_MS
from sglang_sbs.wire.gangs import SIZED_RID_PREFIX, GangPart, part_of_room

logger = logging.getLogger(__name__)

ARRIVAL_SHARE = 5
_PATIENCE = 4
"""Requests on their way are waited for so many times as long as they took of late at most ..."""
_FORGETTING = 0.9
"""... where each gang makes what was before count for less."""
PEERS_S = 0.003
"""How long a rank that is ready waits for the others within a turn: they read their sockets at the
same time, some a little later."""
_ASK_S = 0.0002
MOST_TURN_S = 0.005
"""A turn counts no longer: it may have been a forward pass, during which nothing could start."""
MAX_ERRORS = 3
MAX_SILENCES = 5
"""Gangs in a row that waited for other ranks of which none was heard: they cannot be heard here."""
_MOST_GANGS = 64
"""Remembered beside those in the handshake queue, of which there may be more."""
_MOST_INCOMPLETE = 8
_IN_HANDSHAKE = 1
"""``KVPoll.Bootstrapping`` (``disaggregation/base/conn.py``)."""

OpenBoard = Callable[[str, int, int], Board]


@dataclass(slots=True)
class _Gang:
    part: GangPart
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
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        open_board: OpenBoard = SocketBoard,
    ) -> None:
        """``gate_ms``: 0: hold nothing; None: ``DEFAULT_GATE_MS``."""
        self._limit_s = (DEFAULT_GATE_MS if gate_ms is None else gate_ms) / 1e3
        self._boot_id = boot_id
        self._clock = clock
        self._sleep = sleep
        self._open_board = open_board
        self._board: Board | None = None
        """None: this rank shares no barrier with others."""
        self._attached = False
        self._off = self._limit_s == 0
        self._errors = 0
        self._silences = 0
        self._turn = 1
        self._turn_s = clock()
        self._last_turn_s = 0.0
        """How long the turn before this one counts."""
        self._gangs: dict[int, _Gang] = {}
        self._followed_s: dict[int, float] = {}
        """How long requests waited for gangs of which this rank has no part."""
        self._usual_span_s = 0.0
        self._incomplete: list[_Gang] = []
        """Those that started without requests that had not come."""

    def handles(self, req: Any) -> bool:
        """Whether this one, not the gate, decides when the request may start."""
        return not self._off and is_sized(req)

    def before_next_batch(self, _scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
        """Before ``Scheduler.get_next_disagg_prefill_batch_to_run``: once in every turn."""
        self._turn += 1

    def around_pop_bootstrapped(
        self, original: Callable[..., Any], queue: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Around ``PrefillBootstrapQueue.pop_bootstrapped``."""
        held: list[Any] = []
        if not self._off:
            try:
                held = self._held(queue)
            except Exception:
                self._failed()
        if not held:
            return original(queue, *args, **kwargs)
        rids = {req.rid for req in held}
        queue.queue = [req for req in queue.queue if req.rid not in rids]
        try:
            return original(queue, *args, **kwargs)
        finally:
            queue.queue = held + queue.queue

    def _held(self, queue: Any) -> list[Any]:
        now_s = self._clock()
        self._last_turn_s, self._turn_s = min(now_s - self._turn_s, MOST_TURN_S), now_s
        if not self._attached:
            self._attach(queue.scheduler)
        if self._board is not None:
            self._board.listen()
        here: dict[int, list[Any]] = {}
        following: dict[int, tuple[GangPart, list[Any]]] = {}
        for req in () if self._off else queue.queue:
            part = part_of_room(req.bootstrap_room) if is_sized(req) else None
            if part is None:
                continue
            if part.members == 0:
                following.setdefault(part.tag, (part, []))[1].append(req)
            elif part.members > 1 or part.ranks > 1:
                self._note(part, req.rid)
                here.setdefault(part.tag, []).append(req)
        for tag in following.keys() & self._gangs.keys():
            # Its part of the gang decides for them, and waits for their handshakes.
            here.setdefault(tag, []).extend(following.pop(tag)[1])
        if len(self._gangs) > _MOST_GANGS:
            gone = [tag for tag in self._gangs if tag not in here]
            for tag in gone[: len(self._gangs) - _MOST_GANGS]:
                del self._gangs[tag]
        if self._incomplete:
            self._learn_of_late_ones()
        held = []
        for tag, reqs in here.items():
            if not self._may_start(queue, self._gangs[tag], reqs):
                held += reqs
        for part, reqs in following.values():
            if not self._may_follow(part):
                held += reqs
        return held

    def _may_follow(self, part: GangPart) -> bool:
        """Whether those may start that follow a gang of which this rank has no part: in the turn in
        which it starts. They wait as long as a handshake at most."""
        tag = part.tag
        if self._board is None or self._followed_s.get(tag, 0.0) >= self._limit_s:
            return True
        until_s = self._clock() + PEERS_S
        while not (agreed := self._agreed(part)) and self._board.heard(tag):
            if self._clock() >= until_s:
                break
            self._sleep(_ASK_S)
            self._board.listen()
        if not agreed:
            self._followed_s[tag] = self._followed_s.pop(tag, 0.0) + self._last_turn_s
            while len(self._followed_s) > _MOST_GANGS:
                del self._followed_s[next(iter(self._followed_s))]
        return agreed

    def _note(self, part: GangPart, rid: str) -> None:
        gang = self._gangs.get(part.tag)
        if gang is None:
            gang = self._gangs[part.tag] = _Gang(part)
        gang.seen.add(rid)

    def _may_start(self, queue: Any, gang: _Gang, reqs: Sequence[Any]) -> bool:
        if len(gang.seen) >= gang.part.members and not gang.word.arrived:
            gang.word.arrived = True
            self._say(gang)
        if gang.free:
            return True
        in_handshake = sum(_in_handshake(queue, req) for req in reqs)
        if not gang.came:
            gang.span_s += self._last_turn_s
            gang.came = self._has_come(gang)
            if gang.came:
                self._took(gang.span_s)
        if gang.word.arrived and in_handshake == 0:
            gang.free = self._all_ready(gang)
        if not gang.free and in_handshake < len(reqs):
            gang.free = self._waited_enough(gang)
        return gang.free

    def _all_ready(self, gang: _Gang) -> bool:
        """Whether the other ranks let it go in this turn, too."""
        if gang.part.ranks == 1 or self._board is None:
            return True
        now_s = self._clock()
        word, until_s = gang.word, now_s + PEERS_S
        if not word.ready_turn:
            word.ready_turn, word.ready_s = self._turn, now_s
            self._say(gang)
            # This process may have slept in between, and the others not have heard it in time.
            word.ready_s = self._clock()
            self._board.listen()
        while not self._agreed(gang.part, word):
            if word.asked_turn != self._turn:
                word.asked_turn, word.until_s = self._turn, until_s
                self._say(gang)
            elif self._clock() >= until_s:
                return False
            self._sleep(_ASK_S)
            self._board.listen()
        self._heard_of_others(True)
        return True

    def _agreed(self, part: GangPart, *mine: Word) -> bool:
        """All are ready, and were before the first of those that wait in this turn gave up. Of what
        they told each other all ranks conclude the same."""
        assert self._board is not None
        heard = self._board.heard(part.tag).values()
        ready = [*mine, *(one for one in heard if one.ready_turn)]
        if len(ready) < part.ranks:
            return False
        latest_s = max((one.ready_s for one in ready if one.ready_turn == self._turn), default=0.0)
        return all(latest_s <= one.until_s for one in ready if one.asked_turn == self._turn)

    def _waited_enough(self, gang: _Gang) -> bool:
        if gang.came:
            gang.handshake_s += self._last_turn_s
        else:
            gang.arrival_s += self._last_turn_s
        patience_s = max(self._limit_s, _PATIENCE * self._usual_span_s)
        enough = gang.handshake_s >= self._limit_s or gang.arrival_s >= min(
            patience_s, ARRIVAL_SHARE * self._limit_s
        )
        if enough:
            logger.debug("gang %d starts without the rest of it", gang.part.tag)
            if not gang.came:
                self._incomplete = [*self._incomplete, gang][-_MOST_INCOMPLETE:]
            gang.word.ready_turn = gang.word.ready_turn or self._turn
            gang.word.asked_turn = 0  # whoever becomes ready in this turn goes, too
            self._say(gang)
            if gang.part.ranks > 1 and self._board is not None:
                self._heard_of_others(bool(self._board.heard(gang.part.tag)))
        return enough

    def _has_come(self, gang: _Gang) -> bool:
        """Whether all of it is there, on all ranks."""
        if len(gang.seen) < gang.part.members:
            return False
        if gang.part.ranks == 1 or self._board is None:
            return True
        heard = self._board.heard(gang.part.tag).values()
        return sum(one.arrived for one in heard) >= gang.part.ranks - 1

    def _took(self, span_s: float) -> None:
        self._usual_span_s = max(span_s, _FORGETTING * self._usual_span_s)

    def _learn_of_late_ones(self) -> None:
        """What came after its gang had started was late, not lost: wait longer from now on."""
        late = [gang for gang in self._incomplete if self._has_come(gang)]
        for gang in late:
            self._incomplete.remove(gang)
            self._took(ARRIVAL_SHARE * self._limit_s)

    def _heard_of_others(self, heard: bool) -> None:
        self._silences = 0 if heard else self._silences + 1
        if self._silences >= MAX_SILENCES and self._board is not None:
            logger.warning("gangs: nothing is heard of other DP ranks; each goes by itself")
            self._board.close()
            self._board = None

    def _say(self, gang: _Gang) -> None:
        if self._board is not None and gang.part.ranks > 1:
            self._board.say(gang.part.tag, gang.word)

    def _attach(self, scheduler: Any) -> None:
        """Set up on first use: only now is the rank of this process known."""
        self._attached = True
        ranks = rank_processes(scheduler)
        nodes = int(getattr(scheduler.server_args, "nnodes", 0))
        if ranks.of_rank != 1 or ranks.pipeline != 1 or nodes != 1:
            self._off = True
            return
        placement = read_placement(scheduler)
        if shares_barrier(scheduler) and placement.dp_size <= MOST_RANKS:
            name = f"sglang-sbs.{os.getuid()}.{self._boot_id}"
            self._board = self._open_board(name, placement.dp_rank, placement.dp_size)

    def _failed(self) -> None:
        """Called while handling an exception of ours: SGLang goes on as if nothing was held."""
        self._errors += 1
        if self._errors == 1:
            logger.warning("gangs are not held together: first error", exc_info=True)
        if self._errors >= MAX_ERRORS:
            self._off = True
            if self._board is not None:
                self._board.close()


def is_sized(req: Any) -> bool:
    """Whether its router told what it was sent with."""
    return str(req.rid).startswith(SIZED_RID_PREFIX) and isinstance(req.bootstrap_room, int)


def _in_handshake(queue: Any, req: Any) -> int:
    """1 while decode has not taken it in; a failed one is out of it, for SGLang to deal with."""
    if int(req.disagg_kv_sender.poll()) != _IN_HANDSHAKE:
        return 0
    optimistic = getattr(queue, "can_prefill_before_bootstrap", None)
    return int(optimistic is None or not optimistic(req))
