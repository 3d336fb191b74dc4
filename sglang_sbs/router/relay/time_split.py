"""Splits the time to a request's first token, for the access log and ``Server-Timing``."""

from __future__ import annotations

import msgspec

from sglang_sbs.router.assignment.assigner import Assigner
from sglang_sbs.router.relay.recent import RecentRequest
from sglang_sbs.scheduling.explained.stories import AttemptStory, Story
from sglang_sbs.scheduling.explained.timelines import ENGINE

HEADER = "Server-Timing"


def complete(story: Story, one: RecentRequest) -> None:
    """Add the front end's view of an attempt in progress."""
    if len(story.sent) != 1 or one.announced_s is None:
        return
    for number, attempt in enumerate(story.attempts):
        if attempt.timeline.client is None:
            client = one.client_side(one.announced_s, one.first_byte_s)
            timeline = msgspec.structs.replace(attempt.timeline, client=client)
            story.attempts[number] = AttemptStory(timeline, attempt.why, attempt.now_s)


def split_of(one: RecentRequest, assigner: Assigner) -> dict[str, float]:
    """Return the TTFT's parts in seconds (``scheduling/explained/timelines.py``). If another
    process schedules, everything after the hold is one part."""
    if one.announced_s is None or one.first_byte_s is None:
        return {}
    known = assigner.timeline(one.sent[0].rid) if len(one.sent) == 1 else None
    if known is not None and known.decided_s is not None:
        client = one.client_side(one.announced_s, one.first_byte_s)
        return known.parts(client)
    parts = {"admission": one.announced_s - one.began_s}
    left_s = one.first_byte_s - one.announced_s
    if one.held_s is not None and len(one.sent) == 1:
        parts["hold"] = min(one.held_s, left_s)
        left_s -= parts["hold"]
    return parts | {ENGINE: left_s}


def server_timing(parts: dict[str, float]) -> str:
    """Return the header's value; empty without parts."""
    if not parts:
        return ""
    each = [f"{name};dur={1e3 * seconds:.1f}" for name, seconds in parts.items()]
    return ", ".join([*each, f"ttft;dur={1e3 * sum(parts.values()):.1f}"])


def in_one_line(one: RecentRequest, parts: dict[str, float]) -> str:
    """Format the rids and the split for the access log."""
    rids = [attempt.rid for attempt in one.sent[:2]]
    more = f" and {len(one.sent) - 2} more" if len(one.sent) > 2 else ""
    text = f"rid {' '.join(rids)}{more}" if rids else "not sent"
    if parts:
        split = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in parts.items())
        text += f"; ttft {1e3 * sum(parts.values()):.0f} ms ({split})"
    return text
