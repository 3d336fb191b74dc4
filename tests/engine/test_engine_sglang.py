"""The hook against the installed SGLang: what it hooks and reads is there.

Needs the ``engine`` extra; without SGLang these tests fail rather than disappear. Hooks patch
SGLang for the whole process, and a CPU-only SGLang needs stand-ins for GPU packages, so each look
at it is a process of its own.
"""

from __future__ import annotations

import pytest
from harness.sglang_process import ask

from sglang_sbs import __version__
from sglang_sbs.engine.collect import HEALTH_CHECK_RID_PREFIX
from sglang_sbs.engine.room_status import OPENING

pytestmark = pytest.mark.sglang

ROUTERS = {"SGLANG_SBS_ROUTERS": "tcp://127.0.0.1:1", "SGLANG_SBS_BOOT_ID": "boot-1"}


@pytest.fixture(scope="module")
def hooked() -> dict[str, object]:
    """SGLang with the plugin loaded as the engine's main process loads it."""
    return ask(
        """
        import inspect, logging
        logging.basicConfig(level=logging.INFO)
        from sglang_sbs.engine import register
        from sglang.srt.plugins.hook_registry import HookRegistry
        register()
        HookRegistry.apply_hooks()
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.entrypoints import http_server
        for name in ("run_batch", "process_batch_result", "on_idle", "_add_request_to_queue",
                     "abort_request", "get_next_disagg_prefill_batch_to_run",
                     "maybe_init_rust_server"):
            method = getattr(Scheduler, name)
            original = method.__wrapped__
            answer[name] = list(inspect.signature(original).parameters)
        from sglang.srt.disaggregation.base.conn import KVPoll
        from sglang.srt.disaggregation.common.conn import CommonKVManager
        update = CommonKVManager.update_status.__wrapped__
        answer["update_status"] = list(inspect.signature(update).parameters)
        answer["opening"] = [int(KVPoll.Bootstrapping), int(KVPoll.WaitingForInput)]
        class Args:
            launch_command = ""
            kv_events_config = None
            def resolved_dict(self):
                return {}
        from sglang_sbs.engine.gang_gather import columns_of_sglang
        answer["columns"] = columns_of_sglang()
        answer["patched"] = hasattr(http_server.build_server_info, "__wrapped__")
        from sglang.srt.utils import common
        common.describe_kv_events_publisher = lambda args: None
        answer["sbs"] = http_server.build_server_info(Args(), {})["sbs"]
        import pickle
        from sglang.srt.managers import multi_tokenizer_mixin
        class Memory:
            def close(self):
                pass
        def keep(args, name):
            answer["of_workers"] = pickle.loads(pickle.dumps(args[2]))
            return Memory()
        multi_tokenizer_mixin.write_to_shared_memory = keep
        http_server.write_data_for_multi_tokenizer(None, None, {"startup_time": 1.0})
        plain = http_server.build_server_info.__wrapped__
        answer["sbs_of_workers"] = plain(Args(), answer["of_workers"]).get("sbs")
        """,
        **ROUTERS,
    )


def test_hook_targets_have_the_expected_parameters(hooked: dict[str, object]) -> None:
    assert hooked["run_batch"] == ["self", "batch", "pp_proxy_tensors"]
    assert hooked["process_batch_result"] == ["self", "batch", "result"]
    assert hooked["on_idle"] == ["self"]
    assert hooked["_add_request_to_queue"] == ["self", "req", "is_retracted"]
    assert hooked["abort_request"] == ["self", "recv_req"]
    assert hooked["maybe_init_rust_server"] == ["self"]
    assert hooked["update_status"] == ["self", "bootstrap_room", "status"]
    assert hooked["opening"] == list(OPENING)
    assert hooked["get_next_disagg_prefill_batch_to_run"][0] == "self"  # type: ignore[index]


def test_every_hook_is_applied_without_complaint(hooked: dict[str, object]) -> None:
    log = str(hooked["log"])
    assert (log.count("Applied 1 hook(s) to"), log.count("Applied 2 hook(s) to")) == (13, 2)
    assert "EndForward goes without" not in log
    assert "Failed to apply" not in log


def test_the_gathered_row_has_numbers_that_words_can_ride_on(hooked: dict[str, object]) -> None:
    assert hooked["columns"] == [10, 8]


def test_server_info_has_the_sbs_block(hooked: dict[str, object]) -> None:
    assert hooked["patched"]
    assert hooked["sbs"] == {
        "wire_version": 1,
        "boot_id": "boot-1",
        "booted_s": 0,  # a parent that left no time
        "instance_id": "",
        "routers": ["tcp://127.0.0.1:1"],
        "bind": None,
        "encrypted": False,
        "gang_gate_ms": None,
        "barrier": True,
        "deferred_release": True,
        "transfer_timeout_s": 0,
        "sglang_sbs_version": __version__,
        "sgl_kernel_version": "",
    }


def test_processes_of_several_tokenizers_have_the_sbs_block_too(hooked: dict[str, object]) -> None:
    """They load no plugins (``--tokenizer-worker-num``), and get what the main process knows."""
    assert hooked["sbs_of_workers"] == hooked["sbs"]


