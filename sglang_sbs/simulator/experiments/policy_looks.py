"""How policies and routers look in every picture, and what they are in a few words. One table, so
that a colour means the same wherever it is drawn. Needs nothing to draw with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Look(NamedTuple):
    colour: str
    words: str


LOOKS: dict[str, Look] = {
    "sbs": Look("#2ca02c", "staggered batches, sent ahead of the predicted end of a pass"),
    "sbs_paper": Look("#1f77b4", "the paper's Algorithms 1 and 3 to the letter"),
    "sbs_basic": Look("#98df8a", "sbs that is not told what is cached"),
    "sbs_equal": Look("#17becf", "sbs that is told of no priorities and no tenants"),
    "sbs_no_gate": Look("#74c476", "sbs whose engines hold no batch together"),
    "sbs_potential": Look("#2ca02c", "decode ranks as sbs chooses them: least growth of the worst"),
    "sbs_iqr": Look("#1f77b4", "decode ranks by the paper's Algorithm 3"),
    "eta": Look("#ff7f0e", "at once, to the earliest predicted finish"),
    "least_tokens": Look("#9467bd", "at once, to the DP rank with the fewest unfinished tokens"),
    "stale_tokens": Look("#c5b0d5", "least_tokens by loads a second old, as gateways that poll"),
    "least_requests": Look("#bcbd22", "at once, to the DP rank with the fewest requests"),
    "power_of_two": Look("#e377c2", "at once, to the better of two random DP ranks"),
    "round_robin": Look("#8c564b", "at once, to the DP ranks in turn"),
    "random": Look("#ff9896", "at once, to a random DP rank"),
    "random_rank": Look("#d62728", "instances in turn, the DP rank at random: SGLang's own"),
    "cache_aware": Look("#393b79", "the stock gateway's approximate trees, DP ranks at random"),
    "session": Look("#aec7e8", "a conversation stays on one DP rank"),
    "sgl_router": Look("#ad494a", "as SGLang's new router chooses"),
    "llm_d": Look("#e7ba52", "by llm-d's scores"),
    "skewed": Look("#fdae6b", "in turn, with ranks that are preferred all the time"),
    "clairvoyant": Look("#bdbdbd", "knows when every request will end, as no router can"),
    "mini_lb": Look("#7f7f7f", "SGLang's mini load balancer: at random"),
    "sglang_router": Look("#9edae5", "sglang_router 0.3.2 as it comes: cache_aware"),
    "sglang_router:cache_aware": Look("#9edae5", "sglang_router 0.3.2, approximate trees"),
    "sglang_router:random": Look("#dbdb8d", "sglang_router 0.3.2, random instances"),
    "sglang_router:round_robin": Look("#c49c94", "sglang_router 0.3.2, instances in turn"),
    "sglang_router:power_of_two": Look("#f7b6d2", "sglang_router 0.3.2, better of two instances"),
    "smg": Look("#000000", "smg 1.13 as it comes: cache_aware"),
    "smg:round_robin": Look("#636363", "smg 1.13, instances in turn"),
    "smg:min_tokens": Look("#843c39", "smg 1.13, the DP rank with the fewest tokens"),
    "dynamo_kv": Look("#637939", "as NVIDIA Dynamo's router chooses"),
}
_SPARE = ("#ce6dbd", "#3182bd", "#e6550d", "#31a354", "#756bb1", "#bd9e39", "#5254a3", "#a55194")


def base_name(name: str) -> str:
    """Without what engines are started with (``smg:round_robin@delayer``)."""
    return name.partition("@")[0]


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each; those that the table lacks take what it does not use, in their order."""
    found: dict[str, str] = {}
    unknown: list[str] = []
    for name in dict.fromkeys(names):
        base = base_name(name)
        if base not in LOOKS and base not in unknown:
            unknown.append(base)
        look = LOOKS.get(base)
        found[name] = look.colour if look else _SPARE[unknown.index(base) % len(_SPARE)]
    return found


def words_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """What each of them is, as far as the table knows it."""
    return [
        (name, LOOKS[base_name(name)].words)
        for name in dict.fromkeys(names)
        if base_name(name) in LOOKS
    ]
