"""One look per policy, whoever draws it."""

from __future__ import annotations

import pytest

from sglang_sbs.scheduling import policy_names
from sglang_sbs.simulator.experiments.policy_looks import LOOKS, colours_of, words_of
from sglang_sbs.simulator.experiments.sweep import POLICY_CONFIGS


@pytest.mark.parametrize("names", [policy_names(), POLICY_CONFIGS])
def test_whatever_is_drawn_together_has_a_colour_and_words(names: list[str]) -> None:
    assert set(names) - set(LOOKS) == set()
    assert len({LOOKS[name].colour for name in names}) == len(names)
    assert [name for name, _ in words_of(names)] == list(dict.fromkeys(names))


def test_a_colour_does_not_depend_on_the_company() -> None:
    together = colours_of([*reversed(list(LOOKS)), "new", "newer"])
    assert all(colours_of([name]) == {name: together[name]} for name in LOOKS)
    known = {look.colour for look in LOOKS.values()}
    assert together["new"] != together["newer"]
    assert not {together["new"], together["newer"]} & known
