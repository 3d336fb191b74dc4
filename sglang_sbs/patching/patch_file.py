"""One patch: what it is for, the checksums of what it touches, and its hunks. A header like that of
a mail, then a unified diff that ``git apply`` and ``patch -p1`` take as well."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_SIGNS = (b" ", b"-", b"+")
_SHA256 = re.compile(r"(\S+)\s+before ([0-9a-f]{64})\s+after\s+([0-9a-f]{64})")


class PatchError(Exception):
    """Something stands in the way; the message says what, and what to do about it."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Hunk:
    """Lines ``old_start`` and following become those of ``new``."""

    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class FilePatch:
    path: str
    """Relative to the folder the package is installed in, with slashes."""
    before: str
    """SHA-256 of the file as released."""
    after: str
    hunks: tuple[Hunk, ...] = ()

    def apply(self, data: bytes, *, revert: bool = False) -> bytes:
        """The file's other version. Raises: PatchError, ``data`` or the result is not that."""
        wanted, result = (self.after, self.before) if revert else (self.before, self.after)
        if sha256(data) != wanted:
            raise PatchError(f"{self.path} is not the file this patch is for")
        lines = data.split(b"\n")
        # From the end on, so that earlier line numbers stay true.
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
    """Everything one patch file says."""

    name: str
    package: str
    """Name of the distribution: ``sglang`` or ``sglang-router``."""
    versions: tuple[str, ...]
    """Releases whose touched files are the same."""
    what: str
    why: str
    files: tuple[FilePatch, ...] = field(repr=False)
    """In the order to change them in; each step leaves something that works."""


def parse_patch(name: str, data: bytes) -> Patch:
    """Raises: PatchError, naming what is wrong with the patch file."""
    head, marker, diff = data.partition(b"\n--- ")
    header = HeaderParser().parsestr(head.decode("utf-8"))
    fields = {key: " ".join(value.split()) for key, value in header.items()}
    sums: dict[str, tuple[str, str]] = {}
    for value in header.get_all("Sha256", ()):
        match = _SHA256.fullmatch(value)
        if match is None:
            raise PatchError(f"{name}: no 'Sha256: PATH before SUM after SUM' in {value!r}")
        sums[match[1]] = (match[2], match[3])
    missing = [key for key in ("Package", "Versions", "What", "Why") if not fields.get(key)]
    if missing or not marker:
        raise PatchError(f"{name}: has no {', '.join(missing) or 'diff'}")
    hunks = dict(_hunks(name, b"--- " + diff))
    if set(hunks) != set(sums):
        raise PatchError(f"{name}: checksums of {sorted(sums)}, but changes of {sorted(hunks)}")
    return Patch(
        name=name,
        package=fields["Package"],
        versions=tuple(part.strip() for part in fields["Versions"].split(",")),
        what=fields["What"],
        why=fields["Why"],
        files=tuple(FilePatch(path, *sums[path], found) for path, found in hunks.items()),
    )


def _hunks(name: str, diff: bytes) -> Iterator[tuple[str, tuple[Hunk, ...]]]:
    """Path and hunks of each file in a unified diff."""
    for part in re.split(rb"^(?=--- a/)", diff, flags=re.MULTILINE)[1:]:
        old_name, new_name, *lines = part.removesuffix(b"\n").split(b"\n")
        path = old_name.removeprefix(b"--- a/").decode()
        if new_name != f"+++ b/{path}".encode() or path.startswith("/") or ".." in path:
            raise PatchError(f"{name}: {path} is renamed, or not a path inside the package")
        found: list[Hunk] = []
        while lines:
            match = _HUNK.match(lines.pop(0))
            if match is None:
                raise PatchError(f"{name}: no @@ line where one is due in {path}")
            body = list(itertools.takewhile(lambda line: line[:1] in _SIGNS, lines))
            del lines[: len(body)]
            old = tuple(line[1:] for line in body if line[:1] != b"+")
            new = tuple(line[1:] for line in body if line[:1] != b"-")
            if (len(old), len(new)) != (int(match[2] or 1), int(match[4] or 1)):
                raise PatchError(f"{name}: a hunk of {path} is cut short")
            found.append(Hunk(int(match[1]), int(match[3]), old, new))
        yield path, tuple(found)


def patch_directory() -> Path:
    """Where the patch files are: in the installed package, else at the top of the checkout. Raises:
    PatchError, in neither."""
    here = Path(__file__).resolve().parent
    for folder in (here / "patches", here.parent.parent / "patches"):
        if any(folder.glob("*.patch")):
            return folder
    raise PatchError("this installation of sglang-sbs has no patches; install it anew")


def load_patches() -> list[Patch]:
    """All patches, newest release first. Raises: PatchError."""
    paths = sorted(patch_directory().glob("*.patch"))
    patches = [parse_patch(path.stem, path.read_bytes()) for path in paths]
    patches.sort(key=lambda p: version_key(p.versions[0]), reverse=True)
    return sorted(patches, key=lambda p: p.package)


def version_key(version: str) -> tuple[int, ...]:
    """Release number with its post-release: ``(0, 5, 10, 1)`` of ``0.5.10.post1``."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))
