"""What was gathered, as the table of features asks for it (:mod:`.table`).

Reads answers of engines and routers that may be anything, and never raises for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_sbs.doctor.checks.endforward import Attribution
from sglang_sbs.doctor.checks.fields import text
from sglang_sbs.doctor.facts import ClusterFacts, EngineFacts
from sglang_sbs.router.engines.urls import alias_key, normalise_worker_url
from sglang_sbs.router.options.shown_options import shown_options
from sglang_sbs.router.workers.worker import SILENT_AFTER_S


class FeatureView:
    """``options`` are those of the router that was asked, else of the command line given."""

    def __init__(self, facts: ClusterFacts) -> None:
        self.facts = facts
        self.prefill = facts.of_role("prefill")
        self.decode = facts.of_role("decode")
        router = facts.router
        self.asked = router is not None and router.failure is None and bool(router.state)
        """A router of ours answered."""
        self.state: dict[str, Any] = router.state if router is not None else {}
        self.options: dict[str, Any] = (
            shown_options(facts.options.router_flags) if router is None else router.options
        )
        self._entries = {
            _alias(text(entry, "url")): entry
            for entry in (router.workers if router is not None else [])
        }

    @property
    def engines(self) -> list[EngineFacts]:
        """Those that can be used."""
        return [*self.prefill, *self.decode]

    @property
    def policy(self) -> str:
        """Empty: not told."""
        return text(self.state, "policy") or text(self.options, "policy")

    def entry(self, engine: EngineFacts) -> dict[str, Any]:
        """The router's entry of ``/workers``; empty if it has none."""
        return self._entries.get(_alias(engine.url), {})

    def problem(self, engine: EngineFacts, kind: str) -> str:
        """What the router has against an engine; empty: nothing of that kind."""
        problems = self.entry(engine).get("problems")
        return text(problems, kind) if isinstance(problems, dict) else ""

    def silent_ranks(self, engine: EngineFacts) -> list[int] | None:
        """DP ranks without EndForward, at the router or here; ``None``: nobody listened."""
        heard: set[int]
        if self.asked:
            heard = {rank for rank, age_s in self._ages(engine) if age_s < SILENT_AFTER_S}
        elif self.facts.heard is not None and self.facts.router is None:
            heard = set(Attribution(self.engines, self.facts.heard).of(engine))
        else:
            return None
        return [rank for rank in range(engine.known.dp_size) if rank not in heard]

    def instances(self, role: str) -> list[dict[str, Any]]:
        """The scheduler's state of each instance, as the router tells it."""
        told = self.state.get(role)
        return [i for i in told if isinstance(i, dict)] if isinstance(told, list) else []

    def _ages(self, engine: EngineFacts) -> Iterator[tuple[int, float]]:
        for instance in self.instances(engine.target.role):
            ranks = instance.get("ranks")
            if instance.get("instance") != engine.url or not isinstance(ranks, list):
                continue
            for number, rank in enumerate(ranks):
                age_s = rank.get("age_s") if isinstance(rank, dict) else None
                if isinstance(age_s, int | float):
                    yield number, float(age_s)


def _alias(url: str) -> tuple[str, int] | None:
    """What URLs of one engine have in common; ``None``: it is no URL."""
    try:
        return alias_key(normalise_worker_url(url))
    except ValueError:
        return None


def plugin_block(engine: EngineFacts) -> dict[str, Any]:
    """What the plugin says of itself in ``/server_info``; empty: it says nothing."""
    block = engine.data.get("sbs")
    return block if isinstance(block, dict) else {}
