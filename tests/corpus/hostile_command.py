"""The command line of ``scripts/fuzz``: the corpus, then changes of it."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hostile_inputs import KINDS, Input, corpus
from hostile_mutations import mutations
from hostile_runner import stage

_EPILOG = """\
What is sent goes to a router in front of scripted engines, all in this process, at 127.0.0.1. Every
input has to end exactly once, by an answer or a closed connection, without a 500 of the router's
own, without an error or a traceback in the log, and the next request has to be served. HTTP is
also read by h11: where it and aiohttp both read on, they have to read the same requests.

examples:
  scripts/fuzz                                  # a minute for each kind
  scripts/fuzz --kinds http --seconds 600 --seed 7 --keep out/fuzz
"""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/fuzz",
        description="Hostile inputs: those of tests/corpus/inputs, then random changes of them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="which, by commas (all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each kind (60)")
    parser.add_argument("--seed", type=int, default=1, help="of the changes (1)")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="write inputs with faults there, as a table"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there")
    options = parser.parse_args(arguments)
    options.kinds = options.kinds.split(",")
    unknown = [kind for kind in options.kinds if kind not in KINDS]
    if unknown:
        parser.error(f"--kinds: no kind {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return options


async def fuzz(kind: str, seconds: float, seed: int, keep: Path | None) -> tuple[int, int]:
    """How many inputs were tried, and how many had faults."""
    end_s = time.monotonic() + seconds
    tell_s = time.monotonic() + 5.0
    tried = faulty = 0
    inputs = itertools.chain(corpus(kind), mutations(kind, seed))
    while time.monotonic() < end_s:
        async with stage(kind) as router:  # a new one after a fault
            for given in inputs:
                found = await router.faults(given)
                tried += 1
                if found:
                    faulty += 1
                    print(
                        f"{given.name}: {'; '.join(found)}\n    {given.data[:500]!r} {given.fields}"
                    )
                    _keep(given, keep)
                if time.monotonic() > tell_s:
                    left = max(0.0, end_s - time.monotonic())
                    progress = f"{kind}: {tried} tried, {faulty} with faults, {left:.0f} s left"
                    print(progress, file=sys.stderr)
                    tell_s += 5.0
                if found or time.monotonic() >= end_s:
                    break
    return tried, faulty


def _keep(given: Input, folder: Path | None) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    sent = json.dumps(given.data.decode("latin-1")).replace("\x7f", "\\u007f")
    lines = [
        "[[input]]",
        f"name = {json.dumps(given.name)}",
        f"bytes = {sent}",
        f"# {given.fields}",
    ]
    with (folder / f"{given.kind}.toml").open("a") as table:
        table.write("\n".join(lines) + "\n\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    logging.getLogger().addHandler(logging.NullHandler())
    counts = {
        kind: asyncio.run(fuzz(kind, options.seconds, options.seed, options.keep))
        for kind in options.kinds
    }
    print(f"{'kind':14}{'tried':>10}{'with faults':>14}")
    for kind, (tried, faulty) in counts.items():
        print(f"{kind:14}{tried:>10}{faulty:>14}")
    if options.json is not None:
        rows = [{"kind": kind, "tried": n, "faulty": bad} for kind, (n, bad) in counts.items()]
        options.json.write_text(json.dumps({"seed": options.seed, "rows": rows}, indent=2) + "\n")
    return 1 if any(faulty for _, faulty in counts.values()) else 0
