"""The router's scheduling flags, for a simulated router: the same names, units and meaning.

Their defaults are those of the simulation: nothing is refused unless a limit is set
(:data:`~sglang_sbs.simulator.experiments.sweep.NO_FLOW_CONTROL`).
"""

from __future__ import annotations

import argparse
from typing import Any

from sglang_sbs.scheduling.queue.fairness import parse_weights
from sglang_sbs.simulator.options.common import (
    Flag,
    add_all,
    fields_of,
    not_negative,
    positive,
    positive_number,
)


def _weights(text: str) -> dict[str, float]:
    try:
        return parse_weights(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
        "sbs: longest hold, or five mean forward times if those are longer; twice that for a "
        "cached prefix (2000)", "MS", 1e3),
    Flag("--sbs-t-default-ms", "t_default_s", positive_number, None,
        "T_default: forward time before the first (300)", "MS", 1e3),
    Flag("--sbs-priority-step-ms", "priority_step_s", positive_number, None,
        "sbs: what a level of priority is worth, or five mean forward times if those are longer "
        "(5000)", "MS", 1e3),
    Flag("--sbs-iqr-k", "iqr_k", not_negative, None,
        "k of Algorithm 3, for sbs_paper, sbs_iqr (1.5)", "K"),
    Flag("--sbs-tenant-weights", "tenant_weights", _weights, None,
        "sbs: shares of the passes of --tenants; 1 for those that are not named", "NAME=W,..."),
)
# fmt: on


def add_scheduler(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "scheduler", "flags of the router that policies are run with, where they have a meaning"
    )
    add_all(group, _FLAGS)
    group.add_argument(
        "--sbs-refuse-missed-slo",
        action="store_true",
        default=None,
        help="refuse what cannot meet --ttft-slo-ms as things are when it arrives",
    )


def scheduler_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What :func:`add_scheduler` was given, as keywords of a ``SchedulerConfig``."""
    said = {name: value for name, value in fields_of(args, _FLAGS).items() if value is not None}
    return {**said, **({"refuse_missed_slo": True} if args.sbs_refuse_missed_slo else {})}
