"""Hooks without a plugin framework: for SGLang releases before 0.5.11.

Replaces functions and methods of loaded modules by wrapped ones, with the ``register`` and the
three kinds of hooks of SGLang's ``HookRegistry`` (``sglang/srt/plugins/hook_registry.py``,
>= 0.5.11). Reached only in an SGLang that ``sglang-sbs patch`` has taught to call
:func:`sglang_sbs.engine.register`.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable
from typing import Any

_MARK = "_sbs_hooked_by"


class HookType(enum.Enum):
    """As SGLang's: what a hook is called with, relative to the original."""

    BEFORE = "before"
    """``hook(*args, **kwargs)``; its result is ignored."""
    AFTER = "after"
    """``hook(result, *args, **kwargs)``; its result is ignored."""
    AROUND = "around"
    """``hook(original, *args, **kwargs)``; its result is the result."""


class HookRegistry:
    """Hooks take effect at once, in the module or class that owns the target."""

    @staticmethod
    def register(target: str, hook: Callable[..., Any], kind: HookType) -> None:
        """Wrap ``package.module.function`` or ``package.module.Class.method``.

        Registering the same hook again changes nothing: a process may come here twice. Raises:
        LookupError, nothing of that name is loaded.
        """
        owner_name, _, name = target.rpartition(".")
        owner = _find(owner_name)
        original = getattr(owner, name, None)
        if original is None:
            raise LookupError(f"{target} is not there, or not imported yet")
        if getattr(original, _MARK, None) == _identity(hook):
            return
        wrapped = _wrap(original, hook, kind)
        setattr(wrapped, _MARK, _identity(hook))
        setattr(owner, name, wrapped)


def is_loaded(target: str) -> bool:
    """Whether :meth:`HookRegistry.register` would find the target."""
    return _find(target) is not None


def _find(path: str) -> Any:
    """What an imported module has under this name; ``None`` if there is none.

    Importing it here could be too early, or pull an HTTP server into a scheduler process.
    """
    module = path
    while module:
        if sys.modules.get(module) is not None:
            found: Any = sys.modules[module]
            for name in path[len(module) + 1 :].split(".") if path != module else ():
                found = getattr(found, name, None)
            return found
        module = module.rpartition(".")[0]
    return None


def _identity(hook: Callable[..., Any]) -> str:
    return f"{hook.__module__}.{hook.__qualname__}"


def _wrap(
    original: Callable[..., Any], hook: Callable[..., Any], kind: HookType
) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kind is HookType.AROUND:
            return hook(original, *args, **kwargs)
        if kind is HookType.BEFORE:
            hook(*args, **kwargs)
        result = original(*args, **kwargs)
        if kind is HookType.AFTER:
            hook(result, *args, **kwargs)
        return result

    return wrapped
