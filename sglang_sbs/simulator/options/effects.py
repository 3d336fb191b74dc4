"""Flags that have no effect beside others. They are refused, so that nobody takes a result for what
it is not. What ``make_scenario`` and the flags' own checks refuse is not here again."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any

from sglang_sbs.scheduling.policy_registry import reads_reports
from sglang_sbs.simulator.cluster.spec import TopologyChange

_Needs = Mapping[str, tuple[tuple[str, ...], str]]
_NEEDS_ONE: _Needs = {
    "--intake-until": (("intake_ms",), "--intake-ms"),
    "--pool-balance": (("pools",), "--pools"),
    "--decode-seconds": (("decode_kv_tokens", "decode_running"), "--decode-kv-tokens or -running"),
    "--sbs-tenant-weights": (("tenants",), "--tenants"),
    "--sbs-refuse-missed-slo": (("ttft_slo_ms",), "--ttft-slo-ms"),
    "--sbs-priority-step-ms": (("priority_share", "low_share"), "--priority-share or --low-share"),
}
"""Flags that say more about what another one turns on: the values one of which must be there."""
_OF_HOLDING = (
    *("--sbs-n-limit", "--sbs-queue-timeout-secs", "--sbs-max-queue-requests"),
    *("--sbs-max-queue-tokens", "--sbs-max-hold-ms", "--sbs-priority-step-ms"),
    *("--sbs-tenant-weights",),
)
"""An immediate policy has no queue: it refuses nothing, and holds nothing."""
_OF_CACHES = ("--prefix-source", "--kv-tokens", "--host-kv-tokens", "--storage")


def refuse_without_effect(
    args: argparse.Namespace,
    flags: Set[str],
    policies: Collection[str],
    parser: argparse.ArgumentParser,
    *,
    holding: Collection[str],
    readers: Collection[str],
    caches: bool,
) -> None:
    """``flags``: those that were given (:func:`.common.given`). ``holding``: the policies that hold
    requests, ``readers``: those that are told what ranks have cached. ``caches``: the scenario has
    prefix caches. Ends the program with code 2 for the first flag without effect."""
    for flag, (fields, wanted) in _NEEDS_ONE.items():
        if flag in flags and not any(getattr(args, field, None) for field in fields):
            parser.error(f"{flag}: without {wanted} it has no effect")
    for flag in sorted(flags & {*_OF_CACHES}):
        if not caches and (flag != "--kv-tokens" or args.kv_tokens):
            parser.error(f"{flag}: no effect, as there are no prefix caches (--block-tokens)")
    of_policies: tuple[tuple[Collection[str], Callable[[str], bool], str], ...] = (
        (_OF_HOLDING, lambda name: name in holding, "a policy that holds requests, as sbs does"),
        (
            ("--sbs-t-default-ms",),
            lambda name: name in holding or reads_reports(name),
            "a policy that reads EndForward, as sbs and eta do",
        ),
        (("--sbs-iqr-k",), lambda name: name == "sbs_paper", "sbs_paper"),
        (("--prefix-source",), lambda name: name in readers, f"one of {', '.join(readers)}"),
    )
    for names, fits, wanted in of_policies:
        for flag in sorted(flags & {*names}):
            if not any(map(fits, policies)):
                parser.error(f"{flag}: no effect under {', '.join(policies)}: it is for {wanted}")
    _refuse_instances(args, flags, parser)


def _refuse_instances(
    args: argparse.Namespace, flags: Set[str], parser: argparse.ArgumentParser
) -> None:
    listed: list[Mapping[str, Any]] = getattr(args, "instance", None) or []
    for flag, field in (("--dp", "dp_size"), ("--chunks", "chunk_tokens")):
        if flag in flags and listed and all(field in one for one in listed):
            parser.error(f"{flag}: no effect, as every --instance has its own")
    changes: tuple[TopologyChange, ...] = getattr(args, "at", ())
    for change in changes:
        if change.at_s >= args.duration:
            parser.error(
                f"--at {change.at_s:g}:{change.action}:{change.instance}: no effect, as "
                f"--duration ends at {args.duration:g} s"
            )
