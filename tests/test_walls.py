"""Which room may import which: the table is ``walls.toml``, with every exception by name.

The list of exceptions can only shrink: one that is not needed any more has to go, too.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "walls.toml"
PACKAGE = "sglang_sbs"
FOLDERS = (PACKAGE, "benchmarks", "tools")


@dataclass(frozen=True)
class Import:
    """``file`` imports ``module``; ``for_types``: under TYPE_CHECKING only."""

    file: str
    line: int
    module: str
    for_types: bool

    @property
    def exception(self) -> str:
        """Entry of this import in the list of exceptions."""
        return f"{self.file} -> {self.module}"


@cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {dotted(path): path for path in paths}


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: str, source: str, known: set[str]) -> Iterator[Import]:
    """Yield the imports of modules in ``known``, wherever in the file they are."""
    tree = ast.parse(source)
    typing_only = {
        id(inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inside in ast.walk(statement)
    }
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in known else node.module for name in names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        for name in dict.fromkeys(found):
            if name in known:
                yield Import(file, node.lineno, name, id(node) in typing_only)


@cache
def all_imports() -> tuple[Import, ...]:
    known = set(modules())
    return tuple(
        imported
        for path in modules().values()
        for imported in imports_of(str(path.relative_to(ROOT)), path.read_text(), known)
    )


@dataclass(frozen=True)
class Walls:
    """``may_import``: by room. Exceptions are lists of ``file -> module``, circles the names inside
    each package."""

    may_import: dict[str, list[str]]
    exceptions: list[str]
    exceptions_for_types: list[str]
    circles: dict[str, list[str]]
    circles_for_types: dict[str, list[str]]

    def room(self, module: str) -> str | None:
        """The longest name in the table that begins the module's."""
        parts = module.removeprefix(f"{PACKAGE}.").split(".")
        names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next((name for name in names if name in self.may_import), None)

    def allowed(self, room: str) -> set[str]:
        """The rooms that this one may import, with wildcards filled in."""
        found = set()
        for name in self.may_import[room]:
            whole = name.removesuffix(".*")
            found.add(name)
            if whole != name:
                inside = {r for r in self.may_import if r == whole or r.startswith(f"{whole}.")}
                found |= inside - {room}
        return {name for name in found if not name.endswith(".*")}

    def forbids(self, imported: Import) -> bool:
        """Leaving exceptions aside."""
        if imported.module == PACKAGE:
            return False
        here = self.room(
            imported.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        )
        there = self.room(imported.module)
        if here is None or there is None:
            return True
        return there != here and there not in self.allowed(here)

    def broken(self, for_types: bool) -> list[Import]:
        """Return the imports that the table forbids."""
        return [
            imported
            for imported in all_imports()
            if imported.for_types == for_types and self.forbids(imported)
        ]


@cache
def walls() -> Walls:
    table = tomllib.loads(TABLE.read_text())
    lists = table.get("exceptions", {})
    imports = [lists.get(name, []) for name in ("imports", "for_types")]
    return Walls(table["may_import"], *imports, table["circles"], table["circles_for_types"])


@pytest.mark.parametrize("for_types", [False, True], ids=["imports", "for types"])
def test_every_import_is_allowed(for_types: bool) -> None:
    here = walls()
    excused = here.exceptions_for_types if for_types else here.exceptions
    assert [
        f"{imported.file}:{imported.line} imports {imported.module}"
        for imported in here.broken(for_types)
        if imported.exception not in excused
    ] == []


@pytest.mark.parametrize("for_types", [False, True], ids=["imports", "for types"])
def test_every_exception_is_needed(for_types: bool) -> None:
    here = walls()
    excused = here.exceptions_for_types if for_types else here.exceptions
    needed = {imported.exception for imported in here.broken(for_types)}
    assert [imported for imported in excused if imported not in needed] == []
    assert len(set(excused)) == len(excused)


def test_nothing_in_the_package_needs_the_checkout() -> None:
    assert [
        f"{imported.file}:{imported.line} imports {imported.module}"
        for imported in all_imports()
        if imported.file.startswith(f"{PACKAGE}/") and not imported.module.startswith(PACKAGE)
    ] == []


