"""Hooks for SGLang releases before 0.5.11, which have no plugin framework.

Wraps functions and methods of loaded modules, with the ``register`` and two kinds of hooks of
SGLang's ``HookRegistry`` (``plugins/hook_registry.py``). Reached only in an SGLang that
``sglang-sbs patch`` has taught to call :func:`sglang_sbs.engine.register`."""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable
from typing import Any

_MARK = "_sbs_hooked_by"


class HookType(enum.Enum):
    """As SGLang's: ``hook(*args, **kwargs)`` before the original, or
    ``hook(original, *args, **kwargs)`` in its place, whose result is the result."""

    BEFORE = "before"
    AROUND = "around"


class HookRegistry:
    """Hooks take effect at once, in the module or class that owns the target."""

    @staticmethod
    def register(target: str, hook: Callable[..., Any], kind: HookType) -> None:
        """Wrap ``package.module.function`` or ``package.module.Class.method``.

        Registering the same hook again changes nothing: a process may come here twice. Raises:
        AttributeError, it :func:`is_loaded` not.
        """
        owner_name, _, name = target.rpartition(".")
        owner = _find(owner_name)
        original = getattr(owner, name)
        identity = f"{hook.__module__}.{hook.__qualname__}"
        if getattr(original, _MARK, None) == identity:
            return

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if kind is HookType.AROUND:
                return hook(original, *args, **kwargs)
            hook(*args, **kwargs)
            return original(*args, **kwargs)

        setattr(wrapped, _MARK, identity)
        setattr(owner, name, wrapped)


def is_loaded(target: str) -> bool:
    """Whether :meth:`HookRegistry.register` would find the target."""
    return _find(target) is not None


def _find(path: str) -> Any:
    """What an imported module has under this name; ``None`` if there is none. Importing it here
    could be too early, or pull an HTTP server into a scheduler process."""
    names = path.split(".")
    for depth in range(len(names), 0, -1):
        found: Any = sys.modules.get(".".join(names[:depth]))
        if found is not None:
            for name in names[depth:]:
                found = getattr(found, name, None)
            return found
    return None
