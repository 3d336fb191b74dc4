"""``sglang-sbs observe`` as a process, with messages on a real socket."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from observed import Rank, hear_three_requests

from sglang_sbs.observe.cli import Observer, main
from sglang_sbs.observe.recorder import TrafficRecorder
from sglang_sbs.scheduling import PrefillDone, RequestArrived
from sglang_sbs.scheduling.eventlog import read_event_log
from sglang_sbs.wire import EndForward, encode_endforward

WAIT_S = 60


@contextmanager
def observing(out: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and where it listens."""
    command = [sys.executable, "-m", "sglang_sbs.cli", "observe", "--out", str(out)]
    command += ["--endforward", "tcp://127.0.0.1:*", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            assert process.stderr is not None
            first = process.stderr.readline()
            yield process, first.rpartition(" ")[2].strip()
        finally:
            process.kill()


class Wire:
    """Takes the place of a recorder: what engines say goes out on a socket."""

    def __init__(self) -> None:
        self.messages: list[EndForward] = []

    def receive(self, report: EndForward, _now_s: float) -> None:
        self.messages.append(report)


def publish(endpoint: str, arrived: Path) -> None:
    """Publish the sample traffic until the recording has it: what is sent before the subscription
    is known is dropped."""
    context = zmq.Context()
    sock = context.socket(zmq.XPUB)
    try:
        sock.connect(endpoint)
        assert sock.poll(1000 * WAIT_S)
        sock.recv()  # the subscription
        wire = Wire()
        hear_three_requests(wire)  # type: ignore[arg-type]
        for message in wire.messages:
            sock.send_multipart(encode_endforward(message))
        sock.send_multipart([b"sbs1", b"12345678", b"nonsense"])
    finally:
        sock.close(1000 * WAIT_S)
        context.term()


def test_an_interrupted_observation_is_whole_and_says_its_verdict_first(tmp_path: Path) -> None:
    out = tmp_path / "traffic.events"
    with observing(out, "--minutes", "60") as (process, endpoint):
        publish(endpoint, out)
        assert process.stderr is not None
        assert "malformed" in process.stderr.readline()  # the last message was received
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    first, *rest = said.splitlines()
    assert first.startswith("Too few passes to judge (2). Requests waited p50 10 ms, p99 110 ms ")
    assert any(line.startswith("requests    3 ") for line in rest)
    assert rest[-1].endswith(f"sglang-sbs evaluate {out}")
    records = list(read_event_log(out))
    events = [record.event for record in records]
    assert {e.rid for e in events if isinstance(e, RequestArrived)} == {"a", "b", "c"}
    assert {e.rid for e in events if isinstance(e, PrefillDone)} == {"a", "b", "c"}
    assert [r.now_s for r in records[1:]] == sorted(r.now_s for r in records[1:])


def test_without_an_engine_it_says_what_to_do(tmp_path: Path) -> None:
    out = tmp_path / "traffic.events"
    with observing(out, "--minutes", "0.001") as (process, _):
        said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert said.startswith("No engine reported")
    assert "SGLANG_SBS_ROUTERS=" in said


def test_an_older_plugin_and_lost_messages_are_named(tmp_path: Path) -> None:
    old = Observer(tmp_path / "out")
    Rank(old.recorder, 0).say(1.0, sent_s=0.0, rids=["r"], accepted_requests=1)
    assert "too old to report their lengths" in old.summary("tcp://127.0.0.1:1")[0]
    quiet = Observer(tmp_path / "out")
    Rank(quiet.recorder, 0).say(1.0)
    assert "no request came in" in quiet.summary("tcp://127.0.0.1:1")[0]
    torn = Observer(tmp_path / "out")
    hear_three_requests(torn.recorder)
    rank = Rank(torn.recorder, 0, boot_id="another")
    rank.say(1.0)
    rank.seq = 4
    rank.say(2.0, accepted_requests=2)
    (line,) = [row for row in torn.summary("") if row.startswith("incomplete")]
    assert "3 messages of" in line
    torn.receiver.counts["superseded"] = 2
    (line,) = [row for row in torn.summary("") if row.startswith("incomplete")]
    assert "1 message of" in line


def test_a_taken_port_keeps_the_older_recording(tmp_path, capsys) -> None:
    out = tmp_path / "traffic.events"
    out.write_text("the older one")
    with zmq.Context() as context, context.socket(zmq.SUB) as sock:
        port = sock.bind_to_random_port("tcp://127.0.0.1")
        flags = ["--endforward", f"tcp://127.0.0.1:{port}", "--out", str(out)]
        assert main(flags) == 1
    assert "--endforward tcp://127.0.0.1" in capsys.readouterr().err
    assert out.read_text() == "the older one"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--minutes", "0"], "--minutes 0"),
        (["--minutes", "nan"], "--minutes nan"),
        (["--endforward", "7600"], "--endforward 7600"),
        (["--connect", "http://p0:7700"], "--connect http://p0:7700"),
        (["--key-file", "/does/not/exist"], "--key-file"),
    ],
)
def test_a_flag_that_cannot_be_meant_is_named(flags, named, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--out", str(tmp_path / "out"), *flags])
    assert raised.value.code == 2
    assert named in capsys.readouterr().err
    assert TrafficRecorder().counts == {}
