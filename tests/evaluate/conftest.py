"""Logs of a simulated cluster with a known cost, each made once."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from evaluate_rig import SPEC, Ran, arrivals, ran


@pytest.fixture(scope="session")
def round_robin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Ran]:
    """A run of ``round_robin`` by its seed, each made once."""
    known: dict[int, Ran] = {}

    def by_seed(seed: int) -> Ran:
        if seed not in known:
            log = tmp_path_factory.mktemp("runs") / f"{seed}.events"
            sent = arrivals(seed)
            spec = msgspec.structs.replace(SPEC, seed=100 + seed)
            known[seed] = Ran(log, sent, ran("round_robin", sent, spec, log))
        return known[seed]

    return by_seed
