"""The argument parser of the router, made of the table of its flags."""

from __future__ import annotations

import argparse
from collections.abc import Container
from dataclasses import fields
from typing import Any, NoReturn

import msgspec

from sglang_sbs.router.options.config import BreakerConfig, MonitorConfig, RelayConfig
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
  curl http://localhost:30000/workers        # what it knows of each worker
  curl http://localhost:29000/metrics        # Prometheus

Every flag is also accepted with the prefix --router- (--router-policy sbs). Flags of
sglang_router 0.3.2 that have no meaning here are accepted with a warning.
"""

SCHEDULER = "sglang-sbs scheduler"
_SCHEDULER_USAGE = """\
%(prog)s --sbs-listen tcp://HOST:PORT --sbs-key-file FILE --prefill URL [BOOTSTRAP_PORT] ...
           --decode URL ... [--policy sbs] [flags]"""
_SCHEDULER_EXAMPLE = """\
example:
  openssl rand -hex 32 > key; chmod 600 key        # the same file on all machines
  # on 10.0.0.1, and with its own address on 10.0.0.2: one schedules, the other stands by
  sglang-sbs scheduler --sbs-listen tcp://10.0.0.1:7700 --sbs-key-file key \\
      --sbs-scheduler tcp://10.0.0.1:7700,tcp://10.0.0.2:7700 --policy sbs \\
      --prefill http://p0:30000 8998 --decode http://d0:30000
  # on every machine that serves clients
  sglang-sbs router --sbs-key-file key \\
      --sbs-scheduler tcp://10.0.0.1:7700,tcp://10.0.0.2:7700
  # on every engine node: they report to both
  SGLANG_SBS_ROUTERS=tcp://10.0.0.1:7600,tcp://10.0.0.2:7600 python -m sglang.launch_server ...

Their metrics port has /readiness, which says active or standby, and /active, which is 200 at the
active one only. Flags of clients (--port, --api-key, retries, TLS) are the front ends', those of
workers and policy the schedulers'. docs/many-routers.md has what happens when one of them is lost.
"""


class FlagError(ValueError):
    """The command line cannot be used; the message names the flag and what to write instead."""


class Parser(argparse.ArgumentParser):
    """Raises FlagError where argparse would end the program."""

    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser; both spellings of every flag, the second one hidden from ``--help``."""
    usage, example = _USAGE, _EXAMPLE
    description = "Router for PD-disaggregated SGLang clusters with staggered batch scheduling."
    if prog == SCHEDULER:
        usage, example = _SCHEDULER_USAGE, _SCHEDULER_EXAMPLE
        description = "The scheduler alone, for routers that are given --sbs-scheduler."
    parser = Parser(
        prog=prog or "python -m sglang_sbs.launch_router",
        usage=usage,
        description=description,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser)
    return parser


def add_flags(
    parser: argparse.ArgumentParser, prefix: str | None = None, without: Container[str] = ()
) -> None:
    """Without a ``prefix`` to the router's own parser, where both spellings mean the same. To a
    parser of others only ``--{prefix}x`` is added, with argparse's own ``dest``."""
    own = prefix is None
    defaults = _field_defaults()
    for title, options in GROUPS.items():
        section = parser.add_argument_group(title if own else f"router: {title}")
        for option in options:
            if option.flag in without or (option.internal and not own):
                continue
            words = option.arguments(defaults.get(option.fields.partition(" ")[0]))
            section.add_argument(f"--{prefix or ''}{option.flag}", **words)
            if own:
                words |= {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
                parser.add_argument(f"--router-{option.flag}", dest=option.dest, **words)
    if not own:
        for name in REFUSED_FLAGS:
            words = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            parser.add_argument(f"--{prefix}{name}", nargs="*", **words)


def _field_defaults() -> dict[str, Any]:
    """By path, as the table names fields."""
    scheduler = msgspec.structs.asdict(SchedulerConfig())
    found: dict[str, Any] = {f"scheduler.{name}": value for name, value in scheduler.items()}
    found |= {one.name: one.default for one in fields(RouterOptions)}
    parts = {"breaker": BreakerConfig, "monitor": MonitorConfig, "relay": RelayConfig}
    for part, config in parts.items():
        found |= {f"{part}.{one.name}": one.default for one in fields(config)}
    return found
