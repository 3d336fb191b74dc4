"""The same fields from every SGLang version's attributes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from engine_fakes import Batch, Clock, Mode, Req, Role, Scheduler

from sglang_sbs.engine.collect import (
    SchedulerReader,
    read_dist_init_addr,
    read_kv_address,
    read_pass,
    read_placement,
)
from sglang_sbs.wire.endforward import KvAddress

RANKS = {"pp_rank": 0, "attn_tp_rank": 0, "attn_cp_rank": 0}


def test_placement_with_attention_dp() -> None:
    """0.5.22+ says ``dp_size`` 1 there."""
    ps = SimpleNamespace(**RANKS, dp_rank=None, dp_size=1, attn_dp_rank=5, attn_dp_size=8)
    assert read_placement(SimpleNamespace(ps=ps))[:3] == (5, 8, True)


def test_placement_of_plain_replicas() -> None:
    ps = SimpleNamespace(**RANKS, dp_rank=1, dp_size=4, attn_dp_rank=0, attn_dp_size=1)
    assert read_placement(SimpleNamespace(ps=ps))[:3] == (1, 4, True)


def test_placement_without_dp() -> None:
    ps = SimpleNamespace(**RANKS, dp_rank=None, dp_size=1, attn_dp_rank=0, attn_dp_size=1)
    assert read_placement(SimpleNamespace(ps=ps))[:3] == (0, 1, True)


@pytest.mark.parametrize(("attention", "expected"), [(True, (3, 4, True)), (False, (2, 4, True))])
def test_placement_on_the_scheduler_itself(
    attention: bool, expected: tuple[int, int, bool]
) -> None:
    """0.5.11 and 0.5.12."""
    args = SimpleNamespace(enable_dp_attention=attention)
    old = SimpleNamespace(**RANKS, dp_rank=2, dp_size=4, attn_dp_rank=3, server_args=args)
    assert read_placement(old)[:3] == expected


def test_placement_in_the_runtime_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.22+."""
    parallel = SimpleNamespace(**RANKS, dp_rank=None, dp_size=1, attn_dp_rank=1, attn_dp_size=2)
    module = ModuleType("sglang.srt.runtime_context")
    module.get_parallel = lambda: parallel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", module)
    assert read_placement(SimpleNamespace())[:3] == (1, 2, True)
    parallel.attn_tp_rank = 1
    assert read_placement(SimpleNamespace())[:3] == (1, 2, False)


def test_the_processes_of_a_dp_rank_have_numbers_and_one_of_them_speaks() -> None:
    numbers, speaking = [], []
    for attn_cp_rank in range(2):
        for attn_tp_rank in range(4):
            ps = SimpleNamespace(
                **{**RANKS, "attn_tp_rank": attn_tp_rank, "attn_cp_rank": attn_cp_rank},
                **{"dp_rank": None, "dp_size": 1, "attn_dp_rank": 1, "attn_dp_size": 2},
                **{"attn_tp_size": 4, "attn_cp_size": 2, "pp_size": 1},
            )
            scheduler = SimpleNamespace(ps=ps)
            placement = read_placement(scheduler)
            assert (placement.processes, placement.stages) == (8, 1)
            numbers.append(placement.number)
            speaking.append(placement.emits)
    assert numbers == list(range(8))
    assert speaking == [True] + [False] * 7


@pytest.mark.parametrize(
    "attributes",
    [
        pytest.param({"prefix_len": 1024, "extend_end": 2048}, id="0.5.22"),
        pytest.param(
            {"prefix_indices": [0] * 1024, "extend_range": SimpleNamespace(end=2048)}, id="0.5.16"
        ),
        pytest.param({"prefix_indices": [0] * 1024, "fill_len": 2048}, id="0.5.14"),
        pytest.param({"prefix_indices": [0] * 1024, "fill_ids": [0] * 2048}, id="0.5.11"),
    ],
)
def test_the_chunk_in_flight_counts_neither_as_remainder_nor_as_waiting(
    attributes: dict[str, object],
) -> None:
    scheduler = Scheduler(Role.PREFILL, Clock())
    chunked = SimpleNamespace(rid="long", seqlen=2500, **attributes)
    scheduler.chunked_req = chunked  # type: ignore[assignment]
    scheduler.waiting_queue = [Req("next", 600, cached=512)]
    # What get_num_waiting_uncached_tokens says: 88 waiting and 1476 behind the cached prefix.
    scheduler.load_inquirer = SimpleNamespace(get_num_waiting_uncached_tokens=lambda: 88 + 1476)
    backlog = SchedulerReader(scheduler).backlog("prefill")
    assert backlog.chunk_remainder_tokens == 2500 - 2048
    assert backlog.waiting_tokens == 88


@pytest.mark.parametrize("taken_back", [{"extend_end": None}, {"extend_range": None}])
def test_a_chunked_request_that_was_taken_back_is_all_remainder(
    taken_back: dict[str, None],
) -> None:
    scheduler = Scheduler(Role.PREFILL, Clock())
    scheduler.chunked_req = SimpleNamespace(  # type: ignore[assignment]
        rid="long", seqlen=2500, prefix_len=100, **taken_back
    )
    assert SchedulerReader(scheduler).backlog("prefill").chunk_remainder_tokens == 2400


