"""``scripts/check-patches``: every patch on the very release it is for.

Owns the matrix: download, apply, compile, drive the patched code (:mod:`.probe`), revert, compare.
Must not know how any of it is done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_sbs.patching import cli
from sglang_sbs.patching.patch_file import Patch, PatchError, load_patches
from tools import CHECKOUT
from tools.check_patches.probe import (
    CACHED_TOKENS,
    DP_RANK,
    DP_SIZE,
    KV_CAPACITY,
    KV_EVICTABLE,
    KV_FREE,
    PROMPT_TOKENS,
)

STEPS = (
    *("download", "not called", "apply", "compile", "import", "called", "revert", "same bytes"),
)
_IMPORT_NAME = {"sglang": "sglang", "sglang-router": "sglang_router"}

DESCRIPTION = """\
Downloads every release there is a patch for, applies the patch to an unpacked copy, compiles and
imports what it touches, drives the release's own event loops for a few turns to see that the hook
is called (and is not without the patch), reverts, and compares the whole tree byte for byte.
Nothing of this machine's installation is touched.
"""
EPILOG = """\
examples:
  scripts/check-patches                          # all releases, kept in .cache/releases
  scripts/check-patches --only sglang-0.5.9      # one patch
  scripts/check-patches --cache /var/cache/x --json

Exit code: 0 every step of every release succeeded, 1 otherwise.
"""


class StepFailed(Exception):
    """A step of the matrix went wrong; the message says how."""


@dataclass
class Row:
    """One release."""

    release: str
    patch: str
    steps: dict[str, str] = field(default_factory=dict)
    """``ok``, or what went wrong, by step; steps after a failure are missing."""

    @property
    def ok(self) -> bool:
        return list(self.steps.values()) == ["ok"] * len(STEPS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the matrix; 1 if anything failed."""
    parser = argparse.ArgumentParser(
        prog="scripts/check-patches",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(".cache/releases"),
        metavar="DIR",
        help="where downloads are kept (default: .cache/releases)",
    )
    parser.add_argument("--only", metavar="PATCH", help="one patch, by the name of its file")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    args = parser.parse_args(argv)
    patches = [patch for patch in load_patches() if args.only in (None, patch.name)]
    if not patches:
        names = ", ".join(patch.name for patch in load_patches())
        print(f"check-patches: no patch {args.only}; one of {names}", file=sys.stderr)
        return 2
    rows = []
    console = Console(stderr=True)
    for patch in patches:
        for version in patch.versions:
            console.print(f"{patch.package} {version} …", highlight=False)
            rows.append(check_release(patch, version, args.cache))
    ok = all(row.ok for row in rows)
    if args.json:
        matrix = [
            {"release": r.release, "patch": r.patch, "ok": r.ok, "steps": r.steps} for r in rows
        ]
        print(json.dumps({"ok": ok, "matrix": matrix}, indent=2))
    else:
        print_matrix(rows)
    return 0 if ok else 1


def print_matrix(rows: Sequence[Row]) -> None:
    """A table of what happened, then every failure in full."""
    table = Table(box=None, pad_edge=False)
    for name in ("release", *STEPS):
        table.add_column(name)
    for row in rows:
        cells = (row.steps.get(step, "-") for step in STEPS)
        table.add_row(row.release, *("ok" if cell == "ok" else cell[:12] for cell in cells))
    Console(width=120).print(table)
    for row in rows:
        for step, text in row.steps.items():
            if text != "ok":
                print(f"\n{row.release}, {step}: {text}")


def check_release(patch: Patch, version: str, cache: Path) -> Row:
    """All steps for one release, in a folder that is gone afterwards."""
    row = Row(f"{patch.package} {version}", patch.name)
    with tempfile.TemporaryDirectory(prefix="sglang-sbs-patches-") as folder:
        site = Path(folder)
        for step, act in _steps(patch, version, cache, site):
            try:
                act()
                row.steps[step] = "ok"
            except (StepFailed, PatchError, OSError, zipfile.BadZipFile) as error:
                row.steps[step] = str(error) or type(error).__name__
                break
    return row


