"""The doctor's tables as ``docs/doctor.md`` and ``docs/features.md`` have them. What a finding or a
feature means is written there by hand; the other columns are the doctor's.

``python -m tools.doctor_pages`` prints both; tests compare.
"""

from __future__ import annotations

import re
from pathlib import Path

from sglang_sbs.doctor.examine import CATALOGUE
from sglang_sbs.doctor.features import FEATURES
from sglang_sbs.doctor.findings import GROUPS, Severity

DOCS = Path(__file__).resolve().parents[1] / "docs"
_TITLES = {
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
_ROW = re.compile(r"\| `([^`]+)` \| [^|]* \| (.*?) (?<!\\)\| ")


def meanings(page: str) -> dict[str, str]:
    """What the tables of a page say of each id; the third column."""
    return dict(_ROW.findall((DOCS / page).read_text()))


def catalogue_table() -> str:
    """Every finding, by group: a section of ``docs/doctor.md``."""
    lines: list[str] = []
    told = meanings("doctor.md")
    ok_first = sorted(CATALOGUE.items(), key=lambda item: item[1].severity is not Severity.OK)
    for group in GROUPS:
        lines += [f"### {_TITLES[group]}", ""]
        lines += ["| id | severity | meaning | what to do |", "|---|---|---|---|"]
        for name, (severity, change) in ok_first:
            if name.partition(".")[0] == group:
                advice = (change or "—").replace("*", "\\*")
                lines.append(f"| `{name}` | {severity} | {told.get(name, '')} | {advice} |")
        lines.append("")
    return "\n".join(lines)


def features_table() -> str:
    """Every feature: the table of ``docs/features.md``."""
    lines = ["| row | feature | what it is | what turns it on |", "|---|---|---|---|"]
    told = meanings("features.md")
    for one in FEATURES:
        turn_on = one.turn_on.replace("|", "\\|")
        lines.append(f"| `{one.id}` | {one.title} | {told.get(one.id, '')} | {turn_on} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(catalogue_table())
    print(features_table())
