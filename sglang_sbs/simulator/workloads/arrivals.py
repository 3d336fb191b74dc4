"""Arrivals: synthetic workloads and traces. Conversations are in :mod:`.conversations`."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from sglang_sbs.scheduling.eventlog import MAGIC, read_event_log
from sglang_sbs.scheduling.events import RequestArrived
from sglang_sbs.simulator.cluster.arrival import Arrival

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens per ``hash_id`` of a Mooncake trace."""
_OUTPUT_TOKENS = 200
MOST_PROMPT_TOKENS = 10_000_000
"""Limit on a prompt's tokens in a trace; a longer one counts as an error."""
DAY_LOW, DAY_HIGH = 0.2, 1.1
"""Load at night and at noon of a day whose mean load is 0.65."""
LengthOf = Callable[[random.Random], int]
"""Draws a prompt length in tokens."""


class TraceError(ValueError):
    """A trace is unreadable; the message names file, line and what was expected."""


def uniform_like(longest: int) -> LengthOf:
    """Return a distribution of lengths: ``longest`` x Beta(1, 2), with a mean of a third of
    ``longest`` (the paper's 0-3K, mean 1K)."""
    return lambda rng: int(rng.betavariate(1, 2) * longest) + 1


def truncated_pareto(shortest: int, longest: int, mean: float) -> LengthOf:
    """Return a Pareto distribution between two lengths with the given mean (the paper's 3-64K, mean
    6.7K)."""
    alpha = _pareto_alpha(shortest, longest, mean)
    tail = 1 - (shortest / longest) ** alpha
    return lambda rng: int(shortest * (1 - rng.random() * tail) ** (-1 / alpha))


@cache
def _pareto_alpha(shortest: int, longest: int, mean: float) -> float:
    low, high = 1.01, 8.0
    for _ in range(80):
        alpha = (low + high) / 2
        share = shortest / longest
        expected = alpha / (alpha - 1) * shortest * (1 - share ** (alpha - 1)) / (1 - share**alpha)
        low, high = (alpha, high) if expected > mean else (low, alpha)
    return low


def synthetic(
    qps: float, duration_s: float, length_of: LengthOf, seed: int, *, burstiness: float = 1.0
) -> list[Arrival]:
    """Return arrivals with Gamma-distributed gaps; ``burstiness`` is their coefficient of variation
    (1: Poisson)."""
    rng = random.Random(seed)
    shape = 1 / burstiness**2
    arrivals, now_s = [], 0.0
    while (now_s := now_s + rng.gammavariate(shape, 1 / (qps * shape))) < duration_s:
        arrivals.append(Arrival(now_s, length_of(rng), _OUTPUT_TOKENS))
    return arrivals


