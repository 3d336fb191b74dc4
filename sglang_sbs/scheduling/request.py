"""The scheduler's record of one request, which every part of it reads."""

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
    """Nobody has counted the prompt."""
    told_tokens: int = 0
    """Its length as announced, until an engine has counted it."""
    exclude: tuple[InstanceId, ...] = ()
    blocks: Sequence[int] = ()
    """Names of its full KV pages (see :class:`~sglang_sbs.scheduling.events.RequestArrived`)."""
    block_tokens: int = 0
    session: str = ""
    priority: int = 0
    """Larger is more urgent, as are the next two bounded."""
    ttft_slo_s: float | None = None
    tenant: str = ""
    hits: Hits = NO_HITS
    """L_hit per rank, as of when it was last looked up."""
    upcoming: Sequence[Upcoming] = ()
    """Ranks that will have some of it, as of then."""
    hits_version: int = -1
    upcoming_version: int = -1
    cached_tokens: int = 0
    """L_hit of the rank it was sent to."""
    decode_hits: dict[int, int] = field(default_factory=dict)
    """While decode ranks are chosen: tokens of the prompt in their caches, by position."""
    total_tokens: int = 0
    """Prompt plus expected output: what it will occupy in decode."""
    key: float = 0.0
    """Place in the policy's order, smallest first; fixed at arrival."""
    waited_batches: int = 0
    """How many left without it that it could have been in. 0 means newly arrived."""
    waited_cycles: float = 0.0
    """``r.wait`` of Algorithm 2. As many batches as there are instances are a cycle."""
    waits_for: WaitReason | None = None
    """Why it is still here, as far as a decision looked at it."""
    waits: tuple[Waited, ...] = ()
    """Whenever that changed."""
    first_batch: int = 0
    """The number of the last batch that left before it arrived."""
    prefill: tuple[InstanceId, int] | None = None
    decode: tuple[InstanceId, int] | None = None
    prefilled: bool = False
    uncached_tokens: int = field(init=False)
    """L(r) - L_hit(r, d) on the rank that has most of it."""

    def __post_init__(self) -> None:
        self.uncached_tokens = self.prompt_tokens - self.hits.best_tokens

    def resize(self, prompt_tokens: int) -> None:
        """Its prompt is taken to be this long, before anybody looked at its hits."""
        self.prompt_tokens = self.uncached_tokens = prompt_tokens

    def allowed_on(self, instances: Sequence[_Instance]) -> Sequence[_Instance]:
        """A retry avoids the instances it failed on, while there are others."""
        if not self.exclude:
            return instances
        return [one for one in instances if one.id not in self.exclude] or instances

    def may_use(self, instance: _Instance, instances: Iterable[_Instance]) -> bool:
        """Whether it is one of those; asked often, so all are looked at only if they must be."""
        exclude = self.exclude
        return instance.id not in exclude or all(one.id in exclude for one in instances)

    def hit_tokens(self, instance: InstanceId, rank: int) -> int:
        """L_hit(r, d)."""
        hits = self.hits.by_instance.get(instance)
        return hits[rank] if hits is not None else 0

    def fetch_tokens(self, instance: InstanceId, rank: int) -> int:
        """Of these, what the rank must get from shared storage first."""
        fetched = self.hits.to_fetch.get(instance)
        return fetched[rank] if fetched is not None else 0

    @property
    def cached_until(self) -> int | None:
        """The last block of it that some rank has: requests with the same one share a prefix that
        is worth having."""
        if not self.hits.best_tokens:
            return None
        return self.blocks[self.hits.best_tokens // self.block_tokens - 1]

    def uncached_tokens_on(self, instance: InstanceId) -> int:
        """L(r) - L_hit(r, d) on the best rank of one instance."""
        hits = self.hits.by_instance.get(instance)
        return self.prompt_tokens - max(hits) if hits is not None else self.prompt_tokens


def uncached_tokens_of(requests: Iterable[Request]) -> int:
    return sum(r.uncached_tokens for r in requests)
