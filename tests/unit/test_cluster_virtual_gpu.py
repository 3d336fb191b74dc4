"""The cost model of the virtual GPU, and the FIFO device that applies it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tools.cpu_engine.virtual_device import VirtualDevice, VirtualEvent
from tools.cpu_engine.virtual_gpu import VirtualGpuCost

COST = VirtualGpuCost(
    prefill_base_s=1,
    prefill_per_max_token_s=0.5,
    prefill_per_total_token_s=0.25,
    decode_base_s=2,
    decode_per_max_request_s=0.125,
    decode_per_max_kv_token_s=0.0625,
)


def batch(
    per_rank: list[int] | None, extend: bool, seqlens: tuple[int, ...] = (), extend_tokens: int = 0
) -> Any:
    return SimpleNamespace(
        global_num_tokens=per_rank,
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
        is_extend_in_batch=extend,
        extend_num_tokens=extend_tokens,
        reqs=[SimpleNamespace(seqlen=seqlen) for seqlen in seqlens],
    )


def test_prefill_is_set_by_the_fullest_rank_and_by_the_sum() -> None:
    assert COST.prefill_s([4, 0, 2]) == 1 + 0.5 * 4 + 0.25 * 6


def test_decode_is_set_by_the_largest_batch_and_the_largest_kv() -> None:
    assert COST.decode_s([1, 8], [32, 16]) == 2 + 0.125 * 8 + 0.0625 * 32
    assert COST.decode_s([]) == 2


def test_json_round_trips_and_missing_fields_are_defaults() -> None:
    assert VirtualGpuCost.from_json(COST.to_json()) == COST
    assert VirtualGpuCost.from_json("{}") == VirtualGpuCost()
    assert VirtualGpuCost.from_json('{"decode_base_s": 1}') == VirtualGpuCost(decode_base_s=1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"prefill_s": 1}', "unknown field 'prefill_s'; known ones: prefill_base_s"),
        ('{"prefill_base_s": -1}', "prefill_base_s must be a finite number of seconds >= 0"),
        ('{"prefill_base_s": NaN}', "prefill_base_s must be a finite number"),
        ('{"prefill_base_s": "1"}', "prefill_base_s must be a number"),
        ('{"prefill_base_s": true}', "prefill_base_s must be a number"),
    ],
)
def test_a_bad_value_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        VirtualGpuCost.from_json(text)


def test_the_device_is_a_queue() -> None:
    device = VirtualDevice(COST)
    first = device.launch(batch([4, 0], extend=True), launched_at_s=100)
    queued = device.launch(batch([0, 4], extend=True), launched_at_s=101)
    after_a_gap = device.launch(batch([4, 4], extend=True), launched_at_s=200)
    assert first.deadline_s == 100 + 4
    assert queued.deadline_s == 104 + 4
    assert after_a_gap.deadline_s == 200 + 5


def test_an_idle_rank_takes_as_long_as_the_others() -> None:
    busy, idle = VirtualDevice(COST), VirtualDevice(COST)
    tokens = [0, 8]
    busy_end = busy.launch(batch(tokens, extend=True, extend_tokens=8), launched_at_s=5)
    # The scheduler gives a rank without work an IDLE batch in the same pass.
    idle_batch = batch(tokens, extend=False)
    idle_batch.is_extend_in_batch = True
    assert idle.launch(idle_batch, launched_at_s=5).deadline_s == busy_end.deadline_s


def test_without_dp_attention_the_local_batch_counts() -> None:
    device = VirtualDevice(COST)
    prefill = device.launch(batch(None, extend=True, extend_tokens=8), launched_at_s=0)
    assert prefill.deadline_s == COST.prefill_s([8])
    decode = device.launch(batch(None, extend=False, seqlens=(10, 20)), launched_at_s=100)
    assert decode.deadline_s == 100 + COST.decode_s([2], [30])


def test_an_event_is_done_from_its_deadline_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 10.0
    slept: list[float] = []
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    monkeypatch.setattr("time.sleep", slept.append)
    event = VirtualEvent(12.5)
    assert not event.query()
    event.synchronize()
    now_s = 12.5
    assert event.query()
    event.synchronize()
    assert slept == [2.5]
