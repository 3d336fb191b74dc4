"""Records which prefill DP rank holds which KV blocks: L_hit(r, d) for the cache-aware mode.

How it works
------------
The name of a block depends on its tokens and on all tokens before them (as in SGLang's KV events).
So a prompt is a list of names, and a rank's hit is the number of leading names that it holds. A
table maps each name to a bit mask of ranks. A cache drops leaves before their parents, so the ranks
that hold the k-th block hold all blocks before it. A binary search finds how deep each rank's hit
is: a prompt of a thousand blocks takes some ten steps for each different depth.

There are three sources for the blocks that a rank holds:

- Its KV events (``prefix_source`` "events"), which arrive a moment late.
- Requests that were sent there. Their blocks are claimed from the predicted end of their pass on,
  because later requests will find them.

  - With KV events, a claim lapses soon after prefill: by then the events must have arrived.
  - Without ("approximate"), claims are the only source. A claim lapses after a time, and the oldest
    claims lapse when the rank's KV capacity is used up. If an answer reports fewer cached tokens
    than claimed, that capacity is lowered; if it reports none, the rank is cleared.

- Storage that several instances share (``--hicache-storage-backend``), where every rank has the
  same hit. No event reports its contents: SGLang 0.5.23 defines a medium ``EXTERNAL`` for it and
  never sends it. So it is assumed to hold all blocks that a rank of these instances ever published,
  until its table is full. If it drops blocks sooner, the engine's answer shows the smaller hit.

Claims are entered and withdrawn in order. A long claim is entered some blocks at a time by calls of
:meth:`PrefixIndex.advance`, which are due while ``claiming`` is not empty. A rank that lost
everything (restart, flush) gets another bit. The old bit is swept out of the table some entries at
a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import takewhile

from sglang_sbs.scheduling.events import CacheTier, InstanceId, PrefixSource
from sglang_sbs.scheduling.prefix.places import (
    NO_HITS,
    CachedRank,
    Changes,
    Hits,
    Place,
    SentPrefix,
    Upcoming,
    UpcomingBlocks,
)
from sglang_sbs.scheduling.prefix.tables import (
    BlockTable,
    bits_of,
    depths,
    slices_of,
    take_lapsed,
)

CONFIRMED_S = 2.0
"""Seconds after prefill until claims lapse that a rank with KV events has not published."""
APPROXIMATE_TTL_S = 600.0
_SAME_CLAIM_S = 1.0
"""Seconds after a claim within which the same blocks are not claimed again, because claims take
most of the index's time. Without KV events, blocks are claimed at the predicted end of their pass,
and again at prefill's answer."""
DEFAULT_CAPACITY_TOKENS = 262_144
"""Assumed KV capacity of a rank whose engine does not report it, in tokens."""
_SWEEP = 2_000
"""Table entries from which retired ranks' bits are removed per :meth:`PrefixIndex.advance`."""
_STEPS = 4_096
"""Blocks whose claims are entered or withdrawn per call; a long prompt may have more."""
_MOST_CLAIMS = 8
"""Each call does ``_STEPS`` more per this many unfinished claims, so that they cannot pile up."""
_STORAGE = 1
"""Bit in the table of shared storage, which has only one holder."""


