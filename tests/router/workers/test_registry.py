"""Workers: when they may be used, and what is said about trouble."""

from __future__ import annotations

import logging
import socket
from typing import Any

import msgspec
import pytest
from registry_setup import INFO, Setup

from sglang_sbs.router.errors import leg_status_failure, transport_failure
from sglang_sbs.router.options.config import BreakerConfig
from sglang_sbs.router.processes.messages import WorkerState
from sglang_sbs.router.processes.mirrored_registry import MirroredRegistry, state_of
from sglang_sbs.router.workers.boot_identity import QUIET_S, SILENT_AFTER_S
from sglang_sbs.router.workers.registry import BARRIER_S
from sglang_sbs.router.workers.server_info import (
    SbsBlock,
    UnusableWorker,
    WorkerInfo,
    parse_server_info,
)
from sglang_sbs.router.workers.worker import Worker, WorkerEvents
from sglang_sbs.router.workers.worker_view import describe_worker
from sglang_sbs.scheduling.events import InstanceDown, InstanceUp
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.endforward import GATE_ALONE, GATE_ERRORS, GATE_UNSUPPORTED


def report(rank: int = 0, boot: str = "b1", **fields: Any) -> EndForward:
    values: dict[str, Any] = {
        "instance_id": "",
        "boot_id": boot,
        "role": "prefill",
        "dp_rank": rank,
        "dp_size": 2,
        "seq": 0,
        "kind": "forward",
    }
    return EndForward(**values | fields)


def test_a_worker_is_announced_once_described_and_healthy() -> None:
    setup = Setup()
    worker = setup.registry.add("http://p:1", "prefill", 8998)
    assert setup.events == []
    setup.registry.set_healthy(worker, True)
    assert setup.events == []
    setup.registry.described(worker, WorkerInfo(dp_size=2, chunk_tokens=512, page_size=16))
    setup.registry.refresh(worker)
    assert setup.events == [
        InstanceUp(
            instance="http://p:1",
            role="prefill",
            dp_size=2,
            chunk_tokens=512,
            page_size=16,
            overlap=True,
        )
    ]
    assert not setup.registry.ready
    setup.up("http://d:1", "decode")
    assert setup.registry.ready


def test_changed_limits_are_announced_again() -> None:
    setup = Setup()
    worker = setup.up("http://p:1")
    setup.registry.described(worker, WorkerInfo(dp_size=2, chunk_tokens=512))
    assert len(setup.events) == 1
    setup.registry.described(worker, WorkerInfo(dp_size=2, chunk_tokens=1024))
    assert isinstance(setup.events[-1], InstanceUp)
    assert setup.events[-1].chunk_tokens == 1024


def test_a_refused_connection_takes_the_worker_down_at_once() -> None:
    setup = Setup()
    worker = setup.up("http://p:1")
    setup.registry.leg_failed(transport_failure("prefill", worker.url, "refused", unreachable=True))
    assert setup.events[-1] == InstanceDown(instance=worker.url)
    assert setup.doubted == [worker.url]


def test_the_breaker_never_opens_on_the_last_worker_of_its_role() -> None:
    setup = Setup(threshold=2)
    first, second = setup.up("http://p:1"), setup.up("http://p:2")
    failure = leg_status_failure("prefill", first.url, 500, b"")
    for _ in range(2):
        setup.registry.leg_failed(failure)
    assert setup.events[-1] == InstanceDown(instance=first.url)
    for _ in range(5):
        setup.registry.leg_failed(leg_status_failure("prefill", second.url, 500, b""))
    assert second.usable
    setup.now_s += 10
    setup.registry.tick()
    assert isinstance(setup.events[-1], InstanceUp)
    assert setup.events[-1].instance == first.url


def test_client_errors_blame_nobody() -> None:
    setup = Setup(threshold=1)
    worker = setup.up("http://p:1")
    setup.up("http://p:2")
    setup.registry.leg_failed(leg_status_failure("prefill", worker.url, 400, b""))
    assert worker.usable
    assert worker.failures == 0


def test_a_new_boot_id_means_down_until_described_again() -> None:
    setup = Setup()
    worker = setup.up("http://p:1")
    assert setup.registry.reported(worker, report(0))
    assert setup.registry.reported(worker, report(1))
    setup.now_s += QUIET_S
    assert setup.registry.reported(worker, report(0, boot="b2"))
    assert setup.events[-1] == InstanceDown(instance=worker.url)
    assert setup.doubted == [worker.url]
    # A straggler of the old boot changes nothing, the other rank of the new one neither.
    assert not setup.registry.reported(worker, report(1, boot="b1"))
    assert setup.registry.reported(worker, report(1, boot="b2"))
    assert len(setup.events) == 2
    setup.registry.described(worker, WorkerInfo(dp_size=2))
    setup.registry.refresh(worker)
    assert isinstance(setup.events[-1], InstanceUp)


