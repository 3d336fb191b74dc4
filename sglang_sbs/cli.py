"""``sglang-sbs``: one command with a verb per task. Each verb's module parses its own flags, and
only the requested verb's modules are imported."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple

from sglang_sbs import __version__
from sglang_sbs.console.checkout import NotACheckoutError, checkout_module
from sglang_sbs.console.completion import ASKED, complete
from sglang_sbs.console.extras import only_in_a_checkout


class Verb(NamedTuple):
    """A subcommand: the module whose ``main(argv)`` it runs, and its line in the help. Verbs of
    ``benchmarks`` work in a checkout only, because a wheel does not include these modules."""

    module: str
    help: str


VERBS = {
    "router": Verb("sglang_sbs.launch_router", "route to running SGLang prefill/decode instances"),
    "scheduler": Verb(
        "sglang_sbs.launch_scheduler", "schedule for routers on other machines (--sbs-scheduler)"
    ),
    "server": Verb("sglang_sbs.launch_server", "start instances and a router on this machine"),
    "demo": Verb("benchmarks.demo.cli", "in a checkout: run SBS on a small real cluster"),
    "why": Verb("sglang_sbs.explain.why", "explain where a request went, and why it was slow"),
    "log": Verb("sglang_sbs.explain.log", "summarize an event log (--sbs-event-log)"),
    "policy": Verb("sglang_sbs.policies.switch", "show or switch the policy of a router"),
    "policies": Verb("sglang_sbs.policies.cli", "list policies, or check one of your own"),
    "trial": Verb("sglang_sbs.trial.cli", "compare two policies in turns on a router's traffic"),
    "top": Verb("sglang_sbs.dashboard.top", "watch a router in the terminal"),
    "observe": Verb("sglang_sbs.observe.cli", "record engines behind any router; routing stays"),
    "simulate": Verb("sglang_sbs.simulator.cli", "compare policies in simulated time"),
    "evaluate": Verb("sglang_sbs.evaluate.cli", "estimate another policy on recorded traffic"),
    "doctor": Verb("sglang_sbs.doctor.cli", "check running engines and a router"),
    "patch": Verb("sglang_sbs.patching.cli", "add SBS to SGLang before 0.5.11 and sglang_router"),
}


def usage() -> str:
    verbs = "\n".join(f"  {name:<9} {verb.help}" for name, verb in VERBS.items())
    return f"""\
usage: sglang-sbs [--version] VERB [flags]

Staggered Batch Scheduling for SGLang clusters with PD disaggregation and DP attention.

verbs (each has --help):
{verbs}

example:
  sglang-sbs router --pd-disaggregation --prefill http://p0:30000 8998 \\
      --decode http://d0:30000 --policy sbs
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console command and return the verb's exit code, or 2 without a valid verb."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal's encoding lacks
    if argv is None and ASKED in os.environ:
        complete(list(VERBS), _main_of)
        return 1
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(f"sglang-sbs {__version__}")
        return 0
    verb = VERBS.get(words[0])
    if verb is None:
        print(f"sglang-sbs: no verb {words[0]!r}; one of {', '.join(VERBS)}", file=sys.stderr)
        return 2
    return _main_of(words[0])(words[1:]) or 0


def _main_of(verb: str) -> Callable[[Sequence[str]], int | None]:
    module = VERBS[verb].module
    if module.startswith("sglang_sbs."):
        run: Callable[[Sequence[str]], int | None] = import_module(module).main
        return run
    try:
        run = checkout_module(module).main
    except NotACheckoutError:
        return partial(_refuse, verb)
    return run


def _refuse(verb: str, words: Sequence[str]) -> int:
    """Explain that a verb works in a checkout only. Return 0 if its help was requested, else 2."""
    asked = "-h" in words or "--help" in words
    text = f"usage: sglang-sbs {verb} [flags]\n\nsglang-sbs {verb}: {only_in_a_checkout(verb)}"
    print(text, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
