"""The event log of observed messages."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observed import BEHIND_S, DECODE, PREFILL, TRANSIT_S, Rank, hear_three_requests, write_sample

from sglang_sbs.evaluate.fitting.recording import recording_of
from sglang_sbs.explain.log import main as log_main
from sglang_sbs.explain.why import main as why_main
from sglang_sbs.observe.recorder import MAX_SPAN_S, WINDOW_S, TrafficRecorder
from sglang_sbs.observe.traffic import Traffic
from sglang_sbs.scheduling import (
    Dispatch,
    ForwardEnded,
    InstanceDown,
    InstanceUp,
    PrefillDone,
    RequestArrived,
    SchedulerConfig,
)
from sglang_sbs.scheduling.eventlog import LogRecord, read_event_log
from sglang_sbs.simulator.replay import replay
from sglang_sbs.simulator.workloads.arrivals import read_trace
from sglang_sbs.wire import EndForward, decode_endforward, encode_endforward
from sglang_sbs.wire.endforward import Accepted, Started

CLOCK_S = BEHIND_S + TRANSIT_S


def records_of(recorder: TrafficRecorder, event: type) -> list:
    return [entry for entry in recorder.due(float("inf")) if isinstance(entry.event, event)]


def test_an_observed_log_has_arrivals_placement_passes_and_ends_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "traffic.events"
    write_sample(path)
    records = list(read_event_log(path))
    assert records[0].observed
    times = [record.now_s for record in records[1:]]
    assert times == sorted(times)
    arrived = {
        record.event.rid: (round(record.now_s - CLOCK_S, 4), record)
        for record in records
        if isinstance(record.event, RequestArrived)
    }
    assert {rid: at_s for rid, (at_s, _) in arrived.items()} == {"a": 10.0, "b": 10.004, "c": 10.11}
    asked = [(r.event.prompt_tokens, r.event.max_new_tokens) for _, r in arrived.values()]
    assert asked == [(1500, 64), (300, None), (200, None)]
    placed = [record.commands[0] for _, record in arrived.values()]
    assert all(isinstance(placement, Dispatch) for placement in placed)
    assert [(placement.prefill, placement.prefill_rank) for placement in placed] == [
        (PREFILL, 0),
        (PREFILL, 1),
        (PREFILL, 0),
    ]
    # Only the decode rank of `a` reported a bootstrap room; prefill and decode differ in the rid.
    assert [(placement.decode, placement.decode_rank) for placement in placed] == [
        (DECODE, 1),
        ("", 0),
        ("", 0),
    ]
    done = [r for r in records if isinstance(r.event, PrefillDone)]
    assert [(r.event.rid, r.event.cached_tokens, round(r.now_s - CLOCK_S, 4)) for r in done] == [
        ("b", 0, 10.21),
        ("a", 100, 10.42),
        ("c", 0, 10.42),
    ]
    ended = [r.event.report for r in records if isinstance(r.event, ForwardEnded)]
    passes = [a_pass for a_pass in ended if a_pass.kind == "forward"]
    assert sorted(
        (a_pass.forward_id, a_pass.dp_rank, a_pass.extend_tokens) for a_pass in passes
    ) == [
        (1, 0, 1024),
        (1, 1, 300),
        (2, 0, 576),
        (2, 1, 0),
    ]
    ups = [r.event for r in records if isinstance(r.event, InstanceUp)]
    assert [(up.instance, up.role, up.dp_size) for up in ups] == [
        (PREFILL, "prefill", 2),
        (DECODE, "decode", 2),
    ]


def test_an_observed_log_is_a_trace_and_for_people_and_no_replay(tmp_path, capsys) -> None:
    path = tmp_path / "traffic.events"
    write_sample(path)
    assert [(round(a.at_s, 4), a.prompt_tokens) for a in read_trace(path)] == [
        (0.0, 1500),
        (0.004, 300),
        (0.11, 200),
    ]
    assert log_main([str(path)]) == 0
    shown = capsys.readouterr().out
    assert "events, observed" in shown
    assert "3 prefilled" in shown
    assert "(420 ms)" in shown
    assert why_main(["a", "--log", str(path)]) == 0
    assert "another router placed it" in capsys.readouterr().out
    with pytest.raises(ValueError, match="sglang-sbs observe"):
        replay(path)


def test_a_message_that_was_delayed_does_not_move_the_clock() -> None:
    recorder = TrafficRecorder()
    rank = Rank(recorder, 0)
    rank.say(1.0)
    rank.say(2.0, transit_s=0.3, accepted=[Accepted("late", 10, 1.9)])
    (arrived,) = records_of(recorder, RequestArrived)
    assert arrived.now_s == pytest.approx(1.9 + CLOCK_S)


@pytest.mark.parametrize("arrived_s", [0.0, 1e11, 1e-9])
def test_an_impossible_arrival_is_bounded(arrived_s: float) -> None:
    recorder = TrafficRecorder()
    Rank(recorder, 0).say(9000.0, accepted=[Accepted("r", 10, arrived_s)])
    (arrived,) = records_of(recorder, RequestArrived)
    now_s = 9000.0 + CLOCK_S
    assert now_s - MAX_SPAN_S <= arrived.now_s <= now_s


def test_an_id_used_again_and_one_that_is_too_long_are_readable_in_the_log(tmp_path: Path) -> None:
    recorder = TrafficRecorder()
    rank = Rank(recorder, 0)
    long = "r" * 5000
    for number, rid in enumerate([long, "again", "again"], 1):
        at_s = float(number)
        rank.say(at_s, accepted=[Accepted(rid, 10, at_s)])
        rank.pass_(number, at_s, at_s + 0.1, 10, started=[Started(rid)], finished=[rid])
    records = list(recorder.due(float("inf")))
    decoded = msgspec.msgpack.Decoder(RequestArrived)
    arrived = [r.event for r in records if isinstance(r.event, RequestArrived)]
    for event in arrived:
        decoded.decode(msgspec.msgpack.encode(event))
    names = [event.rid for event in arrived]
    assert len(set(names)) == 3
    assert [r.event.rid for r in records if isinstance(r.event, PrefillDone)] == names
    # An evaluation finds each of them in its own pass.
    requests = recording_of(records, SchedulerConfig(), observed=True).requests
    took_s = [requests[name].last_pass.end_s - requests[name].arrived_s for name in names]
    assert took_s == pytest.approx([0.1] * 3, abs=0.01)


def test_messages_twice_lost_or_of_an_older_plugin_are_counted() -> None:
    recorder = TrafficRecorder()
    rank = Rank(recorder, 0)
    rank.say(1.0)
    rank.seq = 0
    rank.say(1.0)
    rank.seq = 5
    rank.say(2.0)
    old = Rank(recorder, 1)
    old.say(3.0, sent_s=0.0, rids=["r"])
    assert recorder.counts == {"messages": 3, "repeated": 1, "missing": 4}
    assert records_of(recorder, RequestArrived) == []


def test_requests_of_an_engine_that_restarted_are_not_mixed_with_those_before() -> None:
    recorder = TrafficRecorder()
    before = Rank(recorder, 0)
    before.say(1.0, accepted=[Accepted("r", 10, 1.0)])
    after = Rank(recorder, 0, boot_id="another boot")
    after.say(2.0, accepted=[Accepted("r", 10, 2.0)])
    after.pass_(1, 2.0, 2.1, 10, started=[Started("r")], finished=["r"])
    records = list(recorder.due(float("inf")))
    rids = [r.event.rid for r in records if isinstance(r.event, RequestArrived)]
    assert rids[0] == "r" != rids[1]
    assert [r.event.rid for r in records if isinstance(r.event, PrefillDone)] == [rids[1]]


def test_an_engine_without_a_configured_name_has_one_of_its_role() -> None:
    recorder = TrafficRecorder()
    Rank(recorder, 0, instance_id="", boot_id="0123456789abcdef").say(1.0)
    Rank(recorder, 0, instance_id="", boot_id="b", dist_init_addr="10.0.0.1:5000").say(1.0)
    assert list(recorder.instances) == ["prefill-01234567", "10.0.0.1:5000"]


def test_passes_launched_ahead_are_known_as_overlap() -> None:
    recorder = TrafficRecorder()
    rank = Rank(recorder, 0)
    rank.say(1.0)
    rank.pass_(1, 1.0, 1.1, 10, inflight_passes=1)
    assert [r.event.overlap for r in records_of(recorder, InstanceUp)] == [False, True]


def test_requests_of_a_first_pass_began_when_the_pass_before_it_ended() -> None:
    seen = {}
    recorder = TrafficRecorder(on_request=lambda request: seen.update({request.rid: request}))
    hear_three_requests(recorder)
    began = {rid: round(request.arrived_s + request.waited_s, 4) for rid, request in seen.items()}
    assert began == {"a": 10.01, "b": 10.01, "c": 10.22}


RIDS = st.sampled_from(["", "a", "b", "x" * 300, "\ud7ff\n"])
TIMES_S = st.sampled_from([0.0, 1.0, 5.0, 1e11])
COUNTS = st.sampled_from([0, 1, 7, 1 << 40])
MESSAGES = st.builds(
    EndForward,
    instance_id=st.sampled_from(["", PREFILL]),
    boot_id=st.sampled_from(["b", "c"]),
    role=st.sampled_from(["prefill", "decode", "null"]),
    dp_rank=st.integers(0, 1),
    dp_size=st.integers(2, 4),
    seq=COUNTS,
    kind=st.sampled_from(["launch", "forward", "idle", "heartbeat"]),
    forward_id=st.integers(0, 1),
    mode=st.sampled_from(["extend", "decode"]),
    launch_s=TIMES_S,
    end_s=TIMES_S,
    sent_s=TIMES_S,
    forward_s=st.sampled_from([0.0, 3600.0]),
    extend_tokens=COUNTS,
    accepted_requests=COUNTS,
    rids=st.lists(RIDS, max_size=2),
    accepted=st.lists(st.builds(Accepted, RIDS, COUNTS, TIMES_S, COUNTS, COUNTS), max_size=3),
    started=st.lists(st.builds(Started, RIDS, TIMES_S, TIMES_S, COUNTS), max_size=2),
    finished=st.lists(RIDS, max_size=3),
    barrier=st.booleans(),
)


@given(st.lists(MESSAGES, max_size=12))
def test_whatever_engines_say_the_log_can_be_read_and_each_request_ends_at_most_once(
    messages: list[EndForward],
) -> None:
    traffic = Traffic()
    recorder = TrafficRecorder(traffic.on_request, traffic.on_pass)
    for number, message in enumerate(messages):
        recorder.receive(decode_endforward(encode_endforward(message)), 5000.0 + number)
    records = list(recorder.due(float("inf")))
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(LogRecord).decode
    assert [decode(encode(record)) for record in records] == records
    times_s = [record.now_s for record in records]
    assert times_s == sorted(times_s)
    assert all(5000.0 - MAX_SPAN_S <= at_s <= 5000.0 + len(messages) for at_s in times_s)
    arrived = [r.event.rid for r in records if isinstance(r.event, RequestArrived)]
    ended = [r.event.rid for r in records if isinstance(r.event, PrefillDone)]
    assert len(arrived) == len(set(arrived)) == recorder.counts["requests"]
    assert len(ended) == len(set(ended))
    assert set(ended) <= set(arrived)
    assert [traffic.progress(), traffic.verdict(), *traffic.lines(1.0)]
    assert 0 <= traffic.idle_share <= 1


@pytest.mark.parametrize("name", [PREFILL, ""])
def test_an_engine_that_restarts_is_away_meanwhile(name: str) -> None:
    recorder = TrafficRecorder()
    records: list[LogRecord] = []
    old, new = (Rank(recorder, 0, boot_id=boot, instance_id=name) for boot in ("old", "new"))
    other = Rank(recorder, 0, boot_id="other", instance_id="http://p1:30000")
    for second in range(10, 61):
        other.say(float(second))
        if second <= 20 or second >= 45:
            (old if second <= 20 else new).say(second + 0.5)
        records += recorder.due(CLOCK_S + second + 0.5 - WINDOW_S)
    records += recorder.due(float("inf"))
    times = [record.now_s for record in records]
    assert times == sorted(times)
    changes = [
        (type(record.event).__name__, round(record.now_s - CLOCK_S, 3), record.event.instance)
        for record in records
        if isinstance(record.event, InstanceUp | InstanceDown)
    ]
    before, after = (name, name) if name else ("prefill-old", "prefill-new")
    assert changes == [
        ("InstanceUp", 10.0, "http://p1:30000"),
        ("InstanceUp", 10.5, before),
        ("InstanceDown", 20.5, before),
        ("InstanceUp", 45.5, after),
    ]
    passes = [LogRecord(r.now_s, r.event, r.commands) for r in records]
    launch = EndForward(
        instance_id="http://p1:30000", boot_id="other", role="prefill", dp_rank=0, dp_size=1,
        seq=0, kind="launch", launch_s=60.0,
    )  # fmt: skip
    passes.append(LogRecord(CLOCK_S + 60, ForwardEnded("http://p1:30000", launch), []))
    found = recording_of(passes, SchedulerConfig(), observed=True).changes
    assert [(round(at_s - CLOCK_S, 3), who, up) for at_s, who, up in found] == [
        (20.5, before, False),
        (45.5, after, True),
    ]
