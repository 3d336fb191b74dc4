"""Every finding the doctor can make: its id, how bad it is, what it means, what to do."""

from __future__ import annotations

from sglang_sbs.doctor.catalogue import cluster, engine
from sglang_sbs.doctor.catalogue.entry import Entry, Severity

__all__ = ["CATALOGUE", "GROUPS", "Entry", "Severity", "markdown"]

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


def markdown() -> str:
    """The catalogue as the section of ``docs/doctor.md``."""
    lines: list[str] = []
    for group, title in GROUPS.items():
        lines += [
            f"### {title}",
            "",
            "| id | severity | meaning | what to do |",
            "|---|---|---|---|",
        ]
        for name, entry in CATALOGUE.items():
            if name.partition(".")[0] == group:
                cells = (f"`{name}`", entry.severity, entry.meaning, entry.change or "—")
                lines.append("| " + " | ".join(cell.replace("*", "\\*") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
