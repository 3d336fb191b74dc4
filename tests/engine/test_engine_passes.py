"""A rank's reports about its forward passes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engine_fakes import Batch, Mode, Rank, Req, Result, Role, Sink

from sglang_sbs.wire.endforward import Started


def launch_all(rank: Rank, turns: int = 20) -> None:
    """Run the overlap loop until nothing is left, then once idle."""
    for _ in range(turns):
        rank.overlap_turn(rank.scheduler.cut_batch())


def test_forward_leaves_before_the_engine_processes_the_result() -> None:
    processed_at_send: list[int] = []
    rank = Rank()

    class Spy(Sink):
        def send(self, frames):  # type: ignore[no-untyped-def]
            super().send(frames)
            if self.messages[-1].kind == "forward":
                processed_at_send.append(len(rank.scheduler.processed))

    rank.sink = Spy()
    rank.scheduler.waiting_queue = [Req("a", 700), Req("b", 700)]
    launch_all(rank)
    assert processed_at_send == [0, 1]
    assert [b.extend_num_tokens for b, _ in rank.scheduler.processed] == [1024, 376]


def test_forward_time_of_a_queued_pass_is_its_time_on_the_device() -> None:
    """T_fwd = end - max(launch, previous end): pass 2 was launched while pass 1 ran."""
    rank = Rank()
    rank.scheduler.waiting_queue = [Req("a", 3000)]
    launch_all(rank)
    forwards = rank.sink.of("forward")
    assert [m.forward_s for m in forwards] == pytest.approx([0.1, 0.1, 0.1])
    assert all(m.age_s == pytest.approx(0) for m in forwards)
    assert [m.forward_id for m in forwards] == [1, 2, 3]
    assert forwards[1].end_s - forwards[1].launch_s > 0.19


def test_the_pass_behind_is_reported_as_in_flight() -> None:
    rank = Rank()
    rank.scheduler.waiting_queue = [Req("a", 1024), Req("b", 100)]
    launch_all(rank)
    first, second = rank.sink.of("forward")
    assert (first.inflight_passes, first.inflight_tokens, first.inflight_requests) == (1, 100, 1)
    assert not first.idle
    assert (second.inflight_passes, second.inflight_tokens) == (0, 0)
    assert second.idle


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_of_a_chunked_request_are_counted_exactly_once(overlap: bool) -> None:
    """Computed, being computed and queued tokens add up to the prompt at any message."""
    rank = Rank()
    turn = rank.overlap_turn if overlap else rank.normal_turn
    rank.scheduler.waiting_queue = [Req("long", 2500), Req("behind", 600)]
    for _ in range(10):
        turn(rank.scheduler.cut_batch())
    forwards = rank.sink.of("forward")
    assert [m.extend_tokens for m in forwards] == [1024, 1024, 452 + 572, 28]
    for m in forwards:
        assert m.computed_tokens + m.inflight_tokens + m.queued_tokens == 3100
    remainders = [m.chunk_remainder_tokens for m in forwards]
    assert remainders == ([452, 28, 0, 0] if overlap else [1476, 452, 28, 0])
    assert forwards[-1].computed_tokens == 3100


def test_a_launch_says_what_is_left_behind_it() -> None:
    rank = Rank()
    rank.scheduler.waiting_queue = [Req("long", 2500), Req("behind", 600)]
    launch_all(rank)
    launches = rank.sink.of("launch")
    assert [m.extend_tokens for m in launches] == [1024, 1024, 1024, 28]
    assert [m.queued_tokens for m in launches] == [2076, 1052, 28, 0]
    for m in launches:
        assert (m.end_s, m.forward_s) == (0, 0)
        assert m.launch_s > 0
        assert m.age_s == pytest.approx(rank.scheduler.launch_cpu_s)
    order = [(m.kind, m.forward_id) for m in rank.messages[:4]]
    assert order == [("launch", 1), ("launch", 2), ("forward", 1), ("launch", 3)]


def test_without_copy_done_the_message_follows_the_processing() -> None:
    rank = Rank()
    rank.scheduler.waiting_queue = [Req("a", 500)]
    rank.normal_turn(rank.scheduler.cut_batch())
    (message,) = rank.sink.of("forward")
    # The engine itself waited for the device in there, so that time is in the pass.
    assert message.forward_s == pytest.approx(0.1 + rank.scheduler.process_cpu_s)
    assert message.idle


def test_a_rank_without_work_reports_the_pass_it_waits_in() -> None:
    rank = Rank()
    idle = Batch(Mode.IDLE, [])
    idle.global_num_tokens = [1024, 0]
    rank.overlap_turn(idle)
    rank.overlap_turn(None)
    launch, forward = rank.messages
    assert (launch.kind, forward.kind) == ("launch", "forward")
    for m in (launch, forward):
        assert (m.mode, m.extend_tokens, m.tokens_per_rank) == ("idle", 0, [1024, 0])
    assert forward.forward_s == pytest.approx(0.1)


def test_a_local_token_count_is_not_taken_for_the_vector_of_all_ranks() -> None:
    rank = Rank()
    batch = Batch(Mode.EXTEND, [Req("a", 10)], 10)
    batch.global_num_tokens = [10]
    rank.overlap_turn(batch)
    assert rank.messages[0].tokens_per_rank is None


@pytest.mark.parametrize("overlap", [True, False])
def test_a_forward_names_the_requests_whose_prompts_end_in_it(overlap: bool) -> None:
    rank = Rank()
    turn = rank.overlap_turn if overlap else rank.normal_turn
    rank.scheduler.waiting_queue = [Req("HEALTH_CHECK_1", 5), Req("long", 2500), Req("short", 600)]
    for _ in range(10):
        turn(rank.scheduler.cut_batch())
    assert [m.finished for m in rank.sink.of("forward")] == [[], [], ["long"], ["short"]]
    assert {rid for m in rank.messages if m.kind != "forward" for rid in m.finished} == set()


def test_a_request_that_decodes_in_a_mixed_pass_ended_its_prompt_before() -> None:
    rank = Rank(Role.NULL)
    request = Req("one", 30)
    for number in range(2):
        request.extend_end = 30 + number
        rank.overlap_turn(Batch(Mode.EXTEND, [request], 30))
    rank.overlap_turn(None)
    assert [m.finished for m in rank.sink.of("forward")] == [["one"], []]


def test_the_first_pass_of_a_request_says_what_was_cached_of_it() -> None:
    rank = Rank()
    rank.scheduler.waiting_queue = [Req("a", 3000, cached=448), Req("b", 20)]
    launch_all(rank)
    started = [request for m in rank.sink.of("launch") for request in m.started]
    assert [(request.rid, request.cached_tokens) for request in started] == [("a", 448), ("b", 0)]


def test_cached_tokens_are_those_of_the_pass() -> None:
    rank = Rank()
    rank.scheduler.waiting_queue = [Req("a", 500, cached=448)]
    launch_all(rank, 2)
    (message,) = rank.sink.of("forward")
    assert (message.extend_tokens, message.cached_tokens) == (52, 448)


def test_identity_and_limits() -> None:
    rank = Rank(dp_rank=3, dp_size=8, chunk=2048)
    rank.scheduler.waiting_queue = [Req("a", 10)]
    launch_all(rank, 2)
    message = rank.sink.of("forward")[0]
    assert (message.instance_id, message.boot_id) == ("http://p0:30000", "boot-1")
    assert (message.role, message.dp_rank, message.dp_size) == ("prefill", 3, 8)
    assert (message.chunk_tokens, message.max_running_requests) == (2048, 48)
    assert message.kv_capacity_tokens == 100_000
    assert [m.seq for m in rank.messages] == list(range(len(rank.messages)))


def test_role_is_read_for_every_message() -> None:
    """``--enable-pd-role-switch`` changes it at run time."""
    rank = Rank()
    rank.idle()
    rank.scheduler.disaggregation_mode = Role.DECODE
    rank.clock.now_s += 2
    rank.idle()
    assert [m.role for m in rank.messages] == ["prefill", "decode"]


def test_only_one_process_per_kv_cache_speaks() -> None:
    for attribute in ("pp_rank", "attn_tp_rank", "attn_cp_rank"):
        rank = Rank()
        setattr(rank.scheduler.ps, attribute, 1)
        rank.scheduler.waiting_queue = [Req("a", 500)]
        launch_all(rank, 3)
        assert rank.messages == []
        assert len(rank.scheduler.processed) == 1


def test_prebuilt_batches_are_no_passes() -> None:
    rank = Rank(Role.DECODE)
    batch = Batch(Mode.PREBUILT, [Req("a", 500)], 500)
    rank.process(batch, rank.run_batch(batch))
    assert rank.messages == []


def test_a_rebuilt_result_falls_back_to_the_batch() -> None:
    """Pipeline parallelism replaces the result between launch and processing."""
    rank = Rank()
    batch = Batch(Mode.EXTEND, [Req("a", 300)], 300)
    result = rank.run_batch(batch)
    rank.process(batch, Result(result.copy_done))
    (message,) = rank.sink.of("forward")
    assert (message.extend_tokens, message.forward_s) == (300, pytest.approx(0.1))


def test_each_message_carries_the_cost_of_the_one_before() -> None:
    rank = Rank()

    class Slow(Sink):
        def send(self, frames):  # type: ignore[no-untyped-def]
            super().send(frames)
            rank.clock.now_s += 30e-6

    rank.sink = Slow()
    rank.scheduler.waiting_queue = [Req("a", 2000)]
    launch_all(rank, 4)
    assert rank.messages[0].hook_us == 0
    assert all(m.hook_us in (29, 30) for m in rank.messages[1:])


# Decode -------------------------------------------------------------------------------------------


def decode_turn(rank: Rank, reqs: list[Req]) -> None:
    rank.scheduler.running_batch = Batch(Mode.DECODE, reqs, 2500)
    rank.overlap_turn(rank.scheduler.running_batch if reqs else None)


def test_decode_messages_are_throttled_but_times_stay_true() -> None:
    rank = Rank(Role.DECODE)
    rank.scheduler.pass_s = 0.02
    reqs = [Req("a", 10), Req("b", 10)]
    rank.scheduler.kv_tokens = 777
    for _ in range(51):
        decode_turn(rank, reqs)
    assert {m.kind for m in rank.messages} == {"forward"}
    gaps = [b.end_s - a.end_s for a, b in zip(rank.messages, rank.messages[1:], strict=False)]
    assert all(gap >= 0.05 for gap in gaps)
    # 50 passes of 20 ms: every third pass speaks.
    assert len(rank.messages) == 17
    for m in rank.messages:
        assert m.forward_s == pytest.approx(0.02)
        assert (m.running_requests, m.kv_tokens, m.batch_size) == (2, 777, 2)


def test_extend_tokens_that_stick_to_a_decode_batch_are_not_reported() -> None:
    rank = Rank(Role.DECODE)
    decode_turn(rank, [Req("a", 10)])
    decode_turn(rank, [Req("a", 10)])
    (message,) = rank.messages
    assert (message.mode, message.extend_tokens, message.computed_tokens) == ("decode", 0, 0)
    assert message.inflight_tokens == 1


def test_a_change_of_the_running_set_is_reported_sooner_but_bounded() -> None:
    rank = Rank(Role.DECODE)
    rank.scheduler.pass_s = 0.005
    rank.scheduler.launch_cpu_s = rank.scheduler.process_cpu_s = 0
    reqs: list[Req] = [Req("first", 10)]
    for i in range(40):
        reqs = [*reqs, Req(f"r{i}", 10)]
        decode_turn(rank, reqs)
    gaps = [b.end_s - a.end_s for a, b in zip(rank.messages, rank.messages[1:], strict=False)]
    assert gaps
    assert all(0.0125 <= gap < 0.05 for gap in gaps)


def test_decode_counts_requests_on_their_way_in() -> None:
    rank = Rank(Role.DECODE)
    s = rank.scheduler
    s.disagg_decode_prealloc_queue.queue = [SimpleNamespace(req=Req("a", 5))]
    s.disagg_decode_transfer_queue.queue = [SimpleNamespace(req=Req(r, 5)) for r in "bc"]
    s.waiting_queue = [Req("d", 5)]
    s.disagg_decode_prealloc_queue.retracted_queue = [Req("e", 5)]
    rank.idle()
    (message,) = rank.messages
    assert (message.kv_transfer_requests, message.waiting_requests) == (3, 2)
    assert (message.bootstrapping_requests, message.waiting_tokens) == (0, 0)


# One engine for both roles ------------------------------------------------------------------------


def test_without_disaggregation_prefill_passes_speak_and_decode_passes_are_throttled() -> None:
    rank = Rank(Role.NULL)
    rank.scheduler.pass_s = 0.004
    for _ in range(3):
        rank.overlap_turn(Batch(Mode.EXTEND, [Req("a", 10)], 10))
    for _ in range(15):
        rank.overlap_turn(Batch(Mode.DECODE, [Req("a", 10)], 10))
    modes = [(m.kind, m.mode) for m in rank.messages]
    assert modes.count(("forward", "extend")) == modes.count(("launch", "extend")) == 3
    assert modes.count(("forward", "decode")) == 1
    assert ("launch", "decode") not in modes


def test_hooks_hand_through_what_they_do_not_know() -> None:
    rank = Rank()
    seen: list[object] = []

    def original(*args: object, **kwargs: object) -> Result:
        seen.extend([args, kwargs])
        return result

    batch, result = Batch(Mode.EXTEND, [], 0), Result()
    scheduler, hook = rank.scheduler, rank.hook
    assert hook.around_run_batch(original, scheduler, batch, "proxy", later=1) is result
    hook.around_process_batch_result(original, scheduler, batch, result, "x", later=2)
    assert seen == [
        (scheduler, batch, "proxy"),
        {"later": 1},
        (scheduler, batch, result, "x"),
        {"later": 2},
    ]


def test_a_launch_names_each_request_once_in_its_first_pass() -> None:
    rank = Rank()
    long, short, health = Req("long", 1500), Req("short", 100), Req("HEALTH_CHECK_1", 1)
    long.time_stats = SimpleNamespace(  # type: ignore[attr-defined]
        prefill_bootstrap_queue_entry_time=1.0, wait_queue_entry_time=2.5
    )
    for req in (long, short, health):
        rank.add(req)
    rank.bootstrapped()
    for _ in range(2):
        batch = rank.scheduler.cut_batch()
        assert batch is not None
        rank.overlap_turn(batch)
    assert [message.started for message in rank.sink.of("launch")] == [
        [Started("long", queued_s=1.0, schedulable_s=2.5)],
        [Started("short")],
    ]
    assert not any(message.started for message in rank.sink.of("forward"))


def test_requests_have_the_ids_that_their_router_gave_them() -> None:
    """SGLang's Rust server makes them longer."""
    rank = Rank()
    for rid in ("sbs-1#35d2f51100000001", "sbs-2", "of#a-user"):
        rank.add(Req(rid, 100))
    rank.bootstrapped()
    batch = rank.scheduler.cut_batch()
    assert batch is not None
    rank.overlap_turn(batch)
    (launch,) = rank.sink.of("launch")
    assert [request.rid for request in launch.started] == ["sbs-1", "sbs-2", "of#a-user"]
    assert [rid for message in rank.messages for rid in message.rids] == [
        "sbs-1",
        "sbs-2",
        "of#a-user",
    ]


