"""Boards, on which the DP ranks of an engine exchange the state of their parts of a batch.

There is one class for each place where ranks can be: :class:`Board` for a rank that waits for
its own part only, :class:`SocketBoard` for ranks on one host, and
:class:`~.gang_gather.GatherBoard` for ranks on several hosts.

The sockets carry datagrams. Each direction of each pair of ranks has a socket of its own, because
a socket queues few messages. Sending never blocks. If a message is lost, the batch waits until its
time limit."""

from __future__ import annotations

import logging
import socket
import struct
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass

from sglang_sbs.wire.gangs import GangPart

logger = logging.getLogger(__name__)

MAX_SILENCES = 5
"""After this many consecutive batches without a message from another rank, the other ranks count as
unreachable."""
MOST_RANKS = 16
"""Largest number of ranks of an engine on one host; the number of sockets grows with its square."""
_MOST_GANGS = 64
"""Number of recent batches whose messages are kept."""
_MESSAGE = struct.Struct("<IQ?QQ")


@dataclass(slots=True)
class Word:
    """The latest state that a rank reported about its part of a batch. A turn is an iteration of
    SGLang's event loop, numbered alike on all ranks."""

    ready_turn: int = 0
    """Turn in which the last request of the part became ready to start. 0: not yet."""
    arrived: bool = False
    """All requests of the part have arrived, ready or not."""
    gave_up_turn: int = 0
    """Turn in which the rank stopped waiting for the rest of the batch. 0: still waiting."""
    taken_turn: int = 0
    """Turn from which all handshakes of the part are over, if they ended during a pass. 0:
    unknown."""


class Board:
    """Sends messages of a process to the others of its engine, and stores the latest word received
    from each, for the most recent batches. This base class reaches no other process."""

    def __init__(self, peers: str = "", rank: int = 0) -> None:
        """``peers``: name of the other processes, for the log. ``rank``: this process's number."""
        self._peers, self._rank = peers, rank
        self._words: dict[int, dict[int, Word]] = {}
        self._silences = 0
        self.is_open = False
        self.failed = False
        """True: the board was open, but the other processes could not be reached."""

    def publish(self, tag: int, word: Word) -> None: ...

    def publish_later(self, tag: int, word: Word) -> None:
        """Send a word from any thread; :meth:`listen` stores it as this rank's own. A board that
        only sends within a turn ignores the word."""

    def listen(self) -> None:
        """Read the messages. Call it in every turn, because the sockets hold few of them."""
        if self._take_in():
            self._silences = 0

    def _take_in(self) -> bool:
        """Read the messages of the other processes; return whether there were any."""
        return False

    def words_of(self, tag: int) -> Mapping[int, Word]:
        """Return the words on a batch by rank, this rank's included."""
        return self._words.get(tag, {})

    def all_arrived(self, part: GangPart) -> bool:
        """Return whether every rank with a part of the batch has all of its requests. A rank
        without contact to others checks only its own."""
        if part.ranks == 1 or not self.is_open:
            return True
        return sum(word.arrived for word in self.words_of(part.tag).values()) >= part.ranks

    def agreed(self, part: GangPart, turn: int, own: Word | None = None) -> bool:
        """Return whether before ``turn`` all ranks were ready, or one had given up waiting.

        All ranks receive a turn's words before the next turn begins, so all return the same.
        ``own``: this rank's word, which alone decides if the rank reaches no other."""
        if part.ranks == 1 or not self.is_open:
            return own is not None and bool(own.ready_turn or own.gave_up_turn)
        words = self.words_of(part.tag).values()
        if any(0 < word.gave_up_turn < turn for word in words):
            return True
        return sum(0 < word.ready_turn < turn for word in words) >= part.ranks

    def taken_in(self, part: GangPart, turn: int) -> bool:
        """Return whether decode had accepted the whole batch, on all ranks, before the end of the
        pass whose result is processed in ``turn``. Usually every rank has received these words by
        then. Requests that have not reached prefill do not count."""
        turns = [word.taken_turn for word in self.words_of(part.tag).values()]
        return sum(0 < taken <= turn for taken in turns) >= part.ranks

    def waited(self, tag: int) -> None:
        """Record that a batch waited for the others. The board closes after ``MAX_SILENCES``
        batches without a message."""
        others = self.words_of(tag).keys() - {self._rank}
        self._silences = 0 if others else self._silences + 1
        if self.is_open and self._silences >= MAX_SILENCES:
            self._give_up("no message arrives")

    def _give_up(self, why: str) -> None:
        logger.warning("batch gate: %s; batches no longer wait for %s", why, self._peers)
        self.failed = True
        self.close()

    def close(self) -> None:
        self.is_open = False
        self._words.clear()

    def _note(self, tag: int, rank: int, word: Word) -> None:
        """Merge a word into the stored one. A zero replaces nothing, because two threads send words
        and each fills in only some fields."""
        words = self._words.setdefault(tag, {})
        before = astuple(words.get(rank, Word()))
        words[rank] = Word(*[new or old for new, old in zip(astuple(word), before, strict=True)])
        while len(self._words) > _MOST_GANGS:
            del self._words[next(iter(self._words))]


class SocketBoard(Board):
    """A board over Linux's abstract Unix sockets, which leave no files behind."""

    def __init__(self, name: str, rank: int, ranks: int, peers: str = "other DP ranks") -> None:
        """``name``: equal on all ranks of the engine, and different from any other engine's.
        Raises: OSError, an address is taken, or the system is not Linux."""
        super().__init__(peers, rank)
        others = [other for other in range(ranks) if other != rank]
        self._addresses = [f"\0{name}.{rank}.{other}" for other in others]
        self._sent: deque[tuple[int, Word]] = deque(maxlen=_MOST_GANGS)
        """Words sent to the other ranks that this one does not count yet."""
        self._inboxes: dict[int, socket.socket] = {}
        self._out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._out.setblocking(False)
        try:
            for peer in others:
                inbox = self._inboxes[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                inbox.setblocking(False)
                inbox.bind(f"\0{name}.{peer}.{rank}")
        except OSError:
            self.close()
            raise
        self.is_open = True

    def publish(self, tag: int, word: Word) -> None:
        self._note(tag, self._rank, word)
        self._send(tag, word)

    def publish_later(self, tag: int, word: Word) -> None:
        self._send(tag, word)
        self._sent.append((tag, word))

    def _send(self, tag: int, word: Word) -> None:
        message = _MESSAGE.pack(tag, *astuple(word))
        for address in self._addresses:
            with suppress(OSError):  # it is not up yet, or its queue is full
                self._out.sendto(message, address)

    def _take_in(self) -> bool:
        while self._sent:
            tag, word = self._sent.popleft()
            self._note(tag, self._rank, word)
        read = [self._read(peer, inbox) for peer, inbox in self._inboxes.items()]
        return any(read)

    def close(self) -> None:
        super().close()
        for channel in (self._out, *self._inboxes.values()):
            channel.close()
        self._inboxes.clear()  # otherwise every turn would keep polling all of them
        self._addresses.clear()

    def _read(self, peer: int, inbox: socket.socket) -> bool:
        """Read a peer's messages; return whether there were any."""
        read = False
        while True:
            try:
                data = inbox.recv(_MESSAGE.size + 1)
            except OSError:
                return read
            if len(data) == _MESSAGE.size:
                read = True
                tag, *word = _MESSAGE.unpack(data)
                self._note(tag, peer, Word(*word))
