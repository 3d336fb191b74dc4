"""Names in the documentation exist, and flags, variables, metrics and generated parts are
documented."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import sglang_parser
from command_checks import our_variables
from doc_commands import ROOT, pages

from benchmarks.compare_routers.contenders import BY_NAME
from sglang_sbs.engine import config as hook
from sglang_sbs.router.options.arguments import build_parser
from sglang_sbs.router.options.stock import REFUSED_FLAGS
from sglang_sbs.simulator.cli import build_parser as build_simulate_parser

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w*-])")
SMG_SECTION = re.compile(r"^## Flags of smg 1\.13.*?(?=^## )", re.MULTILINE | re.DOTALL)
"""Names flags that nothing here has, on purpose."""
OF_OTHERS = {
    "--directory",
    "--file",
    "--from-literal",
    "--replicas",
    "--namespace",
    "--profile",
    "--build",
    "--rm",
    "--wait",
    "--tag",
    "--target",
    "--upgrade",
}
"""Flags of pip, docker, kubectl, patch and the like."""
MOST_PICTURE_BYTES = 200 * 1024
QUOTED_WITHIN = 0.05
"""Accepted difference between a quoted simulation and the present scheduler's, as a share."""


def named(pattern: re.Pattern[str]) -> dict[str, str]:
    """Return the matches in the documentation, each with a page that has it."""
    return {
        match: str(page.relative_to(ROOT))
        for page in pages()
        for match in pattern.findall(SMG_SECTION.sub("", page.read_text()))
    }


def router_flags(*, hidden: bool = True) -> set[str]:
    actions = build_parser()._actions
    shown = [a for a in actions if hidden or a.help != argparse.SUPPRESS]
    return {flag for action in shown for flag in action.option_strings}


@cache
def flags_in_source() -> set[str]:
    """Return the flags of every parser of this project: read in the source, since some are in
    scripts."""
    folders = ("sglang_sbs", "benchmarks", "tools")
    code = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    sources = [*code, *(ROOT / "scripts").iterdir()]
    sources += [path for path in (ROOT / "examples").rglob("*") if path.is_file()]
    return {
        flag
        for path in sources
        if path.suffix in ("", ".py", ".sh", ".env")
        for flag in re.findall(r"[\"'\s(\[](--[a-z][a-z0-9-]*)", path.read_text(errors="replace"))
    }


def test_every_sbs_flag_of_the_router_is_documented() -> None:
    names = ("reference/router-flags.md", "tuning.md")
    text = "".join((ROOT / "docs" / name).read_text() for name in names)
    flags = {flag for flag in router_flags(hidden=False) if flag.startswith("--sbs-")}
    assert len(flags) > 15
    assert {flag for flag in flags if not re.search(rf"{flag}(?![\w-])", text)} == set()


def test_every_documented_sbs_flag_is_the_router_s_or_the_simulator_s() -> None:
    simulate = build_simulate_parser()
    known = router_flags() | {f for a in simulate._actions for f in a.option_strings}
    documented = {flag: page for flag, page in named(FLAG).items() if flag.startswith("--sbs-")}
    assert {flag: page for flag, page in documented.items() if flag not in known} == {}


def test_the_simulator_s_sbs_flags_are_the_router_s() -> None:
    simulate = build_simulate_parser()
    flags = {f for a in simulate._actions for f in a.option_strings if f.startswith("--sbs-")}
    assert flags
    assert flags <= router_flags()


def test_every_other_documented_flag_exists() -> None:
    """Each is in one of our parsers, in SGLang's or in sglang_router's."""
    if not sglang_parser.is_installed():
        pytest.skip("SGLang is not installed (scripts/install --router-only)")
    known = router_flags() | flags_in_source() | {f"--{name}" for name in REFUSED_FLAGS} | OF_OTHERS
    unknown = {
        flag: page
        for flag, page in named(FLAG).items()
        if flag not in known
        and f"--{flag.removeprefix('--no-')}" not in known  # argparse's BooleanOptionalAction
        and "unrecognized" in sglang_parser.refusal(["--model-path", "MODEL", flag])
        and "unrecognized" in sglang_parser.refusal(["--model-path", "MODEL", flag, "1"])
    }
    assert unknown == {}


def test_variables_exist_and_those_of_the_hook_are_documented() -> None:
    own = {v for v in vars(hook).values() if isinstance(v, str) and v.startswith("SGLANG_SBS_")}
    endforward = (ROOT / "docs" / "endforward.md").read_text()
    assert {name for name in own if name not in endforward} == set()
    assert set(named(re.compile(r"SGLANG_SBS_[A-Z_]*[A-Z]"))) <= our_variables()


def test_every_error_code_is_documented() -> None:
    raised = re.compile(r"RouterError\(\s*\d+, \"([a-z_]+)\"")
    codes = {
        code
        for path in (ROOT / "sglang_sbs/router").rglob("*.py")
        for code in raised.findall(path.read_text())
    }
    assert len(codes) > 15
    of_legs = re.compile(r"f\"\{(?:leg|role)\}(_[a-z_]+)\"")
    errors = (ROOT / "sglang_sbs/router/errors.py").read_text()
    codes |= {leg + end for end in of_legs.findall(errors) for leg in ("prefill", "decode")}
    assert "prefill_answer_too_large" in codes
    page = (ROOT / "docs/reference/errors.md").read_text()
    assert {code for code in codes if f"`{code}`" not in page} == set()