def on_off(
    qps: float, duration_s: float, length_of: LengthOf, seed: int, *, phase_s: float
) -> list[Arrival]:
    """Return Poisson arrivals at twice the rate for ``phase_s``, then none for ``phase_s``, and so
    on."""
    # The time of the steady arrivals advances only while the source is on, at twice the speed.
    steady = [(a, a.at_s / 2) for a in synthetic(qps, duration_s, length_of, seed)]
    return [a._replace(at_s=on_s + phase_s * (on_s // phase_s)) for a, on_s in steady]


def day(qps: float, duration_s: float, length_of: LengthOf, seed: int) -> list[Arrival]:
    """Return Poisson arrivals at a rate that rises and falls as a squared sine; ``qps`` is the
    mean."""
    steady = synthetic(qps, duration_s, length_of, seed)
    return [a._replace(at_s=duration_s * time_of_day(a.at_s / duration_s)) for a in steady]


def time_of_day(share: float) -> float:
    """Return the time of day by which this share of the day's requests has arrived; both between 0
    and 1."""
    mean, swing = (DAY_LOW + DAY_HIGH) / 2, (DAY_HIGH - DAY_LOW) / 2
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        come = mean * middle - swing * math.sin(2 * math.pi * middle) / (2 * math.pi)
        low, high = (middle, high) if come < share * mean else (low, middle)
    return high


def with_long(
    arrivals: Sequence[Arrival], duration_s: float, prompt_tokens: int, every_s: float
) -> list[Arrival]:
    times_s = [every_s * (number + 0.5) for number in range(int(duration_s / every_s))]
    long = [Arrival(at_s, prompt_tokens, _OUTPUT_TOKENS) for at_s in times_s]
    return sorted([*arrivals, *long], key=lambda arrival: arrival.at_s)


def with_own_blocks(arrivals: Sequence[Arrival], block_tokens: int) -> list[Arrival]:
    """Give each prompt block names of its own, so that prompts share no prefix. ``block_tokens``: 0
    gives no names."""
    if not block_tokens:
        return list(arrivals)
    named, first = [], 0
    for arrival in arrivals:
        end = first + arrival.prompt_tokens // block_tokens
        named.append(arrival._replace(blocks=tuple(range(first, end))))
        first = end
    return named


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace, sorted by time and starting at 0.

    Formats: Mooncake ``.jsonl`` (``timestamp`` in ms, ``input_length``, ``output_length``, maybe
    ``hash_ids``) and Azure ``.csv`` (``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``);
    and the event log of a router, under any name (:func:`_read_event_log`).

    The hash id of a partial last block is dropped, because engines cache full pages only. A trace
    does not name conversations. Requests count as turns of one conversation if they share the first
    block after the common system prompt, that is, the first that fewer than half of all requests
    have.

    Raises: TraceError: it cannot be read, unknown format, a bad line, or no requests.
    """
    if not path.is_file():
        raise TraceError(f"{path}: no such file")
    reader = {".jsonl": _read_mooncake, ".csv": _read_azure}.get(path.suffix.lower())
    if _is_event_log(path):
        arrivals = sorted(_read_event_log(path))
    elif reader is None:
        raise TraceError(
            f"{path}: expected a Mooncake .jsonl, an Azure .csv trace or an event log of the router"
        )
    else:
        arrivals = _with_sessions(sorted(reader(path, _text_of(path))))
    if not arrivals:
        raise TraceError(f"{path}: no requests in it")
    return [a._replace(at_s=a.at_s - arrivals[0].at_s) for a in arrivals]


def _is_event_log(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error


def _read_event_log(path: Path) -> list[Arrival]:
    """Arrivals of a router's event log in seconds of its clock, lengths in tokens.

    Retries (they exclude the instance that failed) are left out, because they repeat a request. The
    log has no answers, so an answer is as long as the client allowed, or ``_OUTPUT_TOKENS``. Block
    names are left out as well, so that no prefix is found in a cache."""
    arrivals = []
    try:
        for record in read_event_log(path):
            event = record.event
            if not isinstance(event, RequestArrived) or event.exclude:
                continue
            tokens = max(1, _tokens(event.prompt_tokens, "prompt_tokens"))
            most = event.max_new_tokens
            answer = _OUTPUT_TOKENS if most is None else _tokens(most, "max_new_tokens")
            at_s = _finite(record.now_s, "now_s")
            classes = event.session, event.priority, event.tenant
            arrivals.append(Arrival(at_s, tokens, answer, (), *classes))
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: {error}") from error
    return arrivals


def _text_of(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(f"{path}:{line}: this is not UTF-8 text") from error


_BAD_LINE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)


def _read_mooncake(path: Path, text: str) -> list[Arrival]:
    arrivals = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            at_s = _finite(entry["timestamp"], "timestamp") / 1e3
            tokens = max(1, _tokens(entry["input_length"], "input_length"))
            answer = _tokens(entry["output_length"], "output_length")
            names = entry.get("hash_ids", ())[: int(entry["input_length"]) // MOONCAKE_BLOCK_TOKENS]
            arrivals.append(Arrival(at_s, tokens, answer, tuple(map(int, names))))
        except _BAD_LINE as error:
            raise TraceError(f"{path}:{number}: not a Mooncake request ({error})") from error
    return arrivals


def _finite(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    return value


def _tokens(value: Any, name: str) -> int:
    number = _finite(value, name)
    if not 0 <= number <= MOST_PROMPT_TOKENS:
        raise ValueError(f"{name} must be between 0 and {MOST_PROMPT_TOKENS}, not {value!r}")
    return int(number)


def _with_sessions(arrivals: list[Arrival]) -> list[Arrival]:
    users = Counter(block for arrival in arrivals for block in arrival.blocks)
    common = {block for block, count in users.items() if 2 * count >= len(arrivals)}
    firsts = (next((b for b in a.blocks if b not in common), None) for a in arrivals)
    pairs = zip(arrivals, firsts, strict=True)
    return [a if first is None else a._replace(session=str(first)) for a, first in pairs]


def _read_azure(path: Path, text: str) -> list[Arrival]:
    arrivals: list[Arrival] = []
    rows = csv.DictReader(io.StringIO(text, newline=""))
    while True:
        try:
            row = next(rows, None)
            if row is None:
                return arrivals
            # Seven decimals, one more than datetime reads.
            at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            tokens = max(1, _tokens(int(row["ContextTokens"]), "ContextTokens"))
            answer = _tokens(int(row["GeneratedTokens"]), "GeneratedTokens")
            arrivals.append(Arrival(at_s, tokens, answer))
        except (*_BAD_LINE, csv.Error) as error:
            number = rows.reader.line_num
            raise TraceError(f"{path}:{number}: not an Azure request ({error})") from error


def replayed(
    arrivals: Sequence[Arrival], speed: float, duration_s: float, seed: int
) -> list[Arrival]:
    """Return a window of a trace, with times divided by ``speed``. The seed chooses its start.
    After the end of the trace it continues from the beginning with new conversations: their blocks
    get other names."""
    names = 1 + max((max(a.blocks, default=0) for a in arrivals), default=0)
    span_s = (arrivals[-1].at_s + 1e-3) / speed
    offset_s = random.Random(seed).uniform(0, span_s)
    out: list[Arrival] = []
    lap = 0
    while lap * span_s < offset_s + duration_s:
        for arrival in arrivals:
            at_s = arrival.at_s / speed + lap * span_s - offset_s
            if at_s >= duration_s:
                break
            if at_s >= 0:
                out.append(_of_lap(arrival._replace(at_s=at_s), lap, names))
        lap += 1
    return out


def _of_lap(arrival: Arrival, lap: int, names: int) -> Arrival:
    if not lap or not (arrival.blocks or arrival.session):
        return arrival
    blocks = tuple(block + lap * names for block in arrival.blocks)
    return arrival._replace(blocks=blocks, session=arrival.session and f"{arrival.session}.{lap}")
