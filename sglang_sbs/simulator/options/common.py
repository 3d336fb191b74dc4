"""What the ``simulate`` commands share on the command line, and the progress bar."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_sbs.extras import without_matplotlib
from sglang_sbs.outputs import try_to_write
from sglang_sbs.simulator.cluster.cost import COSTS, CostError, cost_name, find_cost
from sglang_sbs.simulator.parallel import Row, Task, run_all
from sglang_sbs.simulator.workloads.scenario import WARM_UP_S

_MOST_INSTANCES = 64
PLOT_SUFFIXES = (".png", ".svg", ".html")
_FILE_WIDTH = 130
"""Columns where the output is no terminal: wide enough for every table."""


def numbers(text: str) -> list[float]:
    """Comma-separated positive numbers."""
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: write positive numbers, as in 0.6,0.8,1.0")
    return values


def integers(text: str) -> list[int]:
    """Comma-separated positive integers."""
    try:
        values = [int(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write positive integers, as in 3072,6144")
    return values


def positive(text: str) -> int:
    """A positive integer."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write a positive integer, as in 3")
    return value


def positive_number(text: str) -> float:
    """A positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: write a positive number, as in 0.8")
    return value


def not_negative(text: str) -> float:
    """A number that is 0 or greater."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: write a number, 0 or greater")
    return value


def instance_counts(text: str) -> list[int]:
    """``2..6`` or ``2,4,6``."""
    first, dots, last = text.partition("..")
    try:
        values = list(range(int(first), int(last) + 1)) if dots else integers(text)
    except ValueError:
        values = []
    if not values or not all(1 <= value <= _MOST_INSTANCES for value in values):
        raise argparse.ArgumentTypeError(
            f"{text!r}: write a range or a list between 1 and {_MOST_INSTANCES}, as in 2..6 or 2,4"
        )
    return values


def names(
    text: str, allowed: Collection[str], flag: str, parser: argparse.ArgumentParser
) -> list[str]:
    """Comma-separated names, each one of ``allowed``; ends the program with code 2 otherwise."""
    words = text.split(",")
    for word in words:
        if word not in allowed:
            parser.error(f"{flag}: {word!r} is not one of {', '.join(allowed)}")
    return words


def cost_words(text: str, parser: argparse.ArgumentParser) -> list[str]:
    """Comma-separated costs that can be found; ends the program with code 2 otherwise."""
    words = text.split(",")
    for word in words:
        try:
            find_cost(word)
        except CostError as error:
            parser.error(f"--cost: {error}")
    called = [cost_name(word) for word in words]
    for word, name in zip(words, called, strict=True):
        if called.count(name) > 1 or (name in COSTS and word not in COSTS):
            parser.error(f"--cost: rows would call two costs {name!r}; rename or leave out {word}")
    return words


def add_overlap(group: argparse._ActionsContainer, *, default: bool = True) -> argparse.Action:
    """``--overlap``, ``--no-overlap``: how the simulated engines launch their passes."""
    return group.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=default,
        help="engines look one batch ahead, as SGLang does by default: what waits when a pass "
        "starts is the next one, without what arrives while it runs. --no-overlap, SGLang's "
        "--disable-overlap-schedule: a pass takes all that waits when it starts "
        f"(--{'' if default else 'no-'}overlap)",
    )


def add_common(
    parser: argparse.ArgumentParser,
    *,
    default_seeds: int | None = 1,
    seeds_help: str = "seeds per cell (default 1)",
) -> None:
    """Flags every simulation has."""
    parser.add_argument("--seeds", type=positive, default=default_seeds, help=seeds_help)
    parser.add_argument("--first-seed", type=int, default=1, help="(default 1)")
    parser.add_argument(
        "--cost",
        default="mixed",
        help=f"cost models of a pass, comma-separated: {', '.join(COSTS)}, or FILE.json with one "
        "fitted to an engine's EndForward reports, called by its stem (default mixed)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--workers", type=positive, metavar="N", help="processes (default: cores)")


def add_prefill_runs(parser: argparse.ArgumentParser, policies: str) -> None:
    """Flags of the commands that run prefill scenarios under policies."""
    parser.add_argument("--policies", help=f"comma-separated (default {policies})")
    parser.add_argument(
        "--chunks", type=integers, help="C_chunk per rank, comma-separated (the scenario's)"
    )
    parser.add_argument(
        "--duration",
        type=positive_number,
        default=80.0,
        help=f"simulated seconds, {WARM_UP_S:g} of them warm-up (80)",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="picture (png, svg) or page with tables (html); wants matplotlib",
    )


def check_prefill_runs(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the program with code 2 for what cannot be run or drawn."""
    if args.plot is not None and args.plot.suffix not in PLOT_SUFFIXES:
        parser.error(f"--plot {args.plot}: the name must end in {', '.join(PLOT_SUFFIXES)}")
    if args.duration <= WARM_UP_S:
        parser.error(f"--duration must be longer than the warm-up of {WARM_UP_S:g} s")


def check_outputs(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the program with code 2 if ``--json``, ``--plot`` or ``--out`` cannot be written or
    drawn: before anything is simulated for it."""
    for name in ("json", "plot", "out"):
        path: Path | None = getattr(args, name, None)
        if path is None:
            continue
        try:
            if name == "out":
                path.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=path).close()
            else:
                try_to_write(path)
        except OSError as error:
            parser.error(f"--{name} {path}: cannot be written: {error.strerror}")
        if name != "json" and (lacking := without_matplotlib()) is not None:
            parser.error(f"--{name} {path}: a picture is wanted, but {lacking}")


def given(
    words: Sequence[str], args: argparse.Namespace, parser: argparse.ArgumentParser
) -> set[str]:
    """What of the parsed ``args`` stands on the command line, be it the default or not."""
    blank = argparse.Namespace(**dict.fromkeys(vars(args)))
    return {
        name for name, value in vars(parser.parse_args(words, blank)).items() if value is not None
    }


def seeds(args: argparse.Namespace) -> range:
    """The seeds of every cell."""
    return range(args.first_seed, args.first_seed + args.seeds)


def open_console() -> Console:
    """Standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


def run_with_progress(tasks: Sequence[Task], console: Console, workers: int | None) -> list[Row]:
    """Run the tasks behind a progress bar."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("simulating", total=len(tasks))
        return run_all(tasks, lambda _row: progress.advance(task), workers)


def write_json(rows: Sequence[Row], path: Path, console: Console) -> None:
    """The rows as a JSON list; what has no value is null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(list(rows), option=orjson.OPT_INDENT_2))
    console.print(f"written: {path}")
