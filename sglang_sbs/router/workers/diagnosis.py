"""What a worker's reports say of it, and what is wrong where none come."""

from __future__ import annotations

import msgspec

from sglang_sbs.router.workers.server_info import PLUGIN_VERSION, WorkerInfo, parse_version

AS_REPORTED = "as its EndForward says"
"""Why a worker has no barrier, where only its reports say so."""


def as_reported(info: WorkerInfo, barrier: bool = False) -> WorkerInfo:
    """What EndForward says of the barrier is believed where /server_info, which nobody else can
    answer, does not say."""
    told = info.sbs is not None and info.sbs.barrier is not None
    if told or info.no_barrier not in ("", AS_REPORTED) or info.dp_size == 1:
        return info
    return msgspec.structs.replace(info, no_barrier="" if barrier else AS_REPORTED)


def why_mute(info: WorkerInfo) -> str:
    """What to do about an engine that sends no EndForward."""
    version = parse_version(info.version)
    if info.sbs is None and version is not None and (0, 0, 0) < version < PLUGIN_VERSION:
        wanted = ".".join(map(str, PLUGIN_VERSION))
        return (
            f"SGLang {info.version} loads no plugins: install sglang-sbs next to it, run "
            "'sglang-sbs patch apply' there and set SGLANG_SBS_ROUTERS=tcp://ROUTER:7600, or "
            f"upgrade the engine to {wanted} or later"
        )
    if info.sbs is None:
        return (
            "the sglang-sbs plugin is not installed or not configured there: pip install . in a "
            "checkout of sglang-sbs, next to SGLang, and set SGLANG_SBS_ROUTERS=tcp://ROUTER:7600"
        )
    speaks = ", ".join(info.sbs.routers) or info.sbs.bind or "nothing"
    return (
        f"the plugin is there and speaks to {speaks}, but nothing arrives: check that "
        "SGLANG_SBS_ROUTERS names this router's --sbs-endforward-bind, that the port can be "
        "reached, and that SGLANG_SBS_KEY_FILE there and --sbs-endforward-key-file here are the "
        "same secret, or both unset"
    )
