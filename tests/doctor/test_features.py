"""``doctor --features``: each row is on, partly on or off for the right reason."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import pytest
from doctor_rig import DP, rig
from rich.console import Console

from sglang_sbs.doctor.cli import main
from sglang_sbs.doctor.examine import gather
from sglang_sbs.doctor.facts import ClusterFacts, EngineFacts, Failure, RouterFacts
from sglang_sbs.doctor.features import (
    FEATURES,
    FeatureRow,
    feature_rows,
)
from sglang_sbs.doctor.options import DoctorOptions, parse_options
from sglang_sbs.doctor.report import features_exit_code, features_json, print_features
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.server import RouterServer
from sglang_sbs.router.workers.server_info import UnusableWorker, parse_server_info
from tools import feature_deployments
from tools.reference.findings import meanings

ROOT = Path(__file__).parents[2]
FLAGS = ["--prefill", "http://p0:1", "--prefill", "http://p1:1", "--decode", "http://d0:1"]
SHOWN = parse_flags(FLAGS).shown()
"""Options of a router without more flags."""
ROLES = {"http://p0:1": "prefill", "http://p1:1": "prefill", "http://d0:1": "decode"}
KV_EVENTS = {
    **{"publisher": "zmq", "topic": "kv", "block_size": 64, "dp_size": DP},
    **{"endpoint_port_base": 5557, "replay_endpoint_port_base": 5657},
}

RUST = {"dp_rank": 0, "dp_size": DP, "nnodes": 1}
"""Fields that only SGLang's Rust server reports."""

Change = Callable[["Cluster"], object]


def replicas(cluster: Cluster) -> None:
    """Describe engines with ``--dp-size`` and without DP attention."""
    cluster.every(attn_dp_size=1, dp_size=DP, enable_dp_attention=False)


@cache
def parsed(*words: str) -> DoctorOptions:
    return parse_options(words)


class Cluster:
    """2P1D in which every feature is on that can be, with a router that answers."""

    def __init__(self) -> None:
        self.data: dict[str, dict[str, Any]] = {}
        for url, role in ROLES.items():
            self.data[url] = {
                **{"version": "0.5.23", "disaggregation_mode": role, "attn_dp_size": DP},
                **{"tp_size": DP, "nnodes": 2, "enable_dp_attention": True, "page_size": 64},
                **{"chunked_prefill_size": 3072, "max_total_num_tokens": 100_000},
                **{"max_running_requests": 128, "dwdp_size": 1, "deployment_info": RUST},
                "prefill_max_requests": 8 if role == "prefill" else None,
                "sbs": {
                    **{"boot_id": url, "routers": ["tcp://a:7600", "tcp://b:7600"]},
                    **{"encrypted": True, "gang_gate_ms": None},
                },
            }
            if role == "prefill":
                self.data[url]["kv_events"] = KV_EVENTS
        self.flags: list[str] = []
        """The doctor's command line, beyond ``--router``."""
        self.router: RouterFacts | None = RouterFacts("http://r:1")
        self.router.workers = [
            {"url": url, "worker_type": role, "kv_events": True, "prefill_max_requests": 8}
            for url, role in ROLES.items()
        ]
        self.router.state = {
            **{"policy": "sbs", "trigger": "adaptive", "batches": 7},
            **{"interval_s": 0.1, "mean_forward_s": 0.3, "latency_s": 0.002},
            "prefill": [self.instance(url) for url in list(ROLES)[:2]],
            "decode": [self.instance("http://d0:1")],
        }
        self.router.options = SHOWN | {
            **{"tokenizer": True, "front_ends": 4, "endforward_encrypted": True}
        }

    @staticmethod
    def instance(url: str) -> dict[str, Any]:
        return {"instance": url, "passes": 9, "ranks": [{"age_s": 0.2} for _ in range(DP)]}

    def asked(self) -> RouterFacts:
        assert self.router is not None
        return self.router

    def every(self, **fields: Any) -> None:
        """Set fields of every engine's ``/server_info``."""
        for data in self.data.values():
            data.update(fields)

    def first(self, **fields: Any) -> None:
        self.data["http://p0:1"].update(fields)

    def trouble(self, kind: str, text: str) -> None:
        """The router has this against all its workers."""
        for worker in self.asked().workers:
            worker["problems"] = {kind: text}

    def decode(self, **fields: Any) -> None:
        self.data["http://d0:1"].update(fields)

    def plugins(self, **fields: Any) -> None:
        for data in self.data.values():
            data["sbs"].update(fields)

    def facts(self) -> ClusterFacts:
        words = [*FLAGS, *self.flags, *(["--router", "http://r:1"] if self.router else [])]
        engines = []
        for url, data in self.data.items():
            role: Any = ROLES[url]
            engine = EngineFacts(url, role, data=data)
            engine.admin_api_key = data.get("admin_api_key", "")
            engines.append(engine)
            with contextlib.suppress(UnusableWorker):
                engine.info = parse_server_info(data, role)
        return ClusterFacts(parsed(*words), engines, router=self.router)

    def rows(self) -> dict[str, FeatureRow]:
        return {row.id: row for row in feature_rows(self.facts())}


