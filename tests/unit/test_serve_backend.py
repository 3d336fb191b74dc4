"""``sglang serve MODEL --model-type sbs``, through SGLang's own command and its registry."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sglang_sbs.launch_server import main
from tools.cpu_engine.environment import cpu_engine_environment

ROOT = Path(__file__).parents[2]
FLAGS = "--prefill-instances 3 --tp 2 --dp 2 --enable-dp-attention --router-policy sbs --dry-run"

PROGRAM = """
import contextlib, io, json, sys
from sglang.cli import serve_backends
from sglang.cli.serve import _create_backend_registry, serve

def printed(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        serve(None, list(words))
    return out.getvalue()

request = serve_backends.ServeRequest(("--model-path", "/m"), "/m")
print(json.dumps({
    "names": _create_backend_registry().available_names,
    "version": serve_backends.SERVE_BACKEND_API_VERSION,
    "unasked": _create_backend_registry().auto_detect(request).name,
    "help": printed("--model-type", "sbs", "--help"),
    "planned": printed("/m", *sys.argv[1:], "--model-type", "sbs"),
}))
"""


def run_sglang(folder: Path) -> dict[str, str]:
    """PROGRAM in a process that has what SGLang imports, and the entry points of this tree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "sglang_sbs-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-sbs\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    environment = dict(os.environ) | cpu_engine_environment(num_ranks=1)
    path = [str(folder), str(ROOT), environment["PYTHONPATH"]]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *FLAGS.split()],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"PYTHONPATH": os.pathsep.join(path)},
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return answer


def commands(printed: str) -> list[str]:
    """Command lines without the ports, which are those that were free."""
    return [re.sub(r"\b\d{4,5}\b", "*", line) for line in printed.splitlines() if line]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="no SGLang installed")
def test_sglang_serve_plans_what_our_launcher_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = run_sglang(tmp_path)
    assert "sbs" in answer["names"]
    assert answer["unasked"] == "llm"  # who does not ask for it gets SGLang's own server
    assert answer["help"].startswith("usage: sglang serve --model-type sbs [-h]")
    assert "sglang_sbs.launch_server" not in answer["help"]
    assert "cookbook" in answer["help"]  # SGLang had the last word
    main(["--model-path", "/m", *FLAGS.split()])
    wanted = commands(capsys.readouterr().out)
    assert len(wanted) == 10
    assert commands(answer["planned"]) == wanted
