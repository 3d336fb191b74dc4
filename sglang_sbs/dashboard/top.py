"""``sglang-sbs top``: the dashboard in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson
from rich.console import Console
from rich.live import Live
from rich.text import Text

from sglang_sbs.console import ask_router
from sglang_sbs.console.ask_router import NoAnswerError
from sglang_sbs.dashboard.client import frames
from sglang_sbs.dashboard.top_view import TopView, plain

_GANGS = 40
_AGAIN_S = 1.0
_DRAW_EVERY = 2
"""Draw only every second frame: five per second are more than a terminal needs."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="sglang-sbs top",
        description="Show the scheduler live in a terminal: DP ranks, queue, hold times, TTFT "
        "against immediate dispatch (an estimate), alerts, and the slowest requests with their "
        "causes. Has the same content as the router's page at /dashboard. Fits 80x24 and grows "
        "with the terminal.",
        epilog="examples:\n"
        "  sglang-sbs top --router http://router:30000\n"
        "  sglang-sbs top --once --for 5                 # one frame, after watching for 5 s\n"
        "  sglang-sbs top --json | jq '.alerts[].text'   # for scripts\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ask_router.add_arguments(made)
    made.add_argument("--once", action="store_true", help="print one frame and end")
    made.add_argument("--json", action="store_true", help="print one frame as JSON and end")
    long = (
        "with --once and --json: time to watch first (default: %(default)s), because passes, "
        "decisions and TTFT from before are not recorded"
    )
    made.add_argument(
        "--for", dest="seconds", type=float, default=1.0, metavar="SECONDS", help=long
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 1 if the router cannot be watched; 2 for bad flags."""
    made = parser()
    args = ask_router.parse(made, argv)
    if not 0 <= args.seconds <= 600:
        made.error(f"--for {args.seconds}: between 0 and 600 seconds")
    key = ask_router.key_of(args)
    try:
        if args.once or args.json:
            asyncio.run(_once(args.router, key, args.seconds, as_json=args.json))
        else:
            asyncio.run(_live(args.router, key))
    except NoAnswerError as error:
        print(f"sglang-sbs top: {plain(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


async def _once(router: str, key: str | None, seconds: float, *, as_json: bool) -> None:
    gangs: deque[dict[str, Any]] = deque(maxlen=_GANGS)
    passes: list[Any] = []
    first_s: float | None = None
    past: list[Any] = []
    async for frame in frames(router, key):
        gangs.extend(frame["gangs"])
        passes += frame["passes"]
        past = frame.get("past", past)
        first_s = frame["now_s"] if first_s is None else first_s
        if frame["now_s"] - first_s < seconds:
            continue
        if as_json:
            whole = frame | {"gangs": list(gangs), "passes": passes, "past": past}
            sys.stdout.buffer.write(orjson.dumps(whole, option=orjson.OPT_INDENT_2) + b"\n")
        else:
            Console().print(TopView(frame | {"past": past}, router))
        return
    raise NoAnswerError(f"{router}: the stream ended before {seconds:g} s were over")


async def _live(router: str, key: str | None) -> None:
    watching = asyncio.ensure_future(_watch(router, key))
    loop = asyncio.get_running_loop()
    # Handle SIGINT even where it is ignored, as in background jobs of scripts; either way the
    # terminal's own screen is restored.
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, watching.cancel)
    with suppress(asyncio.CancelledError):
        await watching


async def _watch(router: str, key: str | None) -> None:
    """Draw until cancelled. Raises: NoAnswerError."""
    past: list[Any] = []
    connected = False
    with Live(Text("connecting"), console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            try:
                number = 0
                async for frame in frames(router, key):
                    connected = True
                    past = frame.get("past", past)
                    if number % _DRAW_EVERY == 0:
                        view = TopView(frame | {"past": past}, f"{router}  (Ctrl-C ends)")
                        live.update(view, refresh=True)
                    number += 1
                note = "the stream ended"
            except NoAnswerError as error:
                if not connected:
                    raise
                note = str(error)
            live.update(Text(f"{plain(note)}; trying again", style="red"), refresh=True)
            await asyncio.sleep(_AGAIN_S)
