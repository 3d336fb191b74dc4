"""The processes that a cluster is planned as, and the refused options."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.planned_clusters import DP_ATTENTION, plan, value

from sglang_sbs.cluster.plan import (
    BOOTSTRAP_OFFSET,
    DERIVED_FROM_DIST_INIT,
    DIST_INIT_OFFSET,
    HEALTH_PASS_ENV,
    HTTP_OFFSET,
    NCCL_OFFSET,
    PORTS_PER_INSTANCE,
    RUST_SERVER_ENV,
    ClusterOptions,
    InstancePlan,
    PlanError,
    Role,
    plan_cluster,
)
from sglang_sbs.cluster.ports import claim_ports
from tools.cpu_engine.engines import CpuEngines
from tools.cpu_engine.virtual_gpu import VIRTUAL_GPU_ENV, VirtualGpuCost

EIGHT_RANKS = [
    ("--attn-dp-size", "8"),
    ("--attn-dp-size=8",),
    ("--attention-data-parallel-size", "8"),
    ("--attn-dp-size", "8", "--enable-dp-attention"),
    ("--attn-dp-size", "8", "--dp-size", "1"),
    ("--dp", "8", "--enable-dp-attention"),
    ("--dp", "2", "--enable-dp-attention", "--dwdp-size", "8"),
]
"""Every spelling of eight DP ranks that share one TP group."""


def ports(instance: InstancePlan) -> set[int]:
    """Every port SGLang binds for `instance` (`PortArgs`, DP attention)."""
    dist_init = int(value(instance.argv, "--dist-init-addr").rpartition(":")[2])
    bound = {int(value(instance.argv, flag)) for flag in ("--port", "--nccl-port")}
    bound |= set(range(dist_init, dist_init + 1 + 7))
    if instance.bootstrap_port is not None:
        bound.add(instance.bootstrap_port)
    return bound


def test_engines_are_started_with_sglangs_own_launcher() -> None:
    prefill, decode = plan(engine_flags=DP_ATTENTION).instances
    assert prefill.argv[:3] == (sys.executable, "-m", "sglang.launch_server")
    assert value(prefill.argv, "--model-path") == "/models/tiny"
    assert value(prefill.argv, "--disaggregation-mode") == "prefill"
    assert value(prefill.argv, "--disaggregation-bootstrap-port") == str(prefill.bootstrap_port)
    assert value(decode.argv, "--disaggregation-mode") == "decode"
    assert "--disaggregation-bootstrap-port" not in decode.argv
    assert prefill.argv[-5:] == decode.argv[-5:] == DP_ATTENTION
    assert prefill.url == f"http://127.0.0.1:{value(prefill.argv, '--port')}"
    assert prefill.log_path == Path("/logs/prefill-0.log")


def test_engines_have_boot_ids_of_their_own() -> None:
    """``sglang serve`` loads plugins before it starts ours, and the id lands in its environment."""
    environment = {"SGLANG_SBS_BOOT_ID": "of the launcher", "OTHER": "kept"}
    for process in plan(environment=environment).instances:
        assert "SGLANG_SBS_BOOT_ID" not in process.environment
        assert process.environment["OTHER"] == "kept"


def test_no_two_processes_share_a_port() -> None:
    planned = plan(prefill_instances=3, decode_instances=2, engine_flags=DP_ATTENTION)
    assert planned.router is not None
    router_port = int(value(planned.router.argv, "--port"))
    endforward_port = int(value(planned.router.argv, "--sbs-endforward-bind").rpartition(":")[2])
    taken = [router_port, endforward_port]
    for instance in planned.instances:
        taken += ports(instance)
    assert len(taken) == len(set(taken))


def kv_events(instance: InstancePlan) -> dict[str, Any]:
    config = json.loads(value(instance.argv, "--kv-events-config"))
    assert isinstance(config, dict)
    return config


@pytest.mark.parametrize(
    ("ranks", "spelling"),
    [(ranks, ("--dp", str(ranks), "--enable-dp-attention")) for ranks in (2, 7, 8, 32)]
    + [(8, flags) for flags in EIGHT_RANKS],
)
def test_prefill_publishes_its_kv_events_at_ports_of_its_own(
    ranks: int, spelling: tuple[str, ...]
) -> None:
    parallel = ("--tp", str(ranks), *spelling)
    planned = plan(prefill_instances=2, engine_flags=(*parallel, "--page-size", "64"))
    taken: list[int] = []
    for instance in planned.instances:
        own = ports(instance) | {int(value(instance.argv, "--dist-init-addr")[10:]) + 13}
        if instance.bootstrap_port is None:
            assert "--kv-events-config" not in instance.argv
        else:
            config = kv_events(instance)
            assert config["bind"] is True
            for endpoint in (config["endpoint"], config["replay_endpoint"]):
                host, _, port = endpoint.removeprefix("tcp://").partition(":")
                assert host == "127.0.0.1"
                taken += range(int(port), int(port) + ranks)
        taken += own
    assert len(taken) == len(set(taken))


@pytest.mark.parametrize(
    "options",
    [
        {"engine_flags": ()},
        {"engine_flags": ("--page-size", "1")},
        {"engine_flags": ("--page-size", "64", "--disable-radix-cache")},
        {"engine_flags": ("--page-size=64",), "with_router": False},
        {"engine_flags": ("--page-size=64",), "router_flags": ("--sbs-prefix-source", "off")},
        {
            "engine_flags": ("--page-size=64",),
            "router_flags": ("--router-sbs-prefix-source=approximate",),
        },
    ],
)
def test_no_kv_events_that_nobody_wants_or_that_cost_too_much(options: dict[str, Any]) -> None:
    for instance in plan(**options).instances:
        assert "--kv-events-config" not in instance.argv


def test_decode_publishes_its_kv_events_where_it_has_a_radix_cache() -> None:
    flags = ("--disaggregation-decode-enable-radix-cache",)
    prefill, decode = plan(engine_flags=("--page-size", "64"), decode_flags=flags).instances
    assert kv_events(prefill)["endpoint"] != kv_events(decode)["endpoint"]
    _, decode = plan(decode_flags=flags).instances
    assert "--kv-events-config" not in decode.argv


def test_a_users_own_kv_events_are_left_alone() -> None:
    given = '{"publisher": "zmq"}'
    planned = plan(engine_flags=("--page-size", "64"), prefill_flags=("--kv-events-config", given))
    assert value(planned.instances[0].argv, "--kv-events-config") == given


def test_with_the_rust_server_every_dp_rank_has_a_port_that_nobody_else_has() -> None:
    environment = {RUST_SERVER_ENV: "1"}
    made = plan(engine_flags=DP_ATTENTION, unified_instances=1, environment=environment)
    prefill, decode, unified = made.instances
    taken = [
        ports(instance) | {int(url.rpartition(":")[2]) for url in instance.server_urls}
        for instance in made.instances
    ]
    assert not taken[0] & taken[1]
    first = int(value(prefill.argv, "--port"))
    assert prefill.server_urls == (f"http://127.0.0.1:{first}", f"http://127.0.0.1:{first + 1}")
    assert first + 1 not in ports(prefill), "its other sockets are elsewhere"
    # SGLang's own rule: another port is a launch error.
    assert prefill.bootstrap_port == first
    assert value(prefill.argv, "--disaggregation-bootstrap-port") == str(first)
    assert decode.environment[RUST_SERVER_ENV] == "1"
    assert RUST_SERVER_ENV not in unified.environment, "it is asked at one address"
    assert unified.server_urls == (unified.url,)


def test_heartbeats_of_decode_run_no_passes_unless_the_user_wants_them() -> None:
    for given, set_to in (({}, "0"), ({HEALTH_PASS_ENV: "1"}, "1")):
        environment = {RUST_SERVER_ENV: "1", **given}
        prefill, decode = plan(engine_flags=DP_ATTENTION, environment=environment).instances
        assert prefill.environment[HEALTH_PASS_ENV] == set_to
        assert decode.environment.get(HEALTH_PASS_ENV) == given.get(HEALTH_PASS_ENV)
    prefill, _ = plan(engine_flags=DP_ATTENTION).instances
    assert HEALTH_PASS_ENV not in prefill.environment, "a server of its own answers them"


def test_dp_ranks_that_are_engines_of_their_own_do_not_share_ports() -> None:
    for flags, shared in ((DP_ATTENTION, True), (("--dp", "2"), False), ((), True)):
        prefill, _ = plan(engine_flags=flags).instances
        assert ("--nccl-port" in prefill.argv) is shared
        assert ("--dist-init-addr" in prefill.argv) is shared


@pytest.mark.parametrize("spelling", EIGHT_RANKS)
def test_every_spelling_of_dp_attention_is_one_group_of_ranks(spelling: tuple[str, ...]) -> None:
    flags = ("--tp", "8", *spelling)
    made = plan(prefill_instances=2, engine_flags=flags, environment={RUST_SERVER_ENV: "1"})
    first, second, _ = made.instances
    assert (first.ranks, first.rank_servers, len(first.server_urls)) == (8, 8, 8)
    assert "--dist-init-addr" in first.argv
    assert value(second.argv, "--base-gpu-id") == "8"


def test_dp_size_beside_attn_dp_size_counts_replicas_which_sglang_refuses() -> None:
    both = ("--tp", "8", "--dp-size", "2", "--attn-dp-size", "4")
    for flags in (both, (*both, "--enable-dp-attention")):
        with pytest.raises(PlanError, match=r"--dp-size 2 with --attn-dp-size 4: .* not support"):
            plan(engine_flags=flags)
    with pytest.raises(PlanError, match="--attn-dp-size must be positive, got 0"):
        plan(engine_flags=("--attn-dp-size", "0"))


def test_a_role_may_have_ranks_of_its_own() -> None:
    made = plan(engine_flags=("--tp", "4"), prefill_flags=("--attn-dp-size", "4"))
    assert [instance.ranks for instance in made.instances] == [4, 1]


def test_the_old_mode_has_one_server_per_instance() -> None:
    for variable in ({}, {RUST_SERVER_ENV: "0"}):
        prefill, _ = plan(engine_flags=DP_ATTENTION, environment=variable).instances
        assert prefill.server_urls == (prefill.url,)
        assert prefill.bootstrap_port != int(value(prefill.argv, "--port"))


def test_role_flags_reach_only_their_role() -> None:
    planned = plan(prefill_flags=("--max-running-requests", "8"), decode_flags=("--x",))
    prefill, decode = planned.instances
    assert value(prefill.argv, "--max-running-requests") == "8"
    assert "--max-running-requests" not in decode.argv
    assert "--x" in decode.argv
    assert "--x" not in prefill.argv


def test_engines_know_the_router_and_their_own_url() -> None:
    planned = plan(environment={"HOME": "/root"})
    assert planned.router is not None
    bind = value(planned.router.argv, "--sbs-endforward-bind")
    for instance in planned.instances:
        assert instance.environment["SGLANG_SBS_ROUTERS"] == bind
        assert instance.environment["SGLANG_SBS_INSTANCE_ID"] == instance.url
        assert instance.environment["HOME"] == "/root"
    assert "SGLANG_SBS_INSTANCE_ID" not in planned.router.environment


def test_engines_report_to_the_users_endpoints_as_well() -> None:
    planned = plan(environment={"SGLANG_SBS_ROUTERS": "tcp://recorder:7600"})
    assert planned.router is not None
    bind = value(planned.router.argv, "--sbs-endforward-bind")
    for instance in planned.instances:
        assert instance.environment["SGLANG_SBS_ROUTERS"] == f"{bind},tcp://recorder:7600"


@pytest.mark.parametrize(
    ("bind", "reported_to"),
    [
        ("tcp://127.0.0.1:7600", "tcp://127.0.0.1:7600"),
        ("tcp://0.0.0.0:7600", "tcp://127.0.0.1:7600"),
        ("tcp://*:7600", "tcp://127.0.0.1:7600"),
        ("tcp://[::]:7600", "tcp://[::1]:7600"),
        ("tcp://10.0.0.1:7600", "tcp://10.0.0.1:7600"),
        ("ipc:///tmp/endforward", "ipc:///tmp/endforward"),
        ("none", None),
    ],
)
def test_engines_report_where_the_user_has_the_router_listen(
    bind: str, reported_to: str | None
) -> None:
    planned = plan(router_flags=("--sbs-endforward-bind", bind))
    assert planned.router is not None
    assert value(planned.router.argv, "--sbs-endforward-bind") == bind
    for instance in planned.instances:
        assert instance.environment.get("SGLANG_SBS_ROUTERS") == reported_to


def test_the_router_gets_its_workers_and_the_users_flags() -> None:
    planned = plan(prefill_instances=2, router_flags=("--policy", "sbs"), router_port=30000)
    assert planned.router is not None
    argv = list(planned.router.argv)
    assert argv[:4] == [sys.executable, "-m", "sglang_sbs.launch_router", "--pd-disaggregation"]
    for instance in planned.of_role(Role.PREFILL):
        index = argv.index(instance.url)
        assert argv[index - 1 : index + 2] == [
            "--prefill",
            instance.url,
            str(instance.bootstrap_port),
        ]
    (decode,) = planned.of_role(Role.DECODE)
    assert argv[argv.index(decode.url) - 1] == "--decode"
    assert value(planned.router.argv, "--tokenizer-path") == "/models/tiny"
    assert argv[-2:] == ["--policy", "sbs"]
    assert planned.router.url == "http://127.0.0.1:30000"


def test_a_users_tokenizer_is_not_overridden() -> None:
    planned = plan(router_flags=("--tokenizer-path", "/t"))
    assert planned.router is not None
    assert value(planned.router.argv, "--tokenizer-path") == "/t"


@pytest.mark.parametrize(
    "flags",
    [
        ("--sbs-endforward-key-file", "/k"),
        ("--router-sbs-endforward-key-file=/k",),
    ],
)
def test_engines_share_the_routers_secret(flags: tuple[str, ...]) -> None:
    planned = plan(prefill_instances=2, router_flags=flags)
    for instance in planned.instances:
        assert instance.environment["SGLANG_SBS_ENDFORWARD_KEY_FILE"] == "/k"
    for instance in plan(prefill_instances=2).instances:
        assert "SGLANG_SBS_ENDFORWARD_KEY_FILE" not in instance.environment


def test_a_wildcard_router_is_reached_on_loopback() -> None:
    planned = plan(router_host="0.0.0.0", router_port=30000)
    assert planned.router is not None
    assert value(planned.router.argv, "--host") == "0.0.0.0"
    assert planned.router.url == "http://127.0.0.1:30000"


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [("::1", "[::1]"), ("2001:db8::5", "[2001:db8::5]"), ("::", "[::1]"), ("box", "box")],
)
def test_the_url_of_a_router_at_an_ipv6_address_has_brackets(host: str, reached_at: str) -> None:
    planned = plan(router_host=host, router_port=30000)
    assert planned.router is not None
    assert value(planned.router.argv, "--host") == host
    assert planned.router.url == f"http://{reached_at}:30000"


def test_cpu_engines_are_forked_with_the_cpu_environment() -> None:
    planned = plan(cpu=CpuEngines(), engine_flags=DP_ATTENTION, unified_instances=1)
    assert planned.cpu
    for instance in planned.instances:
        assert value(instance.argv, "--device") == "cpu"
        assert "--base-gpu-id" not in instance.argv
        assert instance.environment["SGLANG_USE_CPU_ENGINE"] == "1"
        assert instance.environment["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
        assert VIRTUAL_GPU_ENV not in instance.environment
    (unified,) = planned.of_role(Role.UNIFIED)
    assert "--disaggregation-mode" not in unified.argv
    assert "--disaggregation-transfer-backend" not in unified.argv


def test_engines_on_gpus_get_nothing_of_the_cpu_support() -> None:
    planned = plan(environment={"PYTHONPATH": "/mine"})
    assert not planned.cpu
    for instance in planned.instances:
        assert instance.environment["PYTHONPATH"] == "/mine"
        assert "--device" not in instance.argv


def test_the_virtual_gpu_implies_cpu_and_carries_its_cost() -> None:
    cost = VirtualGpuCost(prefill_base_s=0.5)
    planned = plan(cpu=CpuEngines(cost), environment={"PYTHONPATH": "/mine"})
    for instance in planned.instances:
        assert VirtualGpuCost.from_json(instance.environment[VIRTUAL_GPU_ENV]) == cost
        assert instance.environment["PYTHONPATH"].endswith(":/mine")
        assert value(instance.argv, "--device") == "cpu"


def test_a_users_flag_wins_over_a_cpu_default() -> None:
    planned = plan(cpu=CpuEngines(), engine_flags=("--dtype=bfloat16", "--max-total-tokens", "99"))
    for instance in planned.instances:
        assert "--dtype" not in instance.argv
        assert value(instance.argv, "--max-total-tokens") == "99"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"prefill_instances": 0}, "--prefill-instances must be at least 1, got 0"),
        ({"decode_instances": -1}, "--decode-instances must be at least 1, got -1"),
        ({"engine_flags": ("--tp", "two")}, "--tp must be a whole number, got 'two'"),
        ({"engine_flags": ("--tp",)}, "--tp must be a whole number, got ''"),
        ({"prefill_flags": ("--port", "1")}, "--port cannot be passed to the engines"),
        ({"engine_flags": ("--nccl-port=1",)}, "--nccl-port cannot be passed to the engines"),
        ({"engine_flags": ("--nnodes", "2")}, "all instances are on this machine"),
        ({"decode_flags": ("--model-path", "/m")}, "--model-path cannot differ"),
    ],
)
def test_what_cannot_be_planned_is_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        plan(**options)


def test_a_port_block_is_claimed_by_one_cluster_on_the_machine() -> None:
    code = (
        "from sglang_sbs.cluster.ports import claim_ports, free_port_blocks\n"
        "first = next(free_port_blocks(16))\n"
        "print(first, claim_ports(range(first, first + 16)), flush=True)\n"
        "input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        first, again = other.stdout.readline().split()
        assert again == "False"
        assert not claim_ports(range(int(first) + 3, int(first) + 4))
        other.communicate("done\n")
    assert claim_ports(range(int(first), int(first) + 16))


def test_ports_that_sglang_derives_are_in_the_instances_own_block_and_nobody_elses() -> None:
    derived = {DIST_INIT_OFFSET + delta for delta in DERIVED_FROM_DIST_INIT}
    assert max(derived) < PORTS_PER_INSTANCE
    assert derived.isdisjoint({HTTP_OFFSET, BOOTSTRAP_OFFSET, NCCL_OFFSET, DIST_INIT_OFFSET})


def test_the_handshake_port_is_where_sglang_puts_it() -> None:
    # Read, not imported: importing SGLang needs the stand-ins that only CPU engines have.
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    source = (Path(package) / "srt" / "server_args.py").read_text()
    (delta,) = re.findall(r"^DP_ATTENTION_HANDSHAKE_PORT_DELTA = (\d+)$", source, re.MULTILINE)
    assert int(delta) in DERIVED_FROM_DIST_INIT


def test_a_prefill_instance_over_two_nodes_is_two_processes_at_two_addresses() -> None:
    planned = plan(prefill_nodes=2, engine_flags=(*DP_ATTENTION, "--page-size", "16"))
    prefill, decode = planned.instances
    (follower,) = prefill.followers
    assert decode.followers == ()
    assert "--nnodes" not in decode.argv
    for argv, rank, host in ((prefill.argv, "0", "127.0.0.1"), (follower.argv, "1", "127.0.0.2")):
        assert value(argv, "--nnodes") == "2"
        assert value(argv, "--node-rank") == rank
        assert value(argv, "--host") == host
        endpoint = json.loads(value(argv, "--kv-events-config"))["endpoint"]
        assert endpoint.startswith(f"tcp://{host}:")
    for flag in ("--port", "--dist-init-addr", "--nccl-port", "--model-path"):
        assert value(follower.argv, flag) == value(prefill.argv, flag)
    assert follower.environment["SGLANG_SBS_INSTANCE_ID"] == prefill.url
    assert follower.environment["SGLANG_SBS_NODE_HOST"] == "127.0.0.2"
    assert "SGLANG_SBS_NODE_HOST" not in prefill.environment
    assert follower.log_path != prefill.log_path
    assert planned.router is not None
    assert "127.0.0.2" not in " ".join(planned.router.argv)


@pytest.mark.parametrize("options", [{"prefill_nodes": 3}, {"prefill_nodes": 0}])
def test_ranks_that_cannot_be_laid_over_nodes_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="multiple"):
        plan(engine_flags=DP_ATTENTION, **options)


def test_with_the_rust_server_each_node_serves_its_own_ranks() -> None:
    def planned(ranks: int) -> InstancePlan:
        options = ClusterOptions(
            model_path="m",
            prefill_nodes=2,
            engine_flags=("--tp", "12", "--dp", str(ranks)),
            environment={RUST_SERVER_ENV: "1"},
        )
        return plan_cluster(options, itertools.count(30000, PORTS_PER_INSTANCE)).instances[0]

    port = int(planned(4).url.rpartition(":")[2])
    assert planned(4).server_urls == tuple(
        f"http://127.0.0.{host}:{port + number}" for host in (1, 2) for number in (0, 1)
    )
    with pytest.raises(PlanError, match="3 DP ranks must be a multiple"):
        planned(3)
