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
OK_STATES: tuple[State, ...] = ("patched", "unneeded")

DESCRIPTION = """\
Lets sglang-sbs into releases that cannot be extended: SGLang before 0.5.11 (the hook that
publishes EndForward) and sglang_router 0.3.2 (--policy sbs). It changes two files of the package,
only if they are those of the release to the byte, and reverts to the very same bytes.
SGLang 0.5.11 and later needs no patch.
"""
EPILOG = """\
examples:
  sglang-sbs patch status                     # what is installed here, and what could be done
  sglang-sbs patch apply                      # in this environment; running it twice is fine
  sglang-sbs patch revert --package sglang    # before upgrading, or for good
  sglang-sbs patch status --site /opt/venv/lib/python3.12/site-packages --json

Restart engines and routers afterwards. Exit code: 0 all is as asked (status: nothing to do),
1 something is not, 2 usage.
"""


@dataclass
class Report:
    """What was found, done or refused for one package."""

    package: str
    version: str
    site: str
    state: State
    message: str
    ok: bool
    patch: str = ""
    what: str = ""
    files: list[dict[str, str]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """The verb."""
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
    add(
        "--package",
        choices=PACKAGES,
        help="only this one (default: every one of them that is installed)",
    )
    add(
        "--version",
        metavar="V",
        help="the release you expect, e.g. 0.5.9: anything else is refused. Of a build from source "
        "that calls itself 0.0.0: the release it was made from",
    )
    add(
        "--site",
        type=Path,
        metavar="DIR",
        help="the site-packages folder to work on (default: those of the interpreter running this)",
    )
    add("--json", action="store_true", help="machine-readable output")
    return parser


def run(
    action: str, package: str | None = None, version: str | None = None, site: Path | None = None
) -> list[Report]:
    """One report for each package concerned. Raises: PatchError, there is nothing to work on."""
    where = str(site) if site is not None else f"this environment ({sys.prefix})"
    if site is not None and not site.is_dir():
        raise PatchError(f"--site {site}: no such folder; name a site-packages folder")
    patches = load_patches()
    wanted = PACKAGES if package is None else (package,)
    found = [item for item in find_installed(site) if item.package in wanted]
    if version is not None and package is None:
        # A release number belongs to one of the packages; the others are not meant.
        meant = {p.package for p in patches if version in p.versions}
        meant |= {item.package for item in found if item.version == version}
        found = [item for item in found if item.package in meant] if meant else found
    if not found:
        raise PatchError(
            f"{where} has no {' or '.join(wanted)}; run this with the Python that runs the engine "
            "or router, or name its site-packages folder with --site"
        )
    return [_one(action, item, patches, version) for item in found]


def _one(action: str, item: Installed, patches: list[Patch], version: str | None) -> Report:
    def report(state: State, message: str, *, ok: bool | None = None) -> Report:
        fine = state in OK_STATES if ok is None else ok
        return Report(item.package, item.version, str(item.root), state, message, fine)

    if item.has_plugins:
        text = f"nothing to patch: {item.package} {item.version} loads plugins by itself"
        return report("unneeded", text)
    if version is not None and item.version != version and not item.is_source_build:
        text = f"{item.package} {item.version} is installed, not {version}"
        return report("no patch", text, ok=False)
    release = version or item.version
    patch = next((p for p in patches if p.package == item.package and release in p.versions), None)
    if patch is None:
        return report("no patch", _no_patch(item, release, patches), ok=action == "revert")
    if item.editable is not None:
        text = (
            f"an editable install of {item.editable}: patch that checkout itself, with\n"
            f"  patch -p1 -d {item.editable} < {patch_directory() / patch.name}.patch"
        )
        return report("editable", text, ok=False)
    changed: list[str] = []
    ok: bool | None = None
    text = ""
    try:
        if action != "status":
            changed = change(item.root, patch, revert=action == "revert")
            done = "applied" if action == "apply" else "reverted"
            text = f"{done}; restart what runs from there" if changed else f"already {done}"
            ok = True
    except PatchError as error:
        text, ok = str(error), False
    files = look(item.root, patch)
    state = state_of(files)
    result = report(state, text or STATUS_TEXTS.get(state) or explain_unknown(files), ok=ok)
    result.patch, result.what, result.changed = patch.name, patch.what, changed
    result.files = [
        {"path": str(file.path), "state": file.state, "sha256": file.sha256} for file in files
    ]
    return result


STATUS_TEXTS: dict[str, str] = {
    "original": "not applied; 'sglang-sbs patch apply' does it",
    "patched": "applied",
    "partly": "applied in part, as an interruption leaves it; apply or revert again",
}


def _no_patch(item: Installed, release: str, patches: list[Patch]) -> str:
    known = [v for p in patches if p.package == item.package for v in p.versions]
    upgrade = ". Or upgrade to 0.5.11 or later, which needs none"
    named = f"{item.package} {release}"
    if item.is_source_build and release == item.version:
        return f"{named} is a build from source: name the release it is made from with --version"
    said = f"no patch for {named}; there are some for {', '.join(known)}"
    return said + upgrade if item.package == "sglang" else said


def _print(report: Report) -> None:
    print(f"{report.package} {report.version} in {report.site}")
    print(f"  {report.message}")
    for path in report.changed:
        print(f"  changed {path}")
    if report.what and report.state == "original" and not report.changed:
        print(f"  what it would do: {report.what}")


if __name__ == "__main__":
    sys.exit(main())
