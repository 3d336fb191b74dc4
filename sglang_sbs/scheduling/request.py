"""The scheduler's record of one request, read by all its parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.prefix.places import NO_HITS, Hits, Upcoming
from sglang_sbs.scheduling.reasons import Waited, WaitReason


class _Named(Protocol):
    id: InstanceId


_Instance = TypeVar("_Instance", bound=_Named)


@dataclass(slots=True, eq=False)
class Request:
    """One request, from arrival to end. Sizes in tokens, times in seconds."""

    rid: str
    order: int
    """Arrival number: the FCFS key."""
    prompt_tokens: int
    max_new_tokens: int | None
    arrived_s: float
    deadline_s: float
    estimated: bool = False
    """The prompt length is an estimate."""
    submitted_tokens: int = 0
    """Submitted length, until an engine has counted it."""
    exclude: tuple[InstanceId, ...] = ()
    blocks: Sequence[int] = ()
    """Names of its full KV pages (see :class:`~sglang_sbs.scheduling.events.RequestArrived`)."""
    block_tokens: int = 0
    session: str = ""
    priority: int = 0
    """Larger is more urgent. This field and the next two are clamped."""
    ttft_slo_s: float | None = None
    tenant: str = ""
    hits: Hits = NO_HITS
    """L_hit per rank, at the time of the last lookup."""
    upcoming: Sequence[Upcoming] = ()
    """Ranks that will have part of it cached, at the time of the last lookup."""
    hits_version: int = -1
    upcoming_version: int = -1
    cached_tokens: int = 0
    """L_hit on the rank it was sent to."""
    decode_hits: dict[int, int] = field(default_factory=dict)
    """Tokens of the prompt cached on decode ranks, by position; set while decode ranks are
    chosen."""
    total_tokens: int = 0
    """Prompt plus expected output: the space it will use in decode."""
    key: float = 0.0
    """Place in the policy's order, smallest first; fixed at arrival."""
    waited_batches: int = 0
    """Number of batches that left without it and could have included it. 0 means newly arrived."""
    waited_cycles: float = 0.0
    """``r.wait`` of Algorithm 2; a cycle is as many batches as there are instances."""
    waits_for: WaitReason | None = None
    """Reason for its waiting in the latest decision about it."""
    waits: tuple[Waited, ...] = ()
    """History of those reasons."""
    first_batch: int = 0
    """Number of the last batch that left before it arrived."""
    prefill: tuple[InstanceId, int] | None = None
    decode: tuple[InstanceId, int] | None = None
    prefilled: bool = False
    uncached_tokens: int = field(init=False)
    """L(r) - L_hit(r, d) on the rank with the largest hit."""

    def __post_init__(self) -> None:
        self.uncached_tokens = self.prompt_tokens - self.hits.best_tokens

    def resize(self, prompt_tokens: int) -> None:
        """Set the prompt length, before any cache lookup."""
        self.prompt_tokens = self.uncached_tokens = prompt_tokens

    def allowed_on(self, instances: Sequence[_Instance]) -> Sequence[_Instance]:
        """Return the usable instances: a retry avoids those it failed on while there are others."""
        if not self.exclude:
            return instances
        return [instance for instance in instances if instance.id not in self.exclude] or instances

    def may_use(self, instance: _Instance, instances: Iterable[_Instance]) -> bool:
        """Return whether one instance is usable; called often, so the others are checked only if
        necessary."""
        exclude = self.exclude
        return instance.id not in exclude or all(instance.id in exclude for instance in instances)

    def hit_tokens(self, instance: InstanceId, rank: int) -> int:
        """L_hit(r, d)."""
        hits = self.hits.by_instance.get(instance)
        return hits[rank] if hits is not None else 0

    def fetch_tokens(self, instance: InstanceId, rank: int) -> int:
        """Return the part of the hit that the rank must first load from shared storage."""
        fetched = self.hits.to_fetch.get(instance)
        return fetched[rank] if fetched is not None else 0

    @property
    def cached_until(self) -> int | None:
        """Name of its last cached block on any rank; requests with the same one share a useful
        prefix."""
        if not self.hits.best_tokens:
            return None
        return self.blocks[self.hits.best_tokens // self.block_tokens - 1]

    def uncached_tokens_on(self, instance: InstanceId) -> int:
        """L(r) - L_hit(r, d) on the best rank of one instance."""
        hits = self.hits.by_instance.get(instance)
        return self.prompt_tokens - max(hits) if hits is not None else self.prompt_tokens


def uncached_tokens_of(requests: Iterable[Request]) -> int:
    return sum(r.uncached_tokens for r in requests)
