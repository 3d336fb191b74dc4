"""Which process a worker is, case by case."""

from __future__ import annotations

import pytest

from sglang_sbs.router.workers.boot_identity import (
    MAX_REMEMBERED,
    QUIET_S,
    SILENT_AFTER_S,
    BootIdentity,
    BootVerdict,
)

SOON, LATE, SILENT = 0.0, QUIET_S, SILENT_AFTER_S


@pytest.mark.parametrize(
    ("known", "boot_id", "shown", "quiet_s", "retired", "verdict"),
    [
        # The first word of a rank is believed, whatever /server_info shows: there are other nodes.
        (None, "b1", "", SOON, False, BootVerdict.BELIEVED),
        (None, "node-1", "node-0", SOON, False, BootVerdict.BELIEVED),
        # The process that is known.
        ("b1", "b1", "", SOON, False, BootVerdict.BELIEVED),
        ("b1", "b1", "b1", SILENT, False, BootVerdict.BELIEVED),
        # Another one, where /server_info shows the known one, or that one.
        ("b1", "b2", "b1", SOON, False, BootVerdict.UNCONFIRMED),
        ("b1", "b2", "b1", SILENT, False, BootVerdict.UNCONFIRMED),
        ("b1", "b2", "b2", SOON, False, BootVerdict.RESTARTED),
        # Where it shows none, or another node's, the known one has to be quiet.
        ("b1", "b2", "", SOON, False, BootVerdict.DROPPED),
        ("b1", "b2", "", LATE, False, BootVerdict.RESTARTED),
        ("b1", "b2", "node-0", SOON, False, BootVerdict.DROPPED),
        ("b1", "b2", "node-0", LATE, False, BootVerdict.RESTARTED),
        # What was taken to be over.
        (None, "b2", "", SOON, True, BootVerdict.DROPPED),
        ("b1", "b2", "", LATE, True, BootVerdict.DROPPED),
        ("b1", "b2", "", SILENT, True, BootVerdict.RESTARTED),
        ("b1", "b2", "b2", SOON, True, BootVerdict.RESTARTED),
        ("b1", "b2", "b1", SILENT, True, BootVerdict.UNCONFIRMED),
    ],
)
def test_the_verdict_on_a_boot_id(
    known: str | None, boot_id: str, shown: str, quiet_s: float, retired: bool, verdict: BootVerdict
) -> None:
    boot = BootIdentity()
    if known is not None:
        boot.by_rank[0] = known
    if retired:
        boot.retired.add(boot_id)
    assert boot.judge(0, boot_id, shown, quiet_s) is verdict


@pytest.mark.parametrize(
    ("claimant", "before", "now", "restarted", "false_claim"),
    [
        ("", "b1", "b1", False, ""),
        ("", "", "b1", False, ""),
        ("b2", "b1", "b2", True, ""),
        ("b3", "b1", "b2", True, ""),
        ("b2", "b1", "b1", False, "b2"),
        ("b2", "", "b2", False, ""),
        ("b2", "b1", "", False, "b2"),
    ],
)
def test_what_server_info_makes_of_a_claim(
    claimant: str, before: str, now: str, restarted: bool, false_claim: str
) -> None:
    boot = BootIdentity()
    if claimant:
        boot.ask(claimant)
        assert boot.recheck
    assert boot.confirm(before, now) == (restarted, false_claim)
    assert (boot.recheck, boot.claimant) == (False, "")
    assert boot.retired == ({false_claim} if false_claim else set())


def test_a_restart_ends_all_ranks_and_a_boot_that_is_believed_again_is_not_over() -> None:
    boot = BootIdentity()
    for rank, name in enumerate(("node-0", "node-1")):
        boot.by_rank[rank] = name
    boot.restarted(7.0)
    assert (boot.by_rank, boot.retired, boot.restarted_s) == ({}, {"node-0", "node-1"}, 7.0)
    boot.accept(1, "node-1")
    assert boot.retired == {"node-0"}


def test_a_flood_of_boots_is_forgotten() -> None:
    boot = BootIdentity()
    for number in range(3 * MAX_REMEMBERED):
        boot.by_rank[0] = str(number)
        boot.restarted(0.0)
    assert len(boot.retired) <= MAX_REMEMBERED