def test_every_module_has_a_room_and_every_room_is_there() -> None:
    here, known = walls(), set(modules())
    named = {name.removesuffix(".*") for names in here.may_import.values() for name in names}
    assert {
        name
        for name in named | set(here.may_import)
        if name not in known and f"{PACKAGE}.{name}" not in known
    } == set()
    assert named <= set(here.may_import)
    assert [name for name in known - {PACKAGE} if here.room(name) is None] == []


def test_the_table_has_no_circle() -> None:
    here = walls()
    left = {room: here.allowed(room) for room in here.may_import}
    while left:
        free = {room for room, needs in left.items() if not needs & set(left)}
        assert free, f"a circle among {sorted(left)}"
        left = {room: needs for room, needs in left.items() if room not in free}


Graph = dict[str, set[str]]
"""Names, and the names that each needs."""


def siblings(imports: Iterable[Import], *, for_types: bool = False) -> dict[str, Graph]:
    """Return by package which module or package in it imports which other one, lazily or not.

    A package's own ``__init__`` is left out: it may gather what is inside. ``for_types``: count
    imports under TYPE_CHECKING as well.
    """
    found: dict[str, Graph] = {}
    for imported in imports:
        here, there = dotted(ROOT / imported.file).split("."), imported.module.split(".")
        same = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(here, there, strict=False))
        )
        counts = for_types or not imported.for_types
        if counts and same < min(len(here), len(there)):
            graph = found.setdefault(".".join(here[:same]), {})
            graph.setdefault(here[same], set()).add(there[same])
    return found


def in_circles(graph: Graph) -> set[str]:
    """Return the names that import each other."""
    left = {name: needs - {name} for name, needs in graph.items()}
    while True:
        needed = set().union(*left.values())
        kept = {name for name, needs in left.items() if needs & set(left) and name in needed}
        if kept == set(left):
            return kept
        left = {name: left[name] & kept for name in kept}


def test_every_circle_in_a_package_is_named() -> None:
    here = walls()
    for excused, for_types in ((here.circles, False), (here.circles_for_types, True)):
        graphs = siblings(all_imports(), for_types=for_types)
        found = {package: sorted(in_circles(graph)) for package, graph in graphs.items()}
        assert {package: names for package, names in found.items() if names} == excused


def test_a_circle_would_be_noticed() -> None:
    imports = [
        Import(f"sglang_sbs/a/{file}.py", 1, f"sglang_sbs.{module}", for_types)
        for file, module, for_types in [
            ("b/x", "a.c.y", False),
            ("c/z", "a.d", False),
            ("d", "a.b.w", False),
            ("b/x", "a.b.w", False),
            ("b/w", "a.b.x", True),
            ("e", "a.b.x", False),
            ("__init__", "a.e", False),
        ]
    ]
    for for_types, inside in ((False, set()), (True, {"w", "x"})):
        graphs = siblings(imports, for_types=for_types)
        assert {package: in_circles(graph) for package, graph in graphs.items()} == {
            "sglang_sbs.a": {"b", "c", "d"},
            "sglang_sbs.a.b": inside,
        }


def test_a_broken_wall_would_be_noticed() -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from sglang_sbs.router.server import Router\n"
        "def lazily():\n"
        "    import sglang_sbs.router.errors\n"
        "    from sglang_sbs.router import lanes, server\n"
    )
    file = "sglang_sbs/engine/hooks.py"
    found = [
        imported
        for imported in imports_of(file, source, set(modules()))
        if walls().forbids(imported)
    ]
    assert [(imported.line, imported.module, imported.for_types) for imported in found] == [
        (3, "sglang_sbs.router.server", True),
        (5, "sglang_sbs.router.errors", False),
        (6, "sglang_sbs.router.lanes", False),
        (6, "sglang_sbs.router.server", False),
    ]


def test_no_test_module_is_imported_by_another() -> None:
    """Shared code is in ``tests/harness``, or in a module beside them without tests."""
    tests = ROOT / "tests"
    imported = re.compile(r"^\s*(?:from|import) test_\w+", re.M)
    found = {path.name: imported.findall(path.read_text()) for path in tests.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}
