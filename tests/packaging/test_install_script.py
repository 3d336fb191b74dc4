"""The packages that ``scripts/install`` would install, asked of the script with stand-ins for pip
and apt."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDER = """#!/bin/sh
echo "{name} $*" >>"$CALLS"
case "$*" in
    *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
esac
"""


def calls_of(tmp_path: Path, *flags: str) -> list[str]:
    """Every call of Python and apt-get by ``scripts/install FLAGS`` on an empty machine."""
    checkout, stubs, calls = tmp_path / "checkout", tmp_path / "bin", tmp_path / "calls"
    stubs.mkdir()
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", checkout)
    for name in ("install", "cpu-engine-requirements.txt"):
        shutil.copy(ROOT / "scripts" / name, checkout / "scripts")
    for name in ("python3", "apt-get", "ldconfig"):
        (stubs / name).write_text(RECORDER.format(name=name))
        (stubs / name).chmod(0o755)
    (stubs / "sudo").write_text('#!/bin/sh\nshift; exec "$@"\n')
    (stubs / "sudo").chmod(0o755)
    # No Chromium, promtool or etcd of this machine: what the script calls and nothing else.
    needed = "bash cat chmod cp cut dirname dpkg-deb du env id mkdir mv rm sh sha256sum tail tar"
    for name in needed.split():
        if found := shutil.which(name):
            (stubs / name).symlink_to(found)
    environment = {"PATH": str(stubs), "CALLS": str(calls), "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        [checkout / "scripts" / "install", *flags],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return calls.read_text().splitlines()


def system_packages(calls: list[str]) -> set[str]:
    """Return the Debian packages that the calls ask for."""
    words = [call.split() for call in calls if call.startswith("apt-get")]
    asked = [w for w in words if w[1] in ("install", "download")]
    return {word for w in asked for word in w[2:] if not word.startswith("-")}


def extras(calls: list[str]) -> set[str]:
    """Return the extras of this project that the calls ask for."""
    return {
        e
        for call in calls
        for found in re.findall(r"\.\[([\w,]+)\]", call)
        for e in found.split(",")
    }


def test_the_demo_needs_no_development_tools(tmp_path: Path) -> None:
    calls = calls_of(tmp_path, "--demo")
    assert extras(calls) == {"sim"}
    assert any("sglang==" in call for call in calls)
    page = (ROOT / "docs" / "quick-start.md").read_text()
    named = re.search(r"Debian packages \(([^)]*)\)", page)
    assert named is not None
    assert system_packages(calls) == set(re.findall(r"`([\w-]+)`", named[1]))


@pytest.mark.parametrize("flags", [(), ("--router-only",)], ids=str)
def test_what_tests_need_is_installed_for_those_who_run_them(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    calls = calls_of(tmp_path, *flags)
    assert extras(calls) == {"dev", "sim"}
    assert any("sglang==" in call for call in calls) == (not flags)
    assert ({"chromium", "prometheus", "etcd-server"} <= system_packages(calls)) == (not flags)


def test_the_demo_asks_for_no_more_than_it_needs() -> None:
    assert "\nscripts/install --demo\n" in (ROOT / "scripts" / "demo").read_text()
