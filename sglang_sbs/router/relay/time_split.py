"""Splits the time to a request's first token, for the access log and ``Server-Timing``."""

from __future__ import annotations

import msgspec

from sglang_sbs.router.dispatch.dispatcher import Dispatcher
from sglang_sbs.router.relay.recent import RecentRequest
from sglang_sbs.scheduling.explained.stories import AttemptStory, Story
from sglang_sbs.scheduling.explained.timelines import ENGINE

HEADER = "Server-Timing"


def complete(story: Story, request: RecentRequest) -> None:
    """Add the front end's times to a story's attempt in progress, in place, if it has only one."""
    if len(story.sent) != 1 or request.submitted_s is None:
        return
    for number, attempt in enumerate(story.attempts):
        if attempt.timeline.client is None:
            client = request.client_side(request.submitted_s, request.first_byte_s)
            timeline = msgspec.structs.replace(attempt.timeline, client=client)
            story.attempts[number] = AttemptStory(timeline, attempt.why, attempt.now_s)


def split_of(request: RecentRequest, dispatcher: Dispatcher) -> dict[str, float]:
    """Return the TTFT's parts in seconds (``scheduling/explained/timelines.py``); empty before the
    first byte. If another process schedules, everything after the hold is one part."""
    if request.submitted_s is None or request.first_byte_s is None:
        return {}
    known = dispatcher.timeline(request.sent[0].rid) if len(request.sent) == 1 else None
    if known is not None and known.decided_s is not None:
        client = request.client_side(request.submitted_s, request.first_byte_s)
        return known.parts(client)
    parts = {"admission": request.submitted_s - request.began_s}
    left_s = request.first_byte_s - request.submitted_s
    if request.held_s is not None and len(request.sent) == 1:
        parts["hold"] = min(request.held_s, left_s)
        left_s -= parts["hold"]
    return parts | {ENGINE: left_s}


def server_timing(parts: dict[str, float]) -> str:
    """Return the ``Server-Timing`` header's value for parts in seconds; empty without parts."""
    if not parts:
        return ""
    each = [f"{name};dur={1e3 * seconds:.1f}" for name, seconds in parts.items()]
    return ", ".join([*each, f"ttft;dur={1e3 * sum(parts.values()):.1f}"])


def in_one_line(request: RecentRequest, parts: dict[str, float]) -> str:
    """Return the request's rids and the parts of its TTFT (given in seconds) for the access log."""
    rids = [attempt.rid for attempt in request.sent[:2]]
    more = f" and {len(request.sent) - 2} more" if len(request.sent) > 2 else ""
    text = f"rid {' '.join(rids)}{more}" if rids else "not sent"
    if parts:
        split = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in parts.items())
        text += f"; ttft {1e3 * sum(parts.values()):.0f} ms ({split})"
    return text
