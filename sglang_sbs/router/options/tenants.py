"""Flags about tenants: their checks."""

from __future__ import annotations

import argparse
import re

from sglang_sbs.scheduling.queue.fairness import parse_weights

_HEADER_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_TAKEN = frozenset({"authorization", "content-length", "content-type", "host", "connection"})


def tenant_weights_of(args: argparse.Namespace) -> dict[str, float]:
    """What the flag says. Raises: ValueError."""
    if args.sbs_tenant_weights is None:
        return {}
    try:
        return parse_weights(args.sbs_tenant_weights)
    except ValueError as error:
        raise ValueError(f"--sbs-tenant-weights: {error}") from None


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
