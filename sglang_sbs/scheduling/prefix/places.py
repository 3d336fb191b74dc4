"""What the prefix index knows of an instance, its DP ranks, and requests that were sent there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_sbs.scheduling.events import InstanceId, PrefixSource


class Hits(NamedTuple):
    """What the ranks have of one prompt, in tokens."""

    by_instance: dict[InstanceId, list[int]]
    """Per DP rank; instances that have nothing of it are not in it."""
    best_tokens: int
    to_fetch: dict[InstanceId, list[int]] = {}  # noqa: RUF012 - nobody changes it
    """Of these: what the rank must get from shared storage first."""


NO_HITS = Hits({}, 0)


@dataclass(slots=True)
class Place:
    """One instance."""

    id: InstanceId
    source: PrefixSource
    block_tokens: int
    ranks: list[Rank] = field(default_factory=list)
    capacity_blocks: int = 1
    is_up: bool = True
    shares_storage: bool = False

    @property
    def shape(self) -> tuple[PrefixSource, int, int]:
        """What cannot change while it keeps what it has."""
        return self.source, self.block_tokens, len(self.ranks)


@dataclass(slots=True, eq=False)
class Rank:
    """A DP rank, until it loses everything."""

    place: Place
    number: int
    bit: int
    claims: OrderedDict[int, float] = field(default_factory=OrderedDict)
    """Blocks that nobody published, with the time when they lapse; oldest claim first."""


@dataclass(slots=True)
class Sent:
    """A request that was sent, until its prefill is done."""

    place: Place
    rank: int
    blocks: Sequence[int]
    visible_s: float
    visible: bool = False
