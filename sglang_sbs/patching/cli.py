"""``sglang-sbs patch``: show, apply and revert patches of the packages installed here."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from sglang_sbs.patching.installed import PACKAGES, Installed, find_installed
from sglang_sbs.patching.patch_file import Patch, PatchError, load_patches, patch_directory
from sglang_sbs.patching.tree import change, explain_unknown, look, state_of

State = Literal["original", "patched", "partly", "unknown", "unneeded", "no patch", "editable"]
STATUS_TEXTS: dict[str, str] = {
    "original": "not applied; 'sglang-sbs patch apply' does it",
    "patched": "applied",
    "partly": "applied in part, as an interruption leaves it; apply or revert again",
}

DESCRIPTION = """\
Lets sglang-sbs into releases that cannot be extended: SGLang before 0.5.11 (the hook that
publishes EndForward) and sglang_router 0.3.2 (--policy sbs). It changes two files of the package,
only if they are those of the release to the byte, and reverts to the very same bytes.
SGLang 0.5.11 and later needs no patch.
"""
EPILOG = """\
examples:
  sglang-sbs patch status                     # installed releases, and patches for them
  sglang-sbs patch apply                      # in this environment; running it twice is fine
  sglang-sbs patch revert --package sglang    # before upgrading, or for good
  sglang-sbs patch status --site /opt/venv/lib/python3.12/site-packages --json

Restart engines and routers afterwards. Exit code: 0 all is as asked (status: nothing to do),
1 something is not, 2 usage.
"""


@dataclass
class PatchReport:
    package: str
    version: str
    site: str
    state: State = "no patch"
    message: str = ""
    ok: bool = False
    patch: str = ""
    what: str = ""
    files: list[dict[str, str]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        reports = run(args.action, args.package, args.version, args.site)
    except PatchError as error:
        if args.json:
            print(json.dumps({"ok": False, "error": str(error), "packages": []}, indent=2))
        else:
            print(f"sglang-sbs patch: {error}", file=sys.stderr)
        return 1
    ok = all(report.ok for report in reports)
    if args.json:
        print(json.dumps({"ok": ok, "packages": [asdict(r) for r in reports]}, indent=2))
    else:
        for report in reports:
            _print(report)
    return 0 if ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-sbs patch",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("action", choices=("status", "apply", "revert"), help="status changes nothing")
    only = "only this one (default: every one of them that is installed)"
    add("--package", choices=PACKAGES, help=only)
    expected = (
        "the release you expect, e.g. 0.5.9: anything else is refused. Of a build from source "
        "that calls itself 0.0.0: the release it was made from"
    )
    add("--version", metavar="V", help=expected)
    site = "the site-packages folder to work on (default: those of the interpreter running this)"
    add("--site", type=Path, metavar="DIR", help=site)
    add("--json", action="store_true", help="machine-readable output")
    return parser


def run(
    action: str, package: str | None = None, version: str | None = None, site: Path | None = None
) -> list[PatchReport]:
    """Return one report per package concerned. Raises: PatchError, nothing to work on."""
    where = str(site) if site is not None else f"this environment ({sys.prefix})"
    if site is not None and not site.is_dir():
        raise PatchError(f"--site {site}: no such folder; name a site-packages folder")
    patches = load_patches()
    wanted = PACKAGES if package is None else (package,)
    found = [item for item in find_installed(site) if item.package in wanted]
    if version is not None and package is None:
        # A release number belongs to one package, so the others are ignored.
        meant = {p.package for p in patches if version in p.versions}
        meant |= {item.package for item in found if item.version == version}
        found = [item for item in found if item.package in meant] if meant else found
    if not found:
        raise PatchError(
            f"{where} has no {' or '.join(wanted)}; run this with the Python that runs the engine "
            "or router, or name its site-packages folder with --site"
        )
    return [_one(action, item, patches, version) for item in found]


def _one(action: str, item: Installed, patches: list[Patch], version: str | None) -> PatchReport:
    report = PatchReport(item.package, item.version, str(item.root))
    named, release = f"{item.package} {item.version}", version or item.version
    patch = next((p for p in patches if p.package == item.package and release in p.versions), None)
    if release != item.version and not item.is_source_build:
        report.message = f"{named} is installed, not {release}"
    elif item.has_plugins:
        report.state, report.ok = "unneeded", True
        report.message = f"nothing to patch: {named} loads plugins by itself"
    elif patch is None:
        report.message, report.ok = _no_patch(item, release, patches), action == "revert"
    elif item.editable is not None:
        report.state = "editable"
        report.message = (
            f"an editable install of {item.editable}: patch that checkout itself, with\n"
            f"  patch -p1 -d {item.editable} < {patch_directory() / patch.name}.patch"
        )
    else:
        _work_on(report, action, item.root, patch)
    return report


def _work_on(report: PatchReport, action: str, root: Path, patch: Patch) -> None:
    """Perform the action, and report the resulting state of the files."""
    report.patch, report.what = patch.name, patch.what
    try:
        if action != "status":
            report.changed = change(root, patch, revert=action == "revert")
            done = "applied" if action == "apply" else "reverted"
            restart = f"{done}; restart what runs from there"
            report.message, report.ok = restart if report.changed else f"already {done}", True
    except PatchError as error:
        report.message = str(error)
    files = look(root, patch)
    report.state = state = state_of(files)
    report.message = report.message or STATUS_TEXTS.get(state) or explain_unknown(files)
    report.ok = report.ok or (action == "status" and state == "patched")
    report.files = [
        {"path": str(file.path), "state": file.state, "sha256": file.sha256} for file in files
    ]


def _no_patch(item: Installed, release: str, patches: list[Patch]) -> str:
    known = [v for p in patches if p.package == item.package for v in p.versions]
    upgrade = ". Or upgrade to 0.5.11 or later, which needs none"
    named = f"{item.package} {release}"
    if item.is_source_build and release == item.version:
        return f"{named} is a build from source: name the release it is made from with --version"
    text = f"no patch for {named}; there are some for {', '.join(known)}"
    return text + upgrade if item.package == "sglang" else text


def _print(report: PatchReport) -> None:
    print(f"{report.package} {report.version} in {report.site}")
    print(f"  {report.message}")
    for path in report.changed:
        print(f"  changed {path}")
    if report.what and report.state == "original" and not report.changed:
        print(f"  what it would do: {report.what}")


if __name__ == "__main__":
    sys.exit(main())
