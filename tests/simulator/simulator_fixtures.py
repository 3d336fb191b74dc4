"""The fields every row must have, arrivals, and tiny traces in the two formats."""

from __future__ import annotations

import json
import random
from pathlib import Path

ROW_FIELDS = {
    "scenario",
    "policy",
    "load",
    "qps",
    "seed",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "chunk_utilization",
    "bubble_share",
    "completed",
    "rejected",
}

CACHE_FIELDS = {
    "prompt_tokens",
    "computed_tokens",
    "recomputed_tokens",
    "optimal_tokens",
    "hit_rate",
}


def poisson(qps: float, duration_s: float, seed: int, longest: int = 3000):
    """Arrivals (time in s, prompt tokens) as :func:`simulate` takes them."""
    rng = random.Random(seed)
    arrivals, now_s = [], 0.0
    while (now_s := now_s + rng.expovariate(qps)) < duration_s:
        arrivals.append((now_s, int(rng.betavariate(1, 2) * longest) + 1))
    return arrivals


def lengths(count: int, seed: int = 0) -> list[tuple[float, int, int]]:
    """(time in s, prompt tokens, output tokens), sorted by time."""
    rng = random.Random(seed)
    rows, now_s = [], 0.0
    for _ in range(count):
        rows.append((now_s, rng.randint(1, 4000), rng.randint(1, 300)))
        now_s += rng.expovariate(10)
    return rows


def write_mooncake(path: Path, rows: list[tuple[float, int, int]]) -> Path:
    path.write_text(
        "".join(
            json.dumps({"timestamp": round(t * 1e3), "input_length": i, "output_length": o}) + "\n"
            for t, i, o in rows
        )
    )
    return path


def write_azure(path: Path, rows: list[tuple[float, int, int]]) -> Path:
    body = "".join(
        f"2023-11-16 18:{17 + int(t // 60):02d}:{t % 60:010.7f},{i},{o}\n" for t, i, o in rows
    )
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + body)
    return path


def write_turns(path: Path, conversations: int, turns: int, gap_s: float = 2.0) -> Path:
    """A Mooncake trace of conversations: a common block of 512 tokens, then two more per turn."""
    lines = []
    for number in range(conversations):
        for turn in range(turns):
            full = 1 + 2 * (turn + 1)
            own = [1 + 1000 * (number + 1) + depth for depth in range(full - 1)]
            partial = 10**9 + 100 * number + turn
            lines.append(
                {
                    "timestamp": round(1e3 * (turn * gap_s + number * gap_s / conversations)),
                    "input_length": full * 512 + 100,
                    "output_length": 10,
                    "hash_ids": [0, *own, partial],
                }
            )
    lines.sort(key=lambda line: line["timestamp"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
