"""The figures of `scripts/compare-routers` from EndForward and answers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from benchmarks.compare_routers.results import measure
from benchmarks.compare_routers.results.measure import KvBand
from benchmarks.demo.load import Sample
from benchmarks.listener import ReceivedMessage
from sglang_sbs.wire import EndForward


def report_of(rank: int, forward_id: int, kind: str, **changed: object) -> EndForward:
    fields: dict[str, object] = {
        "instance_id": "",
        "boot_id": "boot",
        "role": "prefill",
        "dp_rank": rank,
        "dp_size": 2,
        "seq": 0,
        "kind": kind,
        "forward_id": forward_id,
        "chunk_tokens": 100,
        **changed,
    }
    return EndForward(**fields)  # type: ignore[arg-type]


def passes_of(*times: tuple[float, float, int]) -> list[ReceivedMessage]:
    """Passes of (start, end, tokens left behind), on an engine clock 1000 s ahead of ours."""
    received = []
    for number, (start_s, end_s, left) in enumerate(times):
        for rank, tokens in enumerate((80, 40)):
            received.append(
                ReceivedMessage(start_s, report_of(rank, number, "launch", extend_tokens=tokens))
            )
        for rank in range(2):
            done = report_of(
                rank,
                number,
                "forward",
                end_s=end_s + 1000,
                forward_s=end_s - start_s,
                waiting_tokens=left,
            )
            received.append(ReceivedMessage(end_s + 0.01 * number, done))
    return received


def test_pauses_with_work_in_hand_are_the_engines_own_and_no_bubble() -> None:
    received = passes_of((1, 2, 5), (2.1, 3.1, 5), (3.2, 4.2, 5), (4.3, 5.3, 0), (5.6, 6.6, 0))
    figures = measure.engines(received, {"boot": "p0"}, begin_s=0.0, load_s=10.0)
    assert figures.own_gap_ms == pytest.approx(100.0)
    assert figures.bubble_beyond_share == pytest.approx(0.2 / 5.6)
    assert figures.passes.chunk_utilization == pytest.approx(0.6)


def test_the_nodes_of_an_instance_have_their_passes_together() -> None:
    received = [
        ReceivedMessage(
            message.at_s, replace(message.report, boot_id=f"node {message.report.dp_rank}")
        )
        for message in passes_of((1, 2, 5), (2.1, 3.1, 5))
    ]
    names = {"node 0": "p0", "node 1": "p0"}
    figures = measure.engines(received, names, begin_s=0.0, load_s=10.0)
    assert figures.passes.tokens_per_pass == 120
    assert figures.passes.passes == 2


def test_the_kv_band_is_the_deviation_over_ranks() -> None:
    received = [
        ReceivedMessage(0.0, report_of(rank, 0, "heartbeat", role="decode", kv_tokens=tokens))
        for rank, tokens in enumerate((100, 300))
    ]
    figures = measure.engines(received, {"boot": "d0"}, begin_s=0.0, load_s=1.0)
    assert figures.kv == KvBand(200.0, 100.0)


def test_a_decode_rank_that_says_nothing_is_in_the_band() -> None:
    received = [ReceivedMessage(0.0, report_of(0, 0, "heartbeat", role="decode", kv_tokens=400))]
    figures = measure.engines(received, {"boot": "d0"}, begin_s=0.0, load_s=1.0)
    assert figures.kv == KvBand(200.0, 200.0)


def test_answers_count_what_was_within_the_slo() -> None:
    samples = [Sample(0.0, 10, ttft_s=t, e2e_s=t + 0.7, output_tokens=8) for t in (0.1, 0.2, 3.0)]
    samples.append(Sample(0.0, 10, error="HTTP 503"))
    found = measure.answers(samples, slo_ttft_s=1.0, slo_tpot_s=0.2, load_s=2.0)
    assert (found.completed, found.failed, found.errors) == (3, 1, ["HTTP 503"])
    assert found.goodput_qps == pytest.approx(1.0)
    assert found.tpot_ms.mean == pytest.approx(100.0)
    slow = measure.answers(samples, slo_ttft_s=1.0, slo_tpot_s=0.05, load_s=2.0)
    assert slow.goodput_qps == 0.0
