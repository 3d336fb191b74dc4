"""The router's scheduling flags for a simulated router, and the classes of its requests. Names,
units and meaning are the router's; by default nothing is refused
(:data:`~sglang_sbs.simulator.experiments.sweep.NO_FLOW_CONTROL`)."""

from __future__ import annotations

import argparse
from typing import Any

from sglang_sbs.scheduling.queue.fairness import parse_weights
from sglang_sbs.simulator.options.common import (
    Flag,
    add_all,
    checked,
    fields_of,
    not_negative,
    positive,
    positive_number,
)
from sglang_sbs.simulator.workloads.classes import Classes

_MOST_TENANTS = 16
_share = checked(float, lambda share: 0 <= share <= 1, "a share between 0 and 1, as in 0.2")


def _weights(text: str) -> dict[str, float]:
    try:
        return parse_weights(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
    Flag("--sbs-n-limit", "n_limit", positive, None,
        "N_limit: cycles until flow control (unbounded; router: 100)", "LIMIT"),
    Flag("--sbs-queue-timeout-secs", "default_timeout_s", positive_number, None,
        "longest wait (unbounded; router: 60)", "SECS"),
    Flag("--sbs-max-queue-requests", "max_queue_requests", positive, None,
        "longest queue (unbounded; router: 10000)", "REQUESTS"),
    Flag("--sbs-max-queue-tokens", "max_queue_tokens", positive, None,
        "most prompt tokens in the queue (unbounded)", "TOKENS"),
    Flag("--sbs-max-hold-ms", "max_hold_s", positive_number, None,
        "sbs: longest hold, or five mean forward times if that is longer (2000)", "MS", 1e3),
    Flag("--sbs-t-default-ms", "t_default_s", positive_number, None,
        "T_default: forward time before the first (300)", "MS", 1e3),
    Flag("--sbs-priority-step-ms", "priority_step_s", positive_number, None,
        "sbs: waiting time that a level of priority outweighs, at least five mean forward times "
        "(5000)", "MS", 1e3),
    Flag("--sbs-iqr-k", "iqr_k", not_negative, None,
        "k of Algorithm 3, for sbs_paper (1.5)", "K"),
    Flag("--sbs-tenant-weights", "tenant_weights", _weights, None,
        "sbs: shares of the passes of --tenants; 1 for those that are not named", "NAME=W,..."),
    Flag("--sbs-refuse-missed-slo", "refuse_missed_slo", bool, None,
        "refuse a request that on its arrival can no longer meet --ttft-slo-ms"),
)
CLASSES = (
    Flag("--priority-share", "", _share, 0.0,
        "share of the requests that have a high priority, drawn from the seed (0)", "SHARE"),
    Flag("--low-share", "", _share, 0.0,
        "share of the requests that have a low priority (0)", "SHARE"),
    Flag("--tenants", "", _tenants, {},
        "tenants and their relative number of requests, as in a=9,b=1; their weights are "
        "--sbs-tenant-weights",
        "NAME=PART,..."),
    Flag("--ttft-slo-ms", "ttft_slo_s", positive_number, None,
        "SLO of every request for its first token; goodput is the share that meets it (no SLO; "
        "goodput by the scenario's)", "MS", 1e3),
)
# fmt: on


def add_scheduler(parser: argparse.ArgumentParser) -> None:
    about = "flags of the router, for the policies that use them"
    add_all(parser.add_argument_group("scheduler", about), _FLAGS)


def scheduler_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of :func:`add_scheduler`'s flags as keywords of a ``SchedulerConfig``."""
    return {name: value for name, value in fields_of(args, _FLAGS).items() if value is not None}


def add_classes(parser: argparse.ArgumentParser) -> None:
    about = "priorities, tenants and SLOs of requests; sbs_equal is sbs without the first two"
    add_all(parser.add_argument_group("classes", about), CLASSES)


def classes_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Classes:
    """Return the classes of :func:`add_classes`'s flags; ends the program with code 2 if the shares
    exceed 1."""
    if args.priority_share + args.low_share > 1:
        parser.error("--priority-share and --low-share: write shares that are at most 1 together")
    return Classes(args.priority_share, args.low_share, args.tenants)
