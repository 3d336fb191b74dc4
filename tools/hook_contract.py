"""The needs of the engine plugin in a release of SGLang, read from the sources in its wheel.

Owns the table of ``docs/compatibility.md`` that says for each release which hooks find their target
with the parameters that they count on, and whether the event loops call them in the order that
``sglang_sbs/engine/hooks.py`` describes. Nothing of SGLang is imported. ``python -m
tools.hook_contract`` downloads every release since 0.5.11 and prints the table; the test marked
``registry`` compares it, so that a new release shows as a difference.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from tools import CHECKOUT
from tools.check_patches.command import StepFailed, download

CACHE = CHECKOUT / ".cache" / "hook-contract-2"
"""A small archive for each release: only the files that are read."""
PAGE = CHECKOUT / "docs" / "compatibility.md"
FIRST_RELEASE = (0, 5, 11)
_NEEDED = re.compile(r"sglang/srt/(managers|disaggregation|observability|plugins|utils)/.*\.py")
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_GATHERED = "sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo."
_TIMES = "sglang.srt.observability.req_time_stats."
_TOKENIZERS = "sglang.srt.managers.multi_tokenizer_mixin.write_data_for_multi_tokenizer"
_ROOMS = "sglang.srt.disaggregation.common.conn.CommonKVManager.update_status"

COLUMNS: dict[str, dict[str, tuple[str, ...]]] = {
    "plugin framework": {
        "sglang.srt.plugins.hook_registry.HookRegistry.register": (
            *("cls", "target", "hook", "hook_type"),
        ),
    },
    "messages": {
        _SCHEDULER + "run_batch": ("self", "batch"),
        _SCHEDULER + "process_batch_result": ("self", "batch", "result"),
        _SCHEDULER + "on_idle": ("self",),
        _SCHEDULER + "_add_request_to_queue": ("self", "req"),
        _SCHEDULER + "abort_request": ("self", "recv_req"),
    },
    "`sbs` in `/server_info`": {
        "sglang.srt.utils.common.build_server_info": ("server_args",),
        _TOKENIZERS: ("port_args", "server_args", "scheduler_info"),
    },
    "batch gate": {
        _SCHEDULER + "get_next_disagg_prefill_batch_to_run": ("self",),
        "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.pop_bootstrapped": ("self",),
        _ROOMS: ("self", "bootstrap_room", "status"),
    },
    "gate over hosts": {
        _GATHERED + "_get_local_tensor": ("self", "device"),
        _GATHERED + "all_gather": ("self", "device", "group"),
        _GATHERED + "attention_pairs": (),
        _GATHERED + "can_run_draft_cuda_graph": (),
    },
    "Rust server's nap": {_SCHEDULER + "maybe_init_rust_server": ("self",)},
    "arrival at the server": {
        f"{_TIMES}{stats}ReqTimeStats.{member}": wanted
        for stats in ("APIServer", "DPController", "Scheduler")
        for member, wanted in (("__getstate__", ("self",)), ("created_time", ()))
    },
}
"""Targets of the hooks with the first parameters that the hooks count on, and fields of classes
that are read (without parameters), by column."""
_IDLE = ("on_idle", "self_check_during_idle")
_ORDER = ("get_next_disagg_{}_batch_to_run", "run_batch", "process_batch_result", "on_idle")
"""Order of calls in one turn of an event loop. The overlapped ones may process the turn before
first, too."""

Read = Callable[[str], str | None]
"""The source of a file of the release; None: it has no such file."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Member = ast.FunctionDef | ast.AsyncFunctionDef | ast.AnnAssign


