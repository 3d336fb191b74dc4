"""The doctor's tables as ``docs/doctor.md`` and ``docs/features.md`` have them.

``python -m tools.doctor_pages`` prints both; tests compare.
"""

from __future__ import annotations

from sglang_sbs.doctor.examine import CATALOGUE
from sglang_sbs.doctor.features import FEATURES
from sglang_sbs.doctor.findings import GROUPS, Severity


def catalogue_table() -> str:
    """Every finding, by group: a section of ``docs/doctor.md``."""
    lines: list[str] = []
    ok_first = sorted(CATALOGUE.items(), key=lambda item: item[1].severity is not Severity.OK)
    for group, title in GROUPS.items():
        lines += [f"### {title}", ""]
        lines += ["| id | severity | meaning | what to do |", "|---|---|---|---|"]
        for name, entry in ok_first:
            if name.partition(".")[0] == group:
                cells = (f"`{name}`", entry.severity, entry.meaning, entry.change or "—")
                lines.append("| " + " | ".join(cell.replace("*", "\\*") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def features_table() -> str:
    """Every feature: the table of ``docs/features.md``."""
    lines = ["| row | feature | what it is | what turns it on |", "|---|---|---|---|"]
    for one in FEATURES:
        cells = (f"`{one.id}`", one.title, one.meaning, one.turn_on)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(catalogue_table())
    print(features_table())
