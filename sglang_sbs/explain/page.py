"""One page of text about a request."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime

from sglang_sbs.console.ask_router import plain
from sglang_sbs.console.plain_words import counted
from sglang_sbs.explain import words
from sglang_sbs.explain.words import after, ms
from sglang_sbs.scheduling.eventlog import OBSERVED
from sglang_sbs.scheduling.explained.stories import AttemptStory, Story

_AT_ONCE_S = 1e-4
_BAR = 30
_MOST_SHOWN = 8
"""Limit on attempts of a request that get a section of their own."""


def page(story: Story, log_began_s: float | None = None) -> str:
    """Format a request. Control characters from other parties are removed. ``log_began_s``: the
    scheduler's time at the beginning of an event log."""
    return plain("\n".join(_lines(story, log_began_s)) + "\n")


def _lines(story: Story, log_began_s: float | None) -> Iterator[str]:
    yield from _head(story, log_began_s)
    shown = story.attempts[:_MOST_SHOWN]
    for number, attempt in enumerate(shown, 1):
        if len(story.attempts) > 1:
            yield ""
            yield f"Attempt {number} of {len(story.attempts)}: rid {attempt.timeline.rid}"
        yield from _attempt(attempt, story)
    if len(story.attempts) > len(shown):
        yield ""
        rest = len(story.attempts) - len(shown)
        yield f"{rest} more of this request's attempts are left out: ask for them by their rid."
    if not story.attempts:
        yield ""
        yield "The scheduler does not remember it: it was refused at once, or it is long over."


def _head(story: Story, log_began_s: float | None) -> Iterator[str]:
    first = story.attempts[0].timeline if story.attempts else None
    name = story.request_id or (first.rid if first is not None else "")
    what = f" ({story.kind})" if story.kind else ""
    when = ""
    if story.began_unix_s is not None:
        at = datetime.fromtimestamp(story.began_unix_s, UTC)
        when = f" arrived at {at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03d} UTC"
    elif first is not None and log_began_s is not None:
        when = f" arrived {ms(first.arrived_s - log_began_s)} after the log begins"
    yield f"Request {name}{what}{when}."
    if first is not None:
        tokens = counted(first.prompt_tokens, "prompt token")
        split = f"; it was split into {story.units} single requests" if story.units > 1 else ""
        yield f"It has {tokens}{split}. The router sent it as rid {first.rid}."
    if story.status is not None and story.seconds is not None:
        yield f"It was answered with status {story.status} after {ms(story.seconds)}."


def _attempt(attempt: AttemptStory, story: Story) -> Iterator[str]:
    timeline = attempt.timeline
    yield from _result(attempt, story)
    if attempt.parts:
        yield ""
        yield "Where the time to its first token went"
        whole_s = max(sum(attempt.parts.values()), 1e-9)
        for name, seconds in attempt.parts.items():
            bar = "#" * round(_BAR * seconds / whole_s)
            yield f"  {words.PART_NAMES[name]:<31}{ms(seconds):>10}  {bar}".rstrip()
        if "engine" in attempt.parts:
            yield "  (The engine did not report its passes, so its part cannot be divided.)"
    why, decision = attempt.why, timeline.decision
    if timeline.decided_s is None and not timeline.outcome:
        yield ""
        yield f"It still waits, for {ms(attempt.now_s - timeline.arrived_s)} now, because"
        yield from _waits(attempt)
    elif timeline.decided_s is None:
        if why is not None:
            yield ""
            yield "It had waited until then, because"
            yield from _waits(attempt)
    else:
        held_s = timeline.decided_s - timeline.arrived_s
        yield ""
        if why is not None and not why.waits and held_s < _AT_ONCE_S:
            yield f"It was not held ({ms(held_s)}): it left as soon as it arrived."
        elif why is not None and not why.waits:
            # The paper's trigger looks at the queue once per interval, and notes no reasons.
            yield f"It was held {ms(held_s)} by the scheduler, for reasons that are not recorded."
        else:
            yield f"It was held {ms(held_s)} by the scheduler, because"
            yield from _waits(attempt)
    if decision is not None:
        yield ""
        decode = f"{decision.decode} DP rank {decision.decode_rank}"
        yield f"It was sent to {decision.prefill} DP rank {decision.prefill_rank}"
        held = decision.decode_cached_tokens
        has = f", which has {held:,} tokens of its prompt" if held else ""
        yield f"  It is decoded on {decode}{has}."
        yield from _choice(attempt)
        yield from _predicted(attempt)