class Release:
    """The sources of one release."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.module = cache(self._module)

    def row(self) -> list[str]:
        """A cell for each column and for the order: ``yes``, or what is otherwise."""
        cells = []
        for targets in COLUMNS.values():
            wrong = [text for each in targets.items() if (text := self._differs(*each))]
            cells.append("; ".join(wrong) or "yes")
        return [*cells, "; ".join(self._disorder()) or "yes"]

    def _module(self, name: str) -> ast.Module | None:
        path = name.replace(".", "/")
        source = self._read(f"{path}.py") or self._read(f"{path}/__init__.py")
        return ast.parse(source) if source is not None else None

    def _differs(self, target: str, wanted: tuple[str, ...]) -> str:
        found, name = self.member(target), target.rpartition(".")[2]
        if found is None or isinstance(found, ast.AnnAssign) is bool(wanted):
            return f"no `{name}`"
        if isinstance(found, ast.AnnAssign):
            return ""
        given = [arg.arg for arg in (*found.args.posonlyargs, *found.args.args)]
        if tuple(given[: len(wanted)]) == wanted:
            return ""
        return f"`{name}({', '.join(given)})`"

    def member(self, target: str) -> Member | None:
        """A function, or a method or field of a class or of one that it inherits from."""
        parts = target.split(".")
        for split in range(len(parts) - 1, 0, -1):
            module = self.module(".".join(parts[:split]))
            if module is not None:
                return self._within(module, parts[split:])
        return None

    def _within(self, module: ast.Module, names: list[str]) -> Member | None:
        for node in module.body:
            if len(names) == 1 and (found := _named(node, names[0])) is not None:
                return found
            if isinstance(node, ast.ClassDef) and len(names) == 2 and node.name == names[0]:
                for inner in node.body:
                    if (found := _named(inner, names[1])) is not None:
                        return found
                for base in node.bases:
                    if (found := self._base(module, base, names[1])) is not None:
                        return found
        return None

    def _base(self, module: ast.Module, base: ast.expr, method: str) -> Member | None:
        if not isinstance(base, ast.Name):
            return None
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == base.id:
                        return self.member(f"{node.module}.{alias.name}.{method}")
        return self._within(module, [base.id, method])

    def _disorder(self) -> Iterator[str]:
        for role in ("prefill", "decode"):
            wanted = [name.format(role) for name in _ORDER]
            module = self.module(f"sglang.srt.disaggregation.{role}")
            loops = [] if module is None else list(_event_loops(module))
            if not loops:
                yield f"no event loop of {role}"
            for loop in loops:
                made = list(_calls(loop, {*wanted, *_IDLE}))
                while made and made[0] != wanted[0]:  # of what came before the turn's batch
                    made.pop(0)
                if not _in_order(wanted, made) or made.index("run_batch") < 1:
                    yield f"`{loop.name}`: {', '.join(made) or 'no calls'}"


def _named(node: ast.stmt, name: str) -> Member | None:
    """The statement, if it defines a function or a field of that name."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node if node.name == name else None
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node if node.target.id == name else None
    return None


def _event_loops(module: ast.Module) -> Iterator[Function]:
    for node in ast.walk(module):
        if isinstance(node, Function) and re.match(r"event_loop_(normal|overlap)_", node.name):
            yield node


def _calls(function: Function, names: set[str]) -> Iterator[str]:
    """The calls of `names` in the order of the source, those of inner functions where these are
    called. Any name of the idle hook is ``on_idle``."""
    inner = {node.name: node for node in function.body if isinstance(node, Function)}

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, Function):
                yield from visit(child)
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if isinstance(node.func, ast.Name) and node.func.id in inner:
                yield from _calls(inner[node.func.id], names)
            elif called in names:
                yield "on_idle" if called in _IDLE else called

    yield from visit(function)


def _in_order(wanted: Iterable[str], made: Iterable[str]) -> bool:
    left = iter(made)
    return all(name in left for name in wanted)


def releases() -> list[str]:
    """Every release on the index since 0.5.11, oldest first. Raises: StepFailed."""
    command = [sys.executable, "-m", "pip", "index", "versions", "sglang"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    listed = re.search(r"Available versions: (.*)", done.stdout)
    if listed is None:
        raise StepFailed(f"pip index versions failed: {done.stderr.strip()[-500:]}")
    return [
        release for release in reversed(listed[1].split(", ")) if numbers(release) >= FIRST_RELEASE
    ]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def sources(version: str, cache_dir: Path = CACHE) -> Path:
    """An archive of what is read of a release. The wheel itself is not kept. Raises: StepFailed."""
    kept = cache_dir / f"sglang-{version}.zip"
    if not kept.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
            part = Path(folder) / "part.zip"
            with (
                zipfile.ZipFile(download("sglang", version, Path(folder))) as wheel,
                zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive,
            ):
                for name in filter(_NEEDED.fullmatch, wheel.namelist()):
                    archive.writestr(name, wheel.read(name))
            part.rename(kept)
    return kept


def row_of(version: str) -> str:
    """The line of the table for a release. Raises: StepFailed."""
    with zipfile.ZipFile(sources(version)) as archive:
        names = set(archive.namelist())
        release = Release(lambda path: archive.read(path).decode() if path in names else None)
        return _line([version, *release.row()])


def header() -> list[str]:
    titles = ["SGLang", *COLUMNS, "order of calls"]
    return [_line(titles), "|" + "---|" * len(titles)]


def rows_of_page() -> list[str]:
    """The table as ``docs/compatibility.md`` has it, without its two first lines."""
    lines = PAGE.read_text().split("\n")
    first = lines.index(header()[0]) + 2
    return lines[first : lines.index("", first)]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("\n".join([*header(), *map(row_of, releases())]))
