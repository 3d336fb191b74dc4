"""HTTP/1.1 responses off the wire: head, chunked framing, and what is refused as malformed.

Owns parsing (RFC 9112), strictly: whatever two parsers could read in two ways is an error. Must not
know sockets, connections or who asked. Every defect is a :class:`MalformedResponse`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

MAX_HEAD_BYTES = 64 * 1024
_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\r\n]*)?")
_HEADER_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*)")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_CONTENT_LENGTH = re.compile(r"[0-9]{1,15}")
_MAX_SIZE_LINE = 1024
_MAX_KEPT_BYTES = 1024


class MalformedResponse(ValueError):
    """The bytes are no HTTP/1.1 response this client may act on."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    status: int
    headers: Mapping[str, str]
    """Names in lower case; of a repeated header the values joined by commas."""
    keep_alive: bool
    chunked: bool
    content_length: int | None
    """``None`` with neither chunks nor a length: the body ends with the connection."""

    @property
    def interim(self) -> bool:
        """1xx: another head follows."""
        return self.status < 200


def parse_head(data: bytes) -> ResponseHead:
    """A response head without its final empty line. Raises: MalformedResponse.

    An engine's heads are all alike, but for the second they are sent in: what was parsed is kept.
    """
    return _parse_known(data) if len(data) <= _MAX_KEPT_BYTES else _parse_head(data)


def _parse_head(data: bytes) -> ResponseHead:
    lines = data.decode("latin-1").split("\r\n")
    match = _STATUS_LINE.fullmatch(lines[0])
    if match is None:
        raise MalformedResponse(f"not an HTTP/1.x status line: {lines[0][:40]!r}")
    status = int(match[2])
    if status == 101:
        raise MalformedResponse("101 Switching Protocols was not asked for")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        field = _HEADER_LINE.fullmatch(line)
        if field is None:
            raise MalformedResponse(f"not a header line: {line[:40]!r}")
        name, value = field[1].lower(), field[2].rstrip(" \t")
        known = headers.get(name)
        headers[name] = value if known is None else f"{known}, {value}"
    coding = headers.get("content-encoding", "identity").lower()
    if coding not in ("", "identity"):
        raise MalformedResponse(f"content-encoding {coding!r} was not asked for")
    options = {part.strip() for part in headers.get("connection", "").lower().split(",")}
    chunked = False
    length: int | None = None
    if status < 200 or status in (204, 304):
        length = 0
    elif "transfer-encoding" in headers:
        if headers["transfer-encoding"].strip().lower() != "chunked":
            raise MalformedResponse(f"transfer-encoding {headers['transfer-encoding'][:40]!r}")
        chunked = True
    elif "content-length" in headers:
        values = {part.strip() for part in headers["content-length"].split(",")}
        value = values.pop()
        if values or not _CONTENT_LENGTH.fullmatch(value):
            raise MalformedResponse(f"content-length {headers['content-length'][:40]!r}")
        length = int(value)
    return ResponseHead(
        status=status,
        headers=headers,
        keep_alive=match[1] == "1" and "close" not in options,
        chunked=chunked,
        content_length=length,
    )


_parse_known = lru_cache(maxsize=256)(_parse_head)


class ChunkedDecoder:
    """Takes ``Transfer-Encoding: chunked`` framing off (RFC 9112 section 7.1)."""

    __slots__ = ("_left", "_tail", "done", "surplus")

    def __init__(self) -> None:
        self._left = 0  # payload bytes missing in the current chunk, then 2 for its CRLF
        self._tail = b""
        self.done = False
        self.surplus = False
        """Bytes followed the end of the body: the connection must not be reused."""

    def feed(self, data: bytes) -> bytes:
        """The payload in ``data``; framing may be cut anywhere.

        Raises:
            MalformedResponse: not chunked encoding.
        """
        if self._tail:
            data = self._tail + data
            self._tail = b""
        elif not self._left:
            # Nearly always: one whole chunk, as the engine wrote it.
            line_end = data.find(b"\r\n", 0, 18)
            if (
                line_end > 0
                and _CHUNK_SIZE.fullmatch(data, 0, line_end) is not None
                and len(data) == line_end + int(data[:line_end], 16) + 4 > line_end + 4
                and data.endswith(b"\r\n")
            ):
                return data[line_end + 2 : -2]
        position, size = 0, len(data)
        parts: list[bytes] = []
        left = self._left
        while position < size:
            if left > 2:
                end = position + left - 2
                if end >= size:
                    parts.append(data[position:])
                    left -= size - position
                    break
                parts.append(data[position:end])
                position, left = end, 2
            if left:
                if size - position < left:
                    self._tail = data[position:]
                    break
                if data[position : position + 2] != b"\r\n":
                    raise MalformedResponse("chunk is longer than its size says")
                position, left = position + 2, 0
                continue
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                if size - position > _MAX_SIZE_LINE:
                    raise MalformedResponse("endless chunk size line")
                self._tail = data[position:]
                break
            text = data[position:line_end].split(b";", 1)[0].rstrip(b" \t")
            if _CHUNK_SIZE.fullmatch(text) is None:
                raise MalformedResponse(f"chunk size {text[:20]!r}")
            length = int(text, 16)
            if length == 0:
                self._finish(data, line_end)
                break
            position, left = line_end + 2, length + 2
        self._left = left
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _finish(self, data: bytes, line_end: int) -> None:
        if data.startswith(b"\r\n", line_end + 2):
            end = line_end + 4
        else:
            trailer_end = data.find(b"\r\n\r\n", line_end)
            if trailer_end < 0:
                if len(data) - line_end > MAX_HEAD_BYTES:
                    raise MalformedResponse("endless trailers")
                self._tail = b"0" + data[line_end:]
                return
            end = trailer_end + 4
        self.done = True
        self.surplus = end != len(data)
