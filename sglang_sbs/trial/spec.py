"""Settings of a trial, from a flag or from JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sglang_sbs.scheduling.policy_registry import Policy, policy_names, spec_of

SLOT_S = 180.0
LEAST_SLOTS = 6
"""Smallest number of slots of a trial: with fewer than three pairs the interval is infinite."""
MOST_SLOTS = 1000
MOST_SLOT_S = 86_400.0


class TrialSpec(msgspec.Struct, frozen=True):
    """Settings of a trial; times in seconds."""

    baseline: Policy
    slot_s: float = SLOT_S
    slots: int = 40
    """Largest number of slots; even."""
    width: float = 0.1
    """The trial ends when the interval of the ratio is narrower than this."""
    p99_s: float | None = None
    """Limit on TTFT: the trial ends when over 1 % of a slot's requests exceed it. None: no
    limit."""
    refused: float | None = None
    """Limit on the share of a slot's requests that are refused, which ends the trial. None: no
    limit."""
    winner: bool = False
    """True: continue with the faster policy once the difference is certain. False: return to the
    first policy in any case."""
    seed: int | None = None
    """Seed for the order of slots; None: random."""


def parse_text(text: str) -> TrialSpec:
    """Read settings written as ``BASELINE[,slot=180s][,slots=40]...``. Raises: ValueError, with the
    key and an example of a valid value."""
    return read_object(fields_of(text))


def fields_of(text: str) -> dict[str, str]:
    """Split ``BASELINE[,KEY=VALUE]...`` into unchecked fields, as in the body of ``POST /trial``.
    Raises: ValueError, an entry is not KEY=VALUE, or a key comes twice."""
    baseline, *others = text.split(",")
    fields = {"baseline": baseline}
    for other in others:
        key, equals, value = other.partition("=")
        if not equals or key in fields:
            raise ValueError(f"{other[:40]!r}: write KEY=VALUE once per key, with {_KEYS}")
        fields[key] = value
    return fields


def read_object(body: Mapping[str, Any]) -> TrialSpec:
    """Read settings from fields, as in the body of ``POST /trial``; values may be numbers. Raises:
    ValueError, with the key and an example of a valid value."""
    found: dict[str, Any] = {}
    for key, value in body.items():
        if key not in _FIELDS:
            raise ValueError(f"{str(key)[:40]!r} is not one of {_KEYS}")
        name, read = _FIELDS[key]
        try:
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError
            found[name] = read(str(value).strip()[:100])
        except ValueError:
            raise ValueError(f"{key}={str(value)[:40]}: write {_wanted(key)}") from None
    if "baseline" not in found:
        raise ValueError(f"name the baseline: write {_wanted('baseline')}")
    spec = TrialSpec(**found)
    if spec.p99_s is not None and spec.p99_s > spec.slot_s:
        # No request is followed for longer than a slot, so the limit would never be broken.
        raise ValueError(f"p99={spec.p99_s:g}s: write at most one slot ({spec.slot_s:g} s)")
    return spec


def _wanted(key: str) -> str:
    return _WANTED.get(key) or f"a policy: {', '.join(policy_names())}"


def _policy(text: str) -> Policy:
    name = text.lower().replace("-", "_")
    if spec_of(name) is None:
        raise ValueError
    return name


def _number(text: str, low: float, high: float) -> float:
    # Python also reads "1_0", "inf" and "nan".
    if re.fullmatch(r"[0-9.eE+-]{1,24}", text) is None:
        raise ValueError
    value = float(text)
    if not low <= value <= high:
        raise ValueError
    return value


def _seconds(low: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        found = re.fullmatch(r"([0-9.]{1,12})(ms|s|m|min|h|)", text)
        if found is None:
            raise ValueError
        scale = {"ms": 0.001, "m": 60.0, "min": 60.0, "h": 3600.0}.get(found[2], 1.0)
        return _number(str(scale * float(found[1])), low, MOST_SLOT_S)

    return read


def _slots(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value % 2 or not LEAST_SLOTS <= value <= MOST_SLOTS:
        raise ValueError
    return value


def _share(text: str) -> float:
    if text.endswith("%"):
        return _number(text[:-1], 0, 100) / 100
    return _number(text, 0, 1)


def _then(text: str) -> bool:
    if text not in ("back", "winner"):
        raise ValueError
    return text == "winner"


def _seed(text: str) -> int:
    return int(_number(text if text.isdecimal() else "", 0, 2**53))


_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "baseline": ("baseline", _policy),
    "slot": ("slot_s", _seconds(1.0)),
    "slots": ("slots", _slots),
    "width": ("width", lambda text: _number(text, 0, math.inf)),
    "p99": ("p99_s", _seconds(0.001)),
    "refused": ("refused", _share),
    "then": ("winner", _then),
    "seed": ("seed", _seed),
}
"""Field of :class:`TrialSpec` and parser of its value, by key of the settings."""
_KEYS = ", ".join(_FIELDS)
_WANTED = {
    "slot": "a time from 1s to a day, as in slot=180s or slot=5m",
    "slots": f"an even number from {LEAST_SLOTS} to {MOST_SLOTS}",
    "width": "a width of the interval, as in width=0.1",
    "p99": "a time, as in p99=5s",
    "refused": "a share, as in refused=1%",
    "then": "back or winner",
    "seed": "a whole number",
}
