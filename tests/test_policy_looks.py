"""One look per policy, whoever draws it."""

from __future__ import annotations

import pytest

from benchmarks.compare_routers.contenders import FIELD
from benchmarks.decode.runs import DECODE_POLICIES
from sglang_sbs.scheduling import policy_names
from sglang_sbs.simulator.experiments.policy_looks import LOOKS, base_name, colours_of, words_of
from sglang_sbs.simulator.experiments.sweep import POLICY_CONFIGS

FIELD_NAMES = [contender.name for contender in FIELD]


@pytest.mark.parametrize("names", [policy_names(), POLICY_CONFIGS, DECODE_POLICIES, FIELD_NAMES])
def test_whatever_is_drawn_together_has_a_colour_and_words(names: list[str]) -> None:
    bases = {base_name(name) for name in names}
    assert bases - set(LOOKS) == set()
    assert len({LOOKS[base].colour for base in bases}) == len(bases)
    assert [name for name, _ in words_of(names)] == list(dict.fromkeys(names))


def test_a_colour_does_not_depend_on_the_company() -> None:
    together = colours_of([*reversed(FIELD_NAMES), "new", "newer", "new@delayer"])
    assert all(colours_of([name]) == {name: together[name]} for name in FIELD_NAMES)
    assert together["smg:round_robin"] == together["smg:round_robin@delayer"]
    assert together["new"] == together["new@delayer"] != together["newer"]
    known = {look.colour for look in LOOKS.values()}
    assert not {together["new"], together["newer"]} & known
