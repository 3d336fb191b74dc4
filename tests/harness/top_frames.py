"""Frames of sglang-sbs top."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from harness.recorders import LoneRecorder
from sglang_sbs.dashboard.top_view import TopView
from sglang_sbs.scheduling import InstanceUp, RequestArrived, Scheduler, SchedulerConfig


def frame_of(prefill: int, decode: int, dp_size: int = 8) -> dict[str, Any]:
    """A real frame of a scheduler with so many instances and some requests."""
    scheduler = Scheduler(SchedulerConfig())
    recorder = LoneRecorder(scheduler, 1.0)
    for role, count in (("prefill", prefill), ("decode", decode)):
        for number in range(count):
            name = f"http://{role}-{number}.example:30000"
            up = InstanceUp(instance=name, role=role, dp_size=dp_size, chunk_tokens=4096)
            scheduler.handle(up, 1.0)
    for number in range(20):
        event = RequestArrived(rid=f"r{number}", prompt_tokens=3000)
        recorder.observe(event, scheduler.handle(event, 2.0), 2.0)
    return recorder.frame(2.5)


def drawn(frame: dict[str, Any], width: int, height: int) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=False)
    console.print(TopView(frame, "here"))
    return out.getvalue().rstrip("\n").split("\n")
