"""Command-line helpers of the ``simulate`` commands, and the progress bar."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_sbs.console.extras import without_matplotlib
from sglang_sbs.console.outputs import try_to_write
from sglang_sbs.console.plain_words import counted
from sglang_sbs.simulator.cluster.cost import COSTS, CostError, cost_name, find_cost
from sglang_sbs.simulator.cluster.spec import TopologyError
from sglang_sbs.simulator.parallel import Interrupted, Row, Task, processes, run_all
from sglang_sbs.simulator.workloads.arrivals import TraceError
from sglang_sbs.simulator.workloads.scenario import (
    WARM_UP_S,
    Scenario,
    ScenarioError,
    make_scenario,
)

_MOST_INSTANCES = 64
_PLOT_SUFFIXES = (".png", ".svg", ".html")
DURATION_S = 80.0
_FILE_WIDTH = 130
"""Width of the output in columns if it is not a terminal: wide enough for every table."""
_LINES = 20
"""Limit on progress lines of one command."""
_LONG_S = 5.0
"""Seconds below which the expected duration of the runs is not printed."""
_Value = TypeVar("_Value")


def checked(
    parse: Callable[[str], _Value], fits: Callable[[_Value], bool], wanted: str
) -> Callable[[str], _Value]:
    """Return a type for argparse that parses with ``parse``; values that do not satisfy ``fits``
    cause an error that asks for ``wanted``."""

    def value_of(text: str) -> _Value:
        with suppress(ValueError):
            value = parse(text)
            if fits(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r}: write {wanted}")

    return value_of


def _span(text: str) -> list[int]:
    first, dots, last = text.partition("..")
    return list(range(int(first), int(last) + 1)) if dots else integers(text)


positive = checked(int, lambda n: n > 0, "a positive integer, as in 3")
positive_number = checked(float, lambda x: 0 < x < math.inf, "a positive number, as in 0.8")
not_negative = checked(float, lambda x: 0 <= x < math.inf, "a number, 0 or greater")
numbers = checked(
    lambda text: [float(word) for word in text.split(",")],
    lambda some: all(0 < x < math.inf for x in some) and len({*some}) == len(some),
    "positive numbers, each once, as in 0.6,0.8,1.0",
)
integers = checked(
    lambda text: [int(word) for word in text.split(",")],
    lambda some: min(some) > 0 and len({*some}) == len(some),
    "positive integers, each once, as in 3072,6144",
)
instance_counts = checked(
    _span,
    lambda some: bool(some) and all(1 <= n <= _MOST_INSTANCES for n in some),
    f"a range or a list between 1 and {_MOST_INSTANCES}, as in 2..6 or 2,4",
)
"""Parses ``2..6`` or ``2,4,6``."""


class Flag(NamedTuple):
    """A flag, and the keyword of the simulation that its value becomes."""

    name: str
    field: str
    """Keyword of the simulation that the value becomes; empty if the keyword depends on other
    values as well."""
    type: Callable[[str], Any] | type[argparse.Action] | tuple[str, ...]
    """Parser of the flag's value, or the allowed values; ``bool``: the flag has no value."""
    default: Any
    help: str
    metavar: str | None = None
    per: float = 1
    """Units of the flag per unit of the field."""
    repeated: bool = False

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


def add_all(group: argparse._ActionsContainer, flags: Iterable[Flag]) -> None:
    for flag in flags:
        words: dict[str, Any] = {"metavar": flag.metavar} if flag.metavar else {}
        if isinstance(flag.type, tuple):
            words["choices"] = flag.type
        elif flag.type is argparse.BooleanOptionalAction:
            words["action"] = flag.type
        elif flag.type is bool:
            words["action"] = "store_true"
        else:
            words["type"] = flag.type
        if flag.repeated:
            words["action"] = "extend"
        words |= {"default": flag.default, "help": flag.help}
        group.add_argument(flag.name, **words)


def given(parser: argparse.ArgumentParser, words: Sequence[str]) -> set[str]:
    """Names of the flags and positional arguments in ``words``, including those that repeat a
    default. The parser has no defaults afterwards."""
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    dests = vars(parser.parse_args(words))
    return {
        (action.option_strings or [action.dest])[0]
        for action in parser._actions
        if action.dest in dests
    }