def _steps(
    patch: Patch, version: str, cache: Path, site: Path
) -> Iterator[tuple[str, Callable[[], None]]]:
    before: dict[str, str] = {}
    scripts = ("router",) if patch.package == "sglang-router" else ("main", "prefill", "decode")

    def download_and_unpack() -> None:
        with zipfile.ZipFile(download(patch.package, version, cache)) as wheel:
            wheel.extractall(site)
        before.update(checksums(site))

    def not_called() -> None:
        what = scripts[-1]
        if _was_called(what, probe(site, what)):
            raise StepFailed(f"{what}: our code is called without the patch")

    def apply() -> None:
        paths = [file.path for file in patch.files]
        for changed in (paths, []):  # twice: the second time there is nothing to do
            report = _patch("apply", patch, version, site)
            if report.state != "patched" or report.changed != changed:
                raise StepFailed(f"{report.state}: {report.message}, changed {report.changed}")

    def compile_touched() -> None:
        for file in patch.files:
            try:
                py_compile.compile(str(site / file.path), doraise=True)
            except py_compile.PyCompileError as error:
                raise StepFailed(str(error)) from error

    answers: dict[str, dict[str, Any]] = {}

    def import_them() -> None:
        answers.update((what, probe(site, what)) for what in scripts)
        touched = {file.path.removesuffix(".py").replace("/", ".") for file in patch.files}
        imported = {name for answer in answers.values() for name in answer["imported"]}
        if not touched <= imported:
            raise StepFailed(f"not imported: {', '.join(sorted(touched - imported))}")

    def called() -> None:
        problems = [text for what, answer in answers.items() for text in _problems(what, answer)]
        if problems:
            raise StepFailed("; ".join(problems))

    def revert() -> None:
        report = _patch("revert", patch, version, site)
        if report.state != "original" or not report.changed:
            raise StepFailed(f"{report.state}: {report.message}")

    def same_bytes() -> None:
        after = checksums(site)
        different = sorted(
            path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
        )
        if different:
            raise StepFailed(f"not as before: {', '.join(different[:5])}")

    actions = (download_and_unpack, not_called, apply, compile_touched, import_them, called)
    yield from zip(STEPS, (*actions, revert, same_bytes), strict=True)


def _patch(action: str, patch: Patch, version: str, site: Path) -> cli.PatchReport:
    (report,) = cli.run(action, patch.package, version, site)
    return report


def download(package: str, version: str, cache: Path) -> Path:
    """The wheel of a release, from ``cache`` or the package registry. Raises: StepFailed."""
    name = f"{_IMPORT_NAME[package]}-{version}-*.whl"
    found = sorted(cache.glob(name))
    if not found:
        cache.mkdir(parents=True, exist_ok=True)
        # Into a folder of its own: what is in the cache is complete.
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary", ":all:", "--dest", folder, f"{package}=={version}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise StepFailed(f"pip download failed: {done.stderr.strip()[-500:]}")
            for wheel in Path(folder).glob("*.whl"):
                shutil.move(wheel, cache / wheel.name)
        found = sorted(cache.glob(name))
    if not found:
        raise StepFailed(f"pip downloaded no {name}")
    return found[0]


def checksums(site: Path) -> dict[str, str]:
    """Return the checksum of every file but bytecode, by path."""
    return {
        str(path.relative_to(site)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(site.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }


# What the patched code does ---------------------------------------------------------------------


def probe(site: Path, what: str) -> dict[str, Any]:
    """Run :mod:`.probe` in a process of its own. Raises: StepFailed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    command = [sys.executable, "-m", "tools.check_patches.probe", str(site), what]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=CHECKOUT
    )
    if done.returncode != 0:
        raise StepFailed(f"{what}: {done.stderr.strip()[-1500:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _was_called(what: str, answer: dict[str, Any]) -> bool:
    if what == "router":
        return bool(answer["handed_over"])
    if what == "main":
        return answer["boot_id_of_children"] != [None] or "sbs" in answer["server_info"]
    return bool(answer["messages"])


def _problems(what: str, answer: dict[str, Any]) -> list[str]:
    """Return the differences between a probe's answer and the wanted one."""
    if what == "router":
        wanted: dict[str, Any] = {"exit_code": 7, "stock_policy": "random"}
        return _differences(what, answer, wanted) + (
            [] if len(answer["handed_over"]) == 1 else ["router: not handed over"]
        )
    if what == "main":
        (boot_id,) = answer["boot_id_of_children"]
        shown = answer["server_info"].get("sbs", {}).get("boot_id")
        return [] if boot_id and shown == boot_id else [f"main: boot id {boot_id}, shown {shown}"]
    return _problems_of_messages(what, answer)


def _problems_of_messages(role: str, answer: dict[str, Any]) -> list[str]:
    messages = answer["messages"]
    kinds = [message["kind"] for message in messages]
    wanted_kinds = ["launch", "forward", "idle"] if role == "prefill" else ["forward"]
    if kinds != wanted_kinds:
        return [f"{role}: messages {kinds} instead of {wanted_kinds}"]
    computed = PROMPT_TOKENS - CACHED_TOKENS
    common = {
        "role": role,
        "dp_rank": DP_RANK,
        "dp_size": DP_SIZE,
        "tokens_per_rank": [0, computed],
        "extend_tokens": computed if role == "prefill" else 0,
        "running_requests": 0 if role == "prefill" else 1,
        "accepted_requests": 1,
        "kv_tokens": KV_CAPACITY - KV_FREE - KV_EVICTABLE,
        "boot_id": "boot-of-main",
        "sglang_version": answer["version"],
        "hook_errors": 0,
    }
    problems = [text for message in messages for text in _differences(role, message, common)]
    if [message["rids"] for message in messages] != [["r1"], *([[]] * (len(messages) - 1))]:
        problems.append(f"{role}: the request is not named once, at first")
    return problems


def _differences(what: str, found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [
        f"{what}: {name} is {found[name]!r} instead of {value!r}"
        for name, value in wanted.items()
        if found[name] != value
    ]


if __name__ == "__main__":
    sys.exit(main())
