"""The policies by name, and what others must know of each without knowing how it decides.
:mod:`.policies.selection` makes the policy that a name stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Policy = Literal[
    "sbs",
    "round_robin",
    "random",
    "random_rank",
    "power_of_two",
    "least_requests",
    "least_tokens",
    "stale_tokens",
    "eta",
    "cache_aware",
    "session",
    "sgl_router",
    "llm_d",
]
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """What a policy looks at besides the router's own books."""

    reads_reports: bool = False
    """Engines' reports of their passes."""
    reads_prefixes: bool = False
    """What ranks have cached."""
    unheard: Policy | None = None
    """What takes its place where nothing is heard of engines; ``None``: it can do without."""


_FACTS: dict[str, PolicyFacts] = {
    "sbs": PolicyFacts(reads_reports=True, reads_prefixes=True, unheard="least_tokens"),
    "eta": PolicyFacts(reads_reports=True, unheard="least_tokens"),
    "stale_tokens": PolicyFacts(unheard="least_tokens"),
    "sgl_router": PolicyFacts(reads_prefixes=True),
    "llm_d": PolicyFacts(reads_reports=True, reads_prefixes=True, unheard="least_tokens"),
}


def facts_of(policy: object) -> PolicyFacts:
    """Of a policy's name; of anything else what is true of most."""
    return _FACTS.get(policy, PolicyFacts()) if isinstance(policy, str) else PolicyFacts()
