"""``sglang-sbs simulate --replay``: an event log is reproduced."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_sbs.scheduling import InstanceUp, RequestArrived, Scheduler, SchedulerConfig
from sglang_sbs.scheduling.eventlog import MAGIC, EventLogWriter
from sglang_sbs.simulator.cli import main


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of two events, as a router writes it."""
    path = tmp_path / "router.events"
    config = SchedulerConfig(policy="round_robin")
    scheduler, writer = Scheduler(config), EventLogWriter(path, config)
    for now_s, event in (
        (1.0, InstanceUp(instance="p0", role="prefill", dp_size=2, chunk_tokens=3000)),
        (2.0, RequestArrived(rid="a", prompt_tokens=500)),
    ):
        writer.write(now_s, event, scheduler.handle(event, now_s))
    writer.close()
    return path


def test_a_log_is_reproduced(log, capsys):
    assert main(["--replay", str(log)]) == 0
    captured = capsys.readouterr()
    assert "2 events" in captured.out and "reproduced exactly" in captured.out
    assert captured.err == ""


def test_a_log_that_is_none_is_refused(tmp_path, capsys):
    (tmp_path / "text").write_text("not a log")
    for name in ("absent", "text"):
        assert main(["--replay", str(tmp_path / name)]) == 2
        captured = capsys.readouterr()
        assert name in captured.err
        assert captured.out == ""


@pytest.mark.parametrize("configured", [False, True])
def test_a_log_without_events_reproduces_nothing(configured, tmp_path, capsys):
    path = tmp_path / "router.events"
    if configured:
        EventLogWriter(path, SchedulerConfig()).close()
    else:
        path.write_bytes(MAGIC)
    assert main(["--replay", str(path)]) == 1
    captured = capsys.readouterr()
    assert "router.events holds no events" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("cut", [1, 5])
def test_a_torn_log_is_reproduced_as_far_as_it_goes_and_called_cut_off(cut, log, capsys):
    whole = log.read_bytes()
    log.write_bytes(whole[:-cut])
    assert main(["--replay", str(log)]) == 0
    captured = capsys.readouterr()
    assert "1 events" in captured.out
    assert "router.events is cut off: its last" in captured.err
    log.write_bytes(whole + b"\0\0")
    assert main(["--replay", str(log)]) == 0
    assert "is cut off: its last 2 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("beside", "named"),
    [
        (["--policies", "eta"], "--policies"),
        (["--seeds", "1"], "--seeds"),
        (["paper-3k"], "scenario"),
    ],
)
def test_a_replay_refuses_what_would_have_no_effect(beside, named, log, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*beside, "--replay", str(log)])
    assert ended.value.code == 2
    assert f"--replay: {named}: without effect" in capsys.readouterr().err
