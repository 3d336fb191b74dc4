"""How much there is to read in the default policy.

``python -m tools.policy_shape`` counts lines and decision points per module, and follows the queue
through the calls that :meth:`AdaptiveTrigger.plan` makes. A decision point is an ``if``, ``elif``,
conditional expression, further operand of ``and`` or ``or``, loop (in a comprehension as well),
condition of a comprehension, or ``except``. ``--of DIR`` counts another checkout.

The walk reads the source only. Calls are followed in the order of the text into each function of
the package that is given the queue, or an object with a field that holds it. Each function is
entered once. A *stay* is a run of calls in one module; a return is a stay in a module that the walk
has been in before.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools import CHECKOUT

POLICIES = "sglang_sbs/scheduling/policies"
COUNTED = ("adaptive/*.py", "pbaa.py")
START = "AdaptiveTrigger.plan"
FOLLOWED = "RequestQueue"
_HELD = {"queue", "view", "_view", "_one"}
"""Attributes that are the queue, or hold it, in this checkout and in older ones."""


def decision_points(tree: ast.AST) -> int:
    """See the module's description."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
    return count


@dataclass
class Source:
    """Functions and classes of the policies, by module and name."""

    functions: dict[str, tuple[str, ast.FunctionDef]] = field(default_factory=dict)
    """Module and definition of each function by name; methods are ``Class.name``."""
    holders: set[str] = field(default_factory=lambda: {FOLLOWED})
    """Classes of objects with a field that holds the queue."""

    def read(self, root: Path) -> None:
        trees = {path.stem: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
        for module, tree in trees.items():
            for node in tree.body:
                if isinstance(node, ast.FunctionDef):
                    self.functions[node.name] = module, node
                elif isinstance(node, ast.ClassDef):
                    for method in node.body:
                        if isinstance(method, ast.FunctionDef):
                            self.functions[f"{node.name}.{method.name}"] = module, method
        classes = [n for tree in trees.values() for n in tree.body if isinstance(n, ast.ClassDef)]
        while found := {cls.name for cls in classes if self._holds(cls)} - self.holders:
            self.holders |= found

    def _holds(self, cls: ast.ClassDef) -> bool:
        fields = [node.annotation for node in cls.body if isinstance(node, ast.AnnAssign)]
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                fields += [a.annotation for a in node.args.args if a.annotation is not None]
        return any(self.is_holder(annotation) for annotation in fields)

    def is_holder(self, annotation: ast.AST | None) -> bool:
        """Whether an annotation names the queue, or an object that holds it."""
        nodes = ast.walk(annotation) if annotation is not None else ()
        return any(isinstance(node, ast.Name) and node.id in self.holders for node in nodes)

    def walk(self, name: str) -> Iterator[str]:
        """The module of each function that the queue passes through, and of its caller after it."""
        yield from self._walk(name, set())

    def _walk(self, name: str, entered: set[str]) -> Iterator[str]:
        module, function = self.functions[name]
        entered.add(name)
        yield module
        held = {arg.arg for arg in function.args.args if self.is_holder(arg.annotation)}
        for node in _in_order(function):
            if isinstance(node, ast.Assign) and self._makes_holder(node.value, name):
                targets = [node for target in node.targets for node in ast.walk(target)]
                held |= {target.id for target in targets if isinstance(target, ast.Name)}
            if isinstance(node, ast.Call) and self._is_given(node, held):
                called = self._called(node, name)
                if called is not None and called not in entered:
                    yield from self._walk(called, entered)
                    yield module

    def _makes_holder(self, value: ast.AST, caller: str) -> bool:
        if not isinstance(value, ast.Call):
            return False
        called = self._called(value, caller)
        made = value.func.id if isinstance(value.func, ast.Name) else ""
        returns = self.functions[called][1].returns if called in self.functions else None
        return made in self.holders or self.is_holder(returns)

    def _is_given(self, call: ast.Call, held: set[str]) -> bool:
        """Whether an argument, or the object of a method, is the queue, holds it or comes of it."""
        given = [*call.args, *[keyword.value for keyword in call.keywords]]
        if isinstance(call.func, ast.Attribute):
            given.append(call.func.value)
        nodes = [node for value in given for node in ast.walk(value)]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        return bool(names & held or attributes & _HELD)

    def _called(self, call: ast.Call, caller: str) -> str | None:
        """The function that is called, if its name is clear."""
        if isinstance(call.func, ast.Name):
            name = call.func.id
            return next(
                (known for known in (name, f"{name}.__init__") if known in self.functions), None
            )
        if isinstance(call.func, ast.Attribute):
            if ast.unparse(call.func.value).endswith("queue"):
                return None  # the queue is outside the policies
            method, own = call.func.attr, f"{caller.partition('.')[0]}.{call.func.attr}"
            if isinstance(call.func.value, ast.Name) and call.func.value.id == "self":
                return own if own in self.functions else None
            named = [known for known in self.functions if known.endswith(f".{method}")]
            return named[0] if len(named) == 1 else None
        return None


def _in_order(function: ast.FunctionDef) -> list[ast.Assign | ast.Call]:
    """The nodes of a function in the order of the text; the arguments of a call before it."""
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.Call)]
    return sorted(nodes, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0))


def stays(modules: Iterator[str]) -> list[str]:
    """The modules of a walk, each run of the same one once."""
    found: list[str] = []
    for module in modules:
        if not found or found[-1] != module:
            found.append(module)
    return found


def main() -> None:
    """Print the table and the walk."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--of", type=Path, default=CHECKOUT, metavar="DIR", help="checkout")
    root = parser.parse_args().of / POLICIES
    lines = points = 0
    for path in sorted(path for pattern in COUNTED for path in root.glob(pattern)):
        text = path.read_text()
        own = decision_points(ast.parse(text))
        lines, points = lines + text.count("\n"), points + own
        print(f"{path.stem:18}{text.count(chr(10)):6} lines{own:5} decision points")
    print(f"{'all':18}{lines:6} lines{points:5} decision points")
    source = Source()
    source.read(root)
    walked = stays(source.walk(START))
    rooms = set(walked)
    print(f"{len(walked)} stays in {len(rooms)} modules, {len(walked) - len(rooms)} returns:")
    print("  " + " > ".join(walked))


if __name__ == "__main__":
    main()
