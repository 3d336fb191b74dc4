"""Which features are on in a deployment, why, and what to change: ``doctor --features``.

One table, :data:`FEATURES`, whose functions are in :mod:`.rules`; ``docs/features.md`` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_sbs.doctor.catalogue.table import CATALOGUE
from sglang_sbs.doctor.facts import ClusterFacts
from sglang_sbs.doctor.features import rules
from sglang_sbs.doctor.features.rules import Seen, State
from sglang_sbs.doctor.features.view import FeatureView


@dataclass(frozen=True, slots=True)
class Feature:
    id: str
    title: str
    meaning: str
    turn_on: str
    """Which flag or variable, on which side."""
    decide: Callable[[FeatureView], Seen]


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """A feature in one deployment."""

    id: str
    title: str
    state: State
    why: str
    change: str


def feature_rows(facts: ClusterFacts) -> list[FeatureRow]:
    """Every feature, in the order of :data:`FEATURES`."""
    view = FeatureView(facts)
    rows = []
    for feature in FEATURES:
        seen = feature.decide(view)
        advice = "" if seen.state is State.ON else feature.turn_on
        change = advice if seen.change is None else seen.change
        rows.append(FeatureRow(feature.id, feature.title, seen.state, seen.why, change))
    return rows


FEATURES: tuple[Feature, ...] = (
    Feature(
        "batches",
        "Batches held at the router",
        "Requests wait at the router until a prefill instance is about to be free, then leave as a "
        "batch, each for its DP rank.",
        "--policy sbs (router)",
        rules.batches,
    ),
    Feature(
        "endforward",
        "EndForward push",
        "Every DP rank of every engine tells the router when a pass starts and ends. Ranks that do "
        "not are followed by load polls, more coarsely.",
        "install sglang-sbs beside SGLang on every node and set SGLANG_SBS_ROUTERS there",
        rules.endforward,
    ),
    Feature(
        "endforward-key",
        "EndForward encrypted",
        "Reports are encrypted, and taken only from who has the secret.",
        "the same file as --sbs-endforward-key-file (router) and SGLANG_SBS_KEY_FILE (engines)",
        rules.encrypted,
    ),
    Feature(
        "gang-gate",
        "Gang gate",
        "A prefill pass waits for the late requests of a batch, so that a batch is one pass.",
        "the plugin on every node of the prefill engines named, with SGLANG_SBS_GANG_GATE_MS the "
        "same or unset, and SGLang 0.5.22 or newer where there are several",
        rules.gang_gate,
    ),
    Feature(
        "cache",
        "What is cached",
        "How the router knows which prefixes each rank has: exactly, by KV events; approximately, "
        "by what it sent where; or not at all.",
        CATALOGUE["cache.approximate"].change,
        rules.cache,
    ),
    Feature(
        "token-ids",
        "Token ids forwarded",
        "The router tokenizes text prompts: exact lengths to pack by, and engines with the same "
        "tokenizer get the ids and need not do it again.",
        "--tokenizer-path DIRECTORY (router)",
        rules.token_ids,
    ),
    Feature(
        "priority",
        "Priority classes",
        "Waiting requests are ordered by class and SLO, and tenants take turns if a header names "
        "them.",
        "--policy sbs, and the same --schedule-low-priority-values-first on router and engines",
        rules.priority,
    ),
    Feature(
        "interval",
        "Interval learned",
        "How often a batch leaves follows from measured passes and network delay (I_opt, L_net).",
        "nothing to set: send requests, and see the row endforward",
        rules.interval,
    ),
    Feature(
        "aborts",
        "Aborts on both legs",
        "When a client leaves or one side fails, the router aborts the request on prefill and "
        "decode.",
        CATALOGUE["security.admin-key"].change,
        rules.aborts,
    ),
    Feature(
        "decode-caps",
        "Decode limits kept",
        "A batch leaves only if decode ranks have KV memory and slots for it.",
        "SGLang 0.5.14 or later on decode engines",
        rules.decode_caps,
    ),
    Feature(
        "pass-limit",
        "Requests per pass",
        "An engine with --prefill-max-requests ends a pass early when it has so many.",
        "--prefill-max-requests (engine), if passes of many short prompts are to be bounded",
        rules.pass_limit,
    ),
    Feature(
        "nodes",
        "Several nodes",
        "Engines that span nodes, of which the ranks of every node report.",
        "the plugin and the same SGLANG_SBS_ROUTERS on every node",
        rules.nodes,
    ),
    Feature(
        "rust-server",
        "Rust server",
        "Engines with SGLANG_RUST_SERVER=1 have one HTTP address per DP rank.",
        "SGLANG_RUST_SERVER=1 (engine)",
        rules.rust_server,
    ),
    Feature(
        "barrier",
        "Barrier between ranks",
        "DP ranks of a prefill engine start each pass together, which is what batches are for. "
        "Where they do not, SBS still places by predicted finish.",
        "several DP ranks with --enable-dp-attention, no --dwdp-size and no "
        "SGLANG_SCHEDULER_SKIP_ALL_GATHER (prefill engines)",
        rules.barrier,
    ),
    Feature(
        "front-ends",
        "Several front ends",
        "Several processes relay requests, one schedules.",
        "--workers N (router)",
        rules.front_ends,
    ),
    Feature(
        "standby",
        "Second router",
        "Engines report to more than one router, so that another one knows the cluster when the "
        "first is lost or replaced.",
        "SGLANG_SBS_ROUTERS=tcp://A:7600,tcp://B:7600 (engines)",
        rules.standby,
    ),
)
