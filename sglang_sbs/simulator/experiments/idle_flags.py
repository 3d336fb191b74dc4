"""Refuses flags that have no effect in combination with others, so that results are not misread.
Errors found by ``make_scenario`` and by the flags' own checks are not repeated here."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

from sglang_sbs.scheduling import Scheduler
from sglang_sbs.scheduling.policy_registry import reads_reports
from sglang_sbs.simulator.cluster.spec import TopologyChange
from sglang_sbs.simulator.experiments.sweep import READS_CACHES, scheduler_config
from sglang_sbs.simulator.workloads.scenario import Scenario

_NEEDS_ONE: Mapping[str, tuple[tuple[str, ...], str]] = {
    "--intake-until": (("intake_ms",), "--intake-ms"),
    "--pool-balance": (("pools",), "--pools"),
    "--decode-seconds": (("decode_kv_tokens", "decode_running"), "--decode-kv-tokens or -running"),
    "--sbs-tenant-weights": (("tenants",), "--tenants"),
    "--sbs-refuse-missed-slo": (("ttft_slo_ms",), "--ttft-slo-ms"),
    "--sbs-priority-step-ms": (("priority_share", "low_share"), "--priority-share or --low-share"),
}
"""Flags that modify what another flag turns on, and the values of which one must be given."""
_OF_HOLDING = (
    *("--sbs-n-limit", "--sbs-queue-timeout-secs", "--sbs-max-queue-requests"),
    *("--sbs-max-queue-tokens", "--sbs-max-hold-ms", "--sbs-priority-step-ms"),
    *("--sbs-tenant-weights",),
)
"""Flags without effect under immediate policies, which have no queue and so refuse and hold
nothing."""
_OF_CACHES = ("--prefix-source", "--kv-tokens", "--host-kv-tokens", "--storage", "--decode-cache")


def refuse_idle_flags(
    args: argparse.Namespace,
    flags: Set[str],
    policies: Sequence[str],
    scenario: Scenario,
    parser: argparse.ArgumentParser,
) -> None:
    """Refuse flags without effect. ``flags``: those given (:func:`.common.given`). Ends the program
    with code 2 at the first."""
    for flag, (fields, wanted) in _NEEDS_ONE.items():
        if flag in flags and not any(getattr(args, field, None) for field in fields):
            parser.error(f"{flag}: without {wanted} it has no effect")
    for flag in sorted(flags & {*_OF_CACHES}):
        if not scenario.spec.block_tokens and (flag != "--kv-tokens" or args.kv_tokens):
            parser.error(f"{flag}: no effect, as there are no prefix caches (--block-tokens)")
    holding = [policy for policy in policies if Scheduler(scheduler_config(policy)).policy.holds]
    timed = [*holding, *filter(reads_reports, policies)]
    of_policies: tuple[tuple[Collection[str], Collection[str], str], ...] = (
        (_OF_HOLDING, holding, "a policy that holds requests, as sbs does"),
        (("--sbs-t-default-ms",), timed, "a policy that reads EndForward, as sbs and eta do"),
        (("--sbs-iqr-k",), ("sbs_paper",), "sbs_paper"),
        (("--prefix-source",), READS_CACHES, f"one of {', '.join(READS_CACHES)}"),
    )
    for names, of_these, wanted in of_policies:
        for flag in sorted(flags & {*names}):
            if not {*policies} & {*of_these}:
                under = ", ".join(policies)
                parser.error(f"{flag}: no effect under {under}: it is for {wanted}")
    _refuse_instances(args, flags, parser)


def _refuse_instances(
    args: argparse.Namespace, flags: Set[str], parser: argparse.ArgumentParser
) -> None:
    listed: list[Mapping[str, Any]] = getattr(args, "instance", None) or []
    for flag, field in (("--dp", "dp_size"), ("--chunks", "chunk_tokens")):
        if flag in flags and listed and all(field in fields for fields in listed):
            parser.error(f"{flag}: no effect, as every --instance has its own")
    changes: tuple[TopologyChange, ...] = getattr(args, "at", ())
    for change in changes:
        if change.at_s >= args.duration:
            parser.error(
                f"--at {change.at_s:g}:{change.action}:{change.instance}: no effect, as "
                f"--duration ends at {args.duration:g} s"
            )
