"""Plans of clusters with fixed ports, and the flags of their processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, ClusterOptions, ClusterPlan, plan_cluster

DP_ATTENTION = ("--tp", "2", "--dp", "2", "--enable-dp-attention")


def blocks() -> Iterator[int]:
    return itertools.count(20000, PORTS_PER_INSTANCE)


def plan(**options: Any) -> ClusterPlan:
    defaults = {"model_path": "/models/tiny", "log_dir": Path("/logs")}
    return plan_cluster(ClusterOptions(**{**defaults, **options}), blocks())


def value(argv: tuple[str, ...], flag: str) -> str:
    """The value of a flag that is there once."""
    assert argv.count(flag) == 1, (flag, argv)
    return argv[argv.index(flag) + 1]
