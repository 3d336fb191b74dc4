"""A patch file: its purpose, the checksums of the files it changes, and its hunks. It has a
mail-like header, then a unified diff that ``git apply`` and ``patch -p1`` accept as well."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path

_HUNK = re.compile(rb"^@@ -(\d+)\S* \+(\d+)\S* @@.*\n((?:[ +-].*\n?)*)", re.MULTILINE)
"""Matches a hunk of a unified diff. Groups: first line in the old file, in the new file, and the
hunk's lines."""


class PatchError(Exception):
    """The operation is impossible; the message explains why, and what to do."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Hunk:
    """A hunk of a diff: replaces the lines from ``old_start`` on with those of ``new``."""

    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class FilePatch:
    path: str
    """Path relative to the package's installation folder, with slashes."""
    before: str
    """SHA-256 of the released file."""
    after: str
    hunks: tuple[Hunk, ...]

    def apply(self, data: bytes, *, revert: bool = False) -> bytes:
        """Return the patched file, or with ``revert`` the released one. Raises: PatchError,
        ``data`` or the result does not match its checksum."""
        wanted, result = (self.after, self.before) if revert else (self.before, self.after)
        if sha256(data) != wanted:
            raise PatchError(f"{self.path} is not the file this patch is for")
        lines = data.split(b"\n")
        # Start at the end, so that earlier line numbers stay valid.
        for hunk in reversed(self.hunks):
            start, old, new = hunk.old_start, hunk.old, hunk.new
            if revert:
                start, old, new = hunk.new_start, hunk.new, hunk.old
            lines[start - 1 : start - 1 + len(old)] = new
        changed = b"\n".join(lines)
        if sha256(changed) != result:
            raise PatchError(f"the patch of {self.path} does not give the file its header names")
        return changed


@dataclass(frozen=True)
class Patch:
    name: str
    package: str
    """Name of the distribution: ``sglang`` or ``sglang-router``."""
    versions: tuple[str, ...]
    """Releases in which the changed files are identical."""
    what: str
    files: tuple[FilePatch, ...] = field(repr=False)
    """Files in the order of changing them; each intermediate state works."""


def parse_patch(name: str, data: bytes) -> Patch:
    """Parse a patch file. The files are ours, and checked before a release
    (``tools/check_patches``). A damaged one does no harm: :meth:`FilePatch.apply` returns the
    expected file or raises."""
    head, _, diff = data.partition(b"\n--- a/")
    header = HeaderParser().parsestr(head.decode("utf-8"))
    sums = [value.split() for value in header.get_all("Sha256", ())]
    hunks = dict(map(_hunks_of, diff.removesuffix(b"\n").split(b"\n--- a/")))
    return Patch(
        name=name,
        package=header["Package"],
        versions=tuple(header["Versions"].split(", ")),
        what=" ".join(header["What"].split()),
        files=tuple(
            FilePatch(path, before, after, hunks[path]) for path, _, before, _, after in sums
        ),
    )


def _hunks_of(part: bytes) -> tuple[str, tuple[Hunk, ...]]:
    """Return path and hunks of one file of a unified diff."""
    hunks = []
    for match in _HUNK.finditer(part):
        lines = match[3].removesuffix(b"\n").split(b"\n")
        old = tuple(line[1:] for line in lines if line[:1] != b"+")
        new = tuple(line[1:] for line in lines if line[:1] != b"-")
        hunks.append(Hunk(int(match[1]), int(match[2]), old, new))
    return part.partition(b"\n")[0].decode(), tuple(hunks)


def patch_directory() -> Path:
    """Find the patch files in the installed package, or at the top of the checkout. Raises:
    PatchError, in neither."""
    here = Path(__file__).resolve().parent
    for folder in (here / "patches", here.parent.parent / "patches"):
        if any(folder.glob("*.patch")):
            return folder
    raise PatchError("this installation of sglang-sbs has no patches; install it anew")


def load_patches() -> list[Patch]:
    """Load all patches, newest release first. Raises: PatchError."""
    paths = sorted(patch_directory().glob("*.patch"))
    patches = [parse_patch(path.stem, path.read_bytes()) for path in paths]
    patches.sort(key=lambda p: version_key(p.versions[0]), reverse=True)
    return sorted(patches, key=lambda p: p.package)


def version_key(version: str) -> tuple[int, ...]:
    """Return the release number with its post-release as a sort key: ``(0, 5, 10, 1)`` for
    ``0.5.10.post1``."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))
