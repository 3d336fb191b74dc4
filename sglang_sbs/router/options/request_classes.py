"""Flags about who may wait: priorities, SLOs and tenants.

Owns their names, help and checks. Must not know how they are used.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.queue.fairness import parse_weights

Add = Callable[..., None]
"""``add(name, help, **kwargs)`` of the parser."""

_HEADER_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_TAKEN = frozenset({"authorization", "content-length", "content-type", "host", "connection"})
_DEFAULTS = SchedulerConfig()


def add_class_flags(add: Add, milliseconds: Callable[[str], float]) -> None:
    """The flags of the group."""
    add(
        "schedule-low-priority-values-first",
        "requests with a smaller number in their field priority go first, as SGLang's flag of this "
        "name has it; give it to engines and router alike. Without it a larger number goes first",
        action="store_true",
    )
    add(
        "sbs-priority-step-ms",
        "a level of priority is worth so much waiting, or five mean forward times if those are "
        "longer; there are 11 levels, -5 to 5, so nobody waits behind a request that came 12 "
        "steps later",
        type=milliseconds,
        default=_DEFAULTS.priority_step_s * 1000,
    )
    add(
        "sbs-refuse-missed-slo",
        "answer 429 at once to a request that cannot have its first token within its header "
        "x-sgl-ttft-slo-ms. Without it such a request is served late",
        action="store_true",
    )
    add(
        "sbs-tenant-header",
        "header that names the tenant, e.g. x-tenant-id: tenants with waiting requests then share "
        "the passes. Only what stands before the router may set it: clients could take any name",
        metavar="NAME",
    )
    add(
        "sbs-tenant-weights",
        "shares of tenants, e.g. gold=3,free=0.5; 1 for all others",
        metavar="NAME=W,...",
    )


def class_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, as fields of :class:`SchedulerConfig`. Raises: ValueError."""
    weights: dict[str, float] = {}
    if args.sbs_tenant_weights is not None:
        try:
            weights = parse_weights(args.sbs_tenant_weights)
        except ValueError as error:
            raise ValueError(f"--sbs-tenant-weights: {error}") from None
    return {
        "priority_step_s": args.sbs_priority_step_ms / 1000,
        "refuse_missed_slo": args.sbs_refuse_missed_slo,
        "tenant_weights": weights,
    }


def tenant_header_of(args: argparse.Namespace, warnings: list[str]) -> str | None:
    """The header's name in lower case. Raises: ValueError."""
    name = args.sbs_tenant_header
    if name is None:
        if args.sbs_tenant_weights is not None and args.sbs_role != "scheduler":
            warnings.append("--sbs-tenant-weights has no effect without --sbs-tenant-header")
        return None
    lower: str = name.lower()
    if not _HEADER_NAME.fullmatch(lower) or lower in _TAKEN:
        raise ValueError(
            f"--sbs-tenant-header {name!r}: write the name of a header of its own, e.g. x-tenant-id"
        )
    return lower
