"""How much arrives: over which time it is measured."""

from __future__ import annotations

import pytest
from harness.learned_instance import instance
from msgspec.structs import replace

from sglang_sbs.scheduling.policies.offered_load import OfferedLoad
from sglang_sbs.scheduling.policies.tuning import TUNING


@pytest.mark.parametrize(("fixed_s", "passes"), [(0.01, False), (1.0, True)])
def test_slow_passes_are_given_time_to_tell_a_rate(fixed_s: float, passes: bool) -> None:
    """One request a second for a minute, then a pause: after a pass of a second little is forgotten
    of what comes in one; where passes are short, three seconds are a long time."""
    engine = instance("p0", 4)
    engine.model.formula = replace(engine.model.formula, fixed_s=fixed_s)
    offered = OfferedLoad()
    offered.on_topology_change([engine])
    for second in range(60):
        offered.on_arrived(100, float(second))
        offered.measure([engine], float(second))
    assert offered.request_rate == pytest.approx(1.0, rel=0.25)
    before = offered.request_rate
    offered.measure([engine], 59.0 + TUNING.least_window_s)
    kept = offered.request_rate / before
    assert (kept > 0.7) == passes
