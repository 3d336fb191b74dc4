"""A recorded run attributes passes to requests."""

from __future__ import annotations

import pytest
from harness.prefill_reports import report

from sglang_sbs.evaluate.fitting.recording import recording_of
from sglang_sbs.scheduling import (
    Dispatch,
    ForwardEnded,
    InstanceUp,
    RequestArrived,
    SchedulerConfig,
)
from sglang_sbs.scheduling.eventlog import LogRecord


def logged(kind: str, at_s: float, name: str = "p0", **more) -> LogRecord:
    times = {"launch_s": at_s} if kind == "launch" else {"end_s": at_s}
    who = {"instance_id": name, "boot_id": name, "forward_id": 1}
    made = report(kind=kind, **(who | times | more))
    return LogRecord(at_s, ForwardEnded(instance=name, report=made), [])


def arrived(rid: str, at_s: float, instance: str = "p0") -> LogRecord:
    sent = Dispatch(
        rid=rid,
        prefill=instance,
        prefill_rank=0,
        decode="",
        decode_rank=0,
        batch=1,
        held_s=0.0,
        reason="",
        barrier=True,
    )
    return LogRecord(at_s, RequestArrived(rid=rid, prompt_tokens=500), [sent])


def test_the_engine_says_which_requests_a_pass_finished() -> None:
    """``aborted`` leaves the engine without a report; by order alone it would get the tokens."""
    ups = [
        InstanceUp(instance=name, role="prefill", dp_size=1, chunk_tokens=1024)
        for name in ("p0", "older")
    ]
    recording = recording_of(
        [
            *(LogRecord(0.0, up, []) for up in ups),
            arrived("aborted", 1.0),
            arrived("answered", 1.1),
            arrived("elsewhere", 1.2, "older"),
            logged("launch", 1.9, "older", rids=["elsewhere"], extend_tokens=500, batch_size=1),
            logged("forward", 2.4, "older", forward_s=0.5, extend_tokens=500),
            logged("launch", 2.0, rids=["aborted", "answered"], extend_tokens=500, batch_size=1),
            logged("forward", 2.5, forward_s=0.5, extend_tokens=500, finished=["answered"]),
        ],
        SchedulerConfig(),
    )
    older, only = recording.passes
    assert recording.requests["elsewhere"].last_pass is older, "its plugin reports no ends"
    assert recording.requests["answered"].first_pass is only
    assert recording.requests["answered"].last_pass is only
    assert recording.requests["aborted"].last_pass is None


def test_each_node_of_an_engine_has_its_own_clock() -> None:
    """In the second start its second node reports first."""
    up = InstanceUp(instance="p0", role="prefill", dp_size=2, chunk_tokens=1024)
    records = [LogRecord(0.0, up, [])]
    for number, start in ((1, "a"), (2, "a"), (1, "b")):
        began_s = number if start == "a" else 3.0
        for kind, at_s in (("launch", began_s), ("forward", began_s + 0.5)):
            for rank, uptime_s in ((0, 0.0), (1, 1e6))[:: 1 if start == "a" else -1]:
                of_node = {"boot_id": f"{start} on {rank}", "dp_rank": rank, "dp_size": 2}
                times = {"launch_s" if kind == "launch" else "end_s": at_s + uptime_s}
                tokens = {"extend_tokens": 100 * (rank + 1), "batch_size": 1, "forward_s": 0.5}
                said = logged(kind, at_s, forward_id=number, **of_node, **times, **tokens)
                records.append(said)
    recording = recording_of(records, SchedulerConfig())
    assert [a_pass.tokens for a_pass in recording.passes] == [[100, 200]] * 3
    assert [(a_pass.launch_s, a_pass.end_s) for a_pass in recording.passes] == [
        (1.0, 1.5),
        (2.0, 2.5),
        (3.0, 3.5),
    ]
    assert recording.feedback_s == [0.0] * 12


def test_a_restarted_engine_numbers_its_passes_anew() -> None:
    up = InstanceUp(instance="p0", role="prefill", dp_size=1, chunk_tokens=1024)
    recording = recording_of(
        [
            LogRecord(0.0, up, []),
            arrived("lost", 0.5),
            logged("launch", 1.0, extend_tokens=300, batch_size=1),
            logged("forward", 1.5, forward_s=0.5, extend_tokens=300, rids=["lost"]),
            arrived("new", 8.5),
            logged("launch", 9.0, boot_id="b", extend_tokens=500, batch_size=1, rids=["new"]),
            logged("forward", 9.7, boot_id="b", forward_s=0.7, extend_tokens=500),
        ],
        SchedulerConfig(),
    )
    assert [(a_pass.launch_s, a_pass.end_s) for a_pass in recording.passes] == [
        (1.0, 1.5),
        (9.0, 9.7),
    ]
    assert [a_pass.previous for a_pass in recording.passes] == [None, None]
    assert recording.requests["lost"].last_pass is None
    assert recording.requests["new"].last_pass is recording.passes[1]


def test_a_rank_that_joins_during_a_pass_is_counted_from_the_next_one() -> None:
    up = InstanceUp(instance="p0", role="prefill", dp_size=2, chunk_tokens=1024)
    tokens = {"extend_tokens": 300, "batch_size": 1}
    recording = recording_of(
        [
            LogRecord(0.0, up, []),
            logged("launch", 1.0, dp_size=2, **tokens),
            logged("launch", 1.0, dp_rank=3, dp_size=4, **tokens),
            logged("launch", 2.0, dp_rank=3, dp_size=4, forward_id=2, **tokens),
        ],
        SchedulerConfig(),
    )
    assert [a_pass.tokens for a_pass in recording.passes] == [[300, 0], [0, 0, 0, 300]]


@pytest.mark.parametrize("share", [1e-4, -1e-4])
def test_the_engines_clock_may_drift(share: float) -> None:
    """An hour at 100 ppm: 0.36 s in all, and no more than 3 ms within half a minute."""

    def message(kind: str, at_s: float, number: int) -> LogRecord:
        entry = logged(kind, at_s * (1 + share) + 500.0, forward_id=number)
        late_s = 0.002 if number % 3 else 0.0
        return LogRecord(at_s + late_s, entry.event, [])

    starts_s = range(100, 3700)
    records = [
        message(kind, at_s, number)
        for number, at_s in enumerate(starts_s)
        for kind, at_s in (("launch", at_s), ("forward", at_s + 0.6))
    ]
    up = InstanceUp(instance="p0", role="prefill", dp_size=1, chunk_tokens=1024)
    passes = recording_of([LogRecord(0.0, up, []), *records], SchedulerConfig()).passes
    errors_s = [a_pass.end_s - at_s - 0.6 for a_pass, at_s in zip(passes, starts_s, strict=True)]
    assert max(map(abs, errors_s)) <= 0.004
