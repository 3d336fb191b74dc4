"""The format of patches, and that the ones shipped do nothing but call us."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from fake_site import NEW, OLD, a_patch, as_bytes, patch_text
from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.patching.patch_file import (
    Patch,
    PatchError,
    load_patches,
    parse_patch,
    patch_directory,
    version_key,
)

SHIPPED = load_patches()
LINES = st.lists(st.text("ab \t\r-+@#", max_size=6), max_size=30)


def added_and_removed(patch: Patch) -> tuple[list[bytes], list[bytes]]:
    added: list[bytes] = []
    removed: list[bytes] = []
    for file in patch.files:
        for hunk in file.hunks:
            added += [line for line in hunk.new if line not in hunk.old]
            removed += [line for line in hunk.old if line not in hunk.new]
    return added, removed


def test_every_release_asked_for_has_a_patch() -> None:
    covered = {version for patch in SHIPPED for version in patch.versions}
    assert {"0.5.10", "0.5.10.post1", "0.5.9", "0.5.8.post1", "0.5.7", "0.3.2"} <= covered
    assert {"0.5.6", "0.5.6.post1", "0.5.6.post2"} <= covered
    assert [patch.package for patch in SHIPPED] == sorted(patch.package for patch in SHIPPED)


@pytest.mark.parametrize("patch", SHIPPED, ids=lambda patch: patch.name)
def test_a_shipped_patch_says_what_and_why_and_only_calls_us(patch: Patch) -> None:
    assert len(patch.what) > 40
    assert b"\nWhy: " in (patch_directory() / f"{patch.name}.patch").read_bytes()
    assert len(patch.files) == 2
    added, removed = added_and_removed(patch)
    text = b"\n".join(added).decode()
    assert "sglang_sbs" in text
    assert len(added) <= 14
    if patch.package == "sglang":
        # An engine goes on without us where sglang-sbs is not installed any more.
        assert "except ImportError" in text
        assert removed == []
    else:
        assert b"".join(removed).strip().startswith(b"choices=")


@pytest.mark.parametrize("patch", SHIPPED, ids=lambda patch: patch.name)
def test_git_takes_a_shipped_patch_as_well(patch: Patch) -> None:
    path = patch_directory() / f"{patch.name}.patch"
    done = subprocess.run(
        ["git", "apply", "--numstat", str(path)], capture_output=True, text=True, check=True
    )
    touched = [line.split("\t")[2] for line in done.stdout.splitlines()]
    assert touched == [file.path for file in patch.files]


@given(LINES, LINES)
def test_applying_and_reverting_gives_the_same_bytes(old: list[str], new: list[str]) -> None:
    before, after = "\n".join(old).encode(), "\n".join(new).encode()
    if before == after:
        return
    text = patch_text({"sglang/x.py": before}, {"sglang/x.py": after})
    (file,) = parse_patch("generated", text).files
    assert file.apply(before) == after
    assert file.apply(after, revert=True) == before


def test_another_file_is_refused() -> None:
    first = a_patch().files[0]
    with pytest.raises(PatchError, match=r"sglang/first\.py is not the file"):
        first.apply(b"def one():\n    return 2\n")
    with pytest.raises(PatchError, match=r"sglang/first\.py is not the file"):
        first.apply(OLD["sglang/first.py"].encode(), revert=True)


def test_hunks_that_do_not_give_the_promised_file_are_refused() -> None:
    text = patch_text(as_bytes(OLD), as_bytes(NEW)).replace(b"+    call()", b"+    evil()")
    with pytest.raises(PatchError, match="does not give the file"):
        parse_patch("tampered", text).files[0].apply(OLD["sglang/first.py"].encode())


@given(st.data())
def test_a_damaged_diff_gives_the_promised_file_or_none(data: st.DataObject) -> None:
    text = patch_text(as_bytes(OLD), as_bytes(NEW))
    lines = text.split(b"\n")
    at = data.draw(st.integers(text[: text.index(b"--- a/")].count(b"\n"), len(lines) - 1))
    lines[at : at + 1] = data.draw(st.lists(st.sampled_from([*lines, b"", b"@@ -1,9 +1,9 @@"])))
    try:
        files = parse_patch("damaged", b"\n".join(lines)).files
        given_ = {file.path: file.apply(OLD[file.path].encode()) for file in files}
    except (PatchError, KeyError):
        return
    assert given_ == as_bytes(NEW)


def test_an_installation_without_patches_says_so(tmp_path: Path, monkeypatch) -> None:
    from sglang_sbs.patching import patch_file

    monkeypatch.setattr(patch_file, "__file__", str(tmp_path / "a" / "b" / "patch_file.py"))
    with pytest.raises(PatchError, match="install it anew"):
        patch_directory()


def test_releases_sort_as_numbers() -> None:
    assert version_key("0.5.10.post1") > version_key("0.5.10") > version_key("0.5.9")
    assert version_key("0.5.9+local.7") == (0, 5, 9)
