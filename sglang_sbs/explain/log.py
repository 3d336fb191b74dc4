"""``sglang-sbs log``: shows an event log."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from sglang_sbs.explain import words
from sglang_sbs.explain.event_log import ReadLog, read
from sglang_sbs.explain.page import table
from sglang_sbs.explain.words import ms
from sglang_sbs.scheduling.explained.timelines import PARTS, Timeline

_PARTS = (*PARTS[:3], "engine", *PARTS[3:])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="sglang-sbs log",
        description="Summarize an event log (--sbs-event-log): requests, times to the first token "
        "and their parts, refusals, and the slowest requests.",
        epilog="examples:\n"
        "  sglang-sbs log router.events\n"
        "  sglang-sbs log router.events --slowest 50\n"
        "  sglang-sbs why RID --log router.events     # one of them in full\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("log", type=Path, metavar="EVENTS", help="the file")
    slowest = "number of the slowest requests to show (default: %(default)s)"
    made.add_argument("--slowest", type=int, default=20, metavar="N", help=slowest)
    made.add_argument(
        "--json", action="store_true", help="one JSON object per request, all of them"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 1 if the log cannot be read; 2 for bad flags."""
    made = parser()
    args = made.parse_args(argv)
    if args.slowest < 0:
        made.error(f"--slowest {args.slowest}: 0 or more")
    try:
        log = read(args.log, replay=False)
    except (OSError, ValueError) as error:
        print(f"sglang-sbs log: {error}", file=sys.stderr)
        return 1
    lines = _json(log) if args.json else _text(log, args.log, args.slowest)
    for line in lines:
        print("".join(c if c.isprintable() else "?" for c in line))
    return 0


def _json(log: ReadLog) -> Iterator[str]:
    for timeline in log.requests():
        shown = msgspec.to_builtins(timeline) | {
            "parts": timeline.parts(),
            "ttft_s": timeline.ttft_s,
        }
        yield msgspec.json.encode(shown).decode()


def _text(log: ReadLog, path: Path, slowest: int) -> Iterator[str]:
    requests = log.requests()
    took_s = log.ended_s - log.began_s
    config = log.config
    trigger = f", trigger {config.trigger}" if config.policy == "sbs" else ""
    how = "observed" if log.observed else f"policy {config.policy}{trigger}"
    yield f"{path}: {_span(took_s)}, {log.events:,} events, {how}"
    if log.switches:
        turns = [f"{policy} at +{at_s - log.began_s:.1f} s" for at_s, policy in log.switches]
        more = f" and {len(turns) - 8} more" if len(turns) > 8 else ""
        yield f"the policy was switched: {', '.join(turns[:8])}{more}"
    for role in ("prefill", "decode"):
        ups = [up for up in log.instances.values() if up.role == role]
        shown = ", ".join(f"{up.instance} ({up.dp_size} DP ranks)" for up in ups[:4])
        more = f" and {len(ups) - 4} more" if len(ups) > 4 else ""
        yield f"{len(ups)} {role} instance{'' if len(ups) == 1 else 's'}: {shown}{more}"
    outcomes = Counter(map(_outcome, requests))
    counted = ", ".join(f"{number:,} {name}" for name, number in outcomes.most_common())
    yield f"{len(requests):,} attempts at requests{': ' if counted else ''}{counted}"
    if refusals := log.refusals():
        yield "refused: " + ", ".join(f"{n:,} {cause}" for cause, n in refusals.most_common())
    if log.torn_bytes:
        yield f"the last {log.torn_bytes} bytes are a record that was not written to its end"
    yield from _times(requests)
    slow = sorted(requests, key=_total_s, reverse=True)[:slowest]
    if slow:
        yield ""
        yield f"The slowest {len(slow)}, by the time to the first token (or to their end so far)"
        head = ("first token", "held", "longest part", "arrived", "prompt", "sent to", "rid")
        yield from table([head, *(_row(timeline, log) for timeline in slow)], left={2, 5, 6})


def _times(requests: Sequence[Timeline]) -> Iterator[str]:
    ttft = sorted(timeline.ttft_s for timeline in requests if timeline.ttft_s is not None)
    held = sorted(
        timeline.decided_s - timeline.arrived_s
        for timeline in requests
        if timeline.decided_s is not None
    )
    if ttft:
        yield f"time to the first token: p50 {ms(_at(ttft, 0.5))}, p99 {ms(_at(ttft, 0.99))}"
    if held:
        yield f"held by the scheduler: p50 {ms(_at(held, 0.5))}, p95 {ms(_at(held, 0.95))}"
    parts = [timeline.parts() for timeline in requests if timeline.ttft_s is not None]
    if not parts:
        return
    mean_s = fmean(sum(split.values()) for split in parts)
    yield ""
    yield f"Where the time to the first token went, mean of {len(parts):,}"
    for name in _PARTS:
        if any(name in split for split in parts):
            part_s = sum(split.get(name, 0.0) for split in parts) / len(parts)
            share = part_s / mean_s if mean_s else 0.0
            yield f"  {words.PART_NAMES[name]:<31}{ms(part_s):>10}{share:>6.0%}"


def _outcome(timeline: Timeline) -> str:
    return timeline.outcome or ("not over" if timeline.prefilled_s is None else "prefilled")


def _total_s(timeline: Timeline) -> float:
    if timeline.ttft_s is not None:
        return timeline.ttft_s
    return (timeline.ended_s or timeline.prefilled_s or timeline.arrived_s) - timeline.arrived_s


def _row(timeline: Timeline, log: ReadLog) -> tuple[str, ...]:
    decision = timeline.decision
    if decision is not None:
        to = f"{decision.prefill} rank {decision.prefill_rank}"
    else:
        to = f"refused: {timeline.refusal.cause}" if timeline.refusal is not None else "nowhere"
    held = "" if timeline.decided_s is None else ms(timeline.decided_s - timeline.arrived_s)
    first = ms(_total_s(timeline)) if timeline.ttft_s is not None else f"({ms(_total_s(timeline))})"
    arrived = f"+{timeline.arrived_s - log.began_s:.1f} s"
    tokens = f"{timeline.prompt_tokens:,}"
    return first, held, words.longest(timeline.parts()), arrived, tokens, to, timeline.rid


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
