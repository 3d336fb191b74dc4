"""The router's Dockerfile, as far as it can be judged without a Docker engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from packaging_sources import FOLDERS, ROOT, SOURCES

from sglang_sbs.router.options.options import parse_flags

TEXT = (ROOT / "Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """Name and arguments, continuation lines joined."""
    lines = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^\s*#.*\n", "", TEXT)).splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines if line.strip()]


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    start = max(i for i, (name, _) in enumerate(found) if name == "FROM")
    return found[start:]


def test_hadolint_finds_nothing() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    assert hadolint, "scripts/install brings hadolint"
    done = subprocess.run(
        [hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_image_runs_as_a_numeric_user_without_rights() -> None:
    users = [argument for name, argument in last_stage() if name == "USER"]
    assert users
    assert all(user.isdigit() and int(user) > 0 for user in users)


def test_the_image_gets_the_environment_and_nothing_it_was_built_with() -> None:
    copies = [argument for name, argument in last_stage() if name == "COPY"]
    assert copies == ["--from=build /opt/sglang-sbs /opt/sglang-sbs"]
    assert "-slim" in last_stage()[0][1]
    assert "sglang==" not in TEXT and "[engine" not in TEXT


def test_everything_the_build_needs_is_copied_and_let_through() -> None:
    copied = " ".join(argument for name, argument in instructions() if name == "COPY")
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    for name in (*SOURCES, *FOLDERS):
        assert re.search(rf"\b{re.escape(name)}\b", copied)
        assert f"!{name}" in ignore
        assert (ROOT / name).exists()


def test_the_health_check_asks_what_the_router_answers_without_a_key() -> None:
    (check,) = (argument for name, argument in last_stage() if name == "HEALTHCHECK")
    program = json.loads(check.partition("CMD ")[2])
    assert program[:2] == ["python", "-c"]
    compile(program[2], "healthcheck", "exec")
    environment = " ".join(argument for name, argument in last_stage() if name == "ENV")
    url = re.search(r"SGLANG_SBS_LIVENESS_URL=(\S+)", environment)
    assert url
    options = parse_flags(["--prefill", "http://p:1", "--decode", "http://d:1"])
    assert url[1] == f"http://127.0.0.1:{options.port}/liveness"


def test_the_image_starts_the_router_with_its_arguments() -> None:
    stage = dict(last_stage())
    assert json.loads(stage["ENTRYPOINT"]) == ["python", "-m", "sglang_sbs.launch_router"]
    options = parse_flags(["--prefill", "http://p:1", "--decode", "http://d:1"])
    assert str(options.port) in stage["EXPOSE"].split()
