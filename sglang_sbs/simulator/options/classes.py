"""The flags that say who sends the simulated requests: priorities, tenants and SLOs."""

from __future__ import annotations

import argparse
from typing import Any

from sglang_sbs.simulator.options.common import positive_number
from sglang_sbs.simulator.workloads.classes import Classes

_MOST_TENANTS = 16


def add_classes(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Flags for who sends the requests."""
    add = parser.add_argument_group(
        "classes",
        "who sends the requests; sbs_equal is sbs that is told of no priorities and no tenants",
    ).add_argument
    return [
        add(
            "--priority-share",
            type=_share,
            default=0.0,
            metavar="SHARE",
            help="share of the requests that have a high priority, drawn from the seed (0)",
        ),
        add(
            "--low-share",
            type=_share,
            default=0.0,
            metavar="SHARE",
            help="share of the requests that have a low priority (0)",
        ),
        add(
            "--tenants",
            type=_tenants,
            default={},
            metavar="NAME=PART,...",
            help="who sends how much, as in a=9,b=1; their weights are --sbs-tenant-weights",
        ),
        add(
            "--ttft-slo-ms",
            type=positive_number,
            metavar="MS",
            help="every request brings this SLO for its first token; goodput is what meets it "
            "(no SLO; goodput by the scenario's)",
        ),
    ]


def classes_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Classes:
    """What :func:`add_classes` was given; ends the program with code 2 if it is too much."""
    if args.priority_share + args.low_share > 1:
        parser.error("--priority-share and --low-share: write shares that are at most 1 together")
    return Classes(args.priority_share, args.low_share, args.tenants)


def slo_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The SLO as a keyword of ``make_scenario``."""
    return {"ttft_slo_s": args.ttft_slo_ms / 1e3} if args.ttft_slo_ms else {}


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a share between 0 and 1, as in 0.2")
    return value


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
