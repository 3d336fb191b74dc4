"""Texts for times, parts and reasons."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_sbs.console.plain_words import counted
from sglang_sbs.scheduling.explained.decisions import CandidateInstance, Why
from sglang_sbs.scheduling.reasons import Opening, Term, Waited, WaitReason

PART_NAMES = {
    "admission": "admission",
    "retries": "failed attempts before",
    "hold": "hold in the scheduler",
    "way": "way to the engine",
    "queue": "queue of the engine",
    "pass": "forward pass",
    "engine": "engine, to the end of prefill",
    "decode": "KV transfer, first decode step",
}

_REASONS = {
    "admission": "its body was slow, or --max-concurrent-requests were running",
    "retries": "earlier attempts failed",
    "way": "network, or a busy host of the router or the engine",
    "queue": "the pass before it, or the handshake with decode",
    "decode": "a slow transfer, or a busy decode instance",
}
"""Usual reason why each part of the TTFT takes long, used if nothing is known about this
request."""

_OPENINGS = {
    Opening.IDLE: "the instance was idle",
    Opening.ABOUT_TO_END: "the running forward pass of the instance was about to end, and a batch "
    "must be there by then to be in the next one",
    Opening.JOINS: "a batch was on its way to the instance, and the request could still join it",
    Opening.FULL_AHEAD: "more was waiting than all forward passes that start before can hold, so "
    "nothing was to be gained by holding it any longer",
    Opening.AHEAD: "the engine launches one forward pass ahead (overlap scheduling), and the pass "
    "after the next one had nothing to compute yet",
    Opening.FAR_AWAY: "the way to the engine takes most of a forward pass or longer, so holding "
    "gains nothing",
    Opening.INTERVAL: "the dispatch interval was over (--sbs-trigger paper)",
    Opening.AT_ONCE: "this policy sends every request as soon as it arrives",
}
"""Why the request's batch could leave when it did."""

_LEAST_GAIN_S = 0.001
"""Smallest gain, in seconds, that the text mentions; below it the two instances are about equally
good."""


def ms(seconds: float) -> str:
    """Format a duration as ``0.4 ms``, ``412 ms`` or ``12.3 s``."""
    size = abs(seconds)
    if size < 0.01:
        return f"{1e3 * seconds:.1f} ms"
    return f"{1e3 * seconds:,.0f} ms" if size < 10 else f"{seconds:,.1f} s"


def after(seconds: float) -> str:
    return f"+{ms(seconds)}"


def opening(why: Why) -> str:
    return _OPENINGS[why.opening or Opening.AT_ONCE]


def term(why: Why) -> str:
    chosen = next((at for at in why.candidates if at.chosen), None)
    where = chosen.instance if chosen is not None else "this instance"
    match why.term:
        case Term.ONLY_ONE:
            return f"{where} was the only prefill instance"
        case Term.SOONEST:
            return f"of {_of_them(why)}, the next forward pass of {where} starts first"
        case Term.CACHED:
            cached = 0 if chosen is None else chosen.cached_tokens
            prompt = counted(why.prompt_tokens, "prompt token")
            return f"{where} had {cached:,} of its {prompt} in its cache"
        case Term.LEAST_COST:
            return (
                f"its own completion and the delay it causes others, taken together, cost least "
                f"on {where} of {_of_them(why)}"
            )
        case Term.OVERDUE:
            return (
                f"it had been held for as long as any request is, so {where}, the first instance "
                "that could take it, got it"
            )
        case Term.FIRST_OPEN:
            return (
                f"{where} was the first of {_of_them(why)} that could take it; those that start "
                "earlier had no room, or a batch was on its way to them already"
            )
        case _:
            return f"the rule of the policy chose {where}, without predictions"


def _of_them(why: Why) -> str:
    return f"{why.instances} prefill instances"


def wait(waited: Waited, arrived_s: float) -> str:
    """Describe a reason for waiting in a sentence. Times count from the request's arrival."""
    match waited.reason:
        case WaitReason.NOT_YET if waited.instance and waited.until_s is not None:
            return (
                f"every prefill instance was busy; {waited.instance} was expected to be ready "
                f"first, at {after(waited.until_s - arrived_s)}"
            )
        case WaitReason.NOT_YET:
            return "no prefill instance could take a batch yet"
        case WaitReason.NO_DECODE_ROOM:
            return "no decode DP rank had room for the request"
        case WaitReason.BETTER_ELSEWHERE:
            gain_s = waited.gain_s or 0.0
            less = f" by {ms(gain_s)}" if gain_s >= _LEAST_GAIN_S else ""
            return (
                f"{waited.instance or 'another instance'} was the better place{less}, counting its "
                "own completion and the delay of others, and was not ready yet"
            )
        case WaitReason.PREFIX_COMING:
            coming = (
                f"{waited.instance} was computing the beginning of its prompt for another request"
            )
            if waited.until_s is None:
                return coming
            return f"{coming}, to be cached at {after(waited.until_s - arrived_s)}"
        case WaitReason.SHARE_FULL:
            return "a batch left without it, because that forward pass had its share of the queue"
        case WaitReason.DOES_NOT_FIT:
            return "a batch left without it, because no DP rank had room for all of its prompt"
        case WaitReason.EXCLUDED:
            return "the instance that was ready had failed an earlier attempt at it"
        case WaitReason.NO_PREFILL:
            return "no prefill instance was up"
        case WaitReason.NO_DECODE:
            return "no decode instance was up"


def candidate(at: CandidateInstance) -> tuple[str, ...]:
    return (
        f"{'->' if at.chosen else '  '} {at.instance}",
        after(at.start_s),
        after(at.finish_s),
        ms(at.delay_s),
        f"{at.cached_tokens:,}",
        "" if at.cost_s is None else after(at.cost_s) if at.cost_s else "least",
    )


def in_a_line(parts: Mapping[str, float], why: Why | None, computed: int = 0) -> str:
    """Return the longest part of the time to the first token, with its reason. ``computed``:
    uncached prompt tokens."""
    name = max(parts, key=parts.__getitem__, default="")
    if not name:
        return ""
    reason = _REASONS.get(name, "")
    if name == "hold" and why is not None and why.waits:
        until_s = [waited.at_s for waited in why.waits[1:]] + [why.decided_s or why.waits[-1].at_s]
        spans = zip(why.waits, until_s, strict=True)
        longest_wait, _ = max(spans, key=lambda span: span[1] - span[0].at_s)
        reason = wait(longest_wait, why.arrived_s)
    elif name == "pass" and computed:
        reason = f"it had {counted(computed, 'prompt token')} to compute"
    return f"{PART_NAMES[name]} {ms(parts[name])}{': ' if reason else ''}{reason}"


def longest(parts: Mapping[str, float]) -> str:
    """Return the name of the longest part; empty without parts."""
    name = max(parts, key=parts.__getitem__, default="")
    return PART_NAMES.get(name, name)
