"""``sglang-sbs top``: the dashboard in a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import sys
import termios
from contextlib import suppress
from typing import Any

import orjson
import pytest
from harness.top_frames import drawn, frame_of
from router_harness import TIMEOUT_S, cluster

from sglang_sbs.console.ask_router import KEY_VARIABLE
from sglang_sbs.dashboard.top import main
from sglang_sbs.dashboard.top_view import plain
from sglang_sbs.scheduling import Scheduler, SchedulerConfig


def test_a_worker_without_a_barrier_says_so() -> None:
    frame = frame_of(1, 1)
    assert "no barrier" not in "\n".join(drawn(frame, 120, 40))
    frame["prefill"][0]["barrier"] = False
    assert "8 ranks, no barrier" in "\n".join(drawn(frame, 120, 40))


@pytest.mark.parametrize(("prefill", "decode"), [(0, 0), (1, 1), (3, 1), (32, 8), (117, 2)])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (220, 90)])
def test_top_fits_the_terminal(prefill: int, decode: int, width: int, height: int) -> None:
    lines = drawn(frame_of(prefill, decode), width, height)
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for part in ("waiting", "prefill", "decode", "prefill's answer", "slowest requests"):
        assert part in text


def test_top_shows_more_in_a_larger_terminal() -> None:
    frame = frame_of(32, 8)
    small, large = drawn(frame, 80, 24), drawn(frame, 200, 100)
    assert sum("prefill-" in line for line in small) < 32
    assert any("more: a higher terminal shows them" in line for line in small)
    shown = [line for line in large if line.startswith("prefill-")]
    assert len(shown) == 32
    assert not any("a higher terminal" in line for line in large)


def test_top_names_what_it_leaves_out() -> None:
    frame = frame_of(2, 1)
    whole, small = ("\n".join(drawn(frame, *size)) for size in ((220, 90), (60, 24)))
    assert not any(word in whole for word in ("…", " a cell"))
    assert "prefill: C_avail used per DP rank, up to 2 a cell" in small
    assert "…p://" not in small  # of a name its end stays
    frame["prefill"][0]["instance"] = "http://" + "x" * 30 + ":30000"
    assert "…" + "x" * 17 + ":30000 up" in "\n".join(drawn(frame, 120, 40))
    lines = drawn(frame_of(1, 1), 80, 11)
    assert "lines more: a higher terminal shows them" in lines[-1]


def test_ranks_that_never_reported_are_distinguished_from_silent_and_busy_ones() -> None:
    frame = frame_of(1, 1, dp_size=4)
    instance = frame["prefill"][0]
    instance["age"] = [0.1, 9.0, None, 0.1]
    instance["c_avail"] = [0, 4096, 4096, 4096]
    (line,) = [line for line in drawn(frame, 100, 40) if line.startswith("prefill-0")]
    assert line.rstrip().endswith("█!?·")


def test_alerts_come_before_everything_but_the_head() -> None:
    lines = drawn(frame_of(0, 0), 80, 24)
    assert lines[1].startswith("● no prefill instance is up")
    assert lines[6].startswith("● no decode instance is up"), "the first one is said above"


def test_classes_and_tenants_are_shown_where_there_are_any() -> None:
    frame = frame_of(1, 1)
    assert "high" not in drawn(frame, 120, 40)[4]
    frame["queue"] |= {"classes": {"low": 2, "normal": 1, "high": 3}, "tenants": 2}
    assert drawn(frame, 120, 40)[4].endswith("; 3 high, 2 low; 2 tenants")


def test_top_shows_slow_requests_with_reasons_and_past_alerts() -> None:
    frame = frame_of(2, 1)
    parts_s = {"hold": 0.1, "queue": 0.5, "pass": 0.3}
    frame["split"] = {"p50": {"ttft_s": 0.9, "parts_s": parts_s}}
    frame["split"]["p99"] = {"ttft_s": 2.0, "parts_s": {"hold": 2.0}}
    why = "hold in the scheduler 1,900 ms: no decode DP rank had room for the request"
    frame["slowest"] = [{"ttft_s": 2.0, "ended_s": 0.5, "rid": "a1b2", "why": why}]
    alert = {"severity": "warning", "subject": "http://p0:1", "text": "it was slow"}
    frame["past"] = [alert | {"began_s": 1.0, "ended_s": 61.0}]
    frame["time_s"] = 1_800_000_002.5
    head, small = drawn(frame, 120, 40), "\n".join(drawn(frame, 80, 24))
    said = (
        "TTFT p50 900ms: queue of the engine 500ms, forward pass 300ms, hold in the scheduler 100ms"
    )
    assert head[3] == said
    assert head[4] == "TTFT p99 2.0s: hold in the scheduler 2.0s"
    whole = "\n".join(head)
    assert re.search(r"\d\d:\d\d:01-\d\d:\d\d:01 p0:1: it was slow", whole)
    assert f"  2.0s   2s ago: {why}; a1b2" in whole
    assert "it was slow" not in small
    assert "slowest requests" in small


def trial_of(**more: Any) -> dict[str, Any]:
    """Return a trial in the form that a frame has."""
    text = "trial of sbs against eta: sbs has 0.78x (0.70 to 0.87) the mean TTFT of eta"
    known = {"running": True, "text": text, "policy": "sbs", "baseline": "eta", "now": "baseline"}
    return known | {"high": 0.87, "slot_left_s": 75.0} | more


def test_a_verdict_of_a_trial_stands_in_place_of_the_estimate() -> None:
    frame = frame_of(1, 1)
    assert drawn(frame, 160, 40)[2].startswith("gain: ")
    frame["trial"] = None
    assert drawn(frame, 160, 40)[2].startswith("gain: ")
    frame["trial"] = trial_of()
    lines = drawn(frame, 160, 40)
    assert lines[2] == trial_of()["text"] + "; now eta for 75.0s"
    assert not lines[3].startswith("gain: ")
    frame["trial"] = trial_of(high=None, text="no verdict yet")
    assert drawn(frame, 160, 40)[2] == "no verdict yet; now eta for 75.0s"
    assert drawn(frame, 160, 40)[3].startswith("gain: ")


def test_text_of_others_cannot_drive_the_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J[red]markup\n\u202eabc"
    frame = frame_of(1, 1)
    frame["policy"] = evil
    frame["prefill"][0]["instance"] = evil
    frame["alerts"] = [{"severity": "warning", "kind": "x", "subject": evil, "text": evil}]
    frame["alerts"][0]["todo"] = evil
    frame["well"] |= {"level": "red", "cause": evil, "todo": evil, "subject": evil}
    frame["gain"]["why"] = evil
    frame["slowest"] = [{"ttft_s": 1.0, "ended_s": 1.0, "rid": evil, "why": evil}]
    past = {"severity": evil, "subject": evil, "text": evil, "began_s": 1.0, "ended_s": 2.0}
    frame |= {"past": [past], "time_s": 1_800_000_000.0}
    text = "\n".join(drawn(frame, 200, 40))
    assert "owned" in text
    assert "[red]markup" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert plain("a\x00b\x7fc\u200fd é") == "a·b·c·d é"


async def run(*argv: str) -> int:
    return await asyncio.to_thread(main, argv)


async def test_json_is_one_snapshot(capfd: pytest.CaptureFixture[str]) -> None:
    async with cluster(scheduler=Scheduler(SchedulerConfig())) as running:
        assert await run("--router", running.url, "--json", "--for", "0.3") == 0
        frame = orjson.loads(capfd.readouterr().out)
        assert frame["policy"] == "sbs"
        assert [instance["instance"] for instance in frame["prefill"]] == [running.prefill[0].url]
        assert frame["gangs"] == []


async def test_once_is_one_frame(capsys: pytest.CaptureFixture[str]) -> None:
    async with cluster(scheduler=Scheduler(SchedulerConfig())) as running:
        assert await run("--router", running.url, "--once", "--for", "0") == 0
    text = capsys.readouterr().out
    assert "waiting 0 (0 tokens)" in text
    assert "127.0.0.1" in text


async def test_the_key_comes_from_the_flag_or_the_environment(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    async with cluster("--admin-api-key", "secret", real=True) as running:
        where = ("--router", running.url, "--json", "--for", "0")
        assert await run(*where) == 1
        assert KEY_VARIABLE in capfd.readouterr().err
        assert await run(*where, "--admin-api-key", "wrong") == 1
        assert "not accepted" in capfd.readouterr().err
        assert await run(*where, "--admin-api-key", "secret") == 0
        monkeypatch.setenv(KEY_VARIABLE, "secret")
        assert await run(*where) == 0


def test_no_router_and_bad_flags_are_reported_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--router", "http://127.0.0.1:9", "--once"]) == 1
    assert "is the router there?" in capsys.readouterr().err
    for flags in (["--router", "localhost:30000"], ["--once", "--for", "-1"]):
        with pytest.raises(SystemExit) as stop:
            main(flags)
        assert stop.value.code == 2
    assert "http://HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
async def test_top_runs_in_a_terminal_until_interrupted(ending: signal.Signals) -> None:
    terminal, inside = pty.openpty()
    termios.tcsetwinsize(inside, (24, 80))
    async with cluster(scheduler=Scheduler(SchedulerConfig())) as running:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sglang_sbs.cli", "top", "--router", running.url),
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
            # As in the background of a script: asyncio by itself leaves it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        )
        os.close(inside)
        seen = bytearray()

        def read() -> None:
            """Until it has drawn twice."""
            while seen.count(b"waiting 0") < 2:
                seen.extend(os.read(terminal, 65536))

        def drain() -> None:
            """So that nobody waits for room in the terminal."""
            with suppress(OSError):  # the other side is closed
                while chunk := os.read(terminal, 65536):
                    seen.extend(chunk)

        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.to_thread(read)
            process.send_signal(ending)
            code, _ = await asyncio.gather(process.wait(), asyncio.to_thread(drain))
    os.close(terminal)
    assert code == 0
    assert b"\x1b[?1049h" in seen, "on a screen of its own"
    assert b"Traceback" not in seen
