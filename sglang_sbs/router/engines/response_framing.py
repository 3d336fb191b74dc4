"""Reads HTTP/1.1 responses with llhttp: head, body without its framing, end. Responses that two
parsers could read differently (RFC 9112) raise :class:`MalformedResponse`."""

from __future__ import annotations

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

MAX_HEAD_BYTES = 64 * 1024
"""Limit on the head of a response, and on trailers and chunk extensions."""
_INTERIM = (100, 102, 103)
"""Interim statuses, which are followed by another head."""
_NO_BODY = (204, 304)
_READ = {
    name.encode(): name
    for name in ("content-type", "content-length", "content-encoding", "transfer-encoding")
}
"""Names of the headers that are kept, by their bytes; all others are skipped unread."""


class MalformedResponse(ValueError):
    """The bytes are not an HTTP/1.1 response that this client accepts."""


class ResponseReader:
    """Reads the responses on one connection, one at a time."""

    __slots__ = (
        "_bare_bytes", "_end", "_parser", "_pieces", "headers", "keep_alive", "on_body", "status",
        "surplus", "until_eof",
    )  # fmt: skip

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self.begin()

    def begin(self) -> None:
        """Prepare for the next response."""
        self.status = 0
        """HTTP status once the head is complete, 0 before; interim responses (1xx) are skipped."""
        self.headers: dict[str, str] = {}
        """Values of the headers in ``_READ``; those of repeated headers are joined by commas."""
        self.keep_alive = False
        self.until_eof = False
        """The response has neither chunks nor a length, so its body ends with the connection."""
        self.surplus = False
        """Bytes followed the end of the response, so the connection must not be reused."""
        self._end: int | None = None
        """Number of pieces of body when the response ended; ``None`` before its end."""
        self._bare_bytes = 0
        """Bytes received since the last piece of body: head, trailers or chunk extensions."""

    def close(self) -> None:
        """Drop the parser, whose reference to this reader would otherwise need garbage
        collection."""
        self._parser = None

    @property
    def done(self) -> bool:
        """Whether the end of the response was read. A response that ends with the connection is
        never done."""
        return self._end is not None

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body in ``data``, without its framing. Raises: MalformedResponse,
        ``data`` is not part of a valid response."""
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if self._end is None or isinstance(error.__context__, MalformedResponse):
                raise MalformedResponse(str(error.__context__ or error)) from None
            self.surplus = True
        pieces = self._pieces
        if self.surplus:
            del pieces[self._end :]
        if not pieces:
            self._bare_bytes += len(data)
            if self._bare_bytes > MAX_HEAD_BYTES:
                raise MalformedResponse("over 64 KiB of head, trailers or chunk extensions")
            return b""
        self._bare_bytes = 0
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return body

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._end is not None:
            self.surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # otherwise it belongs to the trailer
            field = _READ.get(name) or _READ.get(name.lower())
            if field is None:
                return
            text = value.decode("latin-1").rstrip(" \t")
            known = self.headers.get(field)
            self.headers[field] = text if known is None else f"{known}, {text}"

    def on_headers_complete(self) -> None:
        if self._end is not None or self._parser is None:
            return
        status, version = self._parser.get_status_code(), self._parser.get_http_version()
        if version not in ("1.0", "1.1") or not 100 <= status <= 599:
            raise MalformedResponse(f"HTTP/{version} {status} is not an HTTP/1.x status")
        headers = self.headers
        if status in _INTERIM:
            self.headers = {}
            return
        if status < 200:
            raise MalformedResponse(f"{status} was not requested")
        content = headers.get("content-encoding", "identity").lower()
        if content not in ("", "identity"):
            raise MalformedResponse(f"content-encoding {content[:40]!r} was not requested")
        transfer = headers.get("transfer-encoding", "chunked").lower()
        if transfer != "chunked":
            raise MalformedResponse(f"transfer-encoding {transfer[:40]!r}")
        framed = "transfer-encoding" in headers or "content-length" in headers
        self.until_eof = status not in _NO_BODY and not framed
        self.keep_alive = self._parser.should_keep_alive()
        self.status = status

    def on_message_complete(self) -> None:
        if self.status and self._end is None:
            self._end = len(self._pieces)
