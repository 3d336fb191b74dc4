"""Installs the hooks in SGLang, through its plugin framework or directly, and adds the ``sbs``
block to ``/server_info``."""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

from sglang_sbs import __version__
from sglang_sbs.engine.collect import keep_created_time, read_placement, skips_gather
from sglang_sbs.engine.config import HookConfig
from sglang_sbs.engine.gang_gather import SYNC_CLASS, SYNC_MODULE, GatherBoard
from sglang_sbs.engine.gang_hold import GangHold
from sglang_sbs.engine.hooks import RankHook
from sglang_sbs.engine.hooks_without_plugins import is_loaded, wrap
from sglang_sbs.engine.room_status import around_update_status

logger = logging.getLogger(__name__)

WIRE_VERSION = 1
NAP_MS = 1
REGISTRY = "sglang.srt.plugins.hook_registry"
SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
SERVER_MODULE = "sglang.srt.entrypoints.http_server"
SCHEDULER = SCHEDULER_MODULE + ".Scheduler."
ON_IDLE = SCHEDULER + "on_idle"
DISAGG_PREFILL_RESULT = SCHEDULER + "process_batch_result_disagg_prefill"
NEXT_PREFILL_BATCH = SCHEDULER + "get_next_disagg_prefill_batch_to_run"
PROCESS_RESULT = SCHEDULER + "process_batch_result"
POP_BOOTSTRAPPED = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.pop_bootstrapped"
GATHERED = f"{SYNC_MODULE}.{SYNC_CLASS}."
SERVER_INFO = "sglang.srt.utils.common.build_server_info"
TOKENIZERS = "sglang.srt.managers.multi_tokenizer_mixin.write_data_for_multi_tokenizer"
GLOBAL_STATE = SERVER_MODULE + ".set_global_state"
TIMES = "sglang.srt.observability.req_time_stats."
SERVER_TIMES = TIMES + "APIServerReqTimeStats.__getstate__"
CONTROLLER_TIMES = TIMES + "DPControllerReqTimeStats.__getstate__"
ROOM_STATUS = "sglang.srt.disaggregation.common.conn.CommonKVManager.update_status"


class Hook(NamedTuple):
    """A function to register in SGLang; ``targets`` are the names of the hooked function in
    different releases, newest first."""

    targets: tuple[str, ...]
    function: Callable[..., Any]
    kind: str
    optional: bool = False
    """The hook is for an extra; EndForward is complete without it."""


def describe(config: HookConfig) -> dict[str, object]:
    """Return the ``sbs`` block of ``GET /server_info``, which shows that the plugin is active and
    where it sends."""
    return {
        "wire_version": WIRE_VERSION,
        "boot_id": config.boot_id,
        "booted_s": config.booted_s,
        "instance_id": config.instance_id,
        "routers": list(config.routers),
        "bind": config.bind,
        "encrypted": config.keys is not None,
        "gang_gate_ms": config.gang_gate_ms,
        "barrier": not skips_gather(),
        "deferred_release": _defers_release(),
        "transfer_timeout_s": _transfer_timeout_s(),
        "sglang_sbs_version": __version__,
        "sgl_kernel_version": _kernel_version(),
    }


def _defers_release() -> bool:
    """Return whether SGLang is configured to keep an aborted request's KV pages until its transfer
    has ended (``environ.py``, from 0.5.19). Whether the transfer backend supports it is not
    checked."""
    try:
        envs = importlib.import_module("sglang.srt.environ").envs
        return bool(envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get())
    except (ImportError, AttributeError):
        return False


def _transfer_timeout_s() -> int:
    """Return Mooncake's transfer timeout, from Mooncake's own variable, in whole seconds; 0 if it
    is unset or invalid."""
    setting = os.environ.get("MC_TRANSFER_TIMEOUT", "")
    return int(setting) if setting.isdecimal() and len(setting) < 10 else 0


