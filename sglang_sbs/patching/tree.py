"""Finds which version of each patched file is present, and exchanges them.

The other version is written next to a file and renamed over it. So a file is always the old or the
new one, and the environment works after each step. Environments that share the file by hard link
(uv's cache) keep the old one."""

from __future__ import annotations

import importlib.util
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sglang_sbs.patching.patch_file import FilePatch, Patch, PatchError, sha256

FileState = Literal["original", "patched", "unknown", "missing"]
TreeState = Literal["original", "patched", "partly", "unknown"]


@dataclass(frozen=True)
class TouchedFile:
    path: Path
    patch: FilePatch
    state: FileState
    sha256: str
    """SHA-256 of the file on disk; empty if it is missing."""


def look(root: Path, patch: Patch) -> list[TouchedFile]:
    """Read the files of a patch below ``root``. Raises: PatchError, one cannot be read."""
    return [_look(root, file) for file in patch.files]


def state_of(files: list[TouchedFile]) -> TreeState:
    """Return the common state of the files; ``partly``: an earlier change was interrupted."""
    states = {file.state for file in files}
    if states & {"unknown", "missing"}:
        return "unknown"
    return "partly" if len(states) > 1 else "patched" if "patched" in states else "original"


def change(root: Path, patch: Patch, *, revert: bool = False) -> list[str]:
    """Apply or revert a patch, skipping steps already done. Returns the changed paths. All checks
    precede the first write. Raises: PatchError, a file is neither the released nor the patched one,
    or cannot be replaced."""
    done: FileState = "original" if revert else "patched"
    files = look(root, patch)
    if state_of(files) == "unknown":
        raise PatchError(explain_unknown(files))
    # Reverting performs the steps of applying in reverse order.
    todo = [file for file in (reversed(files) if revert else files) if file.state != done]
    contents = [file.patch.apply(_read(file.path), revert=revert) for file in todo]
    for file, data in zip(todo, contents, strict=True):
        _replace(file.path, data)
    return [file.patch.path for file in todo]


def explain_unknown(files: list[TouchedFile]) -> str:
    """Return the error message for files that are neither in their original nor in their patched
    state, with the advice to install the package anew."""
    names = ", ".join(
        f"{file.path} " + ("is missing" if file.state == "missing" else f"({file.sha256[:12]}…)")
        for file in files
        if file.state not in ("original", "patched")
    )
    return (
        f"not the files of this release: {names}. They have other changes, or the installation is "
        "damaged; nothing was touched. Reinstall the package, then try again"
    )


def _look(root: Path, patch: FilePatch) -> TouchedFile:
    path = root / patch.path
    if not path.is_file():
        return TouchedFile(path, patch, "missing", "")
    found = sha256(_read(path))
    states: dict[str, FileState] = {patch.before: "original", patch.after: "patched"}
    return TouchedFile(path, patch, states.get(found, "unknown"), found)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PatchError(f"cannot read {path}: {error.strerror}") from error


def _replace(path: Path, data: bytes) -> None:
    """Replace a file's content, keeping its mode (and its owner, if permitted)."""
    temporary = None
    try:
        old = path.stat()
        _forget_bytecode(path)
        handle, temporary = tempfile.mkstemp(prefix=".sglang-sbs-", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, stat.S_IMODE(old.st_mode))
        if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()) and os.geteuid() == 0:
            os.chown(temporary, old.st_uid, old.st_gid)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise PatchError(
            f"cannot replace {path}: {error.strerror}. Run this as the owner of that environment, "
            "or where it is writable (in a container image: while it is built)"
        ) from error


def _forget_bytecode(path: Path) -> None:
    """Remove compiled versions of a file that is about to change. Otherwise bytecode compiled
    without a check (``compileall --invalidation-mode unchecked-hash``) would still be used."""
    cached = set(path.parent.glob(f"__pycache__/{path.stem}.*.pyc"))
    for bytecode in cached | {Path(importlib.util.cache_from_source(str(path)))}:
        try:
            bytecode.unlink(missing_ok=True)
        except OSError as error:
            raise PatchError(
                f"cannot remove {bytecode}: {error.strerror}. Python might go on using it instead "
                "of the changed file; remove it and run this again"
            ) from error
