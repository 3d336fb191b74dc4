"""Stand-ins for GPU-only packages that SGLang imports on every device.

With them `import triton`, `from torchvision.x import Y` and `import sgl_kernel.z` succeed, so that
SGLang's modules load unmodified; only `site/`, which is on PYTHONPATH of CPU engines alone, brings
them in. Every attribute and every submodule exists; *using* one is an error that names it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class AbsentPackageError(NotImplementedError):
    """A GPU-only package was really used on a CPU engine."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} was reached on a CPU engine, which has only a stand-in for it")


def _member(owner: str, name: str) -> Any:
    """CamelCase is a class, anything else a function; Python's own names are not there."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].isupper():
        return type(name, (AbsentClass,), {"__module__": owner})
    return AbsentFunction(f"{owner}.{name}")


class AbsentModule(types.ModuleType):
    """A module in which any name resolves."""

    def __getattr__(self, name: str) -> Any:
        value = _member(self.__name__, name)
        setattr(self, name, value)
        return value


class _AbsentClassMeta(type):
    """Class attributes of an absent package (enum members, say) exist and are inert."""

    def __getattr__(cls, name: str) -> Any:
        return _member(f"{cls.__module__}.{cls.__name__}", name)


class AbsentClass(metaclass=_AbsentClassMeta):
    """Base of the classes of an absent package: can be subclassed and constructed, nothing else."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **_kwargs: Any) -> None:
        super().__init_subclass__()


class AbsentKernel:
    """A compiled kernel's definition: `kernel[grid](...)` and `kernel(...)` are errors."""

    def __init__(self, qualified_name: str) -> None:
        self.qualified_name = qualified_name
        self.__name__ = qualified_name.rpartition(".")[2]

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise AbsentPackageError(self.qualified_name)

    __getitem__ = __call__


class AbsentFunction(AbsentKernel):
    """A function of an absent package: usable as a decorator, an error when called for a value.

    `@package.jit` and `@package.autotune(configs=…)` run at import time and must pass; a call with
    data arguments is real use.
    """

    def __getattr__(self, name: str) -> Any:
        return _member(self.qualified_name, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and (callable(args[0]) or hasattr(args[0], "__func__")):
            return AbsentKernel(getattr(args[0], "__qualname__", self.qualified_name))
        return super().__call__(*args) if args else self


class NoDriver(AbsentKernel):
    """A device driver that is not there: reading any attribute is an error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AbsentPackageError(f"{self.qualified_name}.{name}")


def decorator(*args: Any, **_kwargs: Any) -> Any:
    """`@decorator` or `@decorator(anything)` over a kernel definition that never runs here."""
    if len(args) == 1 and callable(args[0]):
        return AbsentKernel(getattr(args[0], "__qualname__", args[0].__name__))
    return decorator


class _Submodules(MetaPathFinder, Loader):
    """Answers for every `package.submodule` of one absent package."""

    def __init__(self, package: str) -> None:
        self.prefix = package + "."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self.prefix):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: an `AbsentModule` is complete once created."""


def install(package: str, **members: Any) -> None:
    """Turn the module `package`, being imported, into a stand-in.

    `members` are names that need a real value (`__version__`, pure helpers).
    """
    module = sys.modules[package]
    module.__class__ = AbsentModule
    vars(module).update(members)
    sys.meta_path.append(_Submodules(package))


def cdiv(dividend: int, divisor: int) -> int:
    """Ceiling division (`triton.cdiv`, which SGLang also calls on the host)."""
    return -(dividend // -divisor)


def next_power_of_2(value: int) -> int:
    """Smallest power of two >= value (`triton.next_power_of_2`)."""
    return 1 << (value - 1).bit_length() if value > 0 else 1


def same(value: Any) -> Any:
    """The argument itself (`triton.language.constexpr` wraps constants at import time)."""
    return value
