"""``sglang-sbs why``: why a request was held, sent where it was, and where its time went."""

from __future__ import annotations

import argparse
import sys
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sglang_sbs.console import ask_router
from sglang_sbs.console.ask_router import NoAnswerError
from sglang_sbs.explain.event_log import read
from sglang_sbs.explain.page import page
from sglang_sbs.scheduling.explained.stories import Story


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="sglang-sbs why",
        description="Explain one request on one page: why it was held, why it was sent where it "
        "was, predicted and real times, and the parts of the time to its first token.",
        epilog="examples:\n"
        "  sglang-sbs why chatcmpl-5f2c0e --router http://router:30000\n"
        "  sglang-sbs why 5f2c0e9d --log router.events       # from --sbs-event-log\n"
        "  sglang-sbs why 5f2c0e9d --json | jq '.attempts[].parts'\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("id", metavar="ID", help="x-request-id, the answer's id, or the router's rid")
    ask_router.add_arguments(made)
    log = "read an event log (--sbs-event-log) in place of asking a router"
    made.add_argument("--log", type=Path, metavar="EVENTS", help=log)
    made.add_argument("--json", action="store_true", help="as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print why a request was placed as it was, from a router or an event log. Return 0; 1 if the
    request is unknown, the log cannot be read, or no router can be asked; 2 for bad flags."""
    args = ask_router.parse(parser(), argv)
    began_s: float | None = None
    try:
        if args.log is not None:
            story, began_s = _from_log(args.log, args.id)
        else:
            story = _from_router(args)
    except (NoAnswerError, OSError, ValueError) as error:
        print(f"sglang-sbs why: {ask_router.plain(str(error))}", file=sys.stderr)
        return 1
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(story), indent=2).decode())
    else:
        print(page(story, began_s), end="")
    return 0


def _from_log(path: Path, name: str) -> tuple[Story, float]:
    """Find a request in an event log. Return it, and the time when the log begins. Raises:
    NoAnswerError, OSError, ValueError: it is not there, or the log cannot be read."""
    log = read(path, replay=True)
    story = log.story(name)
    if story is None:
        raise NoAnswerError(f"{path} has no request {name}: give its rid, or its x-request-id")
    if log.differs_at:
        print(
            f"sglang-sbs why: this release decides differently than the one that wrote {path}, "
            f"from event {log.differs_at:,} on; reasons after that may be missing",
            file=sys.stderr,
        )
    return story, log.began_s


def _from_router(args: argparse.Namespace) -> Story:
    """Ask the router about a request. Raises: NoAnswerError, it does not know the request or cannot
    be asked."""
    path = f"/requests/{urllib.parse.quote(args.id, safe='')}"
    absent = (
        f"the router remembers no request {args.id}: it keeps the last few thousand; with "
        "--sbs-event-log FILE all can be explained later (why ID --log FILE)"
    )
    try:
        return msgspec.json.decode(ask_router.ask(args, path, absent=absent), type=Story)
    except msgspec.DecodeError as error:
        text = f"{args.router}{path}: the answer is not one of this release: {error}"
        raise NoAnswerError(text) from error