def test_while_a_boot_speaks_no_other_takes_its_place() -> None:
    setup = Setup()
    worker = setup.up("http://p:1")
    for _ in range(5):
        assert setup.registry.reported(worker, report(0))
        assert not setup.registry.reported(worker, report(0, boot="forged"))
        setup.now_s += 1.0
    assert worker.announced
    assert not any(isinstance(event, InstanceDown) for event in setup.events)


def test_a_boot_that_was_taken_to_be_over_is_believed_when_no_other_speaks() -> None:
    setup = Setup()
    worker = setup.up("http://p:1")
    assert setup.registry.reported(worker, report(0))
    setup.now_s += QUIET_S  # a long pass
    # Of the wrong size, so that not even the forged boot is believed to speak from then on.
    assert not setup.registry.reported(worker, report(0, boot="forged", role="decode"))
    assert not setup.registry.reported(worker, report(0))
    setup.now_s += SILENT_AFTER_S
    assert setup.registry.reported(worker, report(0))
    assert setup.registry.reported(worker, report(1))
    assert not setup.registry.reported(worker, report(0, boot="forged"))


def test_reports_with_another_dp_size_are_ignored_and_explained() -> None:
    setup = Setup()
    worker = setup.up("http://p:1")
    assert not setup.registry.reported(worker, report(0, dp_size=4))
    assert "dp_size 4" in worker.problems["dp_size"]
    assert setup.registry.reported(worker, report(0))
    assert worker.problems == {}


def test_reports_that_are_ignored_are_no_signal() -> None:
    setup = Setup()
    worker = setup.up("http://p:1")
    setup.registry.reported(worker, report(0, dp_size=4))
    setup.registry.reported(worker, report(0, role="decode"))
    assert not worker.reporting(setup.now_s)  # so that load polls go on
    assert "role decode" in worker.problems["role"]
    assert describe_worker(worker, setup.now_s)["signal"] == "polls"


def test_a_boot_that_server_info_does_not_confirm_takes_nothing_down() -> None:
    setup = Setup()
    worker = setup.up("http://p:1", sbs=SbsBlock(boot_id="b1"))
    assert setup.registry.reported(worker, report(0))
    assert not setup.registry.reported(worker, report(0, boot="evil"))
    assert (setup.doubted, worker.boot.recheck) == ([worker.url], True)
    setup.registry.described(worker, WorkerInfo(dp_size=2, sbs=SbsBlock(boot_id="b1")))
    assert "SGLANG_SBS_INSTANCE_ID" in worker.problems["stranger"]
    assert not setup.registry.reported(worker, report(0, boot="evil"))
    assert setup.registry.reported(worker, report(0))
    for number in range(100):  # a flood of boots asks the engine no more than now and then
        setup.registry.reported(worker, report(0, boot=f"evil{number}"))
    assert setup.doubted == [worker.url]
    assert worker.usable
    assert setup.silenced == []


def test_a_boot_that_server_info_confirms_is_a_restart() -> None:
    setup = Setup()
    worker = setup.up("http://p:1", sbs=SbsBlock(boot_id="b1"))
    assert setup.registry.reported(worker, report(0))
    assert not setup.registry.reported(worker, report(0, boot="b2"))
    setup.registry.described(worker, WorkerInfo(dp_size=2, sbs=SbsBlock(boot_id="b2")))
    setup.registry.refresh(worker)
    assert [type(event) for event in setup.events[-2:]] == [InstanceDown, InstanceUp]
    assert setup.silenced == [worker]
    assert setup.registry.reported(worker, report(0, boot="b2"))
    assert not setup.registry.reported(worker, report(1, boot="b1"))


