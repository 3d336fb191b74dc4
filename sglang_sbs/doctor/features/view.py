"""What was gathered, as the table of features asks for it (:mod:`.rules`).

Reads answers of engines and routers that may be anything, and never raises for them.
"""

from __future__ import annotations

from typing import Any

from sglang_sbs.doctor.checks.endforward import Attribution, alias_of
from sglang_sbs.doctor.facts import ClusterFacts, EngineFacts, RouterFacts, text
from sglang_sbs.router.options.shown_options import shown_options
from sglang_sbs.router.workers.worker import SILENT_AFTER_S


class FeatureView:
    """``options`` are those of the router that was asked, else of the command line given."""

    def __init__(self, facts: ClusterFacts) -> None:
        self.facts = facts
        self.prefill = facts.of_role("prefill")
        self.decode = facts.of_role("decode")
        self.engines = [*self.prefill, *self.decode]
        self._router = router = facts.router or RouterFacts("")
        self.asked = router.failure is None and bool(router.state)
        """A router of ours answered."""
        self.state = router.state
        self.options: dict[str, Any] = (
            shown_options(facts.options.router_flags) if facts.router is None else router.options
        )
        self._entries = {alias_of(text(entry, "url")): entry for entry in router.workers}
        self.instances = router.instances

    @property
    def policy(self) -> str:
        """Empty: not told."""
        return text(self.state, "policy") or text(self.options, "policy")

    def entry(self, engine: EngineFacts) -> dict[str, Any]:
        """The router's entry of ``/workers``; empty if it has none."""
        return self._entries.get(alias_of(engine.url), {})

    def problem(self, engine: EngineFacts, kind: str) -> str:
        """What the router has against an engine; empty: nothing of that kind."""
        problems = self.entry(engine).get("problems")
        return text(problems, kind) if isinstance(problems, dict) else ""

    def silent_ranks(self, engine: EngineFacts) -> list[int] | None:
        """DP ranks without EndForward, at the router or here; ``None``: nobody listened."""
        heard: set[int]
        if self.asked:
            ages_s = self._router.ages_s(engine.url)
            heard = {
                n for n, age_s in ages_s.items() if age_s is not None and age_s < SILENT_AFTER_S
            }
        elif self.facts.heard is not None and self.facts.router is None:
            heard = set(Attribution(self.engines, self.facts.heard).of(engine))
        else:
            return None
        return [rank for rank in range(engine.known.dp_size) if rank not in heard]