def _result(attempt: AttemptStory, story: Story) -> Iterator[str]:
    timeline = attempt.timeline
    if timeline.refusal is not None:
        waited = ms((timeline.ended_s or timeline.arrived_s) - timeline.arrived_s)
        refusal = timeline.refusal
        yield f"The scheduler refused it after {waited} ({refusal.cause}): {refusal.message}."
        return
    if attempt.ttft_s is not None:
        yield f"Its first token came after {ms(attempt.ttft_s)}."
    failures = [sent.failure for sent in story.sent if sent.rid == timeline.rid and sent.failure]
    if failures:
        yield f"The attempt failed: {failures[0]}."
    elif timeline.outcome in ("failed", "aborted"):
        yield f"The attempt ended as {timeline.outcome}."
    elif timeline.outcome == "completed" and timeline.completion_tokens is not None:
        yield f"It was completed with {counted(timeline.completion_tokens, 'token')}."


def _waits(attempt: AttemptStory) -> Iterator[str]:
    why = attempt.why
    decision = attempt.timeline.decision
    if why is None and decision is not None and decision.reason == OBSERVED:
        yield "  another router placed it, for reasons that engines do not see."
        return
    if why is None:
        yield "  (no reasons: a router keeps those of its last few thousand decisions, and a log of"
        yield "  another release can be replayed up to its first different decision only)"
        return
    for waited in why.waits:
        since_s = waited.at_s - why.arrived_s
        since = f"from {after(since_s)} on" if since_s > _AT_ONCE_S else "at first"
        yield f"  {since} {words.wait(waited, why.arrived_s)}."
    if not why.waits:
        yield "  no decision has looked at it yet."
    if why.batches:
        batches = "1 batch" if why.batches == 1 else f"{why.batches:,} batches"
        yield f"  meanwhile {batches} of other requests left."


def _choice(attempt: AttemptStory) -> Iterator[str]:
    why = attempt.why
    if why is None:
        decision = attempt.timeline.decision
        if decision is not None and decision.reason:
            yield f"  The scheduler's note: {decision.reason}."
        return
    yield f"  Why then: {words.opening(why)}."
    yield f"  Why there: {words.term(why)}."
    if not why.candidates:
        return
    head = ("   instance", "pass starts", "prompt done", "delays others", "cached", "extra cost")
    rows = [head, *(words.candidate(candidate) for candidate in why.candidates)]
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    yield "  Predicted when it was sent, from then on, without the rest of its batch (-> chosen):"
    yield from table(rows)


def table(rows: Sequence[tuple[str, ...]], left: Collection[int] = (0,)) -> Iterator[str]:
    """Align cells in columns. ``left``: indices of left-aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def _predicted(attempt: AttemptStory) -> Iterator[str]:
    why, timeline = attempt.why, attempt.timeline
    if why is None or why.launch_s is None:
        return
    steps = [("forward pass started", why.launch_s, timeline.launched_s)]
    if why.end_s is not None:
        steps.append(("prompt was computed", why.end_s, timeline.computed_s))
    known = [(name, predicted, real) for name, predicted, real in steps if real is not None]
    if not known:
        return
    yield "  Predicted with its batch, and real, in times from its arrival at the scheduler:"
    for name, predicted_s, real_s in known:
        off_s = real_s - predicted_s
        how = f"{ms(abs(off_s))} {'later' if off_s > 0 else 'earlier'}"
        predicted, real = (
            after(predicted_s - timeline.arrived_s),
            after(real_s - timeline.arrived_s),
        )
        yield f"    {name}: predicted {predicted}, real {real} ({how})"