def options(**fields: Any) -> Change:
    return lambda c: c.asked().options.update(fields)


def state(**fields: Any) -> Change:
    return lambda c: c.asked().state.update(fields)


def entry(**fields: Any) -> Change:
    return lambda c: c.asked().workers[0].update(fields)


def silence(*ranks: tuple[str, int, int]) -> Change:
    """Ranks (role, instance, rank) that never reported to the router."""

    def change(c: Cluster) -> None:
        for role, instance, rank in ranks:
            c.asked().state[role][instance]["ranks"][rank]["age_s"] = None

    return change


def without_router(c: Cluster) -> None:
    c.router = None


def unanswered(c: Cluster) -> None:
    c.router = RouterFacts("http://r:1", Failure("unreachable", "refused"))


def without_policy(c: Cluster) -> None:
    c.asked().state["policy"] = c.asked().options["policy"] = None


def closed_port(c: Cluster) -> ClusterFacts:
    facts = c.facts()
    facts.engines[0].closed_kv_ports = [5558]
    return facts


def test_a_deployment_with_everything_has_every_row_on() -> None:
    rows = Cluster().rows()
    assert {row.id: row.state for row in rows.values()} == {
        feature.id: "on" for feature in FEATURES
    }
    assert not any(row.change for row in rows.values())


EVERY_RANK = [
    (role, n, r) for role, n in (("prefill", 0), ("prefill", 1), ("decode", 0)) for r in (0, 1)
]


