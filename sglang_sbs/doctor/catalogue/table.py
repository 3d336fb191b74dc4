"""Every finding the doctor can make: its id, how bad it is, what it means, what to do."""

from __future__ import annotations

from sglang_sbs.doctor.catalogue import cluster, engine
from sglang_sbs.doctor.catalogue.entry import Entry, Severity

__all__ = ["CATALOGUE", "GROUPS", "Entry", "Severity"]

GROUPS = {
    "reach": "Reaching the engines",
    "version": "Versions",
    "plugin": "The engine plugin",
    "endforward": "EndForward",
    "limits": "DP, chunk and limits",
    "flags": "Engine flags",
    "pair": "Prefill with decode",
    "latency": "Latency and clocks",
    "bootstrap": "Bootstrap servers",
    "cache": "Prefix caches",
    "room": "Room on decode",
    "security": "Keys and TLS",
    "router": "The router",
    "probe": "Probe requests",
}
"""Title of each group, in the order of reports."""

CATALOGUE: dict[str, Entry] = engine.ENTRIES | cluster.ENTRIES
