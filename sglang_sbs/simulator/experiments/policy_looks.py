"""Colors, line styles and short descriptions of policies in every figure. One table, so that a
color always means the same. Needs no plotting library."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import NamedTuple


class PolicyLook(NamedTuple):
    colour: str
    words: str


LOOKS: dict[str, PolicyLook] = {
    "sbs": PolicyLook("#2ca02c", "staggered batches, sent ahead of the predicted end of a pass"),
    "sbs_paper": PolicyLook("#1f77b4", "the paper's Algorithms 1 and 3 to the letter"),
    "sbs_basic": PolicyLook("#98df8a", "sbs without knowledge of caches"),
    "sbs_equal": PolicyLook("#17becf", "sbs without priorities and tenants"),
    "eta": PolicyLook("#ff7f0e", "at once, to the earliest predicted finish"),
    "least_tokens": PolicyLook(
        "#9467bd", "at once, to the DP rank with the fewest unfinished tokens"
    ),
    "least_requests": PolicyLook("#bcbd22", "at once, to the DP rank with the fewest requests"),
    "power_of_two": PolicyLook("#e377c2", "at once, to the better of two random DP ranks"),
    "round_robin": PolicyLook("#8c564b", "at once, to the DP ranks in turn"),
    "random": PolicyLook("#ff9896", "at once, to a random DP rank"),
    "random_rank": PolicyLook("#d62728", "instances in turn, the DP rank at random: SGLang's own"),
    "cache_aware": PolicyLook(
        "#393b79", "the stock gateway's approximate trees, DP ranks at random"
    ),
    "session": PolicyLook("#aec7e8", "a conversation stays on one DP rank"),
}
_SPARE = ("#ce6dbd", "#3182bd", "#e6550d", "#31a354", "#756bb1", "#bd9e39", "#5254a3", "#a55194")


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return a color per name; unknown names get unused colors in order."""
    spare = cycle(_SPARE)
    return {
        name: LOOKS[name].colour if name in LOOKS else next(spare) for name in dict.fromkeys(names)
    }


def words_of(names: Iterable[str]) -> list[tuple[str, str]]:
    return [(name, LOOKS[name].words) for name in dict.fromkeys(names) if name in LOOKS]
