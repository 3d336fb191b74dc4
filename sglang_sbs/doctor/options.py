"""The doctor's command line. All flags other than its own are the router's, so that a router's
command line can be pasted."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sglang_sbs.router.engines.urls import normalise_worker_url
from sglang_sbs.router.options.arguments import FlagError, Parser
from sglang_sbs.router.options.option import number
from sglang_sbs.router.options.options import read_flags
from sglang_sbs.router.options.router_options import RouterOptions

_EXAMPLES = """\
flags of the router (all are accepted, these are looked at):
  --prefill URL [BOOTSTRAP_PORT]   a prefill engine; repeat per engine
  --decode URL                     a decode engine; repeat per engine
  --api-key KEY, --admin-api-key KEY
                                   as the router would use them
  --ca-cert-paths FILE ..., --client-cert-path FILE, --client-key-path FILE
                                   for engines with https:// URLs
  --sbs-endforward-bind ENDPOINT   where to listen for EndForward (default: the addresses to which
                                   engines report, if they are on this machine)
  --sbs-endforward-key-file FILE   the secret that engines name in SGLANG_SBS_ENDFORWARD_KEY_FILE

exit code: 0 nothing worse than notes (and without --strict, warnings), 1 something is wrong,
2 the command line cannot be used; with --features 1 if nothing answered

examples:
  # before the router starts, on its machine: EndForward is listened to where it will be
  sglang-sbs doctor --prefill http://p0:30000 8998 --decode http://d0:30000
  # while a router runs: it is asked what arrives; alone it also names the engines
  sglang-sbs doctor --router http://router:30000
  # which features are on, why, and what to change
  sglang-sbs doctor --router http://router:30000 --features
  # one real request through every pair, for CI
  sglang-sbs doctor --prefill http://p0:30000 --decode http://d0:30000 --probe --strict --json -
"""


_seconds = partial(number, 1e-9, 600, "a number of seconds in 0..600")


@dataclass(frozen=True)
class DoctorOptions:
    """The parsed command line. Times in seconds."""

    router_flags: RouterOptions
    router: str | None = None
    """URL of a running router."""
    features: bool = False
    """Show which features are on instead of findings."""
    probe: bool = False
    strict: bool = False
    quiet: bool = False
    json: Path | None = None
    """Path of the report as JSON; ``-``: standard output, instead of the text."""
    timeout_s: float = 10.0
    """Time limit per response."""
    wait_s: float = 6.0
    """Time limit for EndForward from every rank."""
    given_bind: str | None = None
    """Value of ``--sbs-endforward-bind``; None if not given."""
    key_file: Path | None = None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sglang-sbs doctor",
        usage="%(prog)s --prefill URL [BOOTSTRAP_PORT] ... --decode URL ... [--router URL] [flags]",
        description="Examine running SGLang engines (and a router) without changing them. Each "
        "finding has a severity and the flag that fixes it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    switch = partial(add, action="store_true")
    seconds = partial(add, type=_seconds, metavar="S")
    add("--router", metavar="URL", help="a running sglang-sbs router, to query as well")
    features = "which are on, why, and which flag or variable to change"
    switch("--features", help=f"a table of features instead: {features}")
    probe = "send one request for one token through every pair of prefill and decode"
    switch("--probe", help=probe)
    switch("--strict", help="exit with 1 for warnings too")
    switch("--quiet", help="leave out what is fine, and engines without findings")
    add("--json", type=Path, metavar="FILE", help="write the report as JSON; - for standard output")
    answer = "longest wait for each answer; an engine may answer only between passes (default: 10)"
    seconds("--timeout", dest="timeout_s", default=10.0, help=answer)
    reports = "longest wait for EndForward; ends when all ranks have reported (default: 6)"
    seconds("--wait", dest="wait_s", default=6.0, help=reports)
    return parser


def parse_options(argv: Sequence[str]) -> DoctorOptions:
    """Parse and check a command line (without the verb). Raises: FlagError, naming the flag and
    what to write instead."""
    own, rest = _parser().parse_known_args(list(argv))
    if own.features and (own.strict or own.probe):
        raise FlagError(
            "--features shows features instead of findings: leave --strict and --probe out"
        )
    flags, given = read_flags(rest)
    try:
        own.router = None if own.router is None else normalise_worker_url(own.router)
    except ValueError as error:
        raise FlagError(str(error).replace("worker URL", "--router")) from error
    if own.router is None and not (flags.prefill and flags.decode):
        raise FlagError(
            "nothing to examine: give at least one --prefill URL [BOOTSTRAP_PORT] and one --decode "
            "URL, or --router URL to ask a running router which engines it has"
        )
    return DoctorOptions(
        router_flags=flags,
        given_bind=flags.endforward_bind if "sbs_endforward_bind" in given.sources else None,
        key_file=given.args.sbs_endforward_key_file,
        **vars(own),
    )
