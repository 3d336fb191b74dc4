"""What the prefix index knows of an instance, its DP ranks, and requests that were sent there, of
which some share a prefix with others while their ranks compute it."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_sbs.scheduling.events import InstanceId, PrefixSource

_MOST = 8
"""So many requests with the same beginning that are on their way are looked at, newest ones."""


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
    page_tokens: int
    block_tokens: int = 0
    """The size of its known blocks: a page, or several pages without KV events."""
    ranks: list[Rank] = field(default_factory=list)
    capacity_tokens: int = 0
    capacity_blocks: int = 1
    is_up: bool = True
    shares_storage: bool = False

    @property
    def shape(self) -> tuple[PrefixSource, int, int]:
        """What cannot change while it keeps what it has."""
        return self.source, self.page_tokens, len(self.ranks)

    def takes(self, block_tokens: int) -> bool:
        """Whether blocks of that size can be looked for here."""
        if self.source == "events":
            return block_tokens == self.page_tokens
        return block_tokens > 0 and block_tokens % self.page_tokens == 0

    def cut_into(self, block_tokens: int) -> None:
        """From now on its blocks have that size."""
        self.block_tokens = block_tokens
        self.capacity_blocks = max(1, self.capacity_tokens // block_tokens)


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


class Upcoming(NamedTuple):
    """A rank that is going to hold the beginning of a prompt."""

    instance: InstanceId
    rank: int
    tokens: int
    visible_s: float


class UpcomingBlocks:
    """The requests that were sent and cannot be found yet, by their first block."""

    def __init__(self) -> None:
        self.version = 0
        """Counts changes."""
        self._by_root: dict[int, list[Sent]] = {}
        self._changed: dict[int, int] = {}
        """Their version when those with the same first block changed last."""

    def add(self, sent: Sent) -> None:
        self.version += 1
        self._by_root.setdefault(sent.blocks[0], []).append(sent)
        self._changed[sent.blocks[0]] = self.version

    def remove(self, sent: Sent) -> None:
        self.version += 1
        root = sent.blocks[0]
        others = [one for one in self._by_root.pop(root, ()) if one is not sent]
        if others:
            self._by_root[root] = others
            self._changed[root] = self.version
        else:
            self._changed.pop(root, None)

    def all_changed(self) -> None:
        self.version += 1
        self._changed = dict.fromkeys(self._by_root, self.version)

    def changed(self, blocks: Sequence[int], since: int) -> bool:
        """Whether those that begin like this may be others than at that version."""
        return self._changed.get(blocks[0], self.version) > since

    def begins_like(self, blocks: Sequence[int]) -> bool:
        return bool(blocks) and blocks[0] in self._by_root

    def sharing(self, blocks: Sequence[int], count: int) -> Iterator[tuple[Sent, int]]:
        """Those that have some of the first ``count`` blocks, and how many."""
        for sent in self._by_root.get(blocks[0], ())[-_MOST:]:
            yield sent, shared_blocks(blocks, sent.blocks, count)


def shared_blocks(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """How many blocks two prompts have in common. A block names all before it, so by halving."""
    shared = range(min(len(one), len(other), most))
    return bisect_left(shared, True, key=lambda at: one[at] != other[at])
