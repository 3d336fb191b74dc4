"""Describes one router flag: name, accepted values, help and the option field it sets.
:mod:`.table` lists the flags."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

_METAVARS = {"ms": "MS", "secs": "SECONDS", "host": "HOST", "port": "PORT", "policy": "POLICY"}
"""Placeholder of a flag's value in the help, by the last word of the flag."""
_T = TypeVar("_T")
_V = TypeVar("_V")
OF_ITS_FIELD: Any = object()
"""Default of a flag that takes its default from its option field."""


def switch(text: str) -> bool:
    """Mark a flag, as its ``type``, that takes no value. Never called."""
    raise AssertionError(text)


@dataclass(frozen=True, slots=True)
class Option:
    flag: str
    """Name without dashes; accepted as ``--x`` and as ``--router-x``."""
    fields: str
    """Dotted paths of the :class:`~.router_options.RouterOptions` fields that it sets, separated by
    spaces. Empty if other code computes the field."""
    type: Callable[[str], Any] | tuple[str, ...]
    """Parser of the value (or :func:`switch`), or the allowed values."""
    help: str = ""
    """Help text; empty hides the flag from every help."""
    default: Any = OF_ITS_FIELD
    nargs: str | int | None = None
    metavar: str | tuple[str, ...] | None = None
    repeated: bool = False
    """The flag can be repeated."""
    per_s: int = 1
    """Number of the flag's units in a second, e.g. 1000 for ms; the field is in seconds."""
    read: Callable[[Any], Any] | None = None
    """Converts the parsed value to the field's value; ``None``: they are the same. Raises:
    ValueError, the value is invalid."""
    internal: bool = False
    """The flag is passed only between processes of the router."""
    former: str = ""
    """Former name of the flag, still accepted."""
    why_renamed: str = ""
    """Reason for the new name, logged when the former one is used; empty: no warning."""
    completes: Callable[[], Iterable[str]] | None = None
    """Returns values for shell completion if the flag has no fixed choices."""
    hidden: bool = False
    """Hidden from ``--help-all`` because it has no effect with the default policy."""

    @property
    def dest(self) -> str:
        return self.flag.replace("-", "_")

    def value_in(self, args: argparse.Namespace) -> Any:
        """Return the value of the flag's field from parsed arguments. Raises: ValueError, naming
        the flag."""
        value = getattr(args, self.dest)
        if self.per_s != 1:
            return value / self.per_s
        return value if self.read is None else read(f"--{self.flag}", self.read, value)

    def arguments(self, default: Any) -> dict[str, Any]:
        """Return keyword arguments for ``add_argument``; ``default`` is the default of the
        field."""
        shown = bool(self.help) and not self.hidden
        found: dict[str, Any] = {"help": self.help if shown else argparse.SUPPRESS}
        if self.type is switch:
            return found | {"action": "store_true"}
        if isinstance(self.type, tuple):
            found["choices"] = self.type
        else:
            found["metavar"] = self.metavar or _METAVARS.get(self.flag.rpartition("-")[2], "N")
            if self.type is not str:
                found["type"] = self.type
        if self.nargs is not None:
            found["nargs"] = self.nargs
        if self.repeated:
            found["action"] = "append"
        if self.default is not OF_ITS_FIELD:
            default = self.default
        elif self.per_s != 1:
            default *= self.per_s
        if shown and default not in (None, False, ()):
            found["help"] += f" (default: {default})"
        return found if default is None else found | {"default": default}


def read(flag: str, parse: Callable[[_V], _T], value: _V, colon: str = ": ") -> _T:
    """Return ``parse(value)``. Raises: ValueError, with the flag before the message of
    ``parse``."""
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"{flag}{colon}{error}") from None


def prefill_of(entry: Sequence[str]) -> tuple[str, int | None]:
    """Return URL and bootstrap port (``None`` if absent or ``none``) of one ``--prefill``. Raises:
    ValueError, too many words or an invalid port."""
    if len(entry) > 2:
        how = "one URL and one port per --prefill; repeat the flag for further instances"
        raise ValueError(f"{' '.join(entry)}: {how}")
    url, port = entry if len(entry) == 2 else (entry[0], "none")
    if port.lower() == "none":
        return url, None
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        wanted = "the bootstrap port must be a number in 1..65535 or 'none'"
        raise ValueError(f"{url} {port}: {wanted}")
    return url, int(port)


def number(low: float, high: float, what: str, text: str) -> float:
    """Parse a flag's number from ``low`` to ``high``; ``what`` describes it in the error."""
    with contextlib.suppress(ValueError):
        if low <= (value := float(text)) <= high:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}")


def _whole(low: int, high: int, what: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)


seconds = partial(number, 1e-9, 1e9, "a number greater than 0")
"""Positive number, in the unit of its flag."""
non_negative = partial(number, 0, 1e9, "a number >= 0")
share = partial(number, 0, 1, "a number from 0 to 1")
positive_int = partial(_whole, 1, 2**63, "a whole number >= 1")
count = partial(_whole, 0, 2**63, "a whole number >= 0")
port = partial(_whole, 0, 65535, "a port in 0..65535")
