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
    """Arrival number, the key of first come first served."""
    prompt_tokens: int
    max_new_tokens: int | None
    arrived_s: float
    deadline_s: float
    estimated: bool = False
    """The prompt length is an estimate."""
    submitted_tokens: int = 0
    """Prompt length as submitted; 0 once an engine has counted the prompt."""
    exclude: tuple[InstanceId, ...] = ()
    blocks: Sequence[int] = ()
    """Names of the prompt's full KV blocks in order (:attr:`.RequestArrived.blocks`)."""
    block_tokens: int = 0
    session: str = ""
    priority: int = 0
    """Larger is more urgent. Clamped to :data:`.MOST_PRIORITY` in either direction."""
    ttft_slo_s: float | None = None
    tenant: str = ""
    hits: Hits = NO_HITS
    """L_hit: prompt tokens cached on each prefill rank, as of the last lookup."""
    upcoming: tuple[Upcoming, ...] = ()
    """Ranks that compute part of the prompt for other requests, as of the last lookup."""
    hits_version: int = -1
    upcoming_version: int = -1
    cached_tokens: int = 0
    """L_hit on the prefill rank that the request was sent to, in tokens."""
    decode_hits: dict[int, int] = field(default_factory=dict)
    """Prompt tokens cached on decode ranks, by index in ``Membership.decode_targets``; set while
    decode ranks are chosen."""
    total_tokens: int = 0
    """Prompt plus expected output, in tokens: the KV space that it will use on decode."""
    key: float = 0.0
    """Sort key in the policy's order, smallest first; fixed at arrival unless the cached prefix
    grows or the policy changes."""
    waited_batches: int = 0
    """Number of batches that could have included the request and left without it. 0: it is new."""
    waited_cycles: float = 0.0
    """``r.wait`` of Algorithm 2, in cycles of as many batches as there are prefill instances."""
    waits_for: WaitReason | None = None
    """Reason for its wait in the latest decision about it; None: none so far."""
    waits: tuple[Waited, ...] = ()
    """Its first reasons for waiting (at most ``MOST_WAITS``), in order."""
    first_batch: int = 0
    """Number of the last batch that left before it arrived."""
    prefill: tuple[InstanceId, int] | None = None
    decode: tuple[InstanceId, int] | None = None
    prefilled: bool = False
    uncached_tokens: int = field(init=False)
    """L(r) - L_hit(r, d): tokens to compute on the prefill rank with the largest hit."""

    def __post_init__(self) -> None:
        self.uncached_tokens = self.prompt_tokens - self.hits.best_tokens

    def resize(self, prompt_tokens: int) -> None:
        """Set the prompt length, before any cache lookup."""
        self.prompt_tokens = self.uncached_tokens = prompt_tokens

    def allowed_on(self, instances: Sequence[_Instance]) -> Sequence[_Instance]:
        """Return the instances that may get the request: a retry avoids those in ``exclude`` while
        there are others."""
        if not self.exclude:
            return instances
        return [instance for instance in instances if instance.id not in self.exclude] or instances

    def may_use(self, instance: _Instance, instances: Iterable[_Instance]) -> bool:
        """Return whether the request may go to ``instance``, one of ``instances``: the rule of
        :meth:`allowed_on`, which checks the others only if necessary."""
        exclude = self.exclude
        return instance.id not in exclude or all(instance.id in exclude for instance in instances)

    def hit_tokens(self, instance: InstanceId, rank: int) -> int:
        """Return L_hit(r, d): prompt tokens cached on this rank, as of the last lookup."""
        hits = self.hits.by_instance.get(instance)
        return hits[rank] if hits is not None else 0

    def fetch_tokens(self, instance: InstanceId, rank: int) -> int:
        """Return the tokens of the hit that the rank must first load from shared storage."""
        fetched = self.hits.to_fetch.get(instance)
        return fetched[rank] if fetched is not None else 0

    @property
    def cached_until(self) -> int | None:
        """Name of the last block of the longest cached prefix; None: no rank has any. Requests with
        the same one share a useful prefix."""
        if not self.hits.best_tokens:
            return None
        return self.blocks[self.hits.best_tokens // self.block_tokens - 1]

    def uncached_tokens_on(self, instance: InstanceId) -> int:
        """Return the tokens to compute, L(r) - L_hit(r, d), with the largest hit on the
        instance."""
        hits = self.hits.by_instance.get(instance)
        return self.prompt_tokens - max(hits) if hits is not None else self.prompt_tokens


def uncached_tokens_of(requests: Iterable[Request]) -> int:
    return sum(r.uncached_tokens for r in requests)
