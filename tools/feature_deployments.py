"""What is on in each kind of deployment, as the doctor judges it: a table of ``docs/features.md``.

Every column is a cluster in which whatever can be turned on is. Its rows are what
``doctor --features`` says of it: the answers of its engines and of its router are made up here, the
judging is the doctor's own.

    python -m tools.feature_deployments            rewrite the table
    python -m tools.feature_deployments --check    exit code 1 if it would change
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_sbs.doctor.facts import ClusterFacts, EngineFacts, RouterFacts, Target
from sglang_sbs.doctor.features.rules import State
from sglang_sbs.doctor.features.table import FEATURES, FeatureRow, feature_rows
from sglang_sbs.doctor.options import parse_options
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.options.shown_options import shown_options
from sglang_sbs.router.workers.server_info import parse_server_info
from sglang_sbs.scheduling.events import InstanceRole

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "features.md"
BEGIN, END = "<!-- deployments -->", "<!-- end of deployments -->"
RANKS = 2
ENGINES: dict[str, InstanceRole] = {"http://p0:30000": "prefill", "http://d0:30000": "decode"}
ROUTER = "http://r:30000"
WORDS = {State.ON: "yes", State.PARTLY: "partly", State.OFF: "–", State.UNKNOWN: "?"}
NOT_ASKED = ("nodes", "rust-server")
"""Rows that only tell one column from another."""

Fields = dict[str, Any]
DEPLOYMENTS: dict[str, Fields] = {
    "one machine": {},
    "several nodes": {"nnodes": 2},
    "attention TP": {"tp_size": 2 * RANKS},
    "Rust server": {"deployment_info": {"dp_rank": 0, "dp_size": RANKS, "nnodes": 1}},
    "no barrier": {"dwdp_size": 2},
    "SGLang 0.5.10, patched": {"version": "0.5.10", "kv_events": None},
    "no hook": {"sbs": None},
}
"""What its engines say otherwise than those of one machine."""


def facts_of(changes: Fields) -> ClusterFacts:
    """A cluster whose engines and router have answered."""
    engines = []
    for url, role in ENGINES.items():
        data = _server_info(url, role) | changes
        engine = EngineFacts(Target(url, role), data=data, info=parse_server_info(data, role))
        engines.append(engine)
    flags = [*("--prefill", "http://p0:30000"), *("--decode", "http://d0:30000")]
    router = RouterFacts(ROUTER)
    router.options = shown_options(parse_flags(flags)) | {
        **{"tokenizer": True, "front_ends": 4, "endforward_encrypted": True}
    }
    hook = changes.get("sbs", True) is not None
    router.workers = [
        {"url": url, "worker_type": role, "kv_events": True, "prefill_max_requests": 8}
        for url, role in ENGINES.items()
    ]
    router.state = {
        **{"policy": "sbs", "trigger": "adaptive", "batches": 9},
        **{"interval_s": 0.1, "mean_forward_s": 0.3, "latency_s": 0.002},
        **{role: [_instance(url, hook=hook)] for url, role in ENGINES.items()},
    }
    options = parse_options([*flags, "--router", ROUTER])
    return ClusterFacts(options, engines, router=router)


def _server_info(url: str, role: InstanceRole) -> Fields:
    return {
        **{"version": "0.5.23", "disaggregation_mode": role, "attn_dp_size": RANKS},
        **{"tp_size": RANKS, "nnodes": 1, "enable_dp_attention": True, "page_size": 64},
        **{"chunked_prefill_size": 4096, "max_total_num_tokens": 100_000},
        **{"max_running_requests": 128, "dwdp_size": 1},
        "prefill_max_requests": 8 if role == "prefill" else None,
        "kv_events": {
            **{"publisher": "zmq", "topic": "kv", "block_size": 64, "dp_size": RANKS},
            **{"endpoint_port_base": 5557, "replay_endpoint_port_base": 5657},
        },
        "sbs": {
            **{"boot_id": url, "routers": ["tcp://a:7600", "tcp://b:7600"]},
            **{"encrypted": True, "gang_gate_ms": None},
        },
    }


def _instance(url: str, *, hook: bool) -> Fields:
    ages = [{"age_s": 0.2 if hook else None} for _ in range(RANKS)]
    return {"instance": url, "passes": 9, "ranks": ages}


def judged() -> dict[str, dict[str, FeatureRow]]:
    """The doctor's rows of every deployment, by feature."""
    return {
        name: {row.id: row for row in feature_rows(facts_of(changes))}
        for name, changes in DEPLOYMENTS.items()
    }


def table() -> str:
    """What is on where, and why not."""
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
    for url in ENGINES:
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