@pytest.mark.parametrize(
    ("row", "change", "expected", "why"),
    [
        ("batches", state(policy="eta"), "off", "--policy eta"),
        ("batches", unanswered, "unknown", "did not answer"),
        (
            "endforward",
            silence(("prefill", 1, 0)),
            "partly",
            "5 of 6 ranks in 3 engines; http://p1:1",
        ),
        ("endforward", silence(*EVERY_RANK), "off", "0 of 6 ranks"),
        ("endforward", without_router, "unknown", "did not listen"),
        ("endforward", unanswered, "unknown", "did not listen"),
        ("endforward-key", options(endforward_encrypted=False), "off", "in the clear"),
        ("endforward-key", lambda c: c.first(sbs={"routers": []}), "partly", "http://p0:1"),
        ("gang-gate", options(gang_gate=False), "off", "--sbs-gang-gate off"),
        ("gang-gate", lambda c: c.every(pp_size=2), "off", "pipeline parallelism"),
        ("gang-gate", lambda c: c.every(version="0.5.20"), "off", "0.5.22 is the first"),
        ("gang-gate", lambda c: c.every(version="0.5.10", nnodes=1), "off", "0.5.11 is the first"),
        ("gang-gate", lambda c: c.every(tp_size=4 * DP, nnodes=DP * 2), "partly", "several nodes"),
        (
            "gang-gate",
            lambda c: c.trouble("gang_gate", "DP rank 0: it is alone"),
            "partly",
            "http://p0:1: DP rank 0: it is alone",
        ),
        ("gang-gate", lambda c: c.plugins(gang_gate_ms=0.0), "off", "SGLANG_SBS_GANG_GATE_MS=0"),
        ("gang-gate", lambda c: c.first(sbs=None), "partly", "http://p0:1: no plugin"),
        ("gang-gate", state(policy="eta"), "off", "--policy eta"),
        ("gang-gate", lambda c: c.asked().options.clear(), "unknown", "does not report it"),
        (
            "gang-gate",
            lambda c: c.asked().options.pop("gang_gate"),
            "unknown",
            "this router does not report it",
        ),
        ("gang-gate", without_policy, "unknown", "this router does not report it"),
        ("batches", without_policy, "unknown", "this router does not report it"),
        ("priority", without_policy, "unknown", "this router does not report it"),
        ("cache", lambda c: c.first(kv_events=None), "partly", "approximate, 1 of 2 engines"),
        ("cache", entry(kv_events=False), "partly", "does not get its KV events"),
        (
            "cache",
            options(prefix_source="approximate"),
            "partly",
            "--sbs-prefix-source approximate",
        ),
        ("cache", options(prefix_source="off"), "off", "--sbs-prefix-source off"),
        ("cache", lambda c: c.every(disable_radix_cache=True), "off", "--disable-radix-cache"),
        ("token-ids", options(tokenizer=False), "off", "no --tokenizer-path"),
        ("token-ids", options(forward_token_ids="off"), "partly", "tokenize again"),
        ("token-ids", entry(problems={"tokenizer": "x"}), "partly", "http://p0:1"),
        ("token-ids", lambda c: c.trouble("tokenizer", "x"), "off", "on every engine: its"),
        (
            "token-ids",
            lambda c: c.trouble("tokenizer", "has other token ids for chat than …"),
            "partly",
            "on every engine: chats differ",
        ),
        ("priority", state(policy="round_robin"), "off", "--policy round_robin"),
        (
            "priority",
            lambda c: c.every(
                enable_priority_scheduling=True, schedule_low_priority_values_first=True
            ),
            "partly",
            "is not the router's",
        ),
        (
            "interval",
            lambda c: c.asked().state["prefill"][1].update(passes=0),
            "partly",
            "http://p1:1",
        ),
        ("interval", state(prefill=[]), "off", "--sbs-t-default-ms"),
        ("interval", without_router, "unknown", "only a running router"),
        ("aborts", lambda c: c.decode(admin_api_key="k"), "partly", "http://d0:1"),
        ("decode-caps", lambda c: c.decode(max_total_num_tokens=None), "off", "KV tokens"),
        ("decode-caps", lambda c: c.decode(max_running_requests=None), "off", "request limit"),
        ("pass-limit", lambda c: c.every(prefill_max_requests=None), "off", "no prefill engine"),
        ("pass-limit", without_router, "partly", "8 requests per pass"),
        ("nodes", lambda c: c.every(nnodes=1), "off", "on one node"),
        ("nodes", lambda c: c.every(nnodes=None), "unknown", "number of nodes"),
        ("nodes", silence(("decode", 0, 1)), "partly", "http://d0:1: 1 ranks do not report"),
        ("rust-server", lambda c: c.every(deployment_info=None), "off", "Python"),
        ("rust-server", lambda c: c.first(deployment_info=None), "partly", "some engines"),
        ("barrier", lambda c: c.first(dwdp_size=4), "partly", "--dwdp-size 4"),
        (
            "barrier",
            entry(barrier=False, barrier_source="EndForward"),
            "partly",
            "none, by EndForward",
        ),
        ("barrier", lambda c: c.plugins(barrier=False), "off", "SKIP_ALL_GATHER"),
        ("barrier", replicas, "off", "no DP attention"),
        ("barrier", lambda c: c.every(attn_dp_size=1), "off", "one DP rank"),
        ("front-ends", options(front_ends=1), "off", "one process"),
        ("standby", lambda c: c.plugins(routers=["tcp://a:7600"]), "off", "reports to one router"),
        ("standby", lambda c: c.first(sbs=None), "partly", "does not show where"),
    ],
)
def test_each_row_tells_what_keeps_it_from_being_on(
    row: str, change: Change, expected: str, why: str
) -> None:
    cluster = Cluster()
    change(cluster)
    seen = cluster.rows()[row]
    assert (seen.state, why in seen.why) == (expected, True), seen