def _kernel_version() -> str:
    """Return the version of the package formerly named ``sgl-kernel``; empty without it (on
    CPU)."""
    for name in ("sglang-kernel", "sgl-kernel"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def install(config: HookConfig) -> None:
    """Register the hooks. SGLang's ``load_plugins`` applies them when all plugins are loaded;
    without a plugin framework they take effect at once, in the modules already loaded. Raises:
    ImportError, SGLang is missing."""
    gather = GatherBoard()
    hold = GangHold(config.gang_gate_ms, config.boot_id, gather=gather)
    hook = RankHook(config, gang_gate=hold.fault)
    try:
        registry = importlib.import_module(REGISTRY)
    except ImportError:
        names = [name for name in (SCHEDULER_MODULE, SERVER_MODULE) if name in sys.modules]
        if not names:
            raise  # the caller is not a patched SGLang
        loaded = tuple(f"{name}." for name in names)
        hooks = [
            entry for entry in _direct_hooks(hook, config) if entry.targets[0].startswith(loaded)
        ]
        _register(hooks, is_loaded, wrap)
    else:

        def register(target: str, function: Callable[..., Any], kind: str) -> None:
            kind_of_sglang = getattr(registry.HookType, kind)
            registry.HookRegistry.register(target, function, kind_of_sglang)

        _register(_plugin_hooks(hook, hold, gather, config), _resolves, register)


def _rank_hooks(hook: RankHook) -> list[Hook]:
    return [
        Hook((SCHEDULER + "run_batch",), hook.around_run_batch, "AROUND"),
        Hook((PROCESS_RESULT,), hook.around_process_batch_result, "AROUND"),
        Hook((ON_IDLE, SCHEDULER + "self_check_during_idle"), hook.before_on_idle, "BEFORE"),
        Hook((SCHEDULER + "_add_request_to_queue",), hook.around_add_request, "AROUND"),
        Hook((SCHEDULER + "abort_request",), hook.before_abort_request, "BEFORE"),
    ]


def _plugin_hooks(
    hook: RankHook, hold: GangHold, gather: GatherBoard, config: HookConfig
) -> list[Hook]:
    def add_sbs_block(result: Any, *_args: Any, **_kwargs: Any) -> None:
        if isinstance(result, dict):
            result["sbs"] = describe(config)

    def add_for_workers(*args: Any, **kwargs: Any) -> None:
        """Add the block to the ``scheduler_info`` that the HTTP servers of
        ``--tokenizer-worker-num`` get and show. These processes load no plugins."""
        add_sbs_block(kwargs.get("scheduler_info", args[-1] if args else None))

    return [
        Hook((SERVER_INFO,), add_sbs_block, "AFTER"),
        Hook((TOKENIZERS,), add_for_workers, "BEFORE", optional=True),
        *_rank_hooks(hook),
        Hook((NEXT_PREFILL_BATCH,), hold.before_next_batch, "BEFORE", optional=True),
        Hook((POP_BOOTSTRAPPED,), hold.around_pop_bootstrapped, "AROUND", optional=True),
        Hook((GATHERED + "_get_local_tensor",), gather.around_local_row, "AROUND", optional=True),
        Hook((GATHERED + "all_gather",), gather.after_gather, "AFTER", optional=True),
        Hook((SCHEDULER + "maybe_init_rust_server",), nap_briefly, "AFTER", optional=True),
        Hook((SERVER_TIMES,), keep_created_time, "AFTER", optional=True),
        Hook((CONTROLLER_TIMES,), keep_created_time, "AFTER", optional=True),
        Hook((ROOM_STATUS,), around_update_status, "AROUND", optional=True),
        Hook((ROOM_STATUS,), hold.after_update_status, "AFTER", optional=True),
        Hook((PROCESS_RESULT,), hold.around_process_batch_result, "AROUND", optional=True),
    ]


def nap_briefly(_result: None, scheduler: Any) -> None:
    """Shorten the sleep of an idle rank of SGLang's Rust server, which sleeps up to a second and
    wakes only for its own requests (``scheduler_components/idle_sleeper.py``). With DP attention
    its peers and their requests would wait for it before every pass."""
    if getattr(scheduler, "rust_server", None) is not None and read_placement(scheduler).barrier:
        # SGLang fault: rust-idle-sleep
        scheduler.idle_sleeper.timeout_ms = NAP_MS


def _direct_hooks(hook: RankHook, config: HookConfig) -> list[Hook]:
    """Return the hooks for releases without plugins. Before 0.5.11 ``/server_info`` shows the
    ``scheduler_info`` of the server's global state, and until 0.5.9 the prefill loops pass results
    to ``process_batch_result_disagg_prefill``."""

    def add_sbs_block(state: Any, *_args: Any, **_kwargs: Any) -> None:
        if isinstance(state.scheduler_info, dict):
            state.scheduler_info["sbs"] = describe(config)

    return [
        Hook((GLOBAL_STATE,), add_sbs_block, "BEFORE"),
        *_rank_hooks(hook),
        Hook((DISAGG_PREFILL_RESULT,), hook.around_process_batch_result, "AROUND"),
    ]


def _register(
    hooks: list[Hook],
    exists: Callable[[str], bool],
    register: Callable[[str, Callable[..., Any], str], None],
) -> None:
    missing = []
    for hook in hooks:
        target = next(filter(exists, hook.targets), None)
        if target is not None:
            register(target, hook.function, hook.kind)
        elif not hook.optional:
            missing.append(hook.targets[0])
    if missing:
        text = "This SGLang has no %s; EndForward goes without (see docs/endforward.md)"
        logger.warning(text, ", ".join(missing))


def _resolves(target: str) -> bool:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True
