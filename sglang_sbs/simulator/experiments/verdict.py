"""The summary sentences at the beginning of ``simulate``'s output."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from sglang_sbs.simulator.experiments.tables import groups, mean_of
from sglang_sbs.simulator.parallel import Row
from sglang_sbs.trial.ratios import (
    NO_GAIN,
    NO_LOSS,
    Circumstances,
    Ratio,
    joined,
    ratio_of_means,
    why_no_gain,
)

_SHOWN_LOADS = 3
"""Limit on ratios in one sentence; of more, only the smallest and the largest are given."""
_P99_LOSS = 1.05


class _Cell(NamedTuple):
    """The subject compared with the best other policy at one load."""

    load: float
    other: str
    mean: Ratio
    p99: float
    why: str
    """Reason why there is no gain to report; empty if there is one."""


def of_loads(rows: Sequence[Row]) -> list[str]:
    """Verdict on rows of :func:`~.sweep.run_job`: a paragraph per cost model and chunk size."""
    panels = list(groups(rows, "cost", "chunk_tokens").items())
    several = len(panels) > 1
    return [
        (f"Cost {cost}, chunk {chunk}: " if several else "") + _of_panel(mine)
        for (cost, chunk), mine in panels
    ]


def _of_panel(rows: Sequence[Row]) -> str:
    subject = subject_of(rows)
    cells, sentences = [], []
    for (load,), mine in groups(rows, "load").items():
        ours = [row for row in mine if row["policy"] == subject]
        served = {name: some for (name,), some in groups(mine, "policy").items() if _served(some)}
        if not _served(ours):
            if ours:
                sentences.append(
                    f"At load {load:g} {subject} {_unserved(ours)}, so there is no ratio."
                )
            continue
        others = {name: served[name] for name in others_of(subject, served)}
        if others:
            cells.append(_cell(load, ours, others))
        else:
            sentences.append(_alone(subject, load, ours))
    return " ".join([*_compared(subject, cells), *sentences]) or "Nothing was simulated."


def subject_of(rows: Sequence[Row]) -> str:
    """Return the policy that a verdict is about: ``sbs``, another SBS variant, or the first."""
    names = list(dict.fromkeys(row["policy"] for row in rows))
    return "sbs" if "sbs" in names else next(filter(_is_sbs, names), names[0])


def others_of(subject: str, names: Sequence[str] | dict[str, list[Row]]) -> list[str]:
    """Return the policies to compare with; variants of SBS only if there are no others."""
    others = [name for name in names if name != subject]
    return [name for name in others if not _is_sbs(name)] or others


def _is_sbs(policy: str) -> bool:
    return policy.startswith("sbs")


def _served(rows: Sequence[Row]) -> bool:
    """Return whether every request got its first token, so that means are comparable."""
    done = rows and all(row["completed"] for row in rows)
    return bool(done) and not any(row["unfinished"] or row["rejected"] for row in rows)


def _unserved(rows: Sequence[Row]) -> str:
    left, refused = (sum(row[key] for row in rows) for key in ("unfinished", "rejected"))
    if not left and not refused:
        return "has no request after the warm-up"
    parts = [f"leaves {left:,} requests unfinished"] if left else []
    parts += [f"refuses {refused:,}"] if refused else []
    return " and ".join(parts)


def _alone(subject: str, load: float, ours: Sequence[Row]) -> str:
    mean_s = mean_of(ours, "ttft_mean_s")
    return (
        f"{subject} has a mean TTFT of {mean_s:.3f} s at load {load:g}; no other policy served "
        "every request there, so there is no ratio."
    )


def _cell(load: float, ours: Sequence[Row], others: dict[str, list[Row]]) -> _Cell:
    other = min(others, key=lambda name: mean_of(others[name], "ttft_mean_s"))
    theirs = {row["seed"]: row for row in others[other]}
    pairs = [(row, theirs[row["seed"]]) for row in ours if row["seed"] in theirs]
    parts = [
        (our_part, their_part)
        for row, beside in pairs
        for our_part, their_part in zip(row["ttft_parts"], beside["ttft_parts"], strict=True)
    ]
    mean = ratio_of_means(*zip(*parts, strict=True))
    p99 = statistics.fmean(row["ttft_p99_s"] for row, _ in pairs)
    p99 /= statistics.fmean(row["ttft_p99_s"] for _, row in pairs)
    computed = statistics.fmean(row["full_chunk_load"] for row in ours)
    about = Circumstances(ours[0]["policy"], True, computed, ours[0]["dp_size"])
    why = why_no_gain(about) if about.policy == "sbs" else ""
    return _Cell(load, other, mean, p99, "" if why.startswith("no cause") else why)


def _compared(subject: str, cells: Sequence[_Cell]) -> list[str]:
    gains = [cell for cell in cells if cell.mean.high < 1 and cell.mean.ratio <= NO_GAIN]
    losses = [cell for cell in cells if cell.mean.low > 1 and cell.mean.ratio >= NO_LOSS]
    alike = [cell for cell in cells if cell not in gains and cell not in losses]
    tails = [cell for cell in cells if cell.p99 > _P99_LOSS]
    name, sentences = subject, []
    if gains:
        sentences.append(f"{name} has {_at_loads(gains)}.")
        name = "It"
    for why in dict.fromkeys(cell.why for cell in alike):
        mine = [cell for cell in alike if cell.why == why]
        because = f": {why}" if why else ""
        sentences.append(f"{name} gains nothing {_brief(mine)}{because}.")
        name = "It"
    if losses:
        sentences.append(f"{name} loses {_brief(losses)}.")
    if tails:
        sentences.append(f"Its p99 TTFT is longer {_p99s(tails)}.")
    return sentences


def _at_loads(cells: Sequence[_Cell]) -> str:
    """Format ``0.67x (0.61 to 0.74) the mean TTFT of eta, the best other policy, at load 0.6 and
    ...``"""
    words: list[str] = []
    for cell in _shown(cells):
        of = f"that of {cell.other}" if words else f"the mean TTFT of {cell.other}"
        words.append(f"{cell.mean.words()} {of} at load {cell.load:g}")
    return joined(words) + _more(cells, words)


def _brief(cells: Sequence[_Cell]) -> str:
    words = [f"{cell.load:g} ({cell.mean.words()} of {cell.other})" for cell in _shown(cells)]
    return f"at load {joined(words)}" + _more(cells, words)


def _p99s(cells: Sequence[_Cell]) -> str:
    worst = sorted(cells, key=lambda cell: -cell.p99)[:_SHOWN_LOADS]
    words = [f"{cell.load:g} ({cell.p99:.2f}x of {cell.other})" for cell in worst]
    return f"at load {joined(words)}" + _more(cells, words)


def _shown(cells: Sequence[_Cell]) -> list[_Cell]:
    if len(cells) <= _SHOWN_LOADS:
        return list(cells)
    ordered = sorted(cells, key=lambda cell: cell.mean.ratio)
    return [ordered[0], ordered[-1]]


def _more(cells: Sequence[_Cell], words: Sequence[str]) -> str:
    return f", with {len(cells) - len(words)} loads between" if len(cells) > len(words) else ""


def of_capacity(rows: Sequence[Row]) -> list[str]:
    """Verdict on rows of :func:`~.sweep.max_load`: a sentence per cost model, each policy at its
    best chunk size."""
    panels = list(groups(rows, "cost").items())
    several = len(panels) > 1
    return [(f"Cost {cost}: " if several else "") + _of_capacity(mine) for (cost,), mine in panels]


def _of_capacity(rows: Sequence[Row]) -> str:
    subject, slo_s = subject_of(rows), rows[0]["slo_ttft_s"]
    best: dict[str, list[Row]] = {}
    for (name, _chunk), mine in groups(rows, "policy", "chunk_tokens").items():
        if name not in best or mean_of(mine, "max_qps") > mean_of(best[name], "max_qps"):
            best[name] = mine
    ours_qps, chunk = mean_of(best[subject], "max_qps"), best[subject][0]["chunk_tokens"]
    if not ours_qps:
        first = f"{subject} meets a mean TTFT of {slo_s:g} s at no load"
    else:
        first = f"{subject} serves {ours_qps:.4g} QPS within a mean TTFT of {slo_s:g} s"
        first += f" (chunk {chunk})"
    others = others_of(subject, best)
    if not others:
        return f"{first}."
    other = max(others, key=lambda name: mean_of(best[name], "max_qps"))
    theirs = {row["seed"]: row["max_qps"] for row in best[other]}
    theirs_qps = mean_of(best[other], "max_qps")
    if not (ours_qps and theirs_qps):
        return f"{first}; {other}, the best other policy, {theirs_qps:.4g} QPS."
    pairs = [
        (row["max_qps"], theirs[row["seed"]]) for row in best[subject] if row["seed"] in theirs
    ]
    ratio = ratio_of_means([(ours, 1) for ours, _ in pairs], [(qps, 1) for _, qps in pairs])
    alike = " (no certain difference)" if ratio.low <= 1 <= ratio.high < float("inf") else ""
    return f"{first}, {ratio.words()} the {theirs_qps:.4g} QPS of {other}, the best other{alike}."
