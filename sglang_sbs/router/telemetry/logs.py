"""Sets up logging. Lines written while a request is served carry its id, and JSON lines
(``--log-json``) have sglang_router's fields."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

current_request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""Id of the request that this task serves; each request has its own task and context."""

access_logger = logging.getLogger("sglang_sbs.access")

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING}
_QUIET_PATHS = frozenset({"/health", "/liveness", "/readiness", "/metrics"})
"""Paths polled constantly, whose successes are logged at debug level."""
_FIELDS = "fields"


class PlainFormatter(logging.Formatter):
    """Writes one line per record, whatever engines and clients put into it; tracebacks are
    indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        identifier = current_request_id.get()
        record.request_tag = f"[{_printable(identifier)}] " if identifier else ""
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {_escaped(line)}" for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per line: ``timestamp``, ``level``, ``target``, ``message`` and
    others."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "target": record.name,
            "message": record.getMessage(),
        }
        if self._process:
            line["process"] = f"{self._process} {record.process}"
        if identifier := current_request_id.get():
            line["request_id"] = identifier
        line |= getattr(record, _FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(
    level: str, log_dir: Path | None = None, *, as_json: bool = False, process: str = ""
) -> None:
    """Log to standard error and, with ``log_dir``, also to a file there. ``process`` names this
    process if several write to one log. Raises: OSError, the file cannot be written."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_dir / "router.log"))
    who = f"[{process} %(process)d] " if process else ""
    plain = PlainFormatter(f"%(asctime)s %(levelname)s {who}%(name)s: %(request_tag)s%(message)s")
    for handler in handlers:
        handler.setFormatter(JsonFormatter(process) if as_json else plain)
    logging.basicConfig(level=LEVELS.get(level, logging.ERROR), handlers=handlers, force=True)


def is_logged(path: str, status: int) -> bool:
    """Return whether :func:`log_answer` would write a line at the current level."""
    return access_logger.isEnabledFor(_level_of(path, status))


def _level_of(path: str, status: int) -> int:
    if status >= 400:
        return logging.ERROR if status >= 500 else logging.WARNING
    return logging.DEBUG if path in _QUIET_PATHS else logging.INFO


def log_answer(
    method: str,
    path: str,
    status: int,
    error_code: str,
    seconds: float,
    *,
    more: str = "",
    parts: Mapping[str, float] | None = None,
) -> None:
    """Log an answered request: 4xx as a warning, 5xx as an error. ``more`` is appended to the line;
    ``parts``: the request's TTFT by part, in seconds."""
    fields = {
        "method": method,
        "path": path,
        "status_code": status,
        "error_code": error_code,
        "latency_us": round(seconds * 1e6),
    }
    for name, part_s in (parts or {}).items():
        fields[f"{name}_us"] = round(part_s * 1e6)
    shown = (method, _printable(path), status, f"{error_code} " if error_code else "")
    text = "%s %s %d %s%.1f ms%s"
    more = f"; {more}" if more else ""
    level = _level_of(path, status)
    access_logger.log(level, text, *shown, seconds * 1000, more, extra={_FIELDS: fields})


class RefusalLog:
    """Thins out log lines of refusals (429 and 503), of which an outage or overload makes
    thousands. The first of each kind is logged; then one line every few seconds counts the
    others."""

    def __init__(self, every_s: float = 5.0) -> None:
        """Create the log; use it only from one event loop."""
        self._every_s = every_s
        self._more: dict[tuple[int, str], int] = {}
        """Number of refusals since the last line about them, by status and error code."""

    def is_news(self, status: int, error_code: str) -> bool:
        """Return whether a response gets its own line; otherwise count it."""
        kind = status, error_code
        if status not in (429, 503):
            return True
        if kind in self._more:
            self._more[kind] += 1
            return False
        self._begin(kind)
        return True

    def _begin(self, kind: tuple[int, str]) -> None:
        self._more[kind] = 0
        # Use an empty context, because the line is about many requests.
        later, empty = asyncio.get_running_loop().call_later, contextvars.Context()
        later(self._every_s, self._report, kind, context=empty)

    def _report(self, kind: tuple[int, str]) -> None:
        if self._write(kind, self._more.pop(kind, 0)):
            self._begin(kind)

    def _write(self, kind: tuple[int, str], count: int) -> bool:
        if count:
            status, error_code = kind
            fields = {"status_code": status, "error_code": error_code, "refusals": count}
            text = "%d %s: %d more refused within %g s"
            shown = status, error_code, count, self._every_s
            access_logger.log(_level_of("", status), text, *shown, extra={_FIELDS: fields})
        return bool(count)

    def close(self) -> None:
        """Write the pending counts."""
        while self._more:
            self._write(*self._more.popitem())


def _printable(text: str) -> str:
    """Return the text with ``?`` for unprintable characters, truncated to 256 characters."""
    if len(text) <= 256 and text.isprintable():
        return text
    return "".join(c if c.isprintable() else "?" for c in text[:256])


def _escaped(text: str) -> str:
    """Return the text with unprintable characters escaped as in a Python string."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
