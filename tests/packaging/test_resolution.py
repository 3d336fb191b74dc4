"""``pip install sglang-sbs[engine]`` beside every SGLang that loads plugins: is there a solution?

Resolved for real from the registry's metadata, with everything SGLang asks for; nothing of it is
downloaded or installed, so that this needs no CUDA.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging_sources import Built

pytestmark = pytest.mark.registry

# The newest post-release of each.
RELEASES = (
    *("0.5.11", "0.5.12.post1", "0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.16", "0.5.17"),
    *("0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
)
PLATFORM = "x86_64-manylinux_2_39"


def resolve(tmp_path: Path, *requirements: str) -> tuple[int, dict[str, str], str]:
    """Exit code, versions by name, and what the resolver said."""
    wanted, found = tmp_path / "requirements.in", tmp_path / "requirements.txt"
    wanted.write_text("\n".join(requirements) + "\n")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet"]
    command += ["--no-header", "--no-annotate", "--python-version", version]
    command += ["--python-platform", PLATFORM, str(wanted), "--output-file", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return done.returncode, {}, done.stderr
    lines = (line.split(";")[0].strip() for line in found.read_text().splitlines())
    pairs = (line.partition("==") for line in lines if "==" in line)
    return 0, {name: version for name, _, version in pairs}, done.stderr


@pytest.mark.parametrize("release", RELEASES)
def test_the_engine_extra_goes_with(release: str, built: Built, tmp_path: Path) -> None:
    ours = f"sglang-sbs[engine] @ {built.wheel.as_uri()}"
    code, versions, said = resolve(tmp_path, ours, f"sglang=={release}")
    assert code == 0, said
    assert versions["sglang"] == release
    assert "torch" in versions


def test_a_release_without_plugins_is_refused_by_the_extra(built: Built, tmp_path: Path) -> None:
    ours = f"sglang-sbs[engine] @ {built.wheel.as_uri()}"
    code, _, said = resolve(tmp_path, ours, "sglang==0.5.10")
    assert code != 0
    assert "unsatisfiable" in said


def test_the_router_alone_asks_for_no_engine(built: Built, tmp_path: Path) -> None:
    code, versions, said = resolve(tmp_path, f"sglang-sbs @ {built.wheel.as_uri()}")
    assert code == 0, said
    assert not {"torch", "sglang", "transformers", "numpy"} & set(versions)
    assert len(versions) < 50


def test_requirements_have_no_upper_bounds_that_would_clash(built: Built) -> None:
    import zipfile

    with zipfile.ZipFile(built.wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = [
        Requirement(line.removeprefix("Requires-Dist: "))
        for line in lines
        if line.startswith("Requires-Dist: ") and "extra == " not in line
    ]
    assert wanted
    assert [r.name for r in wanted if any(s.operator != ">=" for s in r.specifier)] == []
