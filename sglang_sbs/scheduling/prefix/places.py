"""What the prefix index knows of an instance, its DP ranks, and requests that were sent there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_sbs.scheduling.events import InstanceId, PrefixSource


@dataclass(slots=True)
class Rank:
    """A DP rank, until it loses everything."""

    bit: int
    claims: OrderedDict[int, float] = field(default_factory=OrderedDict)
    """Blocks that nobody published, with the time when they lapse; oldest claim first."""


@dataclass(slots=True)
class Place:
    """One instance."""

    id: InstanceId
    source: PrefixSource
    block_tokens: int
    capacity_blocks: int
    ranks: list[Rank]
    is_up: bool = True
    shares_storage: bool = False


@dataclass(slots=True)
class Sent:
    """A request that was sent, until its prefill is done."""

    place: Place
    rank: int
    blocks: Sequence[int]
    visible_s: float
    visible: bool = False
