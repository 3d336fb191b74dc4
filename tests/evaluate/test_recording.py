"""A recorded run attributes passes to requests."""

from __future__ import annotations

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
    who = {"instance_id": name, "boot_id": name}
    made = report(**who, kind=kind, forward_id=1, **times, **more)
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
