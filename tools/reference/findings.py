"""The doctor's findings and features. The column with the meaning is written by hand and kept from
the page; the other columns come from the doctor."""

from __future__ import annotations

from sglang_sbs.doctor.examine import CATALOGUE
from sglang_sbs.doctor.features import FEATURES
from sglang_sbs.doctor.findings import GROUPS, Severity
from tools.reference.pages import head, kept

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
_INTRODUCTION = """\
`sglang-sbs doctor` ([how to use it](../doctor.md)) reports these.
"""
PAGE = "reference/findings.md"


def meanings(page: str) -> dict[str, str]:
    """The third column of the tables of a page, by id."""
    return {cells[0].strip("`"): text for cells, text in kept(page, 2).items()}


def catalogue_page() -> str:
    """``docs/reference/findings.md``: every finding, by group."""
    lines = [head("Findings of the doctor", "The column *meaning* is by hand."), _INTRODUCTION]
    by_id = meanings(PAGE)
    ok_first = sorted(CATALOGUE.items(), key=lambda item: item[1].severity is not Severity.OK)
    for group in GROUPS:
        lines += [f"## {_TITLES[group]}", ""]
        lines += ["| id | severity | meaning | what to do |", "|---|---|---|---|"]
        for name, (severity, change) in ok_first:
            if name.partition(".")[0] == group:
                advice = (change or "—").replace("*", "\\*")
                lines.append(f"| `{name}` | {severity} | {by_id.get(name, '')} | {advice} |")
        lines.append("")
    return "\n".join(lines)


def features_table() -> str:
    """Every feature: the table of ``docs/features.md``."""
    lines = ["| row | feature | meaning | how to turn it on |", "|---|---|---|---|"]
    by_id = meanings("features.md")
    for feature in FEATURES:
        turn_on = feature.turn_on.replace("|", "\\|")
        lines.append(
            f"| `{feature.id}` | {feature.title} | {by_id.get(feature.id, '')} | {turn_on} |"
        )
    return "\n".join(lines)