def test_decode_is_sent_another_spelling_of_a_prefill_host_that_it_may_know_from_before() -> None:
    setup = Setup()
    prefill = setup.up("http://10.0.0.1:1", sbs=SbsBlock(boot_id="b0", booted_s=100))
    decode = setup.up("http://10.0.0.2:1", role="decode", sbs=SbsBlock(boot_id="d0", booted_s=98))

    def restart(worker: Worker, boot: str, booted_s: int) -> str:
        info = WorkerInfo(dp_size=2, sbs=SbsBlock(boot_id=boot, booted_s=booted_s))
        setup.registry.described(worker, info)
        return worker.bootstrap_host

    assert prefill.bootstrap_host == "10.0.0.1"
    second = restart(prefill, "b1", 200)
    third = restart(prefill, "b2", 300)
    assert len({"10.0.0.1", second, third}) == 3
    assert {socket.inet_aton(host) for host in (second, third)} == {socket.inet_aton("10.0.0.1")}
    mirror = MirroredRegistry(WorkerEvents(), BreakerConfig())
    mirror.follow([state_of(prefill, setup.now_s)])
    (seen,) = mirror
    assert seen.bootstrap_host == third
    assert restart(decode, "d1", 400) == "10.0.0.2"
    assert prefill.bootstrap_host == "10.0.0.1"  # nobody is left who knows another


def test_without_a_boot_id_in_server_info_the_host_is_spelled_by_the_restarts_seen() -> None:
    setup = Setup()
    worker = setup.up("http://10.0.0.1:1")
    hosts = [worker.bootstrap_host]
    for boot in ("b1", "b2", "b3"):
        setup.registry.reported(worker, report(0, boot=boot))
        setup.registry.described(worker, WorkerInfo(dp_size=2))
        setup.now_s += QUIET_S
        hosts.append(worker.bootstrap_host)
    assert hosts == ["10.0.0.1", "10.0.0.1", "0xa.0.0.1", "0x0a.0.0.1"]


def test_a_problem_that_comes_and_goes_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup()
    worker = setup.up("http://p:1")
    for _ in range(50):
        setup.registry.reported(worker, report(0, dp_size=4))
        setup.registry.reported(worker, report(0))
    assert len([r for r in caplog.records if "dp_size 4" in r.getMessage()]) == 1
    setup.now_s += 1000
    setup.registry.reported(worker, report(0, dp_size=4))
    assert len([r for r in caplog.records if "dp_size 4" in r.getMessage()]) == 2


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"version": "0.5.23"}, ["pip install .", "SGLANG_SBS_ROUTERS"]),
        ({"version": "0.5.10"}, ["0.5.10 loads no plugins", "sglang-sbs patch apply", "0.5.11"]),
        (
            {"version": "0.5.23", "sbs": SbsBlock(boot_id="b", routers=("tcp://old:7600",))},
            ["sends to tcp://old:7600", "--sbs-endforward-bind"],
        ),
    ],
)
def test_the_reason_of_a_missing_signal_is_named(info: dict[str, Any], words: list[str]) -> None:
    setup = Setup()
    worker = setup.up("http://p:1", **info)
    worker.dispatches = 3
    setup.registry.tick()
    for word in words:
        assert word in worker.problems["signal"]


def test_a_gang_gate_at_fault_is_a_problem_until_every_rank_has_one_again() -> None:
    setup = Setup()
    worker = setup.up("http://p:1", sbs=SbsBlock(boot_id="b1"))

    def say(rank: int, seq: int, gate: str) -> str:
        assert setup.registry.reported(worker, report(rank, seq=seq, gang_gate=gate))
        return worker.problems.get("gang_gate", "")

    assert say(0, 1, "") == say(1, 1, "unheard of") == ""
    assert "DP rank 1: the batch gate receives nothing" in say(1, 2, GATE_ALONE)
    assert "DP rank 0: the batch gate turned itself off" in say(0, 2, GATE_ERRORS)
    assert "before SGLang 0.5.22" in say(0, 3, GATE_UNSUPPORTED)
    assert "DP rank 1" in say(0, 4, "")
    assert say(1, 3, "") == ""


def test_endforward_tells_of_no_barrier_where_server_info_does_not() -> None:
    setup = Setup()
    worker = setup.up("http://p:1", sbs=SbsBlock(boot_id="b1"))
    assert setup.registry.reported(worker, report())
    assert len(setup.events) == 1
    assert setup.registry.reported(worker, report(seq=1, barrier=False))
    assert setup.registry.reported(worker, report(seq=2, barrier=False))
    assert [e.barrier for e in setup.events if isinstance(e, InstanceUp)] == [True, False]
    assert "no barrier" in describe_worker(worker, 0.0)["ranks"]
    assert describe_worker(worker, 0.0)["barrier_source"] == "EndForward"
    again = WorkerInfo(dp_size=2, chunk_tokens=512, sbs=SbsBlock(boot_id="b1"))
    setup.registry.described(worker, again)
    assert len(setup.events) == 2
    state = state_of(worker, 0.0)
    mirror = MirroredRegistry(WorkerEvents(), BreakerConfig())
    mirror.follow([state])
    assert [up.barrier for up in mirror.announcements()] == [False]
    setup.registry.described(worker, msgspec.structs.replace(again, sbs=SbsBlock(boot_id="b2")))
    setup.registry.refresh(worker)
    assert isinstance(setup.events[-1], InstanceUp)
    assert setup.events[-1].barrier


