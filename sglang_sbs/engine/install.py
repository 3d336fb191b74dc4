"""Puts the hooks into SGLang through its plugin framework.

Owns the hook targets and the ``sbs`` block of ``/server_info``. Must not know what the hooks do.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Callable
from typing import Any

from sglang_sbs import __version__
from sglang_sbs.engine.config import HookConfig
from sglang_sbs.engine.hooks import RankHook

logger = logging.getLogger(__name__)

WIRE_VERSION = 1
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
SERVER_INFO = "sglang.srt.utils.common.build_server_info"


def describe(config: HookConfig) -> dict[str, object]:
    """The ``sbs`` block of ``GET /server_info``: the plugin is there, and where it speaks."""
    return {
        "wire_version": WIRE_VERSION,
        "boot_id": config.boot_id,
        "instance_id": config.instance_id,
        "routers": list(config.routers),
        "bind": config.bind,
        "sglang_sbs_version": __version__,
    }


def install(config: HookConfig) -> None:
    """Register the hooks with SGLang; ``load_plugins`` applies them when all plugins are loaded.

    Raises:
        ImportError: no SGLang with a plugin framework (>= 0.5.11).
    """
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    before, after, around = (getattr(registry.HookType, n) for n in ("BEFORE", "AFTER", "AROUND"))
    hook = RankHook(config)

    def add_sbs_block(result: Any, *_args: Any, **_kwargs: Any) -> None:
        if isinstance(result, dict):
            result["sbs"] = describe(config)

    wanted: list[tuple[str, Callable[..., Any], Any]] = [
        (SERVER_INFO, add_sbs_block, after),
        (SCHEDULER + "run_batch", hook.around_run_batch, around),
        (SCHEDULER + "process_batch_result", hook.around_process_batch_result, around),
        (SCHEDULER + "on_idle", hook.before_on_idle, before),
        (SCHEDULER + "_add_request_to_queue", hook.around_add_request, around),
        (SCHEDULER + "abort_request", hook.before_abort_request, before),
    ]
    missing = []
    for target, function, hook_type in wanted:
        try:
            pkgutil.resolve_name(target)
        except (ImportError, AttributeError):
            missing.append(target)
            continue
        registry.HookRegistry.register(target, function, hook_type)
    if missing:
        logger.warning(
            "This SGLang has no %s; EndForward goes without (see docs/endforward.md)",
            ", ".join(missing),
        )
