"""Changing installed files: whole, atomic, reversible, and never somebody else's."""

from __future__ import annotations

import os
import py_compile
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from fake_site import NEW, OLD, Site, a_patch

from sglang_sbs.patching import tree
from sglang_sbs.patching.patch_file import PatchError


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site.make(tmp_path)


def test_apply_and_revert_to_the_byte(site: Site) -> None:
    patch = a_patch()
    assert tree.state_of(tree.look(site.root, patch)) == "original"
    assert tree.change(site.root, patch) == list(OLD)
    assert site.content() == NEW
    assert tree.state_of(tree.look(site.root, patch)) == "patched"
    assert tree.change(site.root, patch, revert=True) == list(reversed(OLD))
    assert site.content() == OLD
    assert site.leftovers() == []


def test_doing_it_twice_changes_nothing(site: Site) -> None:
    tree.change(site.root, a_patch())
    times = [os.stat(site.root / path).st_mtime_ns for path in OLD]
    assert tree.change(site.root, a_patch()) == []
    assert [os.stat(site.root / path).st_mtime_ns for path in OLD] == times
    tree.change(site.root, a_patch(), revert=True)
    assert tree.change(site.root, a_patch(), revert=True) == []


@pytest.mark.parametrize("revert", [False, True])
@pytest.mark.parametrize("path", list(OLD))
def test_a_file_nobody_knows_is_refused_and_nothing_touched(
    site: Site, path: str, revert: bool
) -> None:
    if revert:
        tree.change(site.root, a_patch())
    (site.root / path).write_text("somebody was here\n")
    before = site.content()
    with pytest.raises(PatchError, match="not the files of this release") as error:
        tree.change(site.root, a_patch(), revert=revert)
    assert str(site.root / path) in str(error.value)
    assert site.content() == before
    assert tree.state_of(tree.look(site.root, a_patch())) == "unknown"


def test_a_missing_file_is_named(site: Site) -> None:
    (site.root / "sglang/first.py").unlink()
    with pytest.raises(PatchError, match=r"first\.py is missing"):
        tree.change(site.root, a_patch())


@pytest.mark.parametrize("revert", [False, True])
def test_an_interruption_between_two_files_can_be_finished_or_taken_back(
    site: Site, monkeypatch: pytest.MonkeyPatch, revert: bool
) -> None:
    replaced: list[Any] = []
    real = os.replace

    def dies_second(source: str, target: Path) -> None:
        if replaced:
            raise KeyboardInterrupt
        replaced.append(target)
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", dies_second)
        with pytest.raises(KeyboardInterrupt):
            tree.change(site.root, a_patch())
    content = site.content()
    assert content["sglang/first.py"] == NEW["sglang/first.py"]
    assert content["sglang/deep/second.py"] == OLD["sglang/deep/second.py"]
    assert tree.state_of(tree.look(site.root, a_patch())) == "partly"
    tree.change(site.root, a_patch(), revert=revert)
    assert site.content() == (OLD if revert else NEW)


def test_a_failing_write_leaves_the_file_and_no_rubbish(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_source: str, _target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PatchError, match="No space left on device"):
        tree.change(site.root, a_patch())
    assert site.content() == OLD
    assert site.leftovers() == []


def test_bytecode_that_cannot_be_removed_is_explained_and_leaves_no_rubbish(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, f"Permission denied: {path.name}")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        with pytest.raises(PatchError, match=r"cannot remove .*first.*\.pyc: Permission denied"):
            tree.change(site.root, a_patch())
    assert site.content() == OLD
    assert site.leftovers() == []


def test_a_read_only_environment_is_explained(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.raises(PatchError, match=r"cannot replace .*first\.py: Permission denied.*owner"):
        tree.change(site.root, a_patch())
    assert site.content() == OLD


def test_an_unreadable_file_is_explained(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(PatchError, match=r"cannot read .*first\.py: Permission denied"):
        tree.look(site.root, a_patch())


def test_the_mode_stays(site: Site) -> None:
    path = site.root / "sglang/first.py"
    path.chmod(0o755)
    tree.change(site.root, a_patch())
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_what_other_environments_share_by_hard_link_is_left_alone(site: Site) -> None:
    cache = site.root / "cache.py"
    os.link(site.root / "sglang/first.py", cache)
    tree.change(site.root, a_patch())
    assert cache.read_text() == OLD["sglang/first.py"]


@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode))
def test_no_process_goes_on_with_old_bytecode(
    tmp_path: Path, mode: py_compile.PycInvalidationMode
) -> None:
    from fake_site import as_bytes, patch_text

    from sglang_sbs.patching.patch_file import parse_patch

    old, new = {"sglang/first.py": "VALUE = 1\n"}, {"sglang/first.py": "VALUE = 2\n"}
    site = Site.make(tmp_path, files=old | {"sglang/__init__.py": ""})
    patch = parse_patch("p", patch_text(as_bytes(old), as_bytes(new)))
    path = tmp_path / "sglang/first.py"
    os.utime(path, (1, 1))
    py_compile.compile(str(path), doraise=True, invalidation_mode=mode)

    def value() -> str:
        program = "from sglang.first import VALUE; print(VALUE)"
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, cwd=site.root, capture_output=True, text=True, check=True, env={}
        )
        return done.stdout.strip()

    assert value() == "1"
    tree.change(site.root, patch)
    assert value() == "2"
    tree.change(site.root, patch, revert=True)
    assert value() == "1"
