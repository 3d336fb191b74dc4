"""Real engines with SGLang's DWDP (``--dwdp-size``) behind the router: prefill ranks that wait for
nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.demo.tokens import DP_SIZE, MIN_PROMPTS, match_tokens
from benchmarks.demo.virtual_cluster import dwdp_flags
from sglang_sbs.scheduling import ForwardEnded
from sglang_sbs.scheduling.eventlog import read_event_log

pytestmark = pytest.mark.cluster


async def test_each_rank_makes_passes_of_its_own_and_no_token_differs(tmp_path: Path) -> None:
    """1P1D that computes the model, against one engine with a barrier asked directly."""
    report = await match_tokens(tmp_path, Console(quiet=True), prefill_flags=dwdp_flags(DP_SIZE))
    assert report.difference == ""
    assert (report.pairs, report.prompts >= MIN_PROMPTS) == (DP_SIZE * DP_SIZE, True)
    ends: dict[int, dict[int, float]] = {rank: {} for rank in range(DP_SIZE)}
    for record in read_event_log(tmp_path / "token-match.events"):
        if not isinstance(record.event, ForwardEnded):
            continue
        message = record.event.report
        if message.role == "prefill" and message.kind == "forward" and message.extend_tokens:
            assert not message.barrier
            ends[message.dp_rank][message.forward_id] = message.end_s
    first, second = ends.values()
    assert first and second, "both ranks computed prompts"
    # With a barrier a pass with a lower number is over first, on whichever rank.
    assert overtakes(first, second) or overtakes(second, first)


def overtakes(mine: dict[int, float], other: dict[int, float]) -> bool:
    """Whether a pass of the first rank ended before one of the other with a lower number."""
    return any(other[low] > mine[high] for high in mine for low in other if low < high)