def without_gather(monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "1")
    return Rank()


def test_a_rank_says_whether_it_shares_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Rank(), Rank(dp_rank=0, dp_size=1)]
    ranks[0].idle()
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "true")
    ranks += [Rank(), Rank(dp_rank=0, dp_size=1)]
    for rank in ranks[1:]:
        rank.idle()
    assert [rank.messages[0].barrier for rank in ranks] == [True, True, False, True]


def test_dp_attention_that_the_release_does_not_count_is_a_barrier() -> None:
    """Until 0.5.12 there is no ``attn_dp_size``."""
    rank = Rank()
    del rank.scheduler.ps.attn_dp_size
    rank.scheduler.ps.dp_size = 2
    rank.scheduler.server_args = SimpleNamespace(enable_dp_attention=True)
    rank.idle()
    rank.scheduler.server_args.enable_dp_attention = False
    replica = Rank()
    replica.scheduler.ps = SimpleNamespace(
        **vars(replica.scheduler.ps) | {"attn_dp_size": 1, "dp_size": 2, "dp_rank": 1}
    )
    replica.idle()
    assert [process.messages[0].barrier for process in (rank, replica)] == [True, False]


@pytest.mark.parametrize("overlap", [True, False])
def test_an_idle_rank_without_a_barrier_says_so_once_and_counts_no_empty_pass(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """SGLang gives it an empty batch in every turn: that is not a pass, and it is idle."""
    rank = without_gather(monkeypatch)
    turn = rank.overlap_turn if overlap else rank.normal_turn
    rank.scheduler.pass_s = 0.001
    rank.scheduler.waiting_queue = [Req("a", 700)]
    for _ in range(50):
        turn(rank.scheduler.cut_batch() or Batch(Mode.IDLE, []))
    assert [m.kind for m in rank.messages] == ["launch", "forward", "idle"]
    assert rank.messages[-1].idle
    assert rank.messages[-1].extend_tokens == 700
    for _ in range(1000):
        turn(Batch(Mode.IDLE, []))
    beats = rank.messages[3:]
    assert {m.kind for m in beats} == {"heartbeat"}
    assert 3 <= len(beats) <= 12


def test_with_a_barrier_an_empty_pass_is_a_pass() -> None:
    rank = Rank()
    for _ in range(3):
        rank.normal_turn(Batch(Mode.IDLE, []))
    assert [m.kind for m in rank.messages] == ["launch", "forward"] * 3
