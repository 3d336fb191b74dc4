"""The event log: the scheduler's events and commands, for replay. The only module of this package
that touches a file.

A file is the magic line, then records of ``u32 big-endian length`` + msgpack :class:`LogRecord`,
the first with the configuration. The events with their ``now_s``, fed to a fresh
``Scheduler(config)``, must give the recorded commands again.

``sglang-sbs observe`` writes the same format about engines behind any router (``observed``). No
scheduler decided there, so such a log cannot be replayed, and its configuration has no meaning."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.events import Command, Event

MAGIC = b"sglang-sbs-events-1\n"
OBSERVED = "observed"
"""``Dispatch.reason`` where another router placed the request (``sglang-sbs observe``)."""
_BUFFER_BYTES = 64 * 1024


class LogRecord(msgspec.Struct, array_like=True, frozen=True):
    now_s: float
    event: Event | None
    commands: list[Command]
    config: SchedulerConfig | None = None
    observed: bool = False
    """``sglang-sbs observe`` wrote this log. Set only in the first record, with ``config``."""


class EventLogWriter:
    """Writes an event log. Writes are buffered, so that an event costs microseconds. An earlier
    file of that name is kept with ``.1`` appended: a router that is restarted after a failure must
    not discard the log of it."""

    def __init__(self, path: Path, config: SchedulerConfig, *, observed: bool = False) -> None:
        _keep_earlier(path)
        # Readable only by its owner: it shows clients, times and common prompt prefixes.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, 0o600)  # before the first write, as the file may exist
            os.ftruncate(descriptor, 0)
        self._file: BinaryIO = os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES)
        self._encoder = msgspec.msgpack.Encoder()
        self._file.write(MAGIC)
        self._append(LogRecord(0.0, None, [], config, observed))
        self.flush()

    def write(self, now_s: float, event: Event, commands: Sequence[Command]) -> None:
        self._append(LogRecord(now_s, event, list(commands)))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Close the file even after errors. Raises: OSError: it was not written completely."""
        self._file.close()

    def _append(self, record: LogRecord) -> None:
        data = self._encoder.encode(record)
        self._file.write(len(data).to_bytes(4, "big") + data)


def _keep_earlier(path: Path) -> None:
    with suppress(OSError):  # no such file, or a directory that must not change: overwrite it
        if path.is_file() and not _lacks_events(path):
            real = path.resolve()
            real.replace(f"{real}.1")


def _lacks_events(path: Path) -> bool:
    """Return whether a file is empty, or a log of a router that failed to start. Restarts must not
    replace the kept log by it."""
    with suppress(ValueError):
        return len(list(islice(read_event_log(path), 2))) < 2
    return path.stat().st_size == 0


def read_event_log(
    path: Path, on_torn: Callable[[int], None] = lambda _bytes: None
) -> Iterator[LogRecord]:
    """Yield the complete records of a log. If the last one is cut off, ``on_torn`` is called with
    its size in bytes. Raises: ValueError: not an event log, or an incompatible version."""
    decoder = msgspec.msgpack.Decoder(LogRecord)
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} is not an sglang-sbs event log")
        while head := file.read(4):
            data = file.read(int.from_bytes(head, "big"))
            if len(head) < 4 or len(data) < int.from_bytes(head, "big"):
                on_torn(len(head) + len(data))
                return
            try:
                yield decoder.decode(data)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}: {error}") from error
