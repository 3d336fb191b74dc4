"""A site-packages folder with a small package, and a patch for it, made on the spot."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from sglang_sbs.patching.patch_file import Patch, parse_patch, sha256

OLD = {
    "sglang/first.py": "def one():\n    return 1\n",
    "sglang/deep/second.py": "import os\n\n\ndef two():\n    return os.sep\n",
}
NEW = {
    "sglang/first.py": "def one():\n    call()\n    return 1\n",
    "sglang/deep/second.py": "import os\n\n\ndef two():\n    call()\n    return os.sep\n",
}


def patch_text(old: dict[str, bytes], new: dict[str, bytes], **head: str) -> bytes:
    """A patch file as people would write it."""
    fields = {"Package": "sglang", "Versions": "0.5.9", "What": "calls.", "Why": "to call."} | head
    lines = [f"{name}: {value}\n".encode() for name, value in fields.items()]
    diff: list[bytes] = []
    for path, before in old.items():
        after = new[path]
        sums = f"Sha256: {path}\n  before {sha256(before)}\n  after  {sha256(after)}\n"
        lines.append(sums.encode())
        diff += difflib.diff_bytes(
            difflib.unified_diff,
            [line + b"\n" for line in before.split(b"\n")],
            [line + b"\n" for line in after.split(b"\n")],
            f"a/{path}".encode(),
            f"b/{path}".encode(),
            lineterm=b"\n",
        )
    return b"".join([*lines, b"\n", *diff])


def as_bytes(texts: dict[str, str]) -> dict[str, bytes]:
    return {path: text.encode() for path, text in texts.items()}


def a_patch(**head: str) -> Patch:
    return parse_patch("fake-0.5.9", patch_text(as_bytes(OLD), as_bytes(NEW), **head))


@dataclass
class Site:
    """An installed release."""

    root: Path

    @classmethod
    def make(
        cls, root: Path, version: str = "0.5.9", name: str = "sglang", files: dict[str, str] = OLD
    ) -> Site:
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        info = root / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        return cls(root)

    def content(self) -> dict[str, str]:
        return {path: (self.root / path).read_text() for path in OLD}

    def info(self) -> Path:
        return next(self.root.glob("*.dist-info"))

    def leftovers(self) -> list[Path]:
        return list(self.root.rglob(".sglang-sbs-*"))
