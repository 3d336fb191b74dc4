"""Prompts of several chunks: when their place matters."""

from __future__ import annotations

import pytest
from harness.learned_instance import CHUNK, instance, request

from sglang_sbs.scheduling.policies.adaptive.long_prompts import LongPrompts
from sglang_sbs.scheduling.policies.offered_load import OfferedLoad
from sglang_sbs.scheduling.queue.request import RequestQueue


@pytest.mark.parametrize(
    ("chunks", "load", "matters"),
    [(1.0, 0.0, False), (1.5, 0.3, True), (1.5, 0.6, False), (2.0, 0.9, True)],
)
def test_the_place_matters_for_prompts_of_more_chunks_the_higher_the_load(
    chunks: float, load: float, matters: bool
) -> None:
    offered = OfferedLoad()
    offered.load = load
    long = LongPrompts(offered)
    both = [instance("p0"), instance("p1")]
    long.on_topology_change(both)
    queue = RequestQueue()
    queue.add(request("r", round(chunks * CHUNK)))
    assert long.matter(queue, 0.0) is matters