def test_every_documented_metric_is_exported() -> None:
    """It is found by its name in the source; a counter's there may lack the ``_total``."""
    source = "".join(
        path.read_text()
        for folder in ("router", "dashboard")
        for path in (ROOT / "sglang_sbs" / folder).rglob("*.py")
    )
    exported = set(re.findall(r"\"((?:sbs|smg)_[a-z_0-9]+)\"", source))
    assert len(exported) > 40
    metric = re.compile(r"`((?:sbs|smg)_[a-z_0-9]+[a-z0-9])(?:\{[^`]*\})?`")
    policies = {"sbs_paper", "sbs_basic", "sbs_equal", "sbs_iqr", "sbs_potential"} | set(BY_NAME)
    suffixes = re.compile(r"_(total|bucket|sum|count)$")
    assert {
        name: page
        for name, page in named(metric).items()
        if name not in exported | policies and suffixes.sub("", name) not in exported
    } == {}


def test_the_timeline_can_be_drawn_again(tmp_path: Path) -> None:
    committed = ROOT / "docs" / "images" / "timeline.png"
    drawn = tmp_path / "timeline.png"
    script = [sys.executable, str(ROOT / "scripts" / "draw-timeline"), "--out", str(drawn)]
    result = subprocess.run(script, capture_output=True, text=True, check=True)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert drawn.stat().st_size < MOST_PICTURE_BYTES
    assert committed.stat().st_size < MOST_PICTURE_BYTES
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    quoted = re.search(r"(\d+) ms and (\d+) ms", page)
    assert quoted is not None
    simulated = [int(ms) for ms in re.findall(r"mean TTFT (\d+) ms", result.stdout)]
    assert simulated == pytest.approx([int(ms) for ms in quoted.groups()], rel=QUOTED_WITHIN)


def test_pictures_are_small() -> None:
    pictures = [p for p in (ROOT / "docs").rglob("*") if p.suffix in (".png", ".svg", ".gif")]
    assert {p.name for p in pictures if p.stat().st_size > MOST_PICTURE_BYTES} == set()


def test_the_readme_stays_short_and_pictured() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    picture = next(i for i, line in enumerate(lines) if line.startswith("!["))
    assert picture < 30


@pytest.mark.parametrize(
    "page",
    [
        "docs/architecture.md",
        "docs/cache.md",
        "docs/differences.md",
        "docs/request-path.md",
        "docs/scheduling.md",
        "docs/security.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
    ],
)
def test_named_modules_exist(page: str) -> None:
    files = {
        str(p.relative_to(ROOT))
        for folder in ("sglang_sbs", "benchmarks", "tests", "tools")
        for p in (ROOT / folder).rglob("*.py")
    }
    named_files = re.findall(r"`([\w/]+\.py)`", (ROOT / page).read_text())
    assert [n for n in named_files if not any(f"/{f}".endswith(f"/{n}") for f in files)] == []


def test_the_architecture_page_says_which_package_may_import_which() -> None:
    """Coarser than the table of walls, which is by room and has `console` too."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    documented = {
        package: set(re.findall(r"`(\w+)`", rooms))
        for package, rooms in re.findall(
            r"^\| `sglang_sbs/(\w+)` \| [^|]* \| ([^|]*)\|$", page, re.MULTILINE
        )
    }
    walls = tomllib.loads((ROOT / "tests" / "walls.toml").read_text())["may_import"]
    allowed = {
        package: {
            name.partition(".")[0]
            for room, names in walls.items()
            if room.partition(".")[0] == package
            for name in names
        }
        & documented.keys() - {package, "console"}
        for package in documented
    }
    packages = {path.parent.name for path in (ROOT / "sglang_sbs").glob("*/__init__.py")}
    assert documented.keys() == packages
    assert documented == allowed


def test_named_scripts_exist() -> None:
    scripts = named(re.compile(r"(?<![\w/])scripts/[a-z][\w-]*[a-z](?![\w*-])"))
    assert {name: page for name, page in scripts.items() if not (ROOT / name).exists()} == {}


def as_documented(default: object) -> str:
    """Return a default in the form of the pages."""
    return f"{default:g}" if isinstance(default, float) else str(default or "none")


def test_the_tuning_guide_names_the_simulator_s_sbs_flags() -> None:
    page = (ROOT / "docs" / "tuning.md").read_text()
    named_there = re.search(r"Of the router's it takes (.*?)\.\n", page, re.DOTALL)
    assert named_there is not None
    flags = {f for a in build_simulate_parser()._actions for f in a.option_strings}
    assert set(FLAG.findall(named_there[1])) == {f for f in flags if f.startswith("--sbs-")}


def test_the_tuning_guide_gives_the_router_s_defaults() -> None:
    defaults = {f: a.default for a in build_parser()._actions for f in a.option_strings}
    page = (ROOT / "docs" / "tuning.md").read_text()
    rows = re.findall(r"^\| \[[^|]*\| (`--[^|]*) \| ([^|]*) \|", page, re.MULTILINE)
    documented = {
        flag.strip("`"): default.strip("`")
        for flags, values in rows
        for flag, default in zip(flags.split(", "), values.split(", "), strict=True)
        if flag.startswith("`--sbs-")
    }
    assert len(documented) > 8
    assert documented == {flag: as_documented(defaults[flag]) for flag in documented}


def test_the_router_s_module_map_is_complete() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    _, _, module_map = page.partition("## Modules of the router")
    modules = {path.stem for path in (ROOT / "sglang_sbs" / "router").rglob("*.py")} - {"__init__"}
    mapped = set(re.findall(r"`(\w+)`", module_map))
    assert (modules - mapped, mapped - modules) == (set(), set())
