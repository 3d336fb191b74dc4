"""Hooks in an SGLang without a plugin framework: what is hooked, once, and what is left alone."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from engine_fakes import Batch, Mode, Rank, Req, Role

from sglang_sbs.engine import register
from sglang_sbs.engine.collect import SchedulerReader, read_placement
from sglang_sbs.engine.hooks_without_plugins import is_loaded, wrap

SCHEDULER, SERVER = "sglang.srt.managers.scheduler", "sglang.srt.entrypoints.http_server"


def module(name: str, **members: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    class Thing:
        def double(self, value: int) -> int:
            """Twice."""
            return 2 * value

    made = module("sbs_test_target", Thing=Thing, triple=lambda value: 3 * value)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_the_two_kinds_of_hooks(target: Any) -> None:
    seen: list[Any] = []

    def before(*args: Any) -> None:
        seen.append(("before", args[-1]))

    def around(original: Any, thing: Any, value: int) -> int:
        return int(original(thing, value + 1)) + 100

    wrap("sbs_test_target.triple", before, "BEFORE")
    wrap("sbs_test_target.Thing.double", around, "AROUND")
    assert target.triple(5) == 15
    assert seen == [("before", 5)]
    assert target.Thing().double(1) == 104
    assert target.Thing.double.__doc__ == "Twice."


def test_registering_again_changes_nothing(target: Any) -> None:
    calls: list[int] = []

    def hook(value: int) -> None:
        calls.append(value)

    for _ in range(3):
        wrap("sbs_test_target.triple", hook, "BEFORE")
    target.triple(1)
    assert calls == [1]


def test_only_what_is_imported_counts_as_loaded(target: Any) -> None:
    assert is_loaded("sbs_test_target.triple")
    assert is_loaded("sbs_test_target.Thing.double")
    assert not is_loaded("sbs_test_target.Thing.halve")
    assert not is_loaded("wave.Wave_read.close")
    assert "wave" not in sys.modules


class OldScheduler:
    """Method names of 0.5.9."""

    def run_batch(self, batch: Any) -> None: ...
    def process_batch_result(self, batch: Any, result: Any) -> None: ...
    def process_batch_result_disagg_prefill(self, batch: Any, result: Any) -> None: ...
    def self_check_during_idle(self) -> None: ...
    def _add_request_to_queue(self, req: Any) -> None: ...
    def abort_request(self, recv_req: Any) -> None: ...


@pytest.fixture
def old_sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A process of SGLang 0.5.9 that is about to call us, without its modules."""
    monkeypatch.setenv("SGLANG_SBS_ROUTERS", "tcp://127.0.0.1:1")
    monkeypatch.setenv("SGLANG_SBS_BOOT_ID", "boot-1")
    for name in ("sglang.srt.plugins.hook_registry", SCHEDULER, SERVER):
        monkeypatch.setitem(sys.modules, name, None)
    return monkeypatch


def old_class() -> type:
    return type("Scheduler", (), {k: v for k, v in vars(OldScheduler).items() if callable(v)})


def test_a_scheduler_process_is_hooked_without_the_http_server(
    old_sglang: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cls = old_class()
    old_sglang.setitem(sys.modules, SCHEDULER, module(SCHEDULER, Scheduler=cls))
    old_sglang.delitem(sys.modules, SERVER)
    register()
    register()  # a patch calls it in every process, whoever called it before
    hooked = [name for name in vars(cls) if hasattr(vars(cls)[name], "__wrapped__")]
    assert sorted(hooked) == sorted(k for k, v in vars(OldScheduler).items() if callable(v))
    assert not any(hasattr(vars(cls)[n].__wrapped__, "__wrapped__") for n in hooked)
    assert "goes without" not in caplog.text
    assert SERVER not in sys.modules


def test_the_main_process_tells_of_the_plugin(old_sglang: pytest.MonkeyPatch) -> None:
    states: list[Any] = []
    server = module(SERVER, set_global_state=states.append)
    old_sglang.setitem(sys.modules, SERVER, server)
    old_sglang.delitem(sys.modules, SCHEDULER)
    register()
    server.set_global_state(SimpleNamespace(scheduler_info={"status": "ready"}))
    assert states[0].scheduler_info["sbs"]["boot_id"] == "boot-1"
    server.set_global_state(SimpleNamespace(scheduler_info=None))
    assert len(states) == 2


def test_what_a_release_lacks_is_named(
    old_sglang: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cls = old_class()
    del cls.self_check_during_idle  # type: ignore[attr-defined]
    old_sglang.setitem(sys.modules, SCHEDULER, module(SCHEDULER, Scheduler=cls))
    old_sglang.delitem(sys.modules, SERVER)
    register()
    assert "This SGLang has no sglang.srt.managers.scheduler.Scheduler.on_idle;" in caplog.text


def test_nested_result_hooks_count_as_one_pass() -> None:
    """0.5.10: ``process_batch_result`` calls ``process_batch_result_disagg_prefill``."""
    rank = Rank(Role.PREFILL)
    processed: list[Any] = []

    def inner(_scheduler: Any, batch: Any, _result: Any) -> None:
        processed.append(batch)

    def outer(scheduler: Any, batch: Any, result: Any) -> None:
        rank.hook.around_process_batch_result(inner, scheduler, batch, result)

    batch = Batch(Mode.EXTEND, [Req("r1", 10)], extend=10)
    for _ in range(2):
        result = rank.run_batch(batch)
        rank.hook.around_process_batch_result(outer, rank.scheduler, batch, result)
    assert len(processed) == 2
    assert len(rank.sink.of("forward")) == 2


def test_results_that_are_none_are_not_taken_for_each_other() -> None:
    rank = Rank(Role.PREFILL)
    batch = Batch(Mode.EXTEND, [Req("r1", 10)], extend=10)
    rank.run_batch(batch)
    rank.hook.around_process_batch_result(lambda *_args: None, rank.scheduler, batch, None)
    assert len(rank.sink.of("forward")) == 1


@pytest.mark.parametrize(
    ("kind", "method", "tokens"),
    [
        ({}, "_get_token_info", 700),
        ({"is_hybrid_swa": True}, "_get_swa_token_info", 800),
        ({"is_hybrid_ssm": True}, "_get_mamba_token_info", 900),
        ({"is_ssm_model": True}, "_get_mamba_token_info", 900),
    ],
)
def test_kv_tokens_before_there_were_pool_stats(
    kind: dict[str, bool], method: str, tokens: int
) -> None:
    scheduler: Any = Rank(Role.PREFILL).scheduler
    del scheduler.pool_stats_observer
    for name, value in kind.items():
        setattr(scheduler, name, value)
    setattr(scheduler, method, lambda: (tokens, 0.5, 1, 2))
    reader = SchedulerReader(scheduler)
    assert reader.missing == []
    assert reader.backlog("prefill").kv_tokens == tokens


def test_without_any_way_to_know_kv_tokens_are_missing() -> None:
    scheduler: Any = Rank(Role.PREFILL).scheduler
    del scheduler.pool_stats_observer
    reader = SchedulerReader(scheduler)
    assert reader.missing == ["kv_tokens"]
    assert reader.backlog("prefill").kv_tokens == 0


def test_ranks_before_context_parallel_attention() -> None:
    scheduler = SimpleNamespace(
        dp_rank=None,
        dp_size=4,
        attn_dp_rank=3,
        attn_tp_rank=0,
        pp_rank=0,
        server_args=SimpleNamespace(enable_dp_attention=True),
    )
    assert read_placement(scheduler)[:3] == (3, 4, True)
