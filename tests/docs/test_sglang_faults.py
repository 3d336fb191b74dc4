"""Faults of SGLang: the table, the modules that work around them, and the page say the same."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_sbs.router.workers.server_info import MIN_VERSION, parse_version
from tools import CHECKOUT
from tools.sglang_faults import FAULTS, NEWEST, header, rows

PACKAGE = CHECKOUT / "sglang_sbs"
MARK = re.compile(r"# SGLang fault: ([a-z, -]+)")
UPSTREAM = re.compile(r"#(\d{4,6})\b")
SOURCES = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}


def marks() -> set[tuple[str, Path]]:
    """Every mark in the package, and where it is."""
    return {
        (name, module)
        for module, source in SOURCES.items()
        for found in MARK.findall(source)
        for name in found.rstrip(" -").split(", ")
    }


def test_every_fault_is_marked_where_it_is_worked_around_and_nothing_else_is() -> None:
    listed = {(fault.name, Path(module)) for fault in FAULTS for module in fault.modules}
    assert listed == marks()
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_the_range_of_every_fault_is_within_the_supported_releases() -> None:
    newest = parse_version(NEWEST)
    assert newest is not None
    for fault in FAULTS:
        assert fault.first is not None or fault.last is None, fault.name
        first, last = parse_version(fault.first or NEWEST), parse_version(fault.last or NEWEST)
        assert first is not None and last is not None
        # A fault that no supported release has needs no workaround any more.
        assert MIN_VERSION <= first <= last <= newest, fault.name
        assert fault.symptom and fault.goes, fault.name


def test_upstream_numbers_in_the_package_are_in_the_table() -> None:
    named = {
        int(number)
        for source in SOURCES.values()
        for line in source.splitlines()
        if "sglang #" in line
        for number in UPSTREAM.findall(line)
    }
    assert named, "none is named: the pattern is wrong"
    assert named <= {number for fault in FAULTS for number in fault.upstream}


def test_the_page_has_the_table() -> None:
    page = (CHECKOUT / "docs" / "architecture.md").read_text()
    table = "\n".join([*header(), *rows()])
    assert table in page, "put the output of `python -m tools.sglang_faults` into the page"
