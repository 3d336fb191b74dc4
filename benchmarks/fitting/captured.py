"""EndForward messages by themselves, one per line of JSON, and what a run was as far as they say.

Owns the file and the reconstruction. Must not know sockets, nor what is fitted. A line has when the
message came, by the receiver's monotonic clock, and the message as the wire's array.

The messages name requests but not their lengths. Of those a message accepts, the growth of the
rank's counter of accepted tokens is the sum; they are taken to be of one size. Where messages are
missing, lengths stay unknown, and attention pairs are counted as if a rank's requests were equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from benchmarks.listener import Heard
from sglang_sbs.evaluate.fitting.recording import Recording, recording_of
from sglang_sbs.scheduling import ForwardEnded, InstanceUp, RequestArrived, SchedulerConfig
from sglang_sbs.scheduling.eventlog import LogRecord


def read_capture(path: Path) -> Recording:
    """Read a file of :meth:`Heard.line`.

    Raises:
        OSError, ValueError: it cannot be read, a line is no message (named by its number), or
            there is no prefill pass in it.
    """
    messages = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                messages.append(msgspec.json.decode(line, type=Heard))
            except msgspec.DecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: no EndForward message, nor is the file an event log "
                    f"of --sbs-event-log: {error}"
                ) from error
    try:
        return recording_of_messages(messages)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error


def recording_of_messages(messages: Iterable[Heard]) -> Recording:
    """Raises: ValueError, there is no EndForward of a prefill pass among them."""
    return recording_of(list(_records(messages)), SchedulerConfig())


def _records(messages: Iterable[Heard]) -> Iterator[LogRecord]:
    """The events a router that did nothing would have logged."""
    counters: dict[tuple[str, int], tuple[int, int]] = {}
    seen: dict[tuple[str, int], int] = {}
    known: set[str] = set()
    for message in messages:
        report, now_s = message.report, message.at_s
        key = (report.boot_id, report.dp_rank)
        if report.role != "prefill" or report.seq <= seen.get(key, -1):
            continue
        seen[key] = report.seq
        if report.boot_id not in known:
            known.add(report.boot_id)
            up = InstanceUp(
                instance=report.boot_id,
                role="prefill",
                dp_size=report.dp_size,
                chunk_tokens=report.chunk_tokens,
            )
            yield LogRecord(now_s, up, [])
        requests, tokens = counters.get(key, (0, 0))
        new = report.accepted_requests - requests
        if new > 0 and new == len(report.rids) and (key in counters or report.seq == 0):
            each = max(1, round((report.accepted_tokens - tokens) / new))
            for rid in report.rids:
                yield LogRecord(now_s, RequestArrived(rid=rid, prompt_tokens=each), [])
        counters[key] = (report.accepted_requests, report.accepted_tokens)
        yield LogRecord(now_s, ForwardEnded(instance=report.boot_id, report=report), [])
