"""Drives the code of a patched release for a few turns, with stand-ins around it.

``python -m tools.check_patches.probe SITE main|prefill|decode|router`` prints one JSON object. Owns
the script of each turn and the fakes below SGLang's scheduler. Must not know patches: on an
unpatched tree the same script shows that nothing is called.

Real are the functions the patch is in (``launch_server``, ``run_scheduler_process``), the event
loops, ``Scheduler`` with its mixins, ``Req``, ``ScheduleBatch`` and ``ForwardMode``; the model, the
GPU and all other packages are stand-ins (``source_import.py``).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import logging
import multiprocessing.connection
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tools.check_patches.source_import import Anything, import_from

KEEP = ("sglang_sbs", "zmq", "msgspec", "uvloop")
SRT_MODULES = tuple(
    f"sglang.srt.{name}"
    for name in (
        "disaggregation.decode",
        "disaggregation.prefill",
        "disaggregation.utils",
        "dllm.mixin.req",
        "entrypoints.http_server",
        "managers.io_struct",
        "managers.schedule_batch",
        "managers.scheduler",
        "managers.scheduler_output_processor_mixin",
        "managers.scheduler_runtime_checker_mixin",
        "managers.utils",
        "model_executor.forward_batch_info",
    )
)
ROUTER_MODULES = ("sglang_router.launch_router", "sglang_router.router_args")
DP_RANK, DP_SIZE = 1, 2
PROMPT_TOKENS, CACHED_TOKENS = 600, 88
KV_CAPACITY, KV_FREE, KV_EVICTABLE = 10_000, 9_000, 300
WATCHED = (
    *("kind", "role", "dp_rank", "dp_size", "mode", "extend_tokens", "tokens_per_rank", "rids"),
    *("accepted_requests", "waiting_tokens", "running_requests", "kv_tokens", "boot_id"),
    *("inflight_passes", "chunk_tokens", "batch_size", "sglang_version", "hook_errors"),
)
"""Fields of EndForward in the answer."""


class TurnsOver(BaseException):
    """Ends an event loop that has no end."""


def main(argv: Sequence[str] | None = None) -> int:
    site, what = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    os.environ["SGLANG_SBS_ROUTERS"] = "tcp://127.0.0.1:1"
    wanted = ROUTER_MODULES if what == "router" else SRT_MODULES
    modules = [name for name in wanted if Path(site, *name.split(".")).with_suffix(".py").is_file()]
    import_from(Path(site), modules, KEEP)
    scripts: dict[str, Callable[[], dict[str, Any]]] = {
        "main": probe_main,
        "prefill": lambda: probe_scheduler("prefill"),
        "decode": lambda: probe_scheduler("decode"),
        "router": probe_router,
    }
    answer = scripts[what]()
    answer["imported"] = [name for name in modules if name in sys.modules]
    print(json.dumps(answer))
    return 0


def probe_main() -> dict[str, Any]:
    """``http_server.launch_server`` up to where it would listen."""
    # 0.5.6 counts on somebody else having imported it.
    assert multiprocessing.connection
    http_server: Any = importlib.import_module("sglang.srt.entrypoints.http_server")
    info: dict[str, Any] = {"status": "ready", "max_req_input_len": 1}
    boot_ids: list[str | None] = []

    def launch(*_args: Any, **_kwargs: Any) -> tuple[Any, ...]:
        boot_ids.append(os.environ.get("SGLANG_SBS_BOOT_ID"))
        stand_in = Anything()
        if hasattr(http_server, "_launch_subprocesses"):
            # One dict until 0.5.7, one per scheduler since.
            infos = info if "parse_remote_instance" not in source else [info]
            return stand_in, stand_in, infos, stand_in
        result = SimpleNamespace(scheduler_infos=[info])
        return stand_in, stand_in, stand_in, result, stand_in

    source = Path(http_server.__file__ or "").read_text(encoding="utf-8")
    if hasattr(http_server, "_launch_subprocesses"):
        http_server._launch_subprocesses = launch
    else:
        http_server.Engine = SimpleNamespace(_launch_subprocesses=launch)
    http_server.launch_server(_ServerArgs("prefill"))
    return {"boot_id_of_children": boot_ids, "server_info": info}


class _ServerArgs:
    """The few arguments that decide which way the code goes; anything else is a stand-in."""

    def __init__(self, role: str) -> None:
        self.disaggregation_mode = role
        self.enable_dp_attention = True
        self.tokenizer_worker_num = 1
        self.tp_size = self.dp_size = DP_SIZE
        self.pp_size = self.ep_size = self.moe_dp_size = self.attn_cp_size = 1
        self.numa_node = None
        self.enable_trace = self.enable_metrics = self.enable_ssl_refresh = False
        self.api_key = self.admin_api_key = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


def probe_scheduler(role: str) -> dict[str, Any]:
    """``run_scheduler_process`` with one request: a pass, its end, and an idle turn."""
    # Before SGLang, which is why the hook does not matter yet.
    publish: Any = importlib.import_module("sglang_sbs.engine.publish")
    wire = importlib.import_module("sglang_sbs.wire.endforward")
    messages: list[Any] = []
    publish.Publisher = lambda *_args, **_kwargs: SimpleNamespace(
        send=lambda frames: messages.append(wire.decode_endforward(frames)), close=lambda: None
    )
    scheduler: Any = importlib.import_module("sglang.srt.managers.scheduler")
    scheduler.get_exception_traceback = traceback.format_exc
    cls = scheduler.Scheduler
    calls: list[str] = []
    for name, function in _fakes(role, calls).items():
        setattr(cls, name, function)
    ranks: dict[str, int | None] = dict.fromkeys(
        ("gpu_id", "tp_rank", "attn_cp_rank", "moe_dp_rank", "moe_ep_rank", "pp_rank"), 0
    )
    parameters = scheduler.run_scheduler_process.__code__.co_varnames
    named = {name: rank for name, rank in ranks.items() if name in parameters}
    # What runs "in the main process" has left it in the environment.
    os.environ["SGLANG_SBS_BOOT_ID"] = "boot-of-main"
    with contextlib.suppress(TurnsOver):
        scheduler.run_scheduler_process(
            server_args=_ServerArgs(role),
            port_args=Anything(),
            dp_rank=None,
            pipe_writer=Anything(),
            **named,
        )
    return {
        "calls": calls,
        "messages": [{name: getattr(message, name) for name in WATCHED} for message in messages],
        "version": importlib.metadata.version("sglang"),
    }


def _fakes(role: str, calls: list[str]) -> dict[str, Callable[..., Any]]:
    """Methods of ``Scheduler`` below its event loops, which would need a model."""
    schedule_batch = importlib.import_module("sglang.srt.managers.schedule_batch")
    modes = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    utils = importlib.import_module("sglang.srt.disaggregation.utils")
    turns = _turns()
    sources = "".join(
        Path(module.__file__ or "").read_text(encoding="utf-8")
        for name, module in sys.modules.items()
        if name in SRT_MODULES
    )

    def init(self: Any, *_args: Any, **_kwargs: Any) -> None:
        self.server_args = _ServerArgs(role)
        self.disaggregation_mode = utils.DisaggregationMode(role)
        self.enable_overlap, self.enable_pdmux = True, False
        self.pp_rank = self.attn_tp_rank = self.attn_cp_rank = 0
        self.dp_rank, self.dp_size, self.attn_dp_rank = None, DP_SIZE, DP_RANK
        self.forward_ct, self.chunked_prefill_size, self.max_prefill_tokens = 0, 1024, 16384
        self.max_running_requests, self.max_total_num_tokens = 48, KV_CAPACITY
        self.max_req_input_len = 1
        self.waiting_queue, self.chunked_req, self.last_batch = [], None, None
        self.running_batch = schedule_batch.ScheduleBatch(reqs=[])
        self.is_hybrid_swa = self.is_hybrid_ssm = self.is_ssm_model = False
        self._engine_paused = False
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: KV_FREE)
        self.tree_cache = SimpleNamespace(evictable_size=lambda: KV_EVICTABLE)
        self.disagg_prefill_bootstrap_queue = _Queue()
        self.disagg_prefill_inflight_queue = []
        self.disagg_decode_prealloc_queue = _Queue(wrap=True)
        self.disagg_decode_transfer_queue = _Queue()

    def missing(self: Any, name: str) -> Any:
        # Of this release: what its own code never mentions, it does not have.
        if name.startswith("__") or not re.search(rf"\bself\.{name}\b", sources):
            raise AttributeError(name)
        return Anything()

    def recv_requests(self: Any) -> list[Any]:
        if next(turns, None) is None:
            raise TurnsOver
        if calls:
            return []
        params = Anything()
        return [schedule_batch.Req("r1", "", [1] * PROMPT_TOKENS, params)]

    def process_input_requests(self: Any, requests: list[Any]) -> None:
        for request in requests:
            self._add_request_to_queue(request)

    def next_batch(self: Any) -> Any:
        calls.append("next_batch")
        if calls.count("next_batch") > 1:
            return None
        request = self.waiting_queue.pop() if role == "prefill" else _only(self, role)
        batch = schedule_batch.ScheduleBatch(reqs=[request])
        batch.forward_mode = modes.EXTEND if role == "prefill" else modes.DECODE
        batch.extend_num_tokens = PROMPT_TOKENS - CACHED_TOKENS
        batch.global_num_tokens = [0, PROMPT_TOKENS - CACHED_TOKENS]
        if role == "decode":
            self.running_batch = batch
        return batch

    def run_batch(self: Any, _batch: Any, *_args: Any) -> Any:
        calls.append("run_batch")
        self.forward_ct += 1
        return SimpleNamespace(copy_done=SimpleNamespace(synchronize=lambda: None))

    def record(name: str) -> Callable[..., Any]:
        def called(_self: Any, *_args: Any, **_kwargs: Any) -> None:
            calls.append(name)

        return called

    quiet = dict.fromkeys(
        (
            "_maybe_clear_mm_inputs",
            "_prefetch_kvcache",
            "launch_batch_sample_if_needed",
            "log_batch_result_stats",
            "maybe_prefetch_staging_for_batch",
            "maybe_send_health_check_signal",
            "process_decode_queue",
            "process_disagg_prefill_inflight_queue",
        ),
        lambda *_args, **_kwargs: None,
    )
    return quiet | {
        "__init__": init,
        "get_remote_instance_transfer_engine_info": lambda _self: ("", None),
        "__getattr__": missing,
        "recv_requests": recv_requests,
        "process_input_requests": process_input_requests,
        "get_next_disagg_prefill_batch_to_run": next_batch,
        "get_next_disagg_decode_batch_to_run": next_batch,
        "run_batch": run_batch,
        "process_batch_result_disagg_prefill": record("processed"),
        "process_batch_result_decode": record("processed"),
        "self_check_during_idle": record("idle"),
    }


def _turns() -> Iterator[int]:
    """One in which the request comes and its pass starts, one for its end, one idle."""
    return iter(range(3))


def _only(scheduler: Any, role: str) -> Any:
    queue = scheduler.disagg_decode_prealloc_queue
    assert role == "decode" and len(queue.queue) == 1
    return queue.queue.pop().req


class _Queue:
    """A queue of requests between the two halves; ``wrap``: as decode keeps them."""

    def __init__(self, *, wrap: bool = False) -> None:
        self.queue: list[Any] = []
        self.retracted_queue: list[Any] = []
        self._wrap = wrap

    def add(self, request: Any, *_args: Any, **_kwargs: Any) -> None:
        self.queue.append(SimpleNamespace(req=request) if self._wrap else request)

    def pop_bootstrapped(self, *_args: Any, **_kwargs: Any) -> list[Any]:
        ready, self.queue = self.queue, []
        return ready


def probe_router() -> dict[str, Any]:
    """``sglang_router``'s command line, with our flags and without."""
    ours: Any = importlib.import_module("sglang_sbs.launch_router")
    handed: list[list[str]] = []

    def main_of_ours(argv: Sequence[str], *_args: Any) -> int:
        handed.append(list(argv))
        return 7

    ours.main = main_of_ours
    launch = importlib.import_module("sglang_router.launch_router")
    argv = ["--pd-disaggregation", "--prefill", "http://p:1", "8998", "--decode", "http://d:1"]
    code: object = None
    try:
        launch.parse_router_args([*argv, "--policy", "sbs", "--sbs-trigger", "paper"])
    except SystemExit as error:
        code = error.code
    stock = launch.parse_router_args([*argv, "--policy", "random"])
    return {
        "handed_over": handed,
        "exit_code": code,
        "stock_policy": stock.policy,
        "stock_prefill": stock.prefill_urls,
        "version": importlib.metadata.version("sglang-router"),
    }


if __name__ == "__main__":
    sys.exit(main())
