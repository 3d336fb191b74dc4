"""The flags that say who sends the simulated requests: priorities, tenants and SLOs."""

from __future__ import annotations

import argparse
from typing import Any

from sglang_sbs.simulator.options.common import Flag, add_all, checked, fields_of, positive_number
from sglang_sbs.simulator.workloads.classes import Classes

_MOST_TENANTS = 16
_share = checked(float, lambda share: 0 <= share <= 1, "a share between 0 and 1, as in 0.2")


def _tenants(text: str) -> dict[str, float]:
    parts: dict[str, float] = {}
    for word in text.split(","):
        name, equals, part = word.partition("=")
        if not (name and equals) or name in parts:
            raise argparse.ArgumentTypeError(f"{word!r}: write NAME=PART, each once, as in a=9,b=1")
        parts[name] = positive_number(part)
    if len(parts) > _MOST_TENANTS:
        raise argparse.ArgumentTypeError(f"{len(parts)} tenants: write at most {_MOST_TENANTS}")
    return parts


# fmt: off
_FLAGS = (
    Flag("--priority-share", "", _share, 0.0,
        "share of the requests that have a high priority, drawn from the seed (0)", "SHARE"),
    Flag("--low-share", "", _share, 0.0,
        "share of the requests that have a low priority (0)", "SHARE"),
    Flag("--tenants", "", _tenants, {},
        "who sends how much, as in a=9,b=1; their weights are --sbs-tenant-weights",
        "NAME=PART,..."),
    Flag("--ttft-slo-ms", "ttft_slo_s", positive_number, None,
        "every request brings this SLO for its first token; goodput is what meets it (no SLO; "
        "goodput by the scenario's)", "MS", 1e3),
)
# fmt: on


def add_classes(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    group = parser.add_argument_group(
        "classes",
        "who sends the requests; sbs_equal is sbs that is told of no priorities and no tenants",
    )
    return add_all(group, _FLAGS)


def classes_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Classes:
    """What :func:`add_classes` was given; ends the program with code 2 if it is too much."""
    if args.priority_share + args.low_share > 1:
        parser.error("--priority-share and --low-share: write shares that are at most 1 together")
    return Classes(args.priority_share, args.low_share, args.tenants)


def slo_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The SLO as a keyword of ``make_scenario``."""
    return fields_of(args, _FLAGS)