def test_a_target_this_sglang_lacks_is_left_out_and_named() -> None:
    answer = ask(
        """
        from sglang_sbs.engine import register
        from sglang.srt.managers.scheduler import Scheduler
        del Scheduler.on_idle
        from sglang.srt.plugins.hook_registry import HookRegistry
        register()
        HookRegistry.apply_hooks()
        answer["hooked"] = hasattr(Scheduler.run_batch, "__wrapped__")
        """,
        **ROUTERS,
    )
    assert answer["hooked"]
    assert "This SGLang has no sglang.srt.managers.scheduler.Scheduler.on_idle;" in str(
        answer["log"]
    )


def test_the_scheduler_gets_the_time_at_which_the_server_received_a_request() -> None:
    """The way of a request's times from the HTTP server over the DP controller to a rank."""
    answer = ask(
        """
        import pickle
        from sglang_sbs.engine import register
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sglang.srt.observability import req_time_stats as times
        def way(created_s):
            server = times.APIServerReqTimeStats()
            server.set_created_time(created_s)
            controller = times.DPControllerReqTimeStats.new_from_obj(
                pickle.loads(pickle.dumps(server)))
            return times.SchedulerReqTimeStats.new_from_obj(
                pickle.loads(pickle.dumps(controller))).created_time
        answer["without"] = way(1234.5)
        register()
        HookRegistry.apply_hooks()
        answer["with"] = way(1234.5)
        """,
        **ROUTERS,
    )
    assert answer["without"] == 0.0
    assert answer["with"] == pytest.approx(1234.5, abs=0.01)


def test_without_configuration_sglang_is_untouched() -> None:
    answer = ask(
        """
        from sglang_sbs.engine import register
        register()
        from sglang.srt.plugins.hook_registry import HookRegistry
        answer["hooks"] = len(HookRegistry._hooks)
        """
    )
    assert answer["hooks"] == 0


def test_what_the_hook_reads_exists() -> None:
    answer = ask(
        """
        import dataclasses
        from array import array
        from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.managers.io_struct import AbortReq
        from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
        from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer
        from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats
        from sglang.srt.managers.scheduler_components.pool_stats_observer import PoolStats
        from sglang.srt.managers.utils import EmbeddingBatchResult, GenerationBatchResult
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.runtime_context import get_parallel
        from sglang.srt.sampling.sampling_params import SamplingParams

        batch = {field.name for field in dataclasses.fields(ScheduleBatch)}
        answer["batch"] = sorted(batch & {
            "reqs", "forward_mode", "forward_iter", "launch_ts", "extend_num_tokens",
            "prefill_stats", "global_num_tokens"})
        answer["cached"] = "log_hit_tokens" in PrefillStats.__dataclass_fields__
        req = Req("r1", "", array("q", [1, 2, 3]), SamplingParams())
        req._sbs_accepted = True
        answer["req"] = [req.rid, req.seqlen, len(req.origin_input_ids), req.prefix_len,
                         req.extend_end, req.finished()]
        for result in (GenerationBatchResult(), EmbeddingBatchResult(embeddings=None)):
            result._sbs_pass = None
            result.copy_done
        answer["modes"] = [(mode.name, mode.is_extend() and not mode.is_target_verify(),
                            mode.is_prebuilt()) for mode in ForwardMode]
        answer["roles"] = sorted(mode.value for mode in DisaggregationMode)
        abort = AbortReq(rid="r1")
        answer["abort"] = [abort.rid, abort.abort_all]
        answer["uncached"] = hasattr(SchedulerLoadInquirer, "get_num_waiting_uncached_tokens")
        answer["kv"] = hasattr(PoolStats, "get_kv_token_stats")
        parallel = type(get_parallel())
        answer["parallel"] = [hasattr(parallel, name) for name in (
            "attn_dp_rank", "attn_tp_rank", "attn_cp_rank", "pp_rank", "dp_rank")]
        answer["prefix"] = HEALTH_CHECK_RID_PREFIX
        """
    )
    assert answer["batch"] == [
        "extend_num_tokens",
        "forward_iter",
        "forward_mode",
        "global_num_tokens",
        "launch_ts",
        "prefill_stats",
        "reqs",
    ]
    assert answer["cached"] and answer["uncached"] and answer["kv"]
    assert answer["req"] == ["r1", 3, 3, 0, None, False]
    modes = {name: (extend, prebuilt) for name, extend, prebuilt in answer["modes"]}  # type: ignore[attr-defined]
    assert modes["EXTEND"] == (True, False)
    assert modes["DECODE"] == modes["IDLE"] == modes["TARGET_VERIFY"] == (False, False)
    assert modes["PREBUILT"] == (False, True)
    assert answer["roles"] == ["decode", "null", "prefill"]
    assert answer["abort"] == ["r1", False]
    assert answer["parallel"] == 5 * [True]
    assert answer["prefix"] == HEALTH_CHECK_RID_PREFIX
