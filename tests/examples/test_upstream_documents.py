"""The H800 examples beside SGLang's own: what those set is set here, or the README says why not."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import (
    ENGINE,
    EXAMPLES,
    Command,
    dry_run,
    known_to_sglang,
    read_by_sglang,
)

UPSTREAM_FLAGS = {
    "pd_disaggregation.md": """
        --model-path --disaggregation-ib-device --disaggregation-mode --host --port
        --trust-remote-code --dist-init-addr --nnodes --node-rank --tp-size --dp-size
        --enable-dp-attention --moe-a2a-backend --mem-fraction-static --max-running-requests
        --disaggregation-transfer-backend
    """,
    "expert_parallelism.md": """
        --deepep-mode --moe-runner-backend --enable-two-batch-overlap --enable-eplb --ep-size
    """,
    "lws_pd/lws-examples": """
        --chunked-prefill-size --max-prefill-tokens --page-size --ep-dispatch-algorithm
        --eplb-algorithm --enable-dp-lm-head --disable-radix-cache --context-length
        --ep-num-redundant-experts --moe-dense-tp-size --deepep-config --init-expert-location
        --cuda-graph-max-bs
    """,
    "rbg_pd": "--eplb-rebalance-layers-per-chunk prefill-round-robin-balance",
    "EP at scale": "--watchdog-timeout --decode-log-interval --attention-backend --cuda-graph-bs",
}
UPSTREAM_VARIABLES = """
    NVSHMEM_HCA_PE_MAPPING NVSHMEM_HCA_LIST NVSHMEM_ENABLE_NIC_PE_MAPPING NVSHMEM_IB_GID_INDEX
    NVSHMEM_IB_TRAFFIC_CLASS NVSHMEM_IB_SL NVSHMEM_DISABLE_P2P NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME
    NCCL_IB_QPS_PER_CONNECTION NCCL_IB_SPLIT_DATA_ON_QPS NCCL_NET_PLUGIN NCCL_IB_TC NCCL_IB_SL
    NCCL_IB_TIMEOUT NCCL_MIN_NCHANNELS NCCL_IB_HCA NCCL_IB_GID_INDEX NCCL_SOCKET_IFNAME
    GLOO_SOCKET_IFNAME MC_TE_METRIC CUDA_LAUNCH_BLOCKING SGLANG_SET_CPU_AFFINITY
    SGLANG_ENABLE_JIT_DEEPGEMM SGLANG_MOONCAKE_TRANS_THREAD SGLANG_HACK_DEEPEP_NUM_SMS
    SGLANG_HACK_DEEPEP_NEW_MODE SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD
    SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT SGLANG_DISAGGREGATION_WAITING_TIMEOUT
"""
"""Variables in their manifests; ``SGL_`` there is ``SGLANG_`` in 0.5.23."""
UPSTREAM_FIELDS = """
    hostNetwork hostIPC privileged readinessProbe nodeSelector tolerations networkConfig
    startupPolicy
"""


def rows() -> list[tuple[str, str, str]]:
    """There, here and why, of the README's table."""
    section = (EXAMPLES / "README.md").read_text().partition("### Beside SGLang")[2]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert all(len(row) == 3 and all(row) for row in cells)
    return [(row[0], row[1], row[2]) for row in cells]


EXPLAINED = " ".join(there for there, _, _ in rows())


@pytest.fixture(scope="module")
def h800() -> list[Command]:
    return dry_run("h800-3p1d/engine.sh")


def kubernetes_engines() -> dict[str, dict[str, Any]]:
    """The leader's container of each role."""
    found = {}
    for role in ("prefill", "decode"):
        group = yaml.safe_load((EXAMPLES / "kubernetes" / f"{role}.yaml").read_text())
        template = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        found[role] = template["spec"]["containers"][0]
    return found


def flag_values(flags: list[str]) -> dict[str, str]:
    """Return the flags' values by name; empty for a switch."""
    words = [part for flag in flags for part in flag.split("=", 1)]
    values: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            last = word
            values[last] = ""
        else:
            values[last] = word
    return values


@pytest.mark.parametrize("document", UPSTREAM_FLAGS)
def test_every_flag_of_a_document_is_set_or_explained(document: str, h800: list[Command]) -> None:
    ours = {flag for command in h800 for flag in command.flags}
    for flag in UPSTREAM_FLAGS[document].split():
        assert flag in ours or f"`{flag}" in EXPLAINED, flag


def test_every_variable_of_their_manifests_is_set_or_explained(h800: list[Command]) -> None:
    ours = {name for command in h800 for name in command.environment}
    for name in UPSTREAM_VARIABLES.split():
        assert name in ours or re.search(rf"`{name}\b", EXPLAINED), name


def test_every_field_of_their_manifests_that_differs_is_explained() -> None:
    for field in UPSTREAM_FIELDS.split():
        assert f"`{field}`" in EXPLAINED, field


def test_what_is_left_out_is_not_set(h800: list[Command]) -> None:
    ours = {word for command in h800 for word in (*command.flags, *command.environment)}
    for there, here, _ in rows():
        if here == "left out":
            named = re.findall(r"`(--[a-z0-9-]+|[A-Z][A-Z0-9_]+)", there)
            assert not ours & set(named), there


def test_flags_and_variables_are_ones_that_sglang_has_unless_it_is_said() -> None:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0]) / "srt"
    environ = (folder / "environ.py").read_text()
    flags = known_to_sglang()
    for there, _, why in rows():
        renamed = "its name in 0.5.23" in why
        assert all((flag in flags) != renamed for flag in re.findall(r"`(--[a-z0-9-]+)", there))
        for gone in re.findall(r"`([a-z][a-z0-9-]+)` \(a flag\)", there):
            assert f"--{gone}" not in flags and "gone from SGLang" in why
        unread = "0.5.23 does not read them" in why
        for name in re.findall(r"`(SGLANG_\w+)", there):
            assert (f"    {name} =" in environ) != unread, name


def test_the_suggested_flags_are_ones_that_sglang_takes() -> None:
    text = (EXAMPLES / "h800-3p1d" / "cluster.env").read_text()
    suggested = re.findall(r"^# \((--[^)]*)\)", text, re.MULTILINE)
    assert len(suggested) == 4
    base = ("--model-path", "m")
    commands = [Command(ENGINE, (*base, *words.split())) for words in suggested]
    read = read_by_sglang(commands)
    assert read[0]["enable_two_batch_overlap"] is True
    assert (read[1]["enable_eplb"], read[1]["ep_num_redundant_experts"]) == (True, 32)
    assert read[2]["init_expert_location"] == read[3]["deepep_config"] == "FILE"


def test_kubernetes_runs_what_the_scripts_run(h800: list[Command]) -> None:
    """Flags and variables of the network, one by one; addresses are each example's own."""
    own = {"--model-path", "--dist-init-addr", "--nnodes", "--node-rank", "--max-prefill-tokens"}
    for role, engine in kubernetes_engines().items():
        script = next(c for c in h800 if c.title.startswith(role))
        there, here = flag_values(list(script.flags)), flag_values(engine["args"])
        assert {k: v for k, v in there.items() if k not in own} == {
            k: v for k, v in here.items() if k not in own
        }
        env = {v["name"]: v["value"] for v in engine["env"] if "value" in v}
        for name, value in script.environment.items():
            if name.startswith(("NCCL_", "NVSHMEM_", "GLOO_", "MC_", "SGLANG_DEEPEP")):
                assert env[name] == value
