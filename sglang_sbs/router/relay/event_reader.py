"""Reads the server-sent events of one engine response: finds where the stream opens, whether it
fails first, whether it is complete, and what broke it. Only whole events are judged, so the result
does not depend on how TCP splits the stream.

This module knows how events are framed
(https://html.spec.whatwg.org/multipage/server-sent-events.html). A :class:`StreamKind` describes
their meaning."""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

from sglang_sbs.router.errors import EventTooLarge, LegFailure

MAX_EVENT_BYTES = 16 << 20
"""Limit on one event of a stream that is edited or merged."""
LONG_BYTES = 64 << 10
"""A longer event is judged by an excerpt. If the first event is longer, the stream opens before
that event is complete."""
_HEAD_BYTES = 1024
_TAIL_BYTES = 4096
"""Bytes of a long event's end in its excerpt; ``_HEAD_BYTES`` of its beginning."""
_MARK_BYTES = 64
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
_BOM = b"\xef\xbb\xbf"
_EVENT_END = b"\n\n"

Payload = bytes | memoryview


class Sign(enum.Enum):
    """Effect of a server-sent event on its stream: preamble, content, regular end, or failure."""

    PREAMBLE = "preamble"
    """Held back until the stream opens: if a failure follows, the request can still be retried."""
    CONTENT = "content"
    END = "end"
    FAILURE = "failure"


class StreamKind(ABC):
    """Describes which events begin, end and break streams of one API."""

    end_name: str
    """Name of the last event of a complete stream, for error messages."""
    needle: bytes
    """Bytes contained in every match of :attr:`mark`, searched first because that is fast."""
    mark: re.Pattern[bytes]
    """Pattern that :meth:`sign` needs from the middle of a long event; matches at most 64 bytes."""
    error_mark: re.Pattern[bytes]
    """Pattern of the beginning of the error in a long ``FAILURE`` event; matches at most 64 bytes.
    If the client's text in the event matches as well, the engine's error is not read."""
    telling_end = False
    """Whether a stream's last event also has its token counts, or is the failure at its end."""
    signs: tuple[bytes, ...]
    """A one-line event without a name is content unless it begins with one of these (``data: ``
    included) or contains :attr:`needle`."""

    @abstractmethod
    def sign(self, data: bytes, name: bytes) -> Sign:
        """Judge an event by its ``data`` and ``event`` fields. Long data is passed as an excerpt:
        the beginning, the first match of :attr:`mark` and the end, separated by zero bytes. A
        preamble is recognized without the mark."""

    @abstractmethod
    def failure(self, worker: str, data: bytes) -> LegFailure | None:
        """Return the failure reported by a ``Sign.FAILURE`` event; ``None`` if it is content after
        all. In the excerpt of an unopened stream, the middle begins with the only match of
        :attr:`error_mark`."""