def test_each_row_is_broken_by_some_test() -> None:
    (mark,) = test_each_row_tells_what_keeps_it_from_being_on.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in mark.args[1]} == {feature.id for feature in FEATURES}


def test_a_front_end_of_several_is_one_of_several() -> None:
    cluster = Cluster()
    cluster.asked().options |= {"role": "front-end", "front_ends": 1}
    assert cluster.rows()["front-ends"].state == "on"


@pytest.mark.parametrize(("nodes", "version"), [(2, "0.5.22"), (2, "0.0.0"), (1, "0.5.11")])
def test_the_gate_where_a_rank_is_several_processes(nodes: int, version: str) -> None:
    cluster = Cluster()
    cluster.every(tp_size=4 * DP, nnodes=nodes, version=version)
    assert cluster.rows()["gang-gate"].state == "on"


def test_a_shut_port_of_kv_events_makes_the_cache_approximate() -> None:
    (row,) = [row for row in feature_rows(closed_port(Cluster())) if row.id == "cache"]
    assert (row.state, "port 5558" in row.why) == ("partly", True)


def test_the_admin_key_given_here_is_the_engines() -> None:
    cluster = Cluster()
    cluster.every(admin_api_key="k")
    assert cluster.rows()["aborts"].state == "off"
    cluster.flags = ["--admin-api-key", "k"]
    assert cluster.rows()["aborts"].state == "on"


def test_without_a_router_the_flags_given_count() -> None:
    cluster = Cluster()
    cluster.router = None
    cluster.flags = ["--policy", "sbs", "--workers", "3", "--sbs-gang-gate", "off"]
    rows = cluster.rows()
    assert (rows["front-ends"].state, rows["front-ends"].why) == ("on", "--frontends 3")
    assert (rows["batches"].state, rows["gang-gate"].state) == ("on", "off")


def test_what_is_off_for_a_reason_needs_no_change() -> None:
    cluster = Cluster()
    cluster.every(nnodes=1, rust_server=False, prefill_max_requests=None)
    rows = cluster.rows()
    assert not any(rows[name].change for name in ("nodes", "rust-server", "pass-limit"))
    cluster.asked().options["front_ends"] = 1
    assert cluster.rows()["front-ends"].change == "--frontends N (router)"


def test_nothing_that_is_answered_is_a_traceback() -> None:
    nonsense = [None, -1, 0, 2**63, 1.5, "", "x", [], {}, [None], {"a": []}, True]
    row_count = 0
    for value in nonsense:
        for name in (*Cluster().data["http://p0:1"], "admin_api_key", "enable_priority_scheduling"):
            cluster = Cluster()
            if name == "disaggregation_mode":
                continue
            cluster.first(**{name: value})
            row_count += len(cluster.rows())
        for name in Cluster().asked().options:
            cluster = Cluster()
            cluster.asked().options[name] = value
            row_count += len(cluster.rows())
        for name in Cluster().asked().state:
            cluster = Cluster()
            cluster.asked().state[name] = value
            row_count += len(cluster.rows())
        for name in Cluster().asked().workers[0]:
            cluster = Cluster()
            cluster.asked().workers[0][name] = value
            row_count += len(cluster.rows())
        cluster = Cluster()
        cluster.asked().state["prefill"][0].update(ranks=value, passes=value)
        row_count += len(cluster.rows())
    assert row_count > 1000


# The command ------------------------------------------------------------------------------------


