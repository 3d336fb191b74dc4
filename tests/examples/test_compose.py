"""The Docker Compose file: valid, and its commands are ones that SGLang and the router take."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import (
    EXAMPLES,
    ROOT,
    ROUTER,
    Command,
    command_of,
    read_by_router,
    read_by_sglang,
)

FOLDER = EXAMPLES / "compose"
ENGINES = ("prefill-0", "prefill-1", "decode")


def dotenv() -> dict[str, str]:
    lines = (FOLDER / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """Return the services in Compose's view: variables of ``.env`` filled in."""
    variables = dotenv()
    text = (FOLDER / "compose.yaml").read_text()
    used = set(re.findall(r"(?<!\$)\$\{(\w+)\}", text))
    assert used == set(variables), "compose.yaml and .env name the same variables"
    filled = re.sub(r"(?<!\$)\$\{(\w+)\}", lambda match: variables[match[1]], text)
    return yaml.safe_load(filled)["services"]


def command(services: dict[str, Any], name: str) -> Command:
    return command_of(services[name]["command"])


def test_the_file_fits_the_compose_specification() -> None:
    tool = shutil.which("check-jsonschema", path=str(Path(sys.executable).parent))
    assert tool, "pip install check-jsonschema"
    done = subprocess.run(
        [tool, "--builtin-schema", "vendor.compose-spec", FOLDER / "compose.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_engines_are_those_of_the_single_node_example(services: dict[str, Any]) -> None:
    read = read_by_sglang([command(services, name) for name in ENGINES])
    assert [args["disaggregation_mode"] for args in read] == ["prefill", "prefill", "decode"]
    gpus = []
    for name, args in zip(ENGINES, read, strict=True):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert len(device["device_ids"]) == args["tp_size"]
        gpus += device["device_ids"]
        environment = services[name]["environment"]
        assert environment["SGLANG_SBS_INSTANCE_ID"] == f"http://127.0.0.1:{args['port']}"
        assert environment["PORT"] == str(args["port"])
        assert environment["SGLANG_SBS_ROUTERS"] == "tcp://127.0.0.1:7600"
        assert args["dp_size"] == 1, "SGLang refuses both"
        assert services[name]["image"].endswith(dotenv()["SGLANG_TAG"])
        if args["disaggregation_mode"] == "prefill":
            events = json.loads(args["kv_events_config"])
            assert events["endpoint"] == f"tcp://127.0.0.1:{args['port'] + 50}"
            assert events["replay_endpoint"] == f"tcp://127.0.0.1:{args['port'] + 70}"
    assert gpus == [str(number) for number in range(8)]
    assert [args["chunked_prefill_size"] // args["attn_dp_size"] for args in read[:2]] == [4096] * 2
    assert read[2]["max_running_requests"] // read[2]["attn_dp_size"] == 128


def test_images_are_built_from_this_checkout(services: dict[str, Any]) -> None:
    for name in (*ENGINES, "router"):
        assert (FOLDER / services[name]["build"]["context"]).resolve() == ROOT
    from_, copy, run = services["decode"]["build"]["dockerfile_inline"].splitlines()
    assert from_ == f"FROM lmsysorg/sglang:{dotenv()['SGLANG_TAG']}"
    folder = re.fullmatch(r"COPY \. (\S+)", copy)
    assert folder
    assert re.fullmatch(rf"RUN pip install (--\S+ )*{folder[1]}", run)


def test_ports_of_engines_do_not_meet(services: dict[str, Any]) -> None:
    ports: list[int] = []
    for args in read_by_sglang([command(services, name) for name in ENGINES]):
        first = int(args["dist_init_addr"].rpartition(":")[2])
        ports += [args["port"], args["nccl_port"], *(first + n for n in (0, 1, 2, 3, 4, 5, 6, 13))]
        if args["disaggregation_mode"] == "prefill":
            ports.append(args["disaggregation_bootstrap_port"])
    assert len(set(ports)) == len(ports)


def test_the_router_knows_the_engines(services: dict[str, Any], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0" * 64)
    key.chmod(0o600)
    words = [
        word.replace("/run/secrets/endforward-key", str(key))
        for word in services["router"]["command"]
    ]
    options = read_by_router(Command(ROUTER, tuple(words)))
    urls = [services[name]["environment"]["SGLANG_SBS_INSTANCE_ID"] for name in ENGINES]
    assert [url for url, _ in options.prefill] == urls[:2]
    assert list(options.decode) == urls[2:]
    ports = read_by_sglang([command(services, name) for name in ENGINES[:2]])
    assert [port for _, port in options.prefill] == [
        args["disaggregation_bootstrap_port"] for args in ports
    ]
    assert options.endforward_bind == "tcp://127.0.0.1:7600"
    assert options.warnings == ()
    assert "nofile" in services["router"]["ulimits"]
    assert 'ENTRYPOINT ["python", "-m", "sglang_sbs.launch_router"]' in (
        (ROOT / "Dockerfile").read_text()
    )