class PrefixIndex:
    """Index of the KV blocks that prefill DP ranks have cached. Block names are any integers. Times
    are seconds on the scheduler's clock and must not decrease."""

    def __init__(self, *, max_blocks: int = 2_000_000) -> None:
        """``max_blocks``: most entries per table, about 200 bytes each with hundreds of ranks."""
        self.changes = Changes()
        """Counts the changes after which results of :meth:`find` may differ."""
        self._device, self._host, self._shared = (BlockTable(max_blocks) for _ in range(3))
        self._places: dict[InstanceId, Place] = {}
        self._rank_of: dict[int, CachedRank] = {}
        """The rank that each bit stands for."""
        self._live: dict[int, int] = {}
        """Bit mask of the ranks of instances that are up, by block size in tokens."""
        self._free_bits: list[int] = []
        self._next_bit = 1
        self._retired = 0
        self._sweeping = 0
        self._to_sweep: list[int] = []
        self._sent: dict[str, SentPrefix] = {}
        self._due: list[tuple[float, str]] = []
        """Heap of (time, request id): when the blocks of dispatched requests become visible."""
        self.coming = UpcomingBlocks()
        """Dispatched requests whose blocks are not visible yet, for :meth:`upcoming`."""
        self._lapsing: deque[tuple[float, CachedRank, Sequence[int]]] = deque()
        self.claiming: deque[Iterator[int]] = deque()
        """Claims that are being entered or withdrawn, oldest first; :meth:`advance` continues them.
        Each iteration yields the number of blocks processed."""
        self._watched: dict[int, list[str]] = {}
        self._appeared: list[str] = []

    def __len__(self) -> int:
        return len(self._device) + len(self._host) + len(self._shared)

    @property
    def pending_requests(self) -> int:
        return len(self._sent)

    # Instances ----------------------------------------------------------------------------

    def up(
        self,
        instance: InstanceId,
        *,
        dp_size: int,
        block_tokens: int,
        source: PrefixSource,
        capacity_tokens: int = 0,
        shares_storage: bool = False,
    ) -> None:
        """Add or update an instance. It starts empty if its source, its block size or its number of
        ranks changed."""
        place = self._places.get(instance)
        if place is None or place.shape != (source, block_tokens, dp_size):
            self.gone(instance)
            if source == "off":
                return
            place = self._places[instance] = Place(instance, source, block_tokens)
            place.ranks = [self._new_rank(place, number) for number in range(dp_size)]
        place.capacity_tokens = capacity_tokens or DEFAULT_CAPACITY_TOKENS
        place.cut_into(place.block_tokens or block_tokens)
        place.shares_storage = shares_storage
        place.is_up = True
        self._on_ranks_change()

    def down(self, instance: InstanceId, *, forget_claims: bool = False) -> None:
        """Stop using an instance for now; its blocks are kept. ``forget_claims``: forget them if
        the instance has no KV events."""
        place = self._places.get(instance)
        if place is not None:
            place.is_up = False
            self._on_ranks_change()
            for rank in range(len(place.ranks) if forget_claims else 0):
                self.restarted(instance, rank)

    def gone(self, instance: InstanceId) -> None:
        """Remove an instance from the cluster."""
        place = self._places.pop(instance, None)
        if place is not None:
            for rank in place.ranks:
                self._retire(rank)
            self._on_ranks_change()

    def clear(self, instance: InstanceId, rank: int) -> None:
        """Forget all blocks of a rank."""
        held = self._rank(instance, rank)
        if held is not None:
            self._retire(held)
            held.place.ranks[rank] = self._new_rank(held.place, rank)
            self._on_ranks_change()

    def restarted(self, instance: InstanceId, rank: int) -> None:
        """Forget all blocks of a rank with a new boot id, unless it publishes KV events."""
        held = self._rank(instance, rank)
        if held is not None and held.place.source == "approximate":
            self.clear(instance, rank)

    # KV events ----------------------------------------------------------------------------

    def stored(
        self, instance: InstanceId, rank: int, blocks: Sequence[int], tier: CacheTier = "device"
    ) -> None:
        held = self._published(instance, rank, blocks, tier)
        if held is not None:
            self._set(self._table(tier), blocks, held.bit)
            self._share(held.place, blocks)

    def removed(
        self, instance: InstanceId, rank: int, blocks: Sequence[int], tier: CacheTier = "device"
    ) -> None:
        held = self._published(instance, rank, blocks, tier)
        if held is not None:
            self.changes.add(self._table(tier).take(blocks, held.bit))

    # Requests -----------------------------------------------------------------------------

    def sent(
        self,
        rid: str,
        instance: InstanceId,
        rank: int,
        blocks: Sequence[int],
        block_tokens: int,
        visible_s: float,
    ) -> None:
        """Record a dispatch; :meth:`find` counts its blocks as cached from ``visible_s`` on."""
        place = self._places.get(instance)
        if place is None or not blocks or not place.takes(block_tokens):
            return
        if place.block_tokens != block_tokens:
            place.cut_into(block_tokens)
            self._on_ranks_change()
        sent = self._sent[rid] = SentPrefix(place, rank, blocks, visible_s)
        heappush(self._due, (visible_s, rid))
        self.coming.add(sent)

    def on_prefilled(
        self, rid: str, now_s: float, *, expected_tokens: int = 0, cached_tokens: int | None = None
    ) -> None:
        """Record the end of a prefill; ids that were not :meth:`sent` are ignored.
        ``expected_tokens``: predicted hit (L_hit). ``cached_tokens``: hit that the engine reported;
        None: none reported."""
        sent = self._sent.get(rid)
        if sent is None:
            return
        held = self._held(sent)
        found_tokens = expected_tokens if cached_tokens is None else cached_tokens
        if held is not None and found_tokens < expected_tokens:
            self._correct(held, sent.rank, found_tokens)
            sent.claimed_on = None  # with less capacity, others must go
        self._show(sent, now_s)
        self._work()
        del self._sent[rid]
        if held is not None and held.place.source == "events":
            self._lapsing.append((now_s + CONFIRMED_S, held, sent.blocks))

    def dropped(self, rid: str) -> None:
        """Record that a request ended without prefill; after :meth:`on_prefilled` this changes
        nothing."""
        sent = self._sent.pop(rid, None)
        if sent is None:
            return
        if not sent.visible:
            self.coming.remove(sent)
        elif (held := self._held(sent)) is not None:
            self.claiming.append(self._unclaimed(held, sent.blocks))
            self._work()

    def find(self, blocks: Sequence[int], block_tokens: int, prompt_tokens: int) -> Hits:
        """Return the cached tokens of a prompt per rank, in whole blocks. The last token of a
        prompt never counts, because a rank always computes it."""
        count = min(len(blocks), (prompt_tokens - 1) // block_tokens) if block_tokens else 0
        live = self._live.get(block_tokens, 0)
        if count <= 0 or not live:
            return NO_HITS
        by_instance: dict[InstanceId, list[int]] = {}
        best = 0
        for depth, ranks in depths((self._device, self._host), blocks, count, live):
            best = max(best, depth)
            for bit in bits_of(ranks):
                rank = self._rank_of[bit]
                place = rank.place
                hits = by_instance.get(place.id)
                if hits is None:
                    hits = by_instance[place.id] = [0] * len(place.ranks)
                hits[rank.number] = depth * block_tokens
        if len(self._shared):
            stored = self._shared.get
            # Earlier blocks of a prompt were written with this one, but the oldest are dropped
            # first.
            if stored(blocks[0]):
                depth = bisect_left(range(count), True, key=lambda at: not stored(blocks[at]))
                return self._with_shared(by_instance, best * block_tokens, depth, block_tokens)
        return Hits(by_instance, best * block_tokens) if best else NO_HITS

    def upcoming(
        self, blocks: Sequence[int], block_tokens: int, prompt_tokens: int
    ) -> tuple[Upcoming, ...]:
        """Return the ranks that are still computing the start of a prompt for other requests."""
        if not self.coming.begins_like(blocks):
            return ()
        count = min(len(blocks), (prompt_tokens - 1) // block_tokens) if block_tokens else 0
        if count <= 0:
            return ()
        return tuple(
            Upcoming(sent.place.id, sent.rank, shared * block_tokens, sent.visible_s)
            for sent, shared in self.coming.sharing(blocks, count)
            if sent.place.is_up and self._places.get(sent.place.id) is sent.place
        )

    def watch(self, block: int, rid: str) -> None:
        """Let :meth:`take_appeared` return the request once a rank holds this (missing) block."""
        self._watched.setdefault(block, []).append(rid)

    def unwatch(self, block: int, rid: str) -> None:
        rids = self._watched.get(block)
        if rids is not None and rid in rids:
            rids.remove(rid)
            if not rids:
                del self._watched[block]

    def take_appeared(self) -> list[str]:
        """Return ids of requests whose watched block has appeared since the last call."""
        appeared, self._appeared = self._appeared, []
        return appeared

    def advance(self, now_s: float) -> None:
        """Enter and withdraw due claims, and sweep a little. Cheap if there is nothing to do."""
        due = self._due
        while due and due[0][0] <= now_s:
            sent = self._sent.get(heappop(due)[1])
            if sent is not None:
                self._show(sent, now_s)
        lapsing = self._lapsing
        while lapsing and lapsing[0][0] <= now_s:
            _, held, blocks = lapsing.popleft()
            self.claiming.append(self._unclaimed(held, blocks))
        if self.claiming:
            self._work()
        if self._retired or self._sweeping:
            self._sweep()

    # Blocks held --------------------------------------------------------------------------

    def _with_shared(
        self, by_instance: dict[InstanceId, list[int]], best: int, depth: int, block_tokens: int
    ) -> Hits:
        """Return the hits including the ``depth`` leading blocks in shared storage, for ranks that
        can load from it. ``best``: best hit without storage, in tokens."""
        tokens = depth * block_tokens
        to_fetch: dict[InstanceId, list[int]] = {}
        for place in self._places.values():
            if place.shares_storage and place.is_up and place.takes(block_tokens):
                own = by_instance.get(place.id) or [0] * len(place.ranks)
                by_instance[place.id] = [max(mine, tokens) for mine in own]
                to_fetch[place.id] = [max(0, tokens - mine) for mine in own]
                best = max(best, tokens)
        return Hits(by_instance, best, to_fetch)

    def _table(self, tier: CacheTier) -> BlockTable:
        return self._device if tier == "device" else self._host

    def _set(
        self, table: BlockTable, blocks: Sequence[int], bit: int, root: int | None = None
    ) -> None:
        """Record that a rank holds blocks, of a prompt with first block ``root`` (None: of any)."""
        rooms_made = table.rooms_made
        new, changed = table.add(blocks, bit)
        self.changes.add(changed, root if table.rooms_made == rooms_made else None)
        if not self._watched.keys().isdisjoint(new):
            for block in new:
                self._appeared += self._watched.pop(block, ())

    def _share(self, place: Place, blocks: Sequence[int]) -> None:
        if place.shares_storage:
            self.changes.add(self._shared.add(blocks, _STORAGE)[1])

    def _published(
        self, instance: InstanceId, rank: int, blocks: Sequence[int], tier: CacheTier
    ) -> CachedRank | None:
        """Return the rank that published blocks, without claims on them; None: ignore the event."""
        held = self._rank(instance, rank)
        if held is None or held.place.source != "events":
            return None
        if tier == "device" and held.claims:
            for block in blocks:
                held.claims.pop(block, None)
        return held

    # Claims -------------------------------------------------------------------------------

    def _held(self, sent: SentPrefix) -> CachedRank | None:
        """Return the rank that a request was sent to; None: its instance was replaced."""
        held = self._rank(sent.place.id, sent.rank)
        return held if held is not None and held.place is sent.place else None

    def _show(self, sent: SentPrefix, now_s: float) -> None:
        if not sent.visible:
            sent.visible = True
            self.coming.remove(sent)
        held = self._held(sent)
        if held is None:
            return
        if held.place.source == "events":
            self.claiming.append(self._claimed(held, sent.blocks, now_s))
        elif sent.claimed_on is not held or now_s - sent.claimed_s > _SAME_CLAIM_S:
            sent.claimed_on, sent.claimed_s = held, now_s
            self.claiming.append(self._presumed(held, sent.blocks, now_s))

    def _work(self) -> None:
        steps = _STEPS * (1 + len(self.claiming) // _MOST_CLAIMS)
        while self.claiming and steps > 0:
            for took in self.claiming[0]:
                steps -= took
                if steps <= 0:
                    break
            else:
                self.claiming.popleft()

    def _claimed(self, held: CachedRank, blocks: Sequence[int], now_s: float) -> Iterator[int]:
        """Claim blocks for a rank that is going to publish them, by steps."""
        for part in self._parts_of(held, slices_of(blocks)):
            new = [block for block in part if not self._device.get(block) & held.bit]
            self._set(self._device, new, held.bit, blocks[0])
            held.claims.update(dict.fromkeys(new, now_s))
            yield len(part)

    def _presumed(self, held: CachedRank, blocks: Sequence[int], now_s: float) -> Iterator[int]:
        """Claim blocks for a rank that will not publish them, and drop lapsed claims, by steps."""
        place, claims, until_s = held.place, held.claims, now_s + APPROXIMATE_TTL_S
        for part in slices_of(blocks):
            if self._rank_of.get(held.bit) is not held:
                break
            self._set(self._device, part, held.bit, blocks[0])
            self._share(place, part)
            yield len(part)
        # The root is claimed last: of one prompt, the earliest claims expire first, and leaves must
        # expire before roots.
        for part in reversed(slices_of(blocks)):
            for block in reversed(part):
                if block in claims:
                    claims.move_to_end(block)
                claims[block] = until_s
            yield len(part)
        while lapsed := take_lapsed(claims, now_s, place.capacity_blocks):
            if self._rank_of.get(held.bit) is not held:
                return
            self.changes.add(self._device.take(lapsed, held.bit))
            yield len(lapsed)

    def _unclaimed(self, held: CachedRank, blocks: Sequence[int]) -> Iterator[int]:
        """Withdraw a rank's claims on those of these blocks that it never published, by steps."""
        claims = held.claims
        # Start at the end, so that the beginning of the prompt is what remains.
        for part in self._parts_of(held, reversed(slices_of(blocks))):
            mine = [block for block in part if block in claims]
            for block in mine:
                del claims[block]
            self.changes.add(self._device.take(mine, held.bit), blocks[0])
            yield len(part)

    def _correct(self, held: CachedRank, rank: int, cached_tokens: int) -> None:
        """Correct the claims of a rank without KV events, where a request found fewer tokens than
        claimed: clear the rank if nothing was found, otherwise lower its capacity."""
        place = held.place
        if place.source != "approximate":
            return
        if cached_tokens < place.page_tokens:
            self.clear(place.id, rank)  # a restart or a flush
        else:
            # It evicts earlier than its capacity suggests, because other data takes space as well.
            place.capacity_blocks = max(1, len(held.claims) * 9 // 10)

    # Ranks and their bits -----------------------------------------------------------------

    def _rank(self, instance: InstanceId, rank: int) -> CachedRank | None:
        place = self._places.get(instance)
        return place.ranks[rank] if place is not None and 0 <= rank < len(place.ranks) else None

    def _new_rank(self, place: Place, number: int) -> CachedRank:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = self._next_bit
            self._next_bit <<= 1
        rank = self._rank_of[bit] = CachedRank(place, number, bit)
        return rank

    def _retire(self, rank: CachedRank) -> None:
        del self._rank_of[rank.bit]
        self._retired |= rank.bit

    def _on_ranks_change(self) -> None:
        self.changes.add(1)
        self.coming.all_changed()
        self._live = {}
        for place in self._places.values():
            if place.is_up:
                bits = sum(rank.bit for rank in place.ranks)
                self._live[place.block_tokens] = self._live.get(place.block_tokens, 0) | bits

    def _parts_of(
        self, held: CachedRank, parts: Iterable[Sequence[int]]
    ) -> Iterator[Sequence[int]]:
        """Yield the parts until the rank is retired, because its bit may be reused then."""
        return takewhile(lambda _: self._rank_of.get(held.bit) is held, parts)

    def _sweep(self) -> None:
        if not self._sweeping:
            self._sweeping, self._retired = self._retired, 0
            self._to_sweep = [*self._device, *self._host]
        some = self._to_sweep[-_SWEEP:]
        del self._to_sweep[-_SWEEP:]
        for table in (self._device, self._host):
            self.changes.add(table.take(some, self._sweeping))
        if not self._to_sweep:
            self._free_bits += bits_of(self._sweeping)
            self._sweeping = 0
