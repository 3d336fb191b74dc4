"""Judges workers by their EndForward reports, and explains missing reports to users."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import NamedTuple

import msgspec

from sglang_sbs.router.workers.server_info import (
    PLUGIN_VERSION,
    SKIPS_GATHER,
    WorkerInfo,
    parse_version,
)
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.endforward import GATE_ALONE, GATE_ERRORS, GATE_UNSUPPORTED

AS_REPORTED = "as its EndForward reports"
"""``WorkerInfo.no_barrier`` if only EndForward reports that there is no barrier."""

GATE_FAULTS = {
    GATE_ALONE: "the batch gate receives nothing from the engine's other processes, so batches are "
    "split. Is the plugin on every node, with the same SGLANG_SBS_GANG_GATE_MS?",
    GATE_ERRORS: "the batch gate turned itself off after errors: see the engine's log",
    GATE_UNSUPPORTED: "no batch gate over several hosts before SGLang 0.5.22: requests of a batch "
    "may start in different passes",
}


NO_KV_EVENTS = (
    "publishes no KV events, so its cache is unknown: start it with "
    '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5657"}\', or use --sbs-prefix-source auto'
)


class Barrier(NamedTuple):
    """Whether the DP ranks of a worker run each forward pass together."""

    is_there: bool
    source: str
    """Where this is known from, in words for users."""


def barrier_of(info: WorkerInfo) -> Barrier:
    """Return whether the worker has a barrier, and which source in ``info`` shows it."""
    if info.dp_size == 1:
        return Barrier(True, "it has one DP rank")
    if info.no_barrier == AS_REPORTED:
        return Barrier(False, "EndForward")
    by_plugin = info.sbs is not None and info.sbs.barrier is not None
    if info.no_barrier == SKIPS_GATHER or (by_plugin and not info.no_barrier):
        return Barrier(not info.no_barrier, "the plugin in /server_info")
    return Barrier(not info.no_barrier, "flags in /server_info")


def as_reported(info: WorkerInfo, barrier: bool = False) -> WorkerInfo:
    """Return ``info`` with the ``barrier`` that EndForward reports, unchanged if ``/server_info``
    already decides it (which only the engine itself can answer)."""
    by_plugin = info.sbs is not None and info.sbs.barrier is not None
    if by_plugin or info.no_barrier not in ("", AS_REPORTED) or info.dp_size == 1:
        return info
    return msgspec.structs.replace(info, no_barrier="" if barrier else AS_REPORTED)


def why_mute(info: WorkerInfo) -> str:
    """Explain why an engine sends no EndForward and how to fix it."""
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
    endpoints = ", ".join(info.sbs.routers) or info.sbs.bind or "nothing"
    return (
        f"the plugin is installed and sends to {endpoints}, but nothing arrives: check that "
        "SGLANG_SBS_ROUTERS names this router's --sbs-endforward-bind, that the port can be "
        "reached, and that SGLANG_SBS_ENDFORWARD_KEY_FILE there and --sbs-endforward-key-file here "
        "are the same secret, or both unset"
    )


def why_stranger(info: WorkerInfo, report: EndForward) -> str:
    """Explain why a report in the name of that engine is from another engine; empty if it may be
    its own."""
    if not _are_apart(info.dist_init_addr, report.dist_init_addr):
        return ""
    return (
        "EndForward in its name comes from an engine with --dist-init-addr "
        f"{report.dist_init_addr!r} and is ignored; its own is {info.dist_init_addr!r}. Is "
        "SGLANG_SBS_INSTANCE_ID the same on two engines? (All nodes of one have to be given the "
        "same address.)"
    )


def why_other_size(info: WorkerInfo, report: EndForward, is_known: bool) -> str:
    """Explain why a report with another DP size than ``/server_info`` is ignored; empty if it is
    accepted. ``is_known``: the boot id is the engine's. After an elastic EP resize, older DP ranks
    keep reporting the former size."""
    if report.dp_size == info.dp_size:
        return ""
    if is_known and info.elastic and report.dp_rank < info.dp_size:
        return ""
    return (
        f"EndForward reports dp_size {report.dp_size}, /server_info {info.dp_size}; its reports "
        "are ignored. Is SGLANG_SBS_INSTANCE_ID of another engine set to this worker's URL?"
    )


def why_silent(ranks: Sequence[int]) -> str:
    """Describe the DP ranks (at least one) that send no EndForward."""
    shown = ", ".join(map(str, ranks[:16])) + (" …" if len(ranks) > 16 else "")
    return f"no EndForward from rank {shown}"


def _are_apart(own: str, other: str) -> bool:
    """Return whether two ``--dist-init-addr`` certainly belong to different engines."""
    if own == other or not own or not other:  # the usual case, and reports are frequent
        return False
    (host, port), (other_host, other_port) = (
        text.lower().rpartition(":")[::2] for text in (own, other)
    )
    (kind, what), (other_kind, other_what) = _identity_of(host), _identity_of(other_host)
    return port != other_port or (kind == other_kind and what != other_what)


def _identity_of(host: str) -> tuple[str, str]:
    """Return ``(kind, value)`` of a host: ``address``, or ``name`` (its first label); both empty
    for loopback, wildcard and localhost, which are the same text on every machine. Values of
    different kinds cannot be compared."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return ("", "") if host == "localhost" else ("name", host.partition(".")[0])
    if address.is_loopback or address.is_unspecified:
        return "", ""
    return "address", str(address)
