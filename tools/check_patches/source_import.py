"""Import single modules of a package for real, and nothing of what they need.

Owns stand-ins that take everything: any module that was not asked for imports as one whose every
name is an :class:`Anything`, which can be called, subclassed, iterated (empty), compared and used
as a decorator that changes nothing. So the code of one release of SGLang can be looked at and
driven on a machine that has neither CUDA nor the versions of torch and transformers it was made
for. Must not know SGLang. Where a package is installed but its GPU parts are not, see
:mod:`tools.cpu_engine.absent_package`.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv"),
    *("mod", "rmod", "pow", "rpow", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rshift"),
    *("neg", "pos", "abs", "invert", "getitem", "matmul", "rmatmul"),
)


class Anything:
    """Takes whatever is done to it, and is empty, zero and false in comparisons."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = Anything()
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return args[0]  # used as a decorator
        return Anything()

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __contains__(self, _item: object) -> bool:
        return False

    def __setitem__(self, _key: object, _value: object) -> None:
        return None

    def __enter__(self) -> Any:
        return Anything()

    def __exit__(self, *_error: object) -> None:
        return None

    def __index__(self) -> int:
        return 0

    def __int__(self) -> int:
        return 0

    def __float__(self) -> float:
        return 0.0

    def __lt__(self, _other: object) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __lt__

    def __instancecheck__(self, _instance: object) -> bool:
        return False

    def __subclasscheck__(self, _subclass: type) -> bool:
        return False


def _operate(_self: Anything, *_args: object) -> Anything:
    return Anything()


for _name in _OPERATORS:
    setattr(Anything, f"__{_name}__", _operate)


class _StandIn(types.ModuleType):
    __all__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name != "__version__":
            raise AttributeError(name)
        value = Anything()
        setattr(self, name, value)
        return value


class _StandInLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Complete once created."""


class _Finder(MetaPathFinder):
    def __init__(self, site: Path, modules: Iterable[str], keep: Iterable[str]) -> None:
        self._site = site
        self._modules = frozenset(modules)
        self._parents = {
            parent for name in self._modules for parent in _parents(name)
        } - self._modules
        self._keep = frozenset(keep) | sys.stdlib_module_names

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self._keep:
            return None
        if fullname in self._modules:
            folder = self._site.joinpath(*fullname.split(".")[:-1])
            return importlib.machinery.PathFinder.find_spec(fullname, [str(folder)])
        if not self._may_exist(fullname):
            return None
        spec = ModuleSpec(fullname, _StandInLoader(), is_package=True)
        if fullname in self._parents:
            spec.submodule_search_locations = [str(self._site.joinpath(*fullname.split(".")))]
        return spec

    def _may_exist(self, fullname: str) -> bool:
        """A package in ``site`` has the modules that it has; any other has every module."""
        parts = fullname.split(".")
        if not (self._site / parts[0]).is_dir():
            return True
        path = self._site.joinpath(*parts)
        return path.is_dir() or any(path.parent.glob(f"{parts[-1]}.*"))


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def import_from(site: Path, modules: Iterable[str], keep: Iterable[str]) -> None:
    """From now on import ``modules`` from ``site``, all else but ``keep`` as stand-ins.

    For a process of its own: it changes what every later import means.

    Args:
        site: a folder that packages are unpacked in.
        modules: full names; packages above them are stand-ins, their ``__init__`` does not run.
        keep: top-level packages that are imported as usual, besides the standard library.
    """
    sys.path.insert(0, str(site))
    sys.meta_path.insert(0, _Finder(site, modules, keep))
