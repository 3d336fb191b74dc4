"""``sglang-sbs policies``: lists the policies, explains when to choose which, and checks whether
your own meets the requirements."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence

from sglang_sbs.scheduling.policy_registry import (
    PolicyError,
    PolicySpec,
    broken,
    policy_names,
    require,
)

_PAGE = {
    "choose_when": "Choose it",
    "needs": "It needs",
    "trade_offs": "Trade-offs",
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="sglang-sbs policies",
        description="List the policies that --policy takes here, or show what is known of some.\n"
        "Policies of other packages are among them (docs/own-policy.md).",
        epilog="examples:\n"
        "  sglang-sbs policies                    # all, a line each\n"
        "  sglang-sbs policies eta                # when to choose it, needs, trade-offs\n"
        "  sglang-sbs policies my_policy --check  # does it do what every policy must?\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("names", metavar="NAME", nargs="*", help="a policy (default: all)")
    made.add_argument(
        "--check",
        action="store_true",
        help="run the conformance suite: eleven runs on a simulated cluster, some seconds",
    )
    made.add_argument("--markdown", action="store_true", help="write the pages as Markdown")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 1 if a check fails; 2 if there is no such policy."""
    args = parser().parse_args(argv)
    try:
        specs = [require(name.replace("-", "_")) for name in args.names or policy_names()]
    except PolicyError as error:
        print(f"sglang-sbs policies: {error}", file=sys.stderr)
        return 2
    for name, why in broken().items():
        print(f"sglang-sbs policies: {name} could not be loaded: {why}", file=sys.stderr)
    if args.check:
        return 1 if sum([_check(spec) for spec in specs]) else 0
    if args.markdown:
        print("\n".join(map(markdown, specs)), end="")
    elif args.names:
        print("\n\n".join(map(_page, specs)))
    else:
        width = max(len(spec.name) for spec in specs)
        for spec in specs:
            print(f"{spec.name:<{width}}  {spec.summary}")
    return 0


def _page(spec: PolicySpec) -> str:
    rows = [("", spec.summary), *((word, getattr(spec, key)) for key, word in _PAGE.items())]
    indent = " " * 13
    lines = [
        textwrap.fill(text, 96, initial_indent=f"{word:<11}  ", subsequent_indent=indent)
        for word, text in rows
    ]
    return "\n".join([spec.name, *lines])


def markdown(spec: PolicySpec) -> str:
    rows = [f"- **{word}**: {getattr(spec, key)}" for key, word in _PAGE.items()]
    return "\n".join([f"## {spec.name}", "", spec.summary, "", *rows, ""])


def _check(spec: PolicySpec) -> int:
    from sglang_sbs.policies.conformance import Check, failures

    def show(check: Check, why: str) -> None:
        print(f"  {'FAILED' if why else 'ok':<6}  {check}" + (f": {why}" if why else ""))

    print(spec.name)
    return failures(spec.name, show=show)
