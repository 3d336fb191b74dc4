"""``sglang-sbs policy``: shows the policy of a router, and switches it."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence

import msgspec

from sglang_sbs.console import ask_router
from sglang_sbs.console.ask_router import NoAnswerError

_ABSENT = "this router cannot switch its policy: upgrade sglang-sbs there"


class _PolicyAnswer(msgspec.Struct):
    """Response of ``/policy``."""

    policy: str
    since: float
    set_by: str
    switches: int
    in_force: str
    policies: list[str]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="sglang-sbs policy",
        description="Show which policy a running router uses, or switch it to another one.\n"
        "No request is lost: the queue and what is in flight stay, only the rule changes.\n"
        "The switch lasts until the router is restarted.",
        epilog="examples:\n"
        "  sglang-sbs policy --router http://router:30000          # which one, since when\n"
        "  sglang-sbs policy sbs --router http://router:30000      # switch\n"
        "  sglang-sbs policy round_robin --router http://router:30000   # and back\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    name = "the policy to switch to, as in --policy of the router; without it nothing is changed"
    made.add_argument("name", metavar="NAME", nargs="?", help=name)
    ask_router.add_arguments(made)
    made.add_argument("--json", action="store_true", help="print the router's answer as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 1 if the router cannot be reached or refuses the switch; 2 for bad flags."""
    args = ask_router.parse(parser(), argv)
    try:
        before = answer = _ask(args)
        if args.name is not None:
            answer = _ask(args, {"policy": args.name})
    except NoAnswerError as error:
        print(f"sglang-sbs policy: {ask_router.plain(str(error))}", file=sys.stderr)
        return 1
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    else:
        print(ask_router.plain(_page(args, before, answer)), end="")
    return 0


def _ask(args: argparse.Namespace, body: dict[str, str] | None = None) -> _PolicyAnswer:
    """Get the router's policy, or with ``body`` switch it, and return the response. Raises:
    NoAnswerError, no usable answer."""
    encoded = None if body is None else msgspec.json.encode(body)
    try:
        return msgspec.json.decode(
            ask_router.ask(args, "/policy", encoded, absent=_ABSENT), type=_PolicyAnswer
        )
    except msgspec.DecodeError as error:
        text = f"{args.router}: the answer is not one of this release: {error}"
        raise NoAnswerError(text) from error


def _page(args: argparse.Namespace, before: _PolicyAnswer, answer: _PolicyAnswer) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(answer.since))
    lines = [f"policy {answer.policy}, since {since}, set by {answer.set_by}"]
    if answer.in_force != answer.policy:
        lines.append(f"the scheduler is away: requests are placed by {answer.in_force} meanwhile")
    if answer.policy != before.policy:
        back = ["sglang-sbs", "policy", before.policy, "--router", args.router]
        lines.append(f"it was {before.policy}; to go back: {shlex.join(back)}")
    elif args.name is not None:
        lines.append("that is the policy it had: nothing has changed")
    else:
        lines.append(
            f"others: {', '.join(name for name in answer.policies if name != answer.policy)}"
        )
    return "\n".join(lines) + "\n"
