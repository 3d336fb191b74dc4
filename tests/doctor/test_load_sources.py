"""``doctor --features`` names where the loads of ranks are known from."""

from __future__ import annotations

import pytest

from sglang_sbs.doctor.facts import ClusterFacts, RouterFacts
from sglang_sbs.doctor.features import FeatureView, _load_sources
from sglang_sbs.doctor.options import parse_options


@pytest.mark.parametrize(
    ("tier", "sources", "words"),
    [
        ("endforward", ["endforward"], "EndForward"),
        ("http", ["endforward", "none"], "EndForward and answers of requests and own dispatches"),
        ("interval", ["load_poll"], "/v1/loads and own dispatches"),
        ("", [None], ""),
    ],
)
def test_the_sources_of_loads_are_named_best_first(
    tier: str, sources: list[str | None], words: str
) -> None:
    router = RouterFacts("http://r:1")
    router.state = {
        "prefill": [{"instance": "p", "tier": tier}],
        "decode": [{"instance": "d", "ranks": [{"source": source} for source in sources]}],
    }
    facts = ClusterFacts(parse_options(["--router", "http://r:1"]), [], router=router)
    assert " and ".join(_load_sources(FeatureView(facts))) == words
