"""The registry of policies by name: ours, those of installed packages, and those of modules named
in an environment variable. ``policies.selection`` creates the policy for a name."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, get_args

Policy = str
"""Name of a policy."""
DecodeChoice = Literal["sbs", "fewest_requests", "power_of_two", "round_robin"]
"""Rule for decode DP ranks. ``sbs``: as set with ``--sbs-decode``."""

GROUP = "sglang_sbs.policies"
"""Entry-point group. The name of an entry point is the name of its policy, the object is its
:class:`PolicySpec`."""
MODULES = "SGLANG_SBS_POLICIES"
"""Environment variable: comma-separated modules with policies that are not packaged yet. Each
module has ``POLICIES``, a sequence of :class:`PolicySpec`."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class PolicyError(ValueError):
    """A policy is unusable. The message gives the reason, for the policy's author."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A policy: how to create it, the inputs it uses, and its documentation."""

    name: str
    """Name for ``--policy``: lower-case letters, digits and underscores."""
    make: Callable[[Any], Any]
    """Creates a ``PrefillPolicy`` from a ``PolicyContext`` (both in ``policies.policy``)."""
    decode: DecodeChoice = "fewest_requests"
    reads_reports: bool = False
    """The policy uses engines' reports of their passes (EndForward)."""
    reads_prefixes: bool = False
    """The policy uses ``request.hits``, the prefixes cached on each rank."""
    fallback: Policy | None = None
    """Policy used instead by a front end that cannot reach the scheduler, and so gets no reports of
    engines; None: this one works without."""
    summary: str
    """One sentence on the policy's behavior."""
    choose_when: str
    needs: str = "Nothing of the engines."
    """Inputs that the policy needs, and their source."""
    trade_offs: str
    """Costs and weaknesses of the policy."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise PolicyError(
                f"policy name {self.name!r}: lower-case letters, digits and underscores, 64 at most"
            )
        if self.decode not in get_args(DecodeChoice):
            choices = ", ".join(get_args(DecodeChoice))
            raise PolicyError(
                f"policy {self.name!r}: decode={self.decode!r} is not one of {choices}"
            )


_specs: dict[str, PolicySpec] = {}
_broken: dict[str, str] = {}
"""Reason of the failure, for each policy of another package that could not be loaded."""


def register(spec: PolicySpec) -> None:
    """Add a policy. Raises: PolicyError: another policy has the name."""
    if _specs.setdefault(spec.name, spec) is not spec:
        raise PolicyError(f"policy {spec.name!r}: another policy has this name")


def policy_names() -> tuple[Policy, ...]:
    """Return the names of all policies, ours first."""
    _look()
    return tuple(_specs)


def broken() -> dict[Policy, str]:
    """Return the installed policies that failed to load, with the reason of each."""
    _look()
    return dict(_broken)


def spec_of(name: object) -> PolicySpec | None:
    """Return the spec of a policy; None: no policy has this name."""
    if not isinstance(name, str):
        return None
    if name not in _specs:
        _look()
    return _specs.get(name)


def require(name: str) -> PolicySpec:
    """Return the spec of a policy. Raises: PolicyError: it does not exist, or failed to load."""
    spec = spec_of(name)
    if spec is None and name in _broken:
        raise PolicyError(f"{name!r} could not be loaded: {_broken[name]}")
    if spec is None:
        raise PolicyError(f"{name!r} is not one of {', '.join(_specs)}")
    return spec


def reads_reports(name: object) -> bool:
    """Return whether the policy with this name uses EndForward; False if there is none."""
    spec = spec_of(name)
    return spec is not None and spec.reads_reports


def reads_prefixes(name: object) -> bool:
    """Return whether the policy with this name uses cached prefixes; False if there is none."""
    spec = spec_of(name)
    return spec is not None and spec.reads_prefixes


@cache
def _look() -> None:
    """Load the policies of other packages, once. One that fails is recorded in ``_broken`` and does
    not affect the others."""
    for name, load in _of_others():
        try:
            for spec in load():
                if spec.fallback is not None and spec.fallback not in _specs:
                    raise PolicyError(f"fallback={spec.fallback!r} is not a policy loaded before")
                register(spec)
        except Exception as error:  # third-party code
            _broken[name] = f"{type(error).__name__}: {error}"


def _of_others() -> Iterator[tuple[str, Callable[[], list[PolicySpec]]]]:
    for module in filter(None, map(str.strip, os.environ.get(MODULES, "").split(","))):
        yield module, lambda: list(importlib.import_module(module).POLICIES)  # noqa: B023
    for entry in entry_points(group=GROUP):
        yield entry.name, lambda: [_named(entry.name, entry.load())]  # noqa: B023


def _named(name: str, spec: object) -> PolicySpec:
    if not isinstance(spec, PolicySpec):
        raise PolicyError(f"the entry point is a {type(spec).__name__}, not a PolicySpec")
    if spec.name != name:
        raise PolicyError(f"the entry point's name is {name!r}, its policy's {spec.name!r}")
    return spec
