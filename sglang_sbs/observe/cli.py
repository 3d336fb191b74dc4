"""``sglang-sbs observe``: listens to engines behind any router and writes an event log."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sglang_sbs import __version__
from sglang_sbs.console.plain_words import counted, plain_error
from sglang_sbs.observe.recorder import WINDOW_S, TrafficRecorder
from sglang_sbs.observe.traffic import Traffic
from sglang_sbs.router.options.several import is_local
from sglang_sbs.router.signals.endforward_socket import EndForwardSocket
from sglang_sbs.scheduling import SchedulerConfig
from sglang_sbs.scheduling.eventlog import EventLogWriter
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.curve import CurveKeys, SecretError, keys_in

_OPEN = (
    "sglang-sbs observe: any process that can reach {} can put requests into the recording. Share "
    "a secret (--key-file, SGLANG_SBS_ENDFORWARD_KEY_FILE on the engines) or keep that port inside "
    "the cluster."
)
_ENDING = (signal.SIGINT, signal.SIGTERM)
_TURN_S = 1.0
"""Seconds between writes of the log, and between progress lines on a terminal."""
_LINE_S = 30.0
"""Seconds between progress lines where the output is not a terminal."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="sglang-sbs observe",
        description="Record the passes of engines with the plugin behind any router. Print how "
        "even the passes are and how long requests wait. Routing does not change. The recording "
        "is an event log: arrivals, prompt lengths, placement and passes.",
        epilog="On the engines, set SGLANG_SBS_ROUTERS=tcp://THIS-HOST:7600 (docs/observe.md).\n\n"
        "examples:\n"
        "  sglang-sbs observe --endforward tcp://0.0.0.0:7600 --minutes 10 --out traffic.events\n"
        "  sglang-sbs evaluate traffic.events             # compare policies on these arrivals\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = "where to listen; the engines name it in SGLANG_SBS_ROUTERS (default: %(default)s)"
    made.add_argument("--endforward", default="tcp://0.0.0.0:7600", metavar="ENDPOINT", help=where)
    to = "publisher of a DP rank, for engines with SGLANG_SBS_BIND; may be repeated"
    made.add_argument("--connect", action="append", default=[], metavar="ENDPOINT", help=to)
    key = "file with the engines' SGLANG_SBS_ENDFORWARD_KEY_FILE secret"
    made.add_argument("--key-file", type=Path, metavar="FILE", help=key)
    minutes = "how long to record; Ctrl-C ends it earlier (default: %(default)s)"
    made.add_argument("--minutes", type=float, default=10.0, metavar="N", help=minutes)
    out = "event log to write; an older file is kept as FILE.1 (default: %(default)s)"
    made.add_argument("--out", type=Path, default=Path("traffic.events"), metavar="FILE", help=out)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 1 if no request was recorded or the log cannot be written; 2 for bad flags."""
    made = parser()
    args = made.parse_args(argv)
    if not 0 < args.minutes <= 7 * 24 * 60:
        made.error(f"--minutes {args.minutes:g}: more than 0, and at most {7 * 24 * 60} (a week)")
    flags = [("--endforward", args.endforward), *(("--connect", url) for url in args.connect)]
    for flag, endpoint in flags:
        if not endpoint.startswith(("tcp://", "ipc://")):
            made.error(f"{flag} {endpoint}: write tcp://HOST:PORT or ipc://PATH")
    try:
        keys = None if args.key_file is None else keys_in(args.key_file)
    except SecretError as error:
        made.error(f"--key-file: {error}")
    if keys is None and not is_local(args.endforward):
        print(_OPEN.format(args.endforward), file=sys.stderr)
    observation = Observer(args.out)
    try:
        asyncio.run(observation.run(args.endforward, args.connect, keys, 60 * args.minutes))
    except OSError as error:
        observation.failed = True
        print(f"sglang-sbs observe: {plain_error(error)}", file=sys.stderr)
        if not observation.took_s:
            return 1
    if sys.stderr.isatty():
        print(file=sys.stderr)  # after the progress line
    for line in observation.summary(args.endforward):
        print(line)
    return 0 if observation.recorder.counts["requests"] and not observation.failed else 1


@dataclass
class Observer:
    """One recording. A record is written when no message with an earlier time can arrive any
    more."""

    out: Path
    traffic: Traffic = field(default_factory=Traffic)
    took_s: float = 0.0
    failed: bool = False
    """True: the log could not be written to its end."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.recorder = TrafficRecorder(self.traffic.on_request, self.traffic.on_pass)
        self.receiver = EndForwardSocket(self._receive, "--endforward")

    @property
    def lost(self) -> int:
        """Number of lost messages. The receiver merges a rank's reports while many messages wait,
        so those do not count."""
        merged = self.receiver.counts["superseded"]
        return max(0, self.recorder.counts["missing"] - merged)

    async def run(
        self, bind: str, connect: Sequence[str], keys: CurveKeys | None, duration_s: float
    ) -> None:
        """Record for the given time, or until SIGINT or SIGTERM. Raises: OSError, the endpoint or
        the file is unavailable."""
        receiver = self.receiver
        loop, stop = asyncio.get_running_loop(), self.stop
        endpoint = receiver.open(bind, keys)
        log: EventLogWriter | None = None
        for number in _ENDING:
            loop.add_signal_handler(number, stop.set)
        try:
            log = EventLogWriter(self.out, SchedulerConfig(), observed=True)
            receiver.dial(connect)
            print(f"Recording to {self.out} the messages sent to {endpoint}", file=sys.stderr)
            began_s = time.monotonic()
            said_s = began_s
            while (left_s := began_s + duration_s - time.monotonic()) > 0 and not stop.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), min(_TURN_S, left_s))
                now_s = time.monotonic()
                self.took_s = now_s - began_s
                self._write(log, now_s - WINDOW_S)
                said_s = self._say(said_s, now_s, duration_s)
            self._write(log, float("inf"))
        finally:
            for number in _ENDING:
                loop.remove_signal_handler(number)
            receiver.close()
            if log is not None:
                log.close()

    def _receive(self, report: EndForward, _peer: str) -> None:
        self.recorder.receive(report, time.monotonic())

    def _write(self, log: EventLogWriter, until_s: float) -> None:
        for record in self.recorder.due(until_s):
            assert record.event is not None
            log.write(record.now_s, record.event, record.commands)
        log.flush()

    def _say(self, said_s: float, now_s: float, duration_s: float) -> float:
        """Print a progress line when one is due, and return the time of the last one."""
        on_terminal = sys.stderr.isatty()
        if not on_terminal and now_s - said_s < _LINE_S:
            return said_s
        text = f"{_clock(self.took_s)} of {_clock(duration_s)}: {self._progress()}"
        if on_terminal:
            columns = shutil.get_terminal_size().columns
            print(f"\r\x1b[K{text[: columns - 1]}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)
        return now_s

    def _progress(self) -> str:
        if not self.recorder.counts["messages"]:
            return "no engine has reported yet"
        return self.traffic.progress()

    def summary(self, endpoint: str) -> list[str]:
        counts, instances = self.recorder.counts, self.recorder.instances
        if not counts["messages"]:
            return [
                f"No engine reported in {_span(self.took_s)}. Install sglang-sbs next to SGLang on "
                f"the engines and start them with SGLANG_SBS_ROUTERS={_reachable(endpoint)}; "
                "`sglang-sbs doctor` finds out what is wrong."
            ]
        prefill = [instance for instance in instances.values() if instance.role == "prefill"]
        seen = f"{_span(self.took_s)}, {counted(len(prefill), 'prefill instance')}"
        if not counts["requests"]:
            if counts["accepted"]:
                return [
                    f"{counted(counts['accepted'], 'request')} came in, but the plugin on the "
                    f"engines is too old to report their lengths: install {__version__} there."
                ]
            return [f"The engines report, and no request came in ({seen})."]
        lines = [
            self.traffic.verdict(),
            "",
            f"observed    {seen}",
            *self.traffic.lines(self.took_s),
        ]
        missed = counts["accepted"] - counts["requests"]
        if missed > 0 or self.lost:
            lines.append(
                f"incomplete  {counted(self.lost, 'message')} of {counts['messages']:,} lost, "
                f"{max(0, missed):,} of {counts['accepted']:,} requests not recorded"
            )
        return [*lines, "", f"To compare policies: sglang-sbs evaluate {self.out}"]


def _reachable(endpoint: str) -> str:
    """Return the endpoint as engines on other machines would write it."""
    for wildcard in ("0.0.0.0", "[::]", "*"):
        endpoint = endpoint.replace(f"//{wildcard}:", f"//{socket.gethostname()}:")
    return endpoint


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
