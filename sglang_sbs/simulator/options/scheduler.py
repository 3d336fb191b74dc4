"""The router's scheduling flags, for a simulated router: the same names, units and meaning.

Their defaults are those of the simulation: nothing is refused unless a limit is set
(:data:`~sglang_sbs.simulator.experiments.sweep.NO_FLOW_CONTROL`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_sbs.scheduling.queue.fairness import parse_weights
from sglang_sbs.simulator.options.common import not_negative, positive, positive_number


class _Flag(NamedTuple):
    field: str
    """Of :class:`~sglang_sbs.scheduling.SchedulerConfig`."""
    parse: Callable[[str], float]
    scale: float
    help: str


_FLAGS = {
    "sbs-n-limit": _Flag(
        "n_limit", positive, 1, "N_limit: cycles until flow control (unbounded; router: 100)"
    ),
    "sbs-queue-timeout-secs": _Flag(
        "default_timeout_s", positive_number, 1, "longest wait (unbounded; router: 60)"
    ),
    "sbs-max-queue-requests": _Flag(
        "max_queue_requests", positive, 1, "longest queue (unbounded; router: 10000)"
    ),
    "sbs-max-queue-tokens": _Flag(
        "max_queue_tokens", positive, 1, "most prompt tokens in the queue (unbounded)"
    ),
    "sbs-max-hold-ms": _Flag(
        "max_hold_s",
        positive_number,
        1e-3,
        "sbs: longest hold, or five mean forward times if those are longer; twice that for a "
        "cached prefix (2000)",
    ),
    "sbs-t-default-ms": _Flag(
        "t_default_s", positive_number, 1e-3, "T_default: forward time before the first (300)"
    ),
    "sbs-priority-step-ms": _Flag(
        "priority_step_s",
        positive_number,
        1e-3,
        "sbs: what a level of priority is worth, or five mean forward times if those are longer "
        "(5000)",
    ),
    "sbs-iqr-k": _Flag("iqr_k", not_negative, 1, "k of Algorithm 3, for sbs_paper, sbs_iqr (1.5)"),
}


def add_scheduler(parser: argparse.ArgumentParser) -> None:
    """Flags of the scheduler under test."""
    add = parser.add_argument_group(
        "scheduler", "flags of the router that policies are run with, where they have a meaning"
    ).add_argument
    for name, flag in _FLAGS.items():
        add(f"--{name}", type=flag.parse, metavar=name.rpartition("-")[2].upper(), help=flag.help)
    add(
        "--sbs-tenant-weights",
        type=_weights,
        metavar="NAME=W,...",
        help="sbs: shares of the passes of --tenants; 1 for those that are not named",
    )
    add(
        "--sbs-refuse-missed-slo",
        action="store_true",
        default=None,
        help="refuse what cannot meet --ttft-slo-ms as things are when it arrives",
    )


def scheduler_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What :func:`add_scheduler` was given, as keywords of a ``SchedulerConfig``."""
    given = {
        flag: getattr(args, name.replace("-", "_"))
        for name, flag in _FLAGS.items()
        if getattr(args, name.replace("-", "_")) is not None
    }
    fields: dict[str, Any] = {
        flag.field: value * flag.scale if flag.scale != 1 else value
        for flag, value in given.items()
    }
    if args.sbs_tenant_weights:
        fields["tenant_weights"] = args.sbs_tenant_weights
    if args.sbs_refuse_missed_slo:
        fields["refuse_missed_slo"] = True
    return fields


def _weights(text: str) -> dict[str, float]:
    try:
        return parse_weights(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