@pytest.mark.parametrize(
    "info", [{"sbs": SbsBlock(boot_id="b1", barrier=True)}, {"dp_size": 1}], ids=["reported", "one"]
)
def test_endforward_does_not_overrule_what_server_info_says(info: dict[str, Any]) -> None:
    setup = Setup()
    worker = setup.up("http://p:1", **info)
    size = worker.dp_size
    assert setup.registry.reported(worker, report(barrier=False, dp_size=size))
    assert len(setup.events) == 1
    assert describe_worker(worker, 0.0)["barrier"]


def test_dp_attention_missing_is_a_problem_of_the_worker() -> None:
    setup = Setup()
    data = INFO | {"attn_dp_size": 1, "dp_size": 8, "enable_dp_attention": False}
    worker = setup.registry.add("http://p:1", "prefill")
    setup.registry.described(worker, parse_server_info(data, "prefill"))
    assert "without DP attention" in worker.problems["launch0"]
    setup.registry.described(worker, parse_server_info(INFO, "prefill"))
    assert not worker.problems, "it was started again, with other flags"
    with pytest.raises(UnusableWorker, match="dp_size"):
        parse_server_info(INFO | {"attn_dp_size": 10**9}, "prefill")


def test_a_missing_signal_is_explained_after_a_few_dispatches(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    setup = Setup()
    worker = setup.up("http://p:1")
    setup.registry.tick()
    assert worker.problems == {}
    worker.dispatches = 3
    setup.registry.tick()
    assert "pip install" in worker.problems["signal"]
    assert describe_worker(worker, setup.now_s)["signal"] == "polls"
    setup.registry.reported(worker, report(0))
    setup.registry.tick()
    assert worker.problems["signal"] == "no EndForward from rank 1"
    setup.registry.reported(worker, report(1))
    setup.registry.tick()
    assert worker.problems == {}
    assert describe_worker(worker, setup.now_s)["signal"] == "endforward"
    setup.now_s += 6
    setup.registry.tick()
    assert worker.problems["signal"] == "no EndForward from rank 0, 1"
    assert set(setup.doubted) == {worker.url}
    for _ in range(3):  # a signal that comes and goes makes no line each time
        for rank in (0, 1):
            setup.registry.reported(worker, report(rank))
        setup.registry.tick()
        setup.now_s += 6
        setup.registry.tick()
    messages = [
        record.getMessage()
        for record in caplog.records
        if "EndForward arrives again" in record.message
    ]
    assert messages == [f"worker {worker.url} (prefill): EndForward arrives again"]


def test_removed_workers_are_announced_down_and_forgotten() -> None:
    setup = Setup()
    worker = setup.up("http://localhost:1")
    assert setup.registry.by_alias("http://127.0.0.1:1") is worker
    setup.registry.remove(worker)
    assert setup.events[-1] == InstanceDown(instance=worker.url)
    assert setup.registry.by_alias("http://127.0.0.1:1") is None
    setup.registry.add("http://localhost:1", "prefill")
    with pytest.raises(ValueError, match="already registered"):
        setup.registry.add("http://LOCALHOST:1/", "decode")


def test_a_worker_that_should_say_something_and_does_not_is_asked() -> None:
    setup = Setup()
    worker = setup.up("http://p:1")
    setup.now_s = 100.0
    setup.registry.tick()
    assert setup.doubted == []  # idle, and without the plugin: nothing is expected
    worker.active = 1
    setup.registry.tick()
    assert setup.doubted == [worker.url]
    setup.registry.tick()
    assert setup.doubted == [worker.url]  # it was asked just now
    setup.now_s += QUIET_S
    setup.registry.reported(worker, report(0))
    setup.registry.tick()
    assert setup.doubted == [worker.url]  # it speaks
    worker.active = 0
    setup.now_s += QUIET_S
    setup.registry.tick()
    assert setup.doubted == [worker.url] * 2  # the plugin reports while idle, too


def test_a_check_that_costs_a_forward_pass_is_not_made_because_of_silence() -> None:
    setup = Setup(health_endpoint="/health")
    worker = setup.up("http://p:1")
    worker.active = 1
    setup.now_s = 100.0
    setup.registry.tick()
    assert setup.doubted == []
    for rank in (0, 1):
        assert setup.registry.reported(worker, report(rank))
    for _ in range(60):  # its reports end, as if a firewall had closed
        setup.now_s += 1
        setup.registry.tick()
    assert worker.problems["signal"] == "no EndForward from rank 0, 1"
    assert setup.doubted == []


def test_what_endforward_says_of_the_barrier_can_be_taken_back_but_not_at_any_pace() -> None:
    setup = Setup()
    worker = setup.up("http://p:1", sbs=SbsBlock(boot_id="b1"))
    assert setup.registry.reported(worker, report(barrier=False))
    for seq in range(1, 20):
        assert setup.registry.reported(worker, report(seq=seq, barrier=seq % 2 == 1))
    assert [e.barrier for e in setup.events if isinstance(e, InstanceUp)] == [True, False]
    worker.barrier_changed_s -= BARRIER_S
    assert setup.registry.reported(worker, report(seq=20))
    assert [e.barrier for e in setup.events if isinstance(e, InstanceUp)] == [True, False, True]


def test_a_worker_described_in_words_of_a_later_release_costs_no_other() -> None:
    setup = Setup()
    sent = [state_of(setup.up(f"http://p:{number}"), 0.0) for number in (1, 2)]
    raw = msgspec.msgpack.encode(sent)
    states = msgspec.msgpack.decode(raw, type=list[WorkerState])
    states[0].info["page_size"] = "as_of_tomorrow"
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(states), type=list[WorkerState])
    mirror = MirroredRegistry(WorkerEvents(), BreakerConfig())
    mirror.follow(again)
    (seen,) = mirror
    assert (seen.url, seen.usable) == ("http://p:2", True)


