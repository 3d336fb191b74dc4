"""A rank's reports about requests: accepted, aborted, idle, alive; and when things go wrong."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from engine_fakes import Batch, Clock, Mode, Rank, Req, Role, Scheduler, Sink, config

from sglang_sbs.engine.hooks import MAX_ERRORS, RankHook
from sglang_sbs.engine.publish import BindError
from sglang_sbs.engine.recent_errors import RecentErrors
from sglang_sbs.wire.endforward import MAX_RIDS, Accepted, KvAddress


@pytest.mark.parametrize("role", list(Role))
def test_accepted_requests_are_counted_and_named_once(role: Role) -> None:
    rank = Rank(role)
    rank.idle()
    rank.add(Req("a", 100))
    rank.add(Req("b", 50))
    rank.clock.now_s += 0.05
    rank.idle()
    rank.clock.now_s += 2
    rank.idle()
    named = [m.rids for m in rank.messages]
    assert named == [[], ["a", "b"], []]
    assert rank.messages[-1].accepted_requests == 2
    assert rank.messages[-1].accepted_tokens == 150


@pytest.mark.parametrize("role", list(Role))
def test_an_accepted_request_comes_with_its_length_and_when_it_reached_the_server(role) -> None:
    rank = Rank(role)
    req = Req("a", 100)
    req.time_stats = SimpleNamespace(created_time=999.5, scheduler_recv_time=999.9)
    req.sampling_params = SimpleNamespace(max_new_tokens=64)
    req.bootstrap_room = 77
    rank.add(req)
    rank.add(Req("of-a-release-that-says-less", 50))
    at_s = rank.clock.now_s
    rank.clock.now_s += 0.05
    rank.idle()
    rank.clock.now_s += 2
    rank.idle()
    first, later = rank.messages
    assert first.accepted == [
        Accepted("a", 100, 999.5, 0 if role is Role.PREFILL else 64, 77),
        Accepted("of-a-release-that-says-less", 50, at_s),
    ]
    assert first.sent_s == pytest.approx(at_s + 0.05)
    assert later.accepted == []


@pytest.mark.parametrize(
    ("created_s", "received_s", "arrived_s"),
    [(0.0, 999.0, 999.0), (1001.0, 0.0, 1000.0), (-5.0, 0.0, 1000.0), (float("nan"), 0.0, 1000.0)],
    ids=["not passed on", "future", "negative", "not a number"],
)
def test_an_arrival_is_the_best_time_that_can_be_true(created_s, received_s, arrived_s) -> None:
    rank = Rank(Role.NULL)
    req = Req("a", 100)
    req.time_stats = SimpleNamespace(created_time=created_s, scheduler_recv_time=received_s)
    req.bootstrap_room = 1 << 70
    req.sampling_params = SimpleNamespace(max_new_tokens=1 << 70)
    rank.add(req)
    rank.idle()
    assert rank.messages[0].accepted == [Accepted("a", 100, arrived_s, 1 << 40)]


def test_health_checks_and_refused_requests_are_not_accepted() -> None:
    rank = Rank()
    rank.add(Req("HEALTH_CHECK_1", 1))
    rank.add(Req("too-long", 95_000))
    rank.idle()
    assert (rank.messages[0].accepted_requests, rank.messages[0].rids) == (0, [])


def test_a_retracted_request_is_not_accepted_again() -> None:
    rank = Rank(Role.DECODE)
    req = Req("a", 100)
    rank.add(req)
    rank.scheduler.disagg_decode_prealloc_queue.queue.clear()
    rank.add(req, is_retracted=True)
    rank.scheduler.disagg_decode_prealloc_queue.retracted_queue.clear()
    rank.add(req)
    rank.idle()
    assert rank.messages[0].accepted_requests == 1


def test_more_rids_than_fit_come_with_the_next_message() -> None:
    rank = Rank()
    rids = [f"r{i}" for i in range(MAX_RIDS + 3)]
    for rid in rids:
        rank.add(Req(rid, 1))
    rank.idle()
    rank.clock.now_s += 2
    rank.idle()
    assert [len(m.rids) for m in rank.messages] == [MAX_RIDS, 3]
    assert [[request.rid for request in m.accepted] for m in rank.messages] == [
        m.rids for m in rank.messages
    ]
    assert rank.messages[0].rids + rank.messages[1].rids == rids


def test_bootstrapping_and_waiting_requests() -> None:
    rank = Rank()
    rank.add(Req("a", 300))
    rank.idle()
    rank.bootstrapped()
    rank.scheduler.waiting_queue.append(Req("b", 500, cached=400))
    rank.clock.now_s += 2
    rank.idle()
    boot, waiting = rank.messages
    assert (boot.bootstrapping_requests, boot.bootstrapping_tokens) == (1, 300)
    assert (boot.waiting_requests, boot.idle) == (0, False)
    assert (waiting.waiting_requests, waiting.waiting_tokens) == (2, 400)
    assert waiting.bootstrapping_requests == 0


def test_idle_is_said_once_and_again_after_work() -> None:
    rank = Rank()
    for _ in range(100):
        rank.idle()
    rank.scheduler.waiting_queue = [Req("a", 10)]
    for _ in range(100):
        rank.overlap_turn(rank.scheduler.cut_batch())
    kinds = [m.kind for m in rank.messages]
    assert kinds == ["idle", "launch", "forward", "idle"]
    assert all(m.idle for m in rank.sink.of("idle"))
    last = rank.messages[-1]
    # The pass fields repeat the last pass.
    assert (last.forward_id, last.extend_tokens) == (1, 10)
    assert last.forward_s == pytest.approx(0.1)
    assert last.age_s == pytest.approx(last.launch_s + 0.1 + last.age_s - last.end_s)


def test_idle_leaves_before_anything_can_sleep_in_on_idle() -> None:
    rank = Rank()
    rank.hook.before_on_idle(rank.scheduler)
    assert [m.kind for m in rank.messages] == ["idle"]


def test_a_spinning_idle_loop_beats_once_per_second() -> None:
    rank = Rank()
    for _ in range(55_000):
        rank.clock.now_s += 0.0001
        rank.hook.before_on_idle(rank.scheduler)
    assert [m.kind for m in rank.messages] == ["idle"] + 5 * ["heartbeat"]


def test_changes_between_passes_are_reported_but_bounded() -> None:
    rank = Rank()
    rank.idle()
    start_s = rank.clock.now_s
    for i in range(100):
        rank.add(Req(f"r{i}", 10))
        rank.clock.now_s += 0.001
        rank.idle()
    beats = rank.sink.of("heartbeat")
    assert 5 <= len(beats) <= (rank.clock.now_s - start_s) / 0.01
    rank.clock.now_s += 0.02
    rank.idle()
    assert rank.messages[-1].accepted_requests == 100


def test_aborted_counts_accepted_requests_once() -> None:
    rank = Rank()
    queued, bootstrapping = Req("q-1", 10), Req("b-1", 10)
    rank.add(queued)
    rank.bootstrapped()
    rank.add(bootstrapping)
    rank.abort("q-")
    rank.abort("b-1")
    rank.abort("b-1")
    rank.abort("nobody")
    rank.idle()
    assert rank.messages[0].aborted_requests == 2


def test_a_finished_or_foreign_request_is_not_aborted() -> None:
    rank = Rank(Role.DECODE)
    done = Req("done", 10)
    rank.add(done)
    done.done = True
    rank.scheduler.running_batch = Batch(Mode.DECODE, [done, Req("HEALTH_CHECK_9", 1)])
    rank.abort("", abort_all=True)
    rank.idle()
    assert rank.messages[0].aborted_requests == 0


# Errors -------------------------------------------------------------------------------------------


class Broken(Sink):
    def send(self, frames):  # type: ignore[no-untyped-def]
        raise RuntimeError("no socket")


def test_errors_never_reach_the_engine_and_end_the_hook(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(sink=Broken())
    rank.scheduler.waiting_queue = [Req(f"r{i}", 1024) for i in range(30)]
    with caplog.at_level(logging.WARNING, logger="sglang_sbs"):
        for _ in range(33):
            rank.overlap_turn(rank.scheduler.cut_batch())
    assert len(rank.scheduler.processed) == 30
    assert rank.hook.off
    assert rank.hook.errors.count == MAX_ERRORS
    assert rank.sink.closed
    assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1
    assert len(caplog.records) == 2


def test_errors_that_are_hours_apart_do_not_end_a_hook() -> None:
    errors = RecentErrors(3)
    for hour in range(10):
        errors.add(3600.0 * hour)
        errors.add(3600.0 * hour + 1)
    assert (errors.count, errors.too_many) == (20, False)
    errors.add(3600.0 * 9 + 2)
    assert errors.too_many


def test_some_errors_are_counted_in_the_messages() -> None:
    rank = Rank()
    healthy = rank.scheduler.pool_stats_observer
    rank.scheduler.waiting_queue = [Req("a", 10)]
    rank.idle()
    rank.scheduler.pool_stats_observer = None
    rank.overlap_turn(rank.scheduler.cut_batch())
    rank.scheduler.pool_stats_observer = healthy
    rank.overlap_turn(None)
    assert [(m.kind, m.hook_errors) for m in rank.messages] == [("heartbeat", 0), ("forward", 1)]


def test_exceptions_of_the_engine_pass_through() -> None:
    rank = Rank()

    def fails(*_args: object) -> None:
        raise ValueError("out of memory")

    batch = Batch(Mode.EXTEND, [], 0)
    with pytest.raises(ValueError, match="out of memory"):
        rank.hook.around_run_batch(fails, rank.scheduler, batch)
    with pytest.raises(ValueError, match="out of memory"):
        rank.hook.around_process_batch_result(fails, rank.scheduler, batch, None)
    assert rank.hook.errors.count == 0


def test_a_socket_that_cannot_be_opened_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    def clash(*_args: object) -> Sink:
        raise BindError("port in use")

    hook = RankHook(config(), open_sink=clash, clock=Clock())
    scheduler = Scheduler(Role.PREFILL, Clock())
    with caplog.at_level(logging.INFO, logger="sglang_sbs"):
        for _ in range(5):
            hook.before_on_idle(scheduler)
    assert hook.off
    assert [r.getMessage() for r in caplog.records] == [
        "EndForward is off on this rank: port in use"
    ]


def test_a_restart_is_a_new_boot_id_with_a_new_sequence() -> None:
    first, second = Sink(), Sink()
    for sink, boot_id in ((first, "boot-1"), (second, "boot-2")):
        clock = Clock()
        hook = RankHook(config(boot_id=boot_id), open_sink=lambda _c, _d, s=sink: s, clock=clock)
        hook.before_on_idle(Scheduler(Role.PREFILL, clock))
    assert [(m.boot_id, m.seq) for m in first.messages + second.messages] == [
        ("boot-1", 0),
        ("boot-2", 0),
    ]


@pytest.mark.parametrize(("node_host", "said"), [("", "10.1.0.2"), ("10.0.0.2", "10.0.0.2")])
def test_a_rank_on_another_node_says_where_its_kv_events_are(node_host: str, said: str) -> None:
    rank = Rank()
    rank.hook = RankHook(config(node_host=node_host), open_sink=lambda _c, _d: rank.sink)
    rank.scheduler.ps.node_rank = 1
    rank.scheduler.kv_events_publisher = SimpleNamespace(  # type: ignore[attr-defined]
        kv_event_publisher=SimpleNamespace(
            _local_pub_endpoint="tcp://10.1.0.2:5558", _local_replay_endpoint="tcp://10.1.0.2:5658"
        )
    )
    args = SimpleNamespace(nnodes=2, dist_init_addr="p0:5000")
    rank.scheduler.server_args = args  # type: ignore[attr-defined]
    rank.idle()
    assert [m.kv_address for m in rank.messages] == [KvAddress(said, 5558, 5658)]
    assert [m.dist_init_addr for m in rank.messages] == ["p0:5000"]
