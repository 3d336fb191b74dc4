"""The features that are on in each kind of deployment, as the doctor judges: for
``docs/compatibility.md``.

Every column is a cluster in which whatever can be turned on is. Its rows are what
``doctor --features`` says of it, from what engines and a router of such a cluster answered
(``tools.record_deployments``). Answers of those that cannot be had on CPU are made up here.

    python -m tools.feature_deployments            rewrite the table
    python -m tools.feature_deployments --check    exit code 1 if it would change
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from sglang_sbs.doctor.facts import ClusterFacts, EngineFacts, RouterFacts
from sglang_sbs.doctor.features import FEATURES, FeatureRow, State, feature_rows
from sglang_sbs.doctor.options import parse_options
from sglang_sbs.router.workers.server_info import parse_server_info

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- deployments -->", "<!-- end of deployments -->"
RECORDS = ROOT / "tests" / "doctor" / "deployments"
REQUEST_LIMIT = 8
ROUTER = "http://r:30000"
WORDS = {State.ON: "yes", State.PARTLY: "partly", State.OFF: "–", State.UNKNOWN: "?"}
NOT_ASKED = ("nodes", "rust-server")
"""Rows that only tell one column from another."""
RECORDED = (
    *("one machine", "several nodes", "attention TP"),
    *("Rust server", "Rust server, several nodes", "no barrier"),
)

Answers = dict[str, Any]
MADE_UP: dict[str, Answers] = {
    "SGLang 0.5.10, patched": {"version": "0.5.10", "kv_events": None},
    "no hook": {"sbs": None},
}
"""Answers of engines that differ from those of one machine."""


def record_path(name: str) -> Path:
    """Return the file of a column."""
    return RECORDS / f"{name.lower().replace(',', '').replace(' ', '-')}.json"


def recorded(answers: Answers) -> ClusterFacts:
    """Return the facts that the doctor gathered; ``answers``: ``engines`` with their
    ``/server_info``; ``workers``, ``state`` and ``options`` of the router."""
    engines = []
    words = ["--router", ROUTER]
    for answer in answers["engines"]:
        role, data = answer["role"], answer["server_info"]
        engine = EngineFacts(answer["url"], role, data=data)
        engine.info = parse_server_info(data, role)
        engine.closed_kv_ports = answer["closed_kv_ports"]
        engines.append(engine)
    of_router = {name: answers[name] for name in ("workers", "state", "options")}
    return ClusterFacts(parse_options(words), engines, router=RouterFacts(ROUTER, **of_router))


def made_up(changes: Answers) -> Answers:
    """The answers of one machine, changed. Without the plugin no rank reports."""
    answers: Answers = orjson.loads(record_path("one machine").read_bytes())
    for engine in answers["engines"]:
        engine["server_info"] |= changes
    if changes.get("sbs", True) is None:
        for role in ("prefill", "decode"):
            for rank in (rank for instance in answers["state"][role] for rank in instance["ranks"]):
                rank["age_s"] = None
    return answers


def judged() -> dict[str, dict[str, FeatureRow]]:
    """The doctor's rows of every deployment, by feature."""
    answers = {name: orjson.loads(record_path(name).read_bytes()) for name in RECORDED}
    answers |= {name: made_up(changes) for name, changes in MADE_UP.items()}
    return {
        name: {row.id: row for row in feature_rows(recorded(answer))}
        for name, answer in answers.items()
    }


def table() -> str:
    """Return the table of features by deployment, with the reasons."""
    rows = judged()
    lines = ["| feature | " + " | ".join(rows) + " |", "|---" * (len(rows) + 1) + "|"]
    why: dict[str, list[str]] = {}
    for feature in FEATURES:
        if feature.id in NOT_ASKED:
            continue
        cells = {name: of[feature.id] for name, of in rows.items()}
        shown = " | ".join(WORDS[row.state] for row in cells.values())
        lines.append(f"| {feature.title} | {shown} |")
        for name, row in cells.items():
            if row.state is not State.ON:
                why.setdefault(name, []).append(f"{feature.title}: {_reason(row)}")
    notes = [f"- **{name}.** {'; '.join(said)}." for name, said in why.items()]
    return "\n".join([*lines, "", *notes])


def _reason(row: FeatureRow) -> str:
    for url in ("http://p0:30000", "http://d0:30000"):
        row_why = row.why.replace(f"{url}: ", "").replace(url, "an engine")
        if row_why != row.why:
            return row_why
    return row.why.removeprefix("on every engine: ")


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 with --check if the page is behind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args(argv)
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    wanted = f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"
    if args.check or page == wanted:
        return int(page != wanted)
    PAGE.write_text(wanted, "utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
