"""The sentences a comparison begins with: what SBS gains and loses, and what has no ratio."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.compare_routers.results.ratios import disturbed_runs, failed_requests, ratio_cells
from benchmarks.compare_routers.results.rows import Row
from benchmarks.compare_routers.results.tables import verdict
from sglang_sbs.console.plain_words import counted
from sglang_sbs.trial.ratios import joined

_KINDS = (("", "the best other router"), ("own_", "our best immediate policy"))


def sentences(rows: Sequence[Row]) -> list[str]:
    """A sentence per variant of SBS, rival and outcome: gains, then losses, then no difference; and
    what was thrown away."""
    cells = ratio_cells(rows)
    lines: list[str] = []
    for policy in dict.fromkeys(cell["policy"] for cell in cells):
        mine = [cell for cell in cells if cell["policy"] == policy]
        for kind, rival in _KINDS:
            lines += _of_policy(policy, mine, kind, rival)
    if failed := [cell for cell in cells if cell["failed"]]:
        where = joined(f"{cell['policy']} at {_where(cell)}" for cell in failed)
        lines.append(f"No ratio, as runs failed: {where}.")
    if disturbed := list(dict.fromkeys(disturbed_runs(rows))):
        lines.append(
            f"No ratio in cells with a run that is thrown away: {joined(disturbed)}. A quieter "
            "machine or a longer --pass-s, then --resume."
        )
    if lost := failed_requests(rows, lambda name: name.startswith("sbs")):
        lines.append(f"SBS left {counted(lost, 'request')} unanswered.")
    return lines or ["No ratio: there is no run of SBS with figures beside another router."]


def _of_policy(
    policy: str, cells: Iterable[dict[str, Any]], kind: str, rival: str
) -> Iterable[str]:
    by_outcome: dict[str, list[str]] = {"better": [], "worse": [], "equal": []}
    tails = []
    for cell in cells:
        mean, p99 = cell[f"{kind}mean_ratio"], cell[f"{kind}p99_ratio"]
        if mean is None:
            continue
        spread = _spread(cell[f"{kind}mean_ratio_spread"])
        by_outcome[verdict(mean)].append(
            f"{mean:.2f}x{spread} of {cell[f'{kind}mean_peer']} at {_where(cell)}"
        )
        if p99 is not None and verdict(p99) == "worse":
            tails.append(f"{p99:.2f}x of {cell[f'{kind}p99_peer']} at {_where(cell)}")
    heads = {
        "better": f"{policy} has a lower mean TTFT than {rival}",
        "worse": f"{policy} LOSES against {rival}",
        "equal": f"{policy} gains nothing over {rival}",
    }
    for outcome, words in by_outcome.items():
        if words:
            yield f"{heads[outcome]}: {joined(words)}."
    if tails:
        yield f"{policy} has a longer p99 TTFT than {rival}: {joined(tails)}."


def _where(cell: dict[str, Any]) -> str:
    return f"{cell['workload']} {cell['load']:g}"


def _spread(ends: Sequence[float] | None) -> str:
    """Over seeds; with one there is none."""
    if ends is None or ends[0] == ends[1]:
        return ""
    return f" ({ends[0]:.2f} to {ends[1]:.2f} by seed)"
