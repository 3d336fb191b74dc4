"""Builds the router's argument parser from the table of its flags."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn

import msgspec

from sglang_sbs.router.options.config import BreakerConfig, MonitorConfig, RelayConfig
from sglang_sbs.router.options.option import Option
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.options.stock import REFUSED_FLAGS
from sglang_sbs.router.options.table import GROUPS
from sglang_sbs.scheduling.config import SchedulerConfig

_USAGE = "%(prog)s --prefill URL [BOOTSTRAP_PORT] ... --decode URL ... [--policy sbs] [flags]"
_EXAMPLE = """\
example:
  # on every engine node: the plugin reports each forward pass to the router
  pip install .     # in a checkout of sglang-sbs
  SGLANG_SBS_ROUTERS=tcp://router:7600 python -m sglang.launch_server \\
      --disaggregation-mode prefill --tp 32 --attn-dp-size 8 ...
  # on the router node: the command you run today, with --policy sbs
  python -m sglang_sbs.launch_router --pd-disaggregation \\
      --prefill http://p0:30000 8998 --prefill http://p1:30000 8998 \\
      --decode http://d0:30000 --policy sbs
  curl http://localhost:30000/workers        # state of each worker as the router sees it
  curl http://localhost:29000/metrics        # Prometheus

Every flag is also accepted with the prefix --router- (--router-policy sbs). Flags of
sglang_router 0.3.2 that have no meaning here are accepted with a warning.
"""

SCHEDULER = "sglang-sbs scheduler"
_SCHEDULER_USAGE = """\
%(prog)s --sbs-listen tcp://HOST:PORT --sbs-scheduler-key-file FILE
           --prefill URL [BOOTSTRAP_PORT] ... --decode URL ... [--policy sbs] [flags]"""
_SCHEDULER_EXAMPLE = """\
example:
  openssl rand -hex 32 > key; chmod 600 key        # the same file on all machines
  # on 10.0.0.1, and with its own address on 10.0.0.2: one schedules, the other stands by
  sglang-sbs scheduler --sbs-listen tcp://10.0.0.1:7700 --sbs-scheduler-key-file key \\
      --sbs-scheduler tcp://10.0.0.1:7700,tcp://10.0.0.2:7700 --policy sbs \\
      --prefill http://p0:30000 8998 --decode http://d0:30000
  # on every machine that serves clients
  sglang-sbs router --sbs-scheduler-key-file key \\
      --sbs-scheduler tcp://10.0.0.1:7700,tcp://10.0.0.2:7700
  # on every engine node: they report to both
  SGLANG_SBS_ROUTERS=tcp://10.0.0.1:7600,tcp://10.0.0.2:7600 python -m sglang.launch_server ...

On the metrics port of each scheduler, /readiness reports active or standby, and /active is 200 only
on the active one. Give front ends the flags for clients (--port, --api-key, retries, TLS), and
schedulers those for workers and policy. docs/many-routers.md explains what each failure does.
"""


class FlagError(ValueError):
    """The command line is unusable; the message names the flag and what to write instead."""


MOST_NEEDED = (
    *("prefill", "decode", "policy", "tokenizer-path", "port", "api-key-file"),
    *("sbs-endforward-key-file", "config"),
)


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises FlagError instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Build the router's parser. It accepts each flag as ``--x`` and, hidden from ``--help``, as
    ``--router-x``. ``format_help()`` returns the text of ``--help-all``."""
    parser = _bare_parser(prog)
    add = parser.add_argument
    add("-h", "--help", action=_ShortHelp, nargs=0, help="show the most important flags")
    add("--help-all", action="help", help="all flags")
    shown = "print the value and the source of each flag (secrets masked), and exit"
    add("--print-config", action="store_true", help=shown)
    checked = "check the flags, then examine the engines (sglang-sbs doctor), and exit"
    add("--check", action="store_true", help=checked)
    add_flags(parser)
    return parser


class _ShortHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(_short_help(parser.prog), end="")
        parser.exit()


def _short_help(prog: str) -> str:
    parser, defaults = _bare_parser(prog), _field_defaults()
    section = parser.add_argument_group("most important flags")
    by_flag = {option.flag: option for options in GROUPS.values() for option in options}
    for option in (by_flag[flag] for flag in MOST_NEEDED):
        section.add_argument(f"--{option.flag}", **_words(option, defaults))
    lines = ["all flags (see --help-all and docs/reference/router-flags.md):"]
    for title, options in GROUPS.items():
        names = [option.flag for option in options if option.help and not option.hidden]
        text = f"{title}: {' '.join(names)}"
        lines += (
            textwrap.wrap(
                text, 98, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
            if names
            else ()
        )
    lines += [f"  and: {' '.join(_ALONE)}", "", parser.epilog or ""]
    parser.epilog = "\n".join(lines)
    return parser.format_help()


_ALONE = ("help", "help-all", "print-config", "check")


def _words(option: Option, defaults: Mapping[str, Any]) -> dict[str, Any]:
    return option.arguments(defaults.get(option.fields.partition(" ")[0]))


def _bare_parser(prog: str | None) -> argparse.ArgumentParser:
    usage, example = _USAGE, _EXAMPLE
    description = "Router for PD-disaggregated SGLang clusters with staggered batch scheduling."
    if prog == SCHEDULER:
        usage, example = _SCHEDULER_USAGE, _SCHEDULER_EXAMPLE
        description = "The scheduler alone, for routers that are given --sbs-scheduler."
    return Parser(
        prog=prog or "python -m sglang_sbs.launch_router",
        usage=usage,
        description=description,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )


def add_flags(
    parser: argparse.ArgumentParser, prefix: str | None = None, without: Container[str] = ()
) -> None:
    """Add the router's flags to a parser, except those in ``without``. The router's own parser (no
    ``prefix``) accepts ``--x`` and ``--router-x``. Another program's gets only ``--{prefix}x``,
    with argparse's own ``dest``."""
    own = prefix is None
    defaults = _field_defaults()
    for title, options in GROUPS.items():
        section = parser.add_argument_group(title if own else f"router: {title}")
        for option in options:
            if option.flag in without or (option.internal and not own):
                continue
            words = _words(option, defaults)
            action = section.add_argument(f"--{prefix or ''}{option.flag}", **words)
            if option.completes is not None:  # asked by argcomplete
                vars(action)["completer"] = partial(_offered, option.completes)
            words |= {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS, "dest": action.dest}
            others = [f"{prefix or ''}{option.former}"] if option.former else []
            if own:
                others += [f"router-{name}" for name in (option.flag, option.former) if name]
            for other in others:
                parser.add_argument(f"--{other}", **words)
    if not own:
        for name in REFUSED_FLAGS:
            words = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            parser.add_argument(f"--{prefix}{name}", nargs="*", **words)


def _offered(values: Callable[[], Iterable[str]], **_asked: Any) -> list[str]:
    return list(values())


def _field_defaults() -> dict[str, Any]:
    """Defaults of all option fields, by dotted path as in the table of flags."""
    scheduler = msgspec.structs.asdict(SchedulerConfig())
    found: dict[str, Any] = {f"scheduler.{name}": value for name, value in scheduler.items()}
    found |= {default.name: default.default for default in fields(RouterOptions)}
    parts = {"breaker": BreakerConfig, "monitor": MonitorConfig, "relay": RelayConfig}
    for part, config in parts.items():
        found |= {f"{part}.{default.name}": default.default for default in fields(config)}
    return found
