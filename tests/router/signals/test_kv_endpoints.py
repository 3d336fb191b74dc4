"""Where an engine publishes its KV events, as its /server_info says."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_sbs.router.workers.server_info import (
    KvEventsBlock,
    WorkerInfo,
    parse_server_info,
)

INFO = {
    "version": "0.5.23",
    "attn_dp_size": 2,
    "page_size": 16,
    "kv_events": {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "replay_endpoint_port_base": 5600,
        "topic": "kv",
        "block_size": 32,
        "dp_size": 2,
    },
}


def described(**changes: Any) -> WorkerInfo:
    block = {k: v for k, v in (INFO["kv_events"] | changes).items() if v is not None}  # type: ignore[operator]
    return parse_server_info(INFO | {"kv_events": block}, "prefill")


def test_server_info_of_0_5_23() -> None:
    info = described()
    assert info.kv_events == KvEventsBlock(
        port=5557, replay_port=5600, topic="kv", block_tokens=32, host="*"
    )
    assert info.page_size == 32
    assert info.radix_cache
    assert info.warnings == ()
    assert not parse_server_info(INFO | {"disable_radix_cache": True}, "prefill").radix_cache
    assert parse_server_info(INFO | {"kv_events": None}, "prefill").page_size == 16


@pytest.mark.parametrize("enabled", [True, False, None])
def test_decode_has_a_radix_cache_only_if_it_was_asked_for(enabled: bool | None) -> None:
    flag = {"disaggregation_decode_enable_radix_cache": enabled}
    assert parse_server_info(INFO | flag, "decode").radix_cache is (enabled is True)


@pytest.mark.parametrize(
    "changes",
    [
        {"endpoint_port_base": 0},
        {"endpoint_port_base": 65535},
        {"endpoint_port_base": "5557"},
        {"block_size": 0},
        {"dp_size": 8},
    ],
)
def test_what_cannot_be_subscribed_to_is_said(changes: dict[str, Any]) -> None:
    info = described(**changes)
    assert info.kv_events is None
    assert "cannot be subscribed to" in info.warnings[0]


@pytest.mark.parametrize("replay", [5558, 5556, 70000, "x"])
def test_overlapping_replay_ports_are_not_used(replay: Any) -> None:
    info = described(replay_endpoint_port_base=replay)
    assert info.kv_events is not None
    assert info.kv_events.replay_port is None
    assert "5559 or higher" in info.warnings[0]


def test_other_publishers_are_none() -> None:
    assert described(publisher="null").kv_events is None
    assert described(replay_endpoint_port_base=None).warnings == ()
