"""Hooks for SGLang releases before 0.5.11, which have no plugin framework. Used only in an SGLang
that ``sglang-sbs patch`` has modified to call :func:`sglang_sbs.engine.register`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

_MARK = "_sbs_hooked_by"


def wrap(target: str, hook: Callable[..., Any], kind: str) -> None:
    """Wrap ``package.module.function`` or ``package.module.Class.method`` of a loaded module at
    once, as SGLang's ``HookRegistry`` (``plugins/hook_registry.py``) does later.

    ``kind``: ``BEFORE`` calls ``hook(*args, **kwargs)`` before the original; ``AROUND`` calls
    ``hook(original, *args, **kwargs)`` in its place. Adding the same hook again changes nothing,
    because a process may run this twice. Raises: AttributeError, it is not loaded
    (:func:`is_loaded`)."""
    owner_name, _, name = target.rpartition(".")
    owner = _find(owner_name)
    original = getattr(owner, name)
    identity = f"{hook.__module__}.{hook.__qualname__}"
    if getattr(original, _MARK, None) == identity:
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kind == "AROUND":
            return hook(original, *args, **kwargs)
        hook(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(wrapped, _MARK, identity)
    setattr(owner, name, wrapped)


def is_loaded(target: str) -> bool:
    """Return whether the dotted name ``target`` exists in a module that is already imported.
    Imports nothing."""
    return _find(target) is not None


def _find(path: str) -> Any:
    """Return the object with this name in an imported module; ``None`` if there is none. Importing
    it here could be too early, or load an HTTP server into a scheduler process."""
    names = path.split(".")
    for depth in range(len(names), 0, -1):
        found: Any = sys.modules.get(".".join(names[:depth]))
        if found is not None:
            for name in names[depth:]:
                found = getattr(found, name, None)
            return found
    return None
