"""The ranks of an instance that has none of the prompts cached."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sglang_sbs.scheduling.policies.pbaa import Allocation, Target, place_fitting
from sglang_sbs.scheduling.request import Request


def target(
    c_avail: Sequence[int], chunk_tokens: int, *, page: int = 1, places: Sequence[float] = ()
) -> Target:
    """``places``: how many requests each rank still takes; empty: any number."""
    unlimited = [math.inf] * len(c_avail)
    ranks = range(len(c_avail))
    return Target("p0", c_avail, places or unlimited, chunk_tokens, page, ranks)


def placed_on(requests: Iterable[Request], to: Target) -> Allocation:
    return place_fitting(requests, to, lambda _request, _capacity: None)