class EventReader:
    """Reads the event stream of one engine, and returns what can be passed on to the client."""

    __slots__ = (
        *("_begun", "_cut", "_errors", "_held", "_last", "_marked", "_most_held", "_partial"),
        *("_read", "_searched", "_seen", "_simple", "_whole", "_worker"),
        *("broken", "done", "events", "failed", "failure", "kind", "opened"),
    )

    def __init__(
        self, kind: StreamKind, worker: str, *, whole: bool = False, most_held: int | None = None
    ) -> None:
        """Create a reader. ``whole``: return the data of complete events, except the last of the
        stream, so that they can be edited; otherwise return the bytes as received. ``most_held``:
        limit on bytes held back until the stream opens, by default ``LONG_BYTES``; a longer
        preamble breaks the stream."""
        self.kind = kind
        self._most_held = LONG_BYTES if most_held is None else most_held
        self._worker = worker
        self._whole = whole
        self.opened = False
        """The stream can be passed on: an event other than preamble or failure has arrived."""
        self.done = False
        """The last event of the stream has arrived."""
        self.events = 0
        """Number of events with data, without the last of the stream."""
        self._last = b""
        self.failure: LegFailure | None = None
        """Failure reported before the stream opened."""
        self.failed = False
        """A failure was reported, before the stream opened or later."""
        self.broken: ValueError | None = None
        """Reason to stop reading: ``EventTooLarge``, or a plain error if the body is not an event
        stream."""
        self._simple = False
        """The stream is open, and an event begins with the next piece."""
        self._held: list[Payload] = []
        self._partial = bytearray()
        """The incomplete event, with line ends as ``\\n``."""
        self._read = 0
        """Bytes that are not in ``_partial`` any more, counted until the stream opens."""
        self._seen = 0
        """No event ends in ``_partial`` before this position."""
        self._begun = False
        """The first event is complete."""
        self._cut = False
        """The incomplete event is long, and its middle was dropped."""
        self._searched = 0
        """Position at which the search of a long event for the mark resumes."""
        self._marked = b""
        """Match of ``kind.mark`` in the current long event; empty if there is none so far."""
        self._errors: list[int] = []
        """Positions at which ``kind.error_mark`` matched in the current long event, if the stream
        is not open. At most two, because an error is read only if there is one match."""

    @property
    def unopened_bytes(self) -> int:
        """Number of bytes received; 0 once the stream is open."""
        return 0 if self.opened else self._read + len(self._partial)

    @property
    def last(self) -> bytes:
        """Data of the latest event except the last of the stream; an excerpt if it is long."""
        return self._last.removeprefix(b"data: ").strip()

    def feed(self, data: bytes) -> Sequence[Payload]:
        """Read more bytes and return what can be passed on: nothing before the stream opens or
        after it is broken."""
        # Nearly every piece is one event of one line. This is the router's hottest path.
        if (
            self._simple
            and data.startswith(b"data: ")
            and data.endswith(_EVENT_END)
            and data.find(b"\n") == len(data) - len(_EVENT_END) <= LONG_BYTES
            and self.kind.needle not in data
            and not data.startswith(self.kind.signs)
        ):
            self.events += 1
            self._last = data
            return (data[6:].strip(),) if self._whole else (data,)
        if self.failure is not None or self.broken is not None:
            return ()
        self._add(data)
        self._read_events()
        self._simple = self.opened and not self._partial and self.broken is None
        if not self._whole:
            self._held.append(data)
        return self._released()

    def watch(self, data: bytes) -> bool:
        """Read more bytes and discard them. Returns whether the stream has opened or certainly
        never will."""
        self.feed(data)
        self._held.clear()
        return self.opened or self.failure is not None or self.broken is not None

    def end(self) -> Sequence[Payload]:
        """Handle the response's end: judge a last event that lacks its blank line. Return what can
        be passed on, as :meth:`feed` does."""
        rest = bytes(self._partial[: LONG_BYTES + 1])
        if self.failure is not None or self.broken is not None or len(rest) > LONG_BYTES:
            return ()
        if not self._is_event(rest):
            return ()
        data, name = _fields(self._without_bom(rest))
        if data is not None:
            # An event without its final blank line must be ignored, but these are unambiguous.
            sign = self.kind.sign(data, name)
            if sign in (Sign.END, Sign.FAILURE):
                self._judge(sign, data, data)
        return self._released()

    def _released(self) -> Sequence[Payload]:
        if not self.opened or not self._held:
            return ()
        held, self._held = self._held, []
        return held

    def _add(self, data: bytes) -> None:
        buffer = self._partial
        if b"\r" in data or buffer.endswith(b"\r"):
            if buffer.endswith(b"\r"):
                del buffer[-1:]
                data = b"\r" + data
            data = data.replace(b"\r\n", b"\n")
        buffer += data

    def _read_events(self) -> None:
        buffer, start, look = self._partial, 0, self._seen
        while (end := buffer.find(_EVENT_END, look)) >= 0:
            long = end - start > LONG_BYTES or self._cut
            if not self.opened and self._read + end > self._most_held:
                self._open_unread(start)
            if self.failure is None and self.broken is None:
                if long:
                    self._long_event(start, end)
                else:
                    self._event(bytes(buffer[start:end]))
            if self.failure is not None or self.broken is not None:
                return
            next_start = end + len(_EVENT_END)
            if long:
                self._partial = buffer = buffer[next_start:]  # views keep the old one
                next_start = 0
            start = look = next_start
        if not self.opened and self._read + len(buffer) > self._most_held + len(_EVENT_END):
            self._open_unread(start)
        self._read += start
        del buffer[:start]
        self._seen = max(0, len(buffer) - len(_EVENT_END))  # a \r\n may be split here
        if len(buffer) > LONG_BYTES and self.broken is None:
            self._long_so_far(buffer)

    def _is_event(self, event: bytes) -> bool:
        """Return False and set :attr:`broken` if the stream begins with something that is not an
        event."""
        event = self._without_bom(event).lstrip(b"\n")
        if self.opened or event.startswith(_FIELDS) or any(f.startswith(event) for f in _FIELDS):
            return True
        self.broken = ValueError("its response is not an event stream")
        return False

    def _without_bom(self, event: bytes) -> bytes:
        return event if self._begun else event.removeprefix(_BOM)

    def _event(self, event: bytes) -> None:
        if not self._is_event(event):
            return
        data, name = _fields(self._without_bom(event))
        self._begun = True
        if data is not None:
            self._judge(self.kind.sign(data, name), data, data)

    def _judge(self, sign: Sign, data: Payload, excerpt: bytes) -> None:
        if sign is Sign.FAILURE:
            failure = self.kind.failure(self._worker, excerpt)
            self.failed = self.failed or failure is not None
            if failure is not None and not self.opened:
                self.failure = failure
                return
            self.done = self.done or (failure is not None and self.kind.telling_end)
        if sign is Sign.END:
            self.opened = self.done = True
            if self.kind.telling_end:
                self._last = excerpt
            return
        self.events += 1
        self._last = excerpt
        self.opened = self.opened or sign is not Sign.PREAMBLE
        if self._whole:
            self._held.append(data)

    def _open_unread(self, start: int) -> None:
        """Judge an event of an unopened stream by its beginning, because it is too long to wait for
        its end. This opens, fails or breaks the stream."""
        end = min(start + _HEAD_BYTES, self._most_held - self._read)
        head = bytes(self._partial[start : max(start, end)])
        if not self._is_event(head):
            return
        data, name = _fields(self._without_bom(head))
        sign = Sign.CONTENT if data is None else self.kind.sign(data, name)
        if data is not None and sign is Sign.FAILURE:
            self.failure = self.kind.failure(self._worker, data)
            self.failed = self.failure is not None
        elif sign is Sign.PREAMBLE:
            why = f"its events before the first output exceed {self._most_held >> 10} KiB"
            self.broken = EventTooLarge(why)
            return
        self.opened = self.failure is None

    def _long_so_far(self, buffer: bytearray) -> None:
        """Search a long event as it arrives; searching it at its end would take too long."""
        if self._whole and len(buffer) > MAX_EVENT_BYTES + len(_EVENT_END):
            self._too_large()
            return
        sign = self._search(buffer, 0, len(buffer))
        droppable = not self._whole and (self.opened or sign is Sign.PREAMBLE)
        if droppable and len(buffer) > 4 * LONG_BYTES:
            self._read += len(buffer) - _HEAD_BYTES - LONG_BYTES
            del buffer[_HEAD_BYTES:-LONG_BYTES]
            self._cut = True
            self._searched = len(buffer)
            self._seen = len(buffer) - len(_EVENT_END)

    def _search(self, buffer: bytearray, start: int, end: int) -> Sign | None:
        """Search the new part of a long event for the marks of its kind. Return the sign of its
        beginning if the stream is not open, otherwise ``None``. No Python code may run per needle:
        clients can fill events with text that almost matches."""
        at = max(start, self._searched - _MARK_BYTES)
        self._searched = end
        sign = None
        if not self.opened:
            data, name = _fields(self._without_bom(bytes(buffer[start : start + _HEAD_BYTES])))
            sign = None if data is None else self.kind.sign(data, name)
        if sign is Sign.FAILURE:
            errors, mark = self._errors, self.kind.error_mark
            while len(errors) < 2 and (found := mark.search(buffer, at, end)) is not None:
                at = found.end()
                if found.start() not in errors:
                    errors.append(found.start())
        elif sign is not Sign.PREAMBLE and not self._marked:
            at = buffer.find(self.kind.needle, at, end)
            if at >= 0:
                found = self.kind.mark.search(buffer, max(start, at - _MARK_BYTES), end)
                self._marked = b"" if found is None else found[0]
        return sign

    def _long_event(self, start: int, end: int) -> None:
        buffer = self._partial
        event = memoryview(buffer)[start:end]
        if self._whole and len(event) > MAX_EVENT_BYTES:
            self._too_large()
            return
        self._search(buffer, start, end)
        data, name = _fields(self._without_bom(bytes(event[:_HEAD_BYTES])))
        if data is not None:
            excerpt = b"\0".join((data, self._marked, bytes(event[-_TAIL_BYTES:])))
            payload: Payload = event
            if self._whole:
                payload = _long_payload(buffer, event, start, end)
            sign = self.kind.sign(excerpt, name)
            if len(self._errors) == 1:  # in this case nothing was dropped
                at = self._errors[0]
                error = bytes(buffer[at : min(at + _TAIL_BYTES, end)])
                excerpt = b"\0".join((data, error, bytes(event[-_TAIL_BYTES:])))
            self._judge(sign, payload, excerpt)
        self._begun = True
        self._marked, self._searched, self._cut = b"", 0, False
        self._errors.clear()

    def _too_large(self) -> None:
        most = f"{MAX_EVENT_BYTES >> 20} MiB"
        self.broken = EventTooLarge(f"an event of the stream is over {most}: ask for fewer tokens")


def _fields(event: bytes) -> tuple[bytes | None, bytes]:
    """Return an event's ``data`` (``None`` if it has none) and its name (empty if none)."""
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip(), b""
    lines = event.split(b"\n")
    data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
    names = [line[6:].strip() for line in lines if line.startswith(b"event:")]
    return b"\n".join(data) if data else None, names[-1] if names else b""


def _long_payload(buffer: bytearray, event: memoryview, start: int, end: int) -> Payload:
    """Return the data of a long event: a view of ``event`` if it is one line (spaces around the
    data included), otherwise a copy."""
    begin = start + bytes(event[:1]).count(b"\n")  # two would have ended an event
    if buffer[begin : begin + 5] == b"data:" and buffer.find(b"\n", begin, end) < 0:
        return event[begin + 5 - start :]
    return _fields(bytes(event))[0] or b""
