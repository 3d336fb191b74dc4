"""Which batches count as torn, and what their spread is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gangs.command import main
from benchmarks.gangs.gangs import figures, gangs_of
from sglang_sbs.scheduling import Dispatch, ForwardEnded, RequestArrived, SchedulerConfig
from sglang_sbs.scheduling.eventlog import EventLogWriter, LogRecord
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.endforward import Started

CHUNK = 1024
OFFSET_S = 100.0
"""Router's clock minus engine's."""


def sent(
    rid: str, *, rank: int, batch: int = 1, now_s: float = OFFSET_S, joins: bool = False
) -> LogRecord:
    command = Dispatch(
        rid=rid,
        prefill="p0",
        prefill_rank=rank,
        decode="d0",
        decode_rank=0,
        batch=batch,
        held_s=0.0,
        reason="",
        joins=joins,
    )
    return LogRecord(now_s, RequestArrived(rid=rid, prompt_tokens=100), [command])


def launched(
    forward_id: int, rank: int, *started: tuple[str, float], tokens: int = 300, left: int = 0
) -> LogRecord:
    report = EndForward(
        instance_id="p0",
        boot_id="b",
        role="prefill",
        dp_rank=rank,
        dp_size=2,
        seq=0,
        kind="launch",
        forward_id=forward_id,
        launch_s=float(forward_id),
        extend_tokens=tokens,
        chunk_tokens=CHUNK,
        chunk_remainder_tokens=left,
        started=[Started(rid, at_s - 0.001, at_s) for rid, at_s in started],
    )
    return LogRecord(OFFSET_S + forward_id, ForwardEnded(instance="p0", report=report), [])


PAIR = [sent("a", rank=0), sent("b", rank=1)]


def test_a_gang_that_one_pass_starts_is_whole() -> None:
    (gang,) = gangs_of([*PAIR, launched(1, 0, ("a", 0.010)), launched(1, 1, ("b", 0.013))])
    assert not gang.torn
    one = figures([gang])
    assert (one.passes, one.torn, one.requests) == (1, 0, 2)
    assert one.spread_p50_ms == pytest.approx(3.0)
    assert one.way_p50_ms == pytest.approx(13.0)
    assert one.within_aim_share == 1.0


def test_a_gang_whose_ranks_start_in_different_passes_is_torn() -> None:
    (gang,) = gangs_of(
        [*PAIR, launched(1, 0, ("a", 0.010)), launched(1, 1), launched(2, 1, ("b", 0.030))]
    )
    assert gang.torn
    one = figures([gang])
    assert (one.passes, one.torn, one.torn_share) == (2, 1, 0.5)


@pytest.mark.parametrize("alone_in", [1, 2])
def test_a_gang_is_torn_by_who_follows_it_and_starts_before(alone_in: int) -> None:
    (gang,) = gangs_of(
        [
            *PAIR,
            sent("late", rank=1, batch=2, joins=True),
            launched(alone_in, 1, ("late", 0.010)),
            launched(2, 0, ("a", 0.010)),
            launched(2, 1, ("b", 0.013)),
        ]
    )
    assert gang.torn == (alone_in == 1)


@pytest.mark.parametrize(
    ("tokens", "left"), [(CHUNK, 0), (900, 200)], ids=["full chunk", "a chunk is cut"]
)
def test_what_does_not_fit_into_a_pass_is_not_torn(tokens: int, left: int) -> None:
    (gang,) = gangs_of(
        [
            sent("a", rank=0),
            sent("b", rank=0),
            launched(1, 0, ("a", 0.010), tokens=tokens, left=left),
            launched(2, 0, ("b", 0.010)),
        ]
    )
    assert (gang.torn, gang.overflowed) == (False, True)


def test_single_requests_unknown_ends_and_warm_up_do_not_count() -> None:
    records: Sequence[LogRecord] = [
        sent("warm", rank=0, batch=0),
        sent("warm2", rank=1, batch=0),
        sent("alone", rank=0, batch=1),
        sent("lost", rank=0, batch=2),
        sent("found", rank=0, batch=2),
        launched(1, 0, ("warm", 0.1), ("alone", 0.1), ("found", 0.1)),
        launched(1, 1, ("warm2", 0.1)),
    ]
    assert [sorted(gang.sent) for gang in gangs_of(records)] == [["warm", "warm2"]]
    assert gangs_of(records, skip=2) == []


def test_the_script_reads_event_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = tmp_path / "run.events", tmp_path / "gangs.json"
    writer = EventLogWriter(log, SchedulerConfig())
    for one in [*PAIR, launched(1, 0, ("a", 0.010)), launched(1, 1, ("b", 0.013))]:
        assert one.event is not None
        writer.write(one.now_s, one.event, one.commands)
    writer.close()
    assert main([str(log), "--json", str(out)]) == 0
    (row,) = json.loads(out.read_bytes())
    assert (row["gangs"], row["torn"]) == (1, 0)
    assert main([str(log), "--skip", "2"]) == 1
    assert "plugin of this release" in capsys.readouterr().out.replace("\n", " ")