def test_without_load_inquirer_waiting_tokens_are_prompt_lengths() -> None:
    """0.5.11 and 0.5.12; the pool is read on the scheduler there."""
    scheduler = Scheduler(Role.PREFILL, Clock())
    stats = SimpleNamespace(get_kv_token_stats=lambda: (42, 0.1))
    del scheduler.load_inquirer, scheduler.pool_stats_observer
    scheduler.get_pool_stats = lambda: stats  # type: ignore[attr-defined]
    scheduler.waiting_queue = [Req("a", 600, cached=512)]
    reader = SchedulerReader(scheduler)
    backlog = reader.backlog("prefill")
    assert (backlog.waiting_tokens, backlog.kv_tokens) == (600, 42)
    assert reader.missing == []


def test_what_a_version_lacks_is_zero_and_named() -> None:
    scheduler = Scheduler(Role.PREFILL, Clock())
    del scheduler.pool_stats_observer, scheduler.max_total_num_tokens
    reader = SchedulerReader(scheduler)
    assert reader.missing == ["kv_tokens", "kv_capacity_tokens"]
    assert reader.backlog("prefill").kv_tokens == 0


def test_without_chunking_the_budget_of_a_pass_is_max_prefill_tokens() -> None:
    scheduler = Scheduler(Role.PREFILL, Clock())
    scheduler.chunked_prefill_size = None  # type: ignore[assignment]
    scheduler.max_prefill_tokens = 16384  # type: ignore[attr-defined]
    assert SchedulerReader(scheduler).draft.chunk_tokens == 16384


def test_a_batch_without_launch_time_uses_that_of_the_hook() -> None:
    """< 0.5.18."""
    batch = Batch(Mode.EXTEND, [Req("a", 10)], 10)
    assert read_pass(Scheduler(Role.PREFILL, Clock()), batch, 12.5, 2).launch_s == 12.5


def test_a_batch_without_number_uses_the_counter_of_the_scheduler() -> None:
    """0.5.11."""
    scheduler, batch = Scheduler(Role.PREFILL, Clock()), Batch(Mode.EXTEND, [Req("a", 10)], 10)
    scheduler.forward_ct = 7
    assert read_pass(scheduler, batch, 0, 2).forward_id == 7


def test_a_verify_pass_extends_nothing() -> None:
    batch = Batch(Mode.TARGET_VERIFY, [Req("a", 10)], 2500)
    assert read_pass(Scheduler(Role.PREFILL, Clock()), batch, 0, 2).extend_tokens == 0


def publisher(**attributes: str | None) -> SimpleNamespace:
    """``ZmqEventPublisher`` of ``disaggregation/kv_events.py``."""
    return SimpleNamespace(kv_event_publisher=SimpleNamespace(**attributes))


BOUND = {"_local_pub_endpoint": "tcp://0.0.0.0:5558", "_local_replay_endpoint": "tcp://[::]:5658"}


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        pytest.param(BOUND, KvAddress("", 5558, 5658), id="0.5.23"),
        pytest.param(
            {"_local_pub_endpoint": "tcp://10.0.0.2:5558", "_local_replay_endpoint": None},
            KvAddress("10.0.0.2", 5558, 0),
            id="bound to an address",
        ),
        pytest.param(
            {"_endpoint": "tcp://*:5558", "_replay_endpoint": "tcp://*:5658"},
            KvAddress("", 5558, 5658),
            id="0.5.22 and before",
        ),
        pytest.param(
            {"_local_pub_endpoint": None, "_local_replay_endpoint": "tcp://0.0.0.0:5658"},
            None,
            id="connects",
        ),
        pytest.param({"_local_pub_endpoint": "ipc:///tmp/kv"}, None, id="ipc"),
        pytest.param({}, None, id="null"),
    ],
)
def test_where_a_rank_on_another_node_publishes_kv_events(
    attributes: dict[str, str | None], expected: KvAddress | None
) -> None:
    ps = SimpleNamespace(**RANKS, node_rank=1)
    current = SimpleNamespace(ps=ps, kv_events_publisher=publisher(**attributes))
    assert read_kv_address(current) == expected
    # Before 0.5.14 it is the scheduler's own, and so are the arguments.
    args = SimpleNamespace(node_rank=1)
    older = SimpleNamespace(**RANKS, server_args=args, **vars(publisher(**attributes)))
    assert read_kv_address(older) == expected


def test_ranks_of_the_first_node_say_nothing_of_it() -> None:
    ps = SimpleNamespace(**RANKS, node_rank=0)
    assert read_kv_address(SimpleNamespace(ps=ps, kv_events_publisher=publisher(**BOUND))) is None
    ps.node_rank = 1
    assert read_kv_address(SimpleNamespace(ps=ps, kv_events_publisher=publisher(**BOUND)))
    assert read_kv_address(SimpleNamespace(ps=SimpleNamespace(**RANKS))) is None


def test_nodes_of_an_engine_say_what_they_have_in_common() -> None:
    def of(**args: object) -> str:
        return read_dist_init_addr(SimpleNamespace(server_args=SimpleNamespace(**args)))

    assert of(nnodes=2, dist_init_addr="p0:5000") == "p0:5000"
    assert of(nnodes=1, dist_init_addr="p0:5000") == of(nnodes=2, dist_init_addr=None) == of() == ""
    assert read_dist_init_addr(SimpleNamespace()) == ""