def test_work_that_no_pass_takes_is_a_problem_until_a_pass_begins() -> None:
    setup = Setup()
    worker = setup.up("http://p:1", sbs=SbsBlock(boot_id="b1"))
    waits = {"kind": "heartbeat", "waiting_requests": 2, "waiting_tokens": 600}

    def say(seq: int, **fields: Any) -> str:
        setup.now_s += 0.6
        assert setup.registry.reported(worker, report(0, seq=seq, **fields))
        return worker.problems.get("stalled", "")

    assert say(1, **waits) == say(2, **waits) == ""
    full = {"kv_tokens": 900, "kv_capacity_tokens": 1000}
    assert "its KV pool is full (900 of 1000 tokens)" in say(3, **waits, **full)
    assert say(4, kind="launch", extend_tokens=300, waiting_requests=1) == ""


def test_another_dp_size_in_endforward_has_server_info_read_again_but_not_at_any_pace() -> None:
    setup = Setup()
    worker = setup.up("http://p:1")
    for number in range(100):
        setup.registry.reported(worker, report(2, dp_size=3 + number))
    assert (setup.doubted, worker.boot.recheck) == ([worker.url], True)
    setup.now_s += 5.0
    assert not setup.registry.reported(worker, report(2, dp_size=3))
    assert setup.doubted == [worker.url] * 2


def test_ranks_that_joined_or_left_are_announced_and_what_left_is_forgotten() -> None:
    setup = Setup()
    info = {"elastic": True, "sbs": SbsBlock(boot_id="b1")}
    worker = setup.up("http://p:1", **info)
    assert not setup.registry.reported(worker, report(2, dp_size=3))
    setup.registry.described(worker, WorkerInfo(dp_size=3, chunk_tokens=512, **info))
    up = setup.events[-1]
    assert isinstance(up, InstanceUp) and up.dp_size == 3
    assert not any(isinstance(event, InstanceDown) for event in setup.events)
    assert setup.silenced == []  # requests in flight there go on
    assert "dp_size" not in worker.problems
    # The ranks of before report the size of before.
    assert setup.registry.reported(worker, report(1, dp_size=2))
    assert setup.registry.reported(worker, report(2, dp_size=3))
    worker.gates_at_fault[2] = "errors"
    setup.registry.described(worker, WorkerInfo(dp_size=2, chunk_tokens=512, **info))
    assert worker.last_report_s.keys() == {1} and worker.gates_at_fault == {}
    assert setup.events[-1].dp_size == 2  # type: ignore[union-attr]
    assert not setup.registry.reported(worker, report(2, dp_size=3))


def test_a_boot_that_is_not_the_engines_gets_no_rank_of_another_size_believed() -> None:
    setup = Setup()
    worker = setup.up("http://p:1", elastic=True, sbs=SbsBlock(boot_id="b1"))
    assert not setup.registry.reported(worker, report(0, boot="other", dp_size=3))
    assert "dp_size 3" in worker.problems["dp_size"]
