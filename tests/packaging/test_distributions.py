"""Wheel and sdist: what is in them, and that the router works from nothing else."""

from __future__ import annotations

import asyncio
import email.parser
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import aiohttp
import pytest
from packaging_sources import ROOT, Built

import sglang_sbs
from tools.stand_ins.mock_engine import MockEngine, Rooms

TIMEOUT_S = 120.0

pytestmark = pytest.mark.registry


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def test_every_file_of_the_package_is_in_the_wheel(built: Built) -> None:
    there = set(names(built.wheel))
    package = ROOT / "sglang_sbs"
    wanted = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted - there == set()
    assert "sglang_sbs/py.typed" in there
    top = {name.partition("/")[0] for name in there}
    assert {name for name in top if not name.endswith(".dist-info")} == {"sglang_sbs"}


def test_the_patches_travel_in_both(built: Built) -> None:
    patches = {path.name: path.read_bytes() for path in (ROOT / "patches").glob("*.patch")}
    assert patches
    with zipfile.ZipFile(built.wheel) as archive:
        for name, data in patches.items():
            assert archive.read(f"sglang_sbs/patching/patches/{name}") == data
    with tarfile.open(built.sdist) as archive:
        members = {member.name.partition("/")[2] for member in archive.getmembers()}
    assert {f"patches/{name}" for name in patches} <= members
    # Once in the tree: what a wheel has is made when it is built.
    assert not (ROOT / "sglang_sbs" / "patching" / "patches").exists()


def test_the_version_is_in_one_place(built: Built) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert project["dynamic"] == ["version", "readme"]
    assert metadata(built.wheel)["Version"] == sglang_sbs.__version__
    assert built.sdist.name == f"sglang_sbs-{sglang_sbs.__version__}.tar.gz"
    stand_ins = ROOT / "sglang_sbs" / "testing" / "site"
    found = [
        path
        for path in (*(ROOT / "sglang_sbs").rglob("*.py"), ROOT / "setup.py")
        if re.search(r"(?m)^__version__\s*=\s*[\"']", path.read_text())
        and not path.is_relative_to(stand_ins)
    ]
    assert found == [ROOT / "sglang_sbs" / "__init__.py"]


def test_nothing_to_complain_about_while_building(built: Built) -> None:
    lines = [line for line in built.log.splitlines() if re.search("warn|deprecat", line, re.I)]
    # PYTHONDONTWRITEBYTECODE of whoever runs this.
    assert [line for line in lines if "byte-compiling is disabled" not in line] == []


def test_engines_find_the_plugin_by_its_entry_point(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        name = next(
            n for n in archive.namelist() if n.endswith("entry_points.txt") and "-info/" in n
        )
        text = archive.read(name).decode()
    assert "[sglang.srt.plugins]\nsglang_sbs = sglang_sbs.engine:register" in text


@pytest.fixture(scope="session")
def python(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and what it asks for, nothing else."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "uv", "pip", "install", "--no-config", "--quiet"]
    command += ["--python", str(python), str(built.wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return python


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}


def ask(python: Path, program: str, cwd: Path) -> str:
    done = subprocess.run(
        [str(python), "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_environment_has_neither_torch_nor_sglang(python: Path, tmp_path: Path) -> None:
    program = "import importlib.util as u; print([u.find_spec(n) for n in ('torch', 'sglang')])"
    assert ask(python, program, tmp_path) == "[None, None]"
    where = ask(python, "import sglang_sbs; print(sglang_sbs.__file__)", tmp_path)
    assert Path(where).is_relative_to(python.parents[1])


def test_patches_are_found_in_the_wheel(python: Path, tmp_path: Path) -> None:
    program = (
        "from sglang_sbs.patching.patch_file import load_patches, patch_directory as d;"
        "print(d()); print(len(load_patches()))"
    )
    folder, count = ask(python, program, tmp_path).splitlines()
    assert Path(folder).is_relative_to(python.parents[1])
    assert int(count) == len(list((ROOT / "patches").glob("*.patch")))


def test_every_verb_has_help_without_the_extras(python: Path, tmp_path: Path) -> None:
    from sglang_sbs.cli import VERBS

    command = str(python.parent / "sglang-sbs")
    for verb in VERBS:
        done = subprocess.run(
            [command, verb, "--help"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=clean_environment(),
        )
        assert done.returncode == 0, f"{verb}: {done.stderr}"
        assert "usage" in done.stdout.lower()


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("simulate paper-3k --plot x.html", "pip install matplotlib"),
        ("demo", "scripts/install"),
        ("server --model-path /m", "pip install 'sglang>=0.5.11'"),
    ],
)
def test_a_verb_that_wants_more_says_what_to_install(
    words: str, remedy: str, python: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [str(python.parent / "sglang-sbs"), *words.split()],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=clean_environment(),
        timeout=TIMEOUT_S,
    )
    assert done.returncode in (1, 2)
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr


async def test_the_router_serves_from_the_wheel(python: Path, tmp_path: Path) -> None:
    rooms = Rooms()
    prefill, decode = MockEngine("prefill", rooms=rooms), MockEngine("decode", rooms=rooms)
    await prefill.start()
    await decode.start()
    process = await asyncio.create_subprocess_exec(
        *(str(python), "-m", "sglang_sbs.launch_router", "--pd-disaggregation"),
        *("--prefill", prefill.url, "8998", "--decode", decode.url, "--policy", "sbs"),
        *("--host", "127.0.0.1", "--port", "0"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", "0"),
        *("--sbs-endforward-bind", "tcp://127.0.0.1:*"),
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
        env=clean_environment(),
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            said = ""
            while "policy sbs at " not in said:
                line = (await process.stderr.readline()).decode()
                assert line, said
                said += line
            url = "http://" + said.split("policy sbs at ")[1].split(",")[0]
            async with aiohttp.ClientSession() as client:
                while True:
                    async with client.get(url + "/readiness") as response:
                        if response.status == 200:
                            break
                    await asyncio.sleep(0.05)
                async with client.post(url + "/generate", json={"text": "hello"}) as response:
                    assert response.status == 200
                    assert (await response.json())["text"] == "t1 t2 t3"
    finally:
        process.terminate()
        await process.wait()
        await prefill.stop()
        await decode.stop()
    assert len(prefill.requests) == len(decode.requests) == 1


def test_the_sdist_has_what_a_build_needs_and_no_caches(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        members = {member.name.partition("/")[2] for member in archive.getmembers()}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= members
    assert [name for name in members if "__pycache__" in name or name.endswith(".pyc")] == []
