"""Two engines over several nodes with one ``SGLANG_SBS_INSTANCE_ID``."""

from __future__ import annotations

from typing import Any

import pytest
from registry_setup import Setup

from sglang_sbs.router.workers.boot_identity import QUIET_S, SILENT_AFTER_S
from sglang_sbs.router.workers.diagnosis import why_stranger
from sglang_sbs.router.workers.server_info import SbsBlock, WorkerInfo, parse_server_info
from sglang_sbs.wire import EndForward, decode_endforward, encode_endforward
from sglang_sbs.wire.endforward import ImplausibleMessage


def report(rank: int, boot: str, address: str, **fields: Any) -> EndForward:
    values = {"instance_id": "http://p:1", "role": "prefill", "dp_size": 4, "seq": 0}
    values |= {"kind": "heartbeat", "boot_id": boot, "dp_rank": rank, "dist_init_addr": address}
    return EndForward(**values | fields)


def on_nodes(address: str = "10.0.0.1:5000", nodes: int = 2) -> WorkerInfo:
    return WorkerInfo(
        dp_size=4, nodes=nodes, dist_init_addr=address, sbs=SbsBlock(boot_id="node-0")
    )


@pytest.mark.parametrize("stranger_first", [True, False])
def test_ranks_of_another_engine_are_ignored_and_named(
    stranger_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup()
    worker = setup.registry.add("http://p:1", "prefill")
    setup.registry.described(worker, on_nodes())
    setup.registry.set_healthy(worker, True)
    own = [report(2, "node-1", "10.0.0.1:5000"), report(0, "node-0", "10.0.0.1:5000")]
    others = [report(rank, "elsewhere", "10.0.0.9:5000") for rank in (2, 3)]
    for _ in range(3):
        setup.now_s += QUIET_S + 1  # a boot that is quiet is over, or so it seems
        for message in others + own if stranger_first else own + others:
            assert setup.registry.reported(worker, message) == (message in own)
        setup.registry.tick()
    assert worker.boot.by_rank == {0: "node-0", 2: "node-1"}
    assert (setup.silenced, setup.doubted) == ([], [])
    problem = worker.problems["dist_init_addr"]
    assert "'10.0.0.9:5000'" in problem
    assert "SGLANG_SBS_INSTANCE_ID" in problem
    assert sum("SGLANG_SBS_INSTANCE_ID" in record.getMessage() for record in caplog.records) == 1
    setup.now_s += SILENT_AFTER_S
    setup.registry.tick()
    assert "dist_init_addr" not in worker.problems


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("p0:5000", "p0:5000"),
        ("p0.pd.svc:5000", "P0:5000"),
        ("p0:5000", "10.0.0.1:5000"),  # a name may mean any address
        ("localhost:5000", "p0:5000"),
        ("0.0.0.0:5000", "10.0.0.1:5000"),
        ("[::1]:5000", "[fd00::1]:5000"),
        ("[fd00::1]:5000", "[fd00:0::1]:5000"),
        ("", "p0:5000"),  # an older plugin
        ("odd", "odd"),
    ],
)
def test_what_may_be_the_same_engine_is_believed(first: str, other: str) -> None:
    for mine, theirs in ((first, other), (other, first)):
        assert why_stranger(on_nodes(mine), report(2, "b", theirs)) == ""


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("p0:5000", "p0:5001"),
        ("p0:5000", "p1:5000"),
        ("10.0.0.1:5000", "10.0.0.2:5000"),
        ("[fd00::1]:5000", "[fd00::2]:5000"),
    ],
)
def test_what_cannot_be_the_same_engine_is_a_stranger(first: str, other: str) -> None:
    assert why_stranger(on_nodes(first), report(2, "b", other))


def test_an_address_is_what_engines_on_several_nodes_have() -> None:
    info = {"version": "0.5.23", "attn_dp_size": 2, "dist_init_addr": "p0:5000"}
    assert parse_server_info(info | {"nnodes": 2}, "prefill").dist_init_addr == "p0:5000"
    assert parse_server_info(info | {"nnodes": 1}, "prefill").dist_init_addr == ""
    assert parse_server_info(info | {"nnodes": 2, "dist_init_addr": None}, "prefill")
    with pytest.raises(ImplausibleMessage, match="dist_init_addr"):
        decode_endforward(encode_endforward(report(0, "b", "x" * 257)))