def shown(facts: ClusterFacts, *, quiet: bool = False) -> str:
    console = Console(file=io.StringIO(), width=300)
    print_features(console, facts, feature_rows(facts), quiet=quiet)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_table_has_a_line_per_row_and_quiet_leaves_out_what_needs_no_change() -> None:
    cluster = Cluster()
    cluster.every(nnodes=1, rust_server=False)
    cluster.asked().options["front_ends"] = 1
    facts = cluster.facts()
    lines = shown(facts).splitlines()
    assert len(lines) == 1 + len(FEATURES) + 1
    assert lines[-1].startswith("Source: 3 engines and the router http://r:1.")
    quiet = shown(facts, quiet=True).splitlines()
    assert [line.split("  ")[0] for line in quiet[1:-1]] == ["Several front ends"]
    assert "--frontends N (router)" in quiet[1]


def test_json_has_every_row() -> None:
    facts = Cluster().facts()
    report = orjson.loads(orjson.dumps(features_json(facts, feature_rows(facts))))
    assert (report["schema"], report["exit_code"], report["router"]) == (1, 0, "http://r:1")
    assert [row["id"] for row in report["features"]] == [feature.id for feature in FEATURES]
    assert set(report["features"][0]) == {"id", "title", "state", "why", "change"}


def test_the_command_where_nobody_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "features.json"
    words = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2", "--features"]
    assert main([*words, "--json", str(path)]) == 1
    assert "Source: 2 engines and the router's flags" in " ".join(capsys.readouterr().out.split())
    states = {row["id"]: row["state"] for row in json.loads(path.read_text())["features"]}
    assert (states["endforward"], states["batches"]) == ("unknown", "on")


def test_a_router_that_does_not_answer_is_reported_by_the_exit_code() -> None:
    cluster = Cluster()
    assert features_exit_code(cluster.facts()) == 0
    unanswered(cluster)
    assert features_exit_code(cluster.facts()) == 1


def test_flags_of_the_other_report_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--strict", "--probe"):
        assert main(["--router", "http://r:1", "--features", flag]) == 2
        assert "--features shows features" in capsys.readouterr().err


async def test_without_a_router_ranks_are_listened_to() -> None:
    async with rig() as r:
        r.prefill[1].speaks = [0]
        rows = {row.id: row for row in feature_rows(await r.facts())}
    assert rows["endforward"].state == "partly"
    assert (
        f"5 of 6 ranks in 3 engines; {r.prefill[1].url}: nothing of rank 1"
        in rows["endforward"].why
    )


async def test_a_running_router_says_what_its_flags_turn_on() -> None:
    async with rig() as r:
        argv = ["--host", "127.0.0.1", "--port", "0", "--sbs-endforward-bind", "none"]
        argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", "0"]
        argv += ["--api-key", "secret-of-users", "--sbs-gang-gate", "off"]
        for engine, port in zip(r.prefill, r.bootstrap_ports, strict=True):
            argv += ["--prefill", engine.url, str(port)]
        given = parse_flags([*argv, "--decode", r.decode.url])
        server = RouterServer(given)
        await server.start()
        try:
            words = ["--router", f"http://127.0.0.1:{server.port}", "--wait", "0.1"]
            facts = await gather(parse_options([*words, "--api-key", "secret-of-users"]))
        finally:
            await server.stop(grace_s=0.0)
    assert facts.router is not None
    assert facts.router.options == given.shown()
    assert "secret-of-users" not in str(facts.router.options)
    rows = {row.id: row for row in feature_rows(facts)}
    assert (rows["batches"].state, rows["gang-gate"].why) == ("on", "--sbs-gang-gate off")


# Docs -------------------------------------------------------------------------------------------


def test_every_row_says_what_it_is_and_what_turns_it_on() -> None:
    assert len({feature.id for feature in FEATURES}) == len(FEATURES)
    for feature in FEATURES:
        assert meanings("features.md")[feature.id].endswith(".") and feature.turn_on, feature.id


def test_the_docs_say_what_is_on_where() -> None:
    assert feature_deployments.main(["--check"]) == 0, (
        "docs/compatibility.md is behind the rules: python -m tools.feature_deployments"
    )
    rows = feature_deployments.judged()
    states = {name: of["gang-gate"].state for name, of in rows.items()}
    off = {name for name, state in states.items() if state != "on"}
    assert off == {"SGLang 0.5.10, patched", "no hook"}