def fields_of(args: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    values = [(flag, getattr(args, flag.dest)) for flag in flags if flag.field]
    return {
        flag.field: value if flag.per == 1 or value is None else value / flag.per
        for flag, value in values
    }


def names(
    text: str, allowed: Collection[str], flag: str, parser: argparse.ArgumentParser
) -> list[str]:
    """Split comma-separated names, each one of ``allowed``; ends the program with code 2
    otherwise."""
    words = text.split(",")
    for word in words:
        if word not in allowed:
            parser.error(f"{flag}: {word!r} is not one of {', '.join(allowed)}")
        if words.count(word) > 1:
            parser.error(f"{flag}: {word} is named twice")
    return words


def cost_words(text: str, parser: argparse.ArgumentParser) -> list[str]:
    """Split comma-separated costs, all of which must exist; ends the program with code 2
    otherwise."""
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


def checked_scenario(
    args: argparse.Namespace, parser: argparse.ArgumentParser, name: str, spec: Mapping[str, Any]
) -> Scenario:
    """Build a scenario; ends the program with code 2 if it is invalid or ends with its warm-up."""
    try:
        scenario = make_scenario(name, **spec)
    except TopologyError as error:
        parser.error(f"--at {error}")
    except (ScenarioError, TraceError) as error:
        parser.error(str(error))
    if args.duration <= scenario.warm_up_s:
        parser.error(f"--duration must be longer than the warm-up of {scenario.warm_up_s:g} s")
    return scenario


def add_overlap(group: argparse._ActionsContainer, *, default: bool = True) -> None:
    text = (
        "engines look one batch ahead, as SGLang does by default: requests that wait when a pass "
        "starts form the next one, without those that arrive while it runs. --no-overlap, "
        "SGLang's --disable-overlap-schedule: a pass takes all requests that wait when it starts "
        f"(--{'' if default else 'no-'}overlap)"
    )
    add_all(group, [Flag("--overlap", "", argparse.BooleanOptionalAction, default, text)])


def command(
    name: str, description: str, epilog: str, usage: str | None = None
) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"sglang-sbs simulate {name}".rstrip(),
        usage=usage and f"%(prog)s {usage}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


# fmt: off
PLOT = Flag("--plot", "", Path, None,
    "picture (png, svg) or page with tables (html); wants matplotlib", "FILE")
_COST = Flag("--cost", "", str, "mixed",
    f"cost models of a pass, comma-separated: {', '.join(COSTS)}, or FILE.json with one "
    "fitted to an engine's EndForward reports, called by its stem (default mixed)")
_RUNS = (
    Flag("--first-seed", "", int, 1, "number of the first seed (default 1)"),
    Flag("--json", "", Path, None, "write the rows here", "FILE"),
    Flag("--workers", "", positive, None, "processes (default: cores)", "N"),
)
_PREFILL_RUNS = (
    Flag("--chunks", "", integers, None, "C_chunk per rank, comma-separated (the scenario's)"),
    Flag("--duration", "", positive_number, None,
        f"simulated seconds, {WARM_UP_S:g} of them warm-up ({DURATION_S:g})"),
    PLOT,
)
# fmt: on


def add_runs(
    parser: argparse.ArgumentParser,
    *,
    default_seeds: int | None = 1,
    seeds_help: str = "seeds per cell (default 1)",
) -> None:
    """Add the flags of commands that run in parallel for some seeds and return rows."""
    add_all(parser, [Flag("--seeds", "", positive, default_seeds, seeds_help), *_RUNS])


def add_common(parser: argparse.ArgumentParser, **seeds: Any) -> None:
    add_runs(parser, **seeds)
    add_all(parser, [_COST])


def add_prefill_runs(parser: argparse.ArgumentParser, policies: str) -> None:
    """Add ``--policies`` and the other flags of commands that run prefill scenarios. ``policies``:
    default that its help shows."""
    parser.add_argument("--policies", help=f"comma-separated (default {policies})")
    add_all(parser, _PREFILL_RUNS)


def check_outputs(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Check the output flags before the simulation; ends the program with code 2 if ``--json``,
    ``--html``, ``--plot`` or ``--out`` cannot be written or drawn."""
    for name in ("json", "html", "plot", "out"):
        path: Path | None = getattr(args, name, None)
        if path is None:
            continue
        if name == "plot" and path.suffix not in _PLOT_SUFFIXES:
            parser.error(f"--plot {path}: the name must end in {', '.join(_PLOT_SUFFIXES)}")
        try:
            if name == "out":
                path.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=path).close()
            else:
                try_to_write(path)
        except OSError as error:
            parser.error(f"--{name} {path}: cannot be written: {error.strerror}")
        if name in ("plot", "out") and (lacking := without_matplotlib()) is not None:
            parser.error(f"--{name} {path}: a picture is wanted, but {lacking}")


def seeds(args: argparse.Namespace) -> range:
    return range(args.first_seed, args.first_seed + args.seeds)


def open_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


def run_with_progress(
    tasks: Sequence[Task], console: Console, workers: int | None, expected_s: float = 0.0
) -> list[Row]:
    """Return rows in the order of the tasks. ``expected_s``: CPU seconds of all tasks, roughly; the
    expected duration is printed if it is long. Raises: Interrupted, with the rows so far."""
    cores = processes(workers)
    if expected_s / cores > _LONG_S:
        runs = counted(len(tasks), "run")
        on = "one process" if cores == 1 else f"{cores} processes"
        print(f"{runs} on {on}: roughly {clock(expected_s / cores)}", file=sys.stderr, flush=True)
    with progress(Console(stderr=True), len(tasks)) as step:
        return run_all(tasks, lambda _row: step(), workers)


def kept(error: Interrupted, runs: int, command: str) -> list[Row]:
    """Print that a command was interrupted, and return its rows. Raises: ``error``, it has no
    rows."""
    if not error.rows:
        raise error
    ended = f"interrupted after {len(error.rows)} of {counted(runs, 'run')}"
    print(f"sglang-sbs {command}: {ended}; the results so far follow", file=sys.stderr)
    return error.rows


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[..., None]]:
    """Show a bar on a terminal, at most :data:`_LINES` lines elsewhere, with the remaining time.
    Call the yielded function after each run, optionally with the name of the simulated case."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    is_shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as bar:
        task, done, began_s = bar.add_task("simulating", total=total), 0, time.monotonic()

        def step(what: str = "") -> None:
            nonlocal done
            done += 1
            bar.advance(task)
            lines = min(total, _LINES)
            if is_shown or done * lines // total == (done - 1) * lines // total:
                return
            left_s = (time.monotonic() - began_s) / done * (total - done)
            left = f", about {clock(left_s)} left" if done < total else ""
            named = f" {what}:" if what else ""
            print(f"simulated{named} {done} of {total}{left}", file=sys.stderr, flush=True)

        yield step


def clock(seconds: float) -> str:
    """Format as ``40 s``, ``4 min``, ``1.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def write_json(content: Sequence[Row] | Row, path: Path | None, console: Console) -> None:
    """Write rows or an object as indented JSON to ``path``, creating its folder, and print the
    path. ``path`` None: do nothing. NaN and None become null."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))
    console.print(f"written: {path}")
