"""``scripts/check-patches``: the releases themselves, from the package registry."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sglang_sbs.patching.patch_file import load_patches
from tools.check_patches import command

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "releases"
"""The script's own cache, so that releases are downloaded once."""


@pytest.mark.registry
def test_every_patch_on_its_release(capsys: pytest.CaptureFixture[str]) -> None:
    code = command.main(["--cache", str(CACHE), "--json"])
    answer = json.loads(capsys.readouterr().out)
    failed = [row for row in answer["matrix"] if not row["ok"]]
    assert failed == []
    assert code == 0
    assert {row["patch"] for row in answer["matrix"]} == {patch.name for patch in load_patches()}


@pytest.mark.registry
def test_a_patch_for_another_release_fails_and_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patch = next(p for p in load_patches() if "0.5.9" in p.versions)
    wrong = [dataclasses.replace(patch, versions=("0.5.8",))]
    monkeypatch.setattr(command, "load_patches", lambda: wrong)
    monkeypatch.setattr(command.cli, "load_patches", lambda: wrong)
    assert command.main(["--cache", str(CACHE)]) == 1
    said = capsys.readouterr().out
    assert "sglang 0.5.8, apply: unknown: not the files of this release" in said


def test_a_name_that_is_no_patch_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "sglang-1.0"]) == 2
    assert "sglang-0.5.9" in capsys.readouterr().err


def test_an_unreachable_registry_is_a_failed_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert command.main(["--cache", str(tmp_path), "--only", "sglang-0.5.9"]) == 1
    assert "download: pip download failed" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
