"""A prefill instance that has learned nothing, and EndForward messages of its only rank."""

from __future__ import annotations

from typing import Any

from sglang_sbs.scheduling import InstanceUp
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.wire import EndForward

_IDENTITY = {"instance_id": "p0", "boot_id": "b", "role": "prefill", "dp_rank": 0, "dp_size": 1}


def report(**fields: Any) -> EndForward:
    """Return the rank's first heartbeat, changed by the fields."""
    return EndForward(**(_IDENTITY | {"seq": 0, "kind": "heartbeat"} | fields))


def fresh(name: str = "p0", **up: Any) -> PrefillInstance:
    """Return an instance with chunks of 1,000 tokens. ``up``: fields of ``InstanceUp``."""
    given = {"dp_size": 1, "chunk_tokens": 1000} | up
    seen = InstanceUp(instance=name, role="prefill", **given)
    return PrefillInstance(seen, t_default_s=0.3, default_chunk_tokens=1000)
