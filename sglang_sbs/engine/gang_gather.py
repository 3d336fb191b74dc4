"""Exchanges batch states between DP ranks on different hosts, within the numbers that SGLang
gathers.

Before each pass, and in each turn of an idle loop, the ranks gather each rank's contribution
(``MLPSyncBatchInfo``, ``managers/scheduler_components/dp_attn.py``). One of the gathered numbers is
for metrics only (``attention_pairs``), another is read as "not zero"
(``can_run_draft_cuda_graph``), so their upper bits are free. The plugin adds no message and changes
no shape, so a rank cannot hang because another has no plugin.

All ranks, the sender included, receive the same words in the same turn, and so decide alike. One
bit marks a rank that takes part. If a rank lacks it, all ranks find this in the same turn and stop.
A word for which there is no room is sent in the next turn, and is valid from then on, even for its
own rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import MISSING, fields
from itertools import islice
from typing import Any, NamedTuple

from sglang_sbs.engine.gang_board import Board, Word
from sglang_sbs.wire.gangs import TAG_BITS

SYNC_MODULE = "sglang.srt.managers.scheduler_components.dp_attn"
SYNC_CLASS = "MLPSyncBatchInfo"

PAIRS_BITS = 38
"""Bits of ``attention_pairs``: enough for a chunk of 64K tokens over a context of 4M."""
_FLAG_BITS = 3
_FLAGS = (1 << _FLAG_BITS) - 1
_WORD_BITS = TAG_BITS + _FLAG_BITS
_PRESENT = 1 << (PAIRS_BITS + _WORD_BITS)
_VOTE_WORDS = 2
"""Number of words that fit above the lowest bit of a yes vote; a no vote must stay zero."""
_MOST_UNSENT = 64
MOST_TURNS_ALONE = 50
"""Limit on turns in which a rank waits for the others to open their boards, e.g. after a switch of
role."""
_EARLIER = 1
"""Offset of the turn in which gathered words were sent: the turn before the current one."""


class Columns(NamedTuple):
    """Positions of the two numbers in the row of a rank."""

    pairs: int
    vote: int


class GatherBoard(Board):
    """The board of one scheduler process; does nothing before :meth:`open`."""

    def __init__(self, find_columns: Callable[[], Columns | None] | None = None) -> None:
        super().__init__("other DP ranks")
        self._find_columns = find_columns or columns_of_sglang
        self._columns: Columns | None = None
        self._unsent: dict[int, Word] = {}
        self._turns_alone = 0
        self._complete = False
        """True: all ranks have taken part at least once."""

    def is_possible(self) -> bool:
        """Return whether SGLang gathers these numbers, as it does since 0.5.22."""
        self._columns = self._columns or self._find_columns()
        return self._columns is not None

    def open(self) -> None:
        """Take part from the next gathering on."""
        self.is_open = self.is_possible()

    def publish(self, tag: int, word: Word) -> None:
        self._unsent[tag] = word
        while len(self._unsent) > _MOST_UNSENT:
            del self._unsent[next(iter(self._unsent))]

    def waited(self, tag: int) -> None:
        """Do nothing: the bit of each rank shows a missing rank without waiting for a word."""

    def close(self) -> None:
        super().close()
        self._unsent.clear()

    # Hooks ----------------------------------------------------------------------------------------

    def around_local_row(
        self, original: Callable[..., Any], info: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Hook around ``MLPSyncBatchInfo._get_local_tensor``, which returns this rank's row."""
        if not self.is_open:
            return original(info, *args, **kwargs)
        pairs, vote = info.attention_pairs, info.can_run_draft_cuda_graph
        try:
            info.attention_pairs, info.can_run_draft_cuda_graph = self._laden(pairs, vote)
        except Exception as error:
            self._fail(error)
        try:
            return original(info, *args, **kwargs)
        finally:
            info.attention_pairs, info.can_run_draft_cuda_graph = pairs, vote

    def after_gather(self, _result: None, info: Any, *_args: Any, **_kwargs: Any) -> None:
        """Hook after ``MLPSyncBatchInfo.all_gather``, which returns the rows of all ranks."""
        if self._columns is None:
            return
        try:
            rows = info.tp0_info_cpu.tolist()
            pairs = [row[self._columns.pairs] for row in rows]
            info.global_attention_pairs = [
                pair_count & ((1 << PAIRS_BITS) - 1) for pair_count in pairs
            ]
            if self.is_open:
                self._receive(pairs, [row[self._columns.vote] for row in rows])
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Stop taking part. The others detect it by the missing bit, in this row or the next."""
        if self.is_open:
            self._give_up(f"the gathered rows are not as expected: {error!r}")

    def _laden(self, pairs: int, vote: Any) -> tuple[int, Any]:
        room = 1 + (_VOTE_WORDS if vote else 0)
        sending = list(islice(self._unsent, room))
        codes = [_encode(tag, self._unsent.pop(tag)) for tag in sending]
        codes += [0] * (1 + _VOTE_WORDS - len(codes))
        pairs = min(pairs, (1 << PAIRS_BITS) - 1) | codes[0] << PAIRS_BITS | _PRESENT
        if vote:
            vote = 1 | codes[1] << 1 | codes[2] << (1 + _WORD_BITS)
        return pairs, vote

    def _receive(self, pairs: list[int], votes: list[int]) -> None:
        missing = [rank for rank, pair_count in enumerate(pairs) if not pair_count & _PRESENT]
        self._turns_alone += bool(missing)
        if missing and (self._complete or self._turns_alone > MOST_TURNS_ALONE):
            named = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
            self._give_up(f"the gate is not on in rank {named}")
            return
        for rank, (pair_count, vote) in enumerate(zip(pairs, votes, strict=True)):
            for code in (pair_count >> PAIRS_BITS, vote >> 1, vote >> (1 + _WORD_BITS)):
                if code & _FLAGS:
                    tag, word = _decode(code)
                    self._note(tag, rank, word)
        self._complete = self._complete or not missing


def _encode(tag: int, word: Word) -> int:
    flags = word.arrived | (word.ready_turn > 0) << 1 | (word.gave_up_turn > 0) << 2
    return tag << _FLAG_BITS | flags


def _decode(code: int) -> tuple[int, Word]:
    tag = code >> _FLAG_BITS & ((1 << TAG_BITS) - 1)
    ready, gave_up = code >> 1 & 1, code >> 2 & 1
    return tag, Word(_EARLIER * ready, bool(code & 1), _EARLIER * gave_up)


def columns_of_sglang() -> Columns | None:
    """Find the columns by means of a row that contains only these two numbers."""
    try:
        sync = getattr(importlib.import_module(SYNC_MODULE), SYNC_CLASS)
        info = sync(**{column.name: 0 for column in fields(sync) if column.default is MISSING})
        row = sync._get_local_tensor
        before = row(info, device="cpu").tolist()
        info.attention_pairs, info.can_run_draft_cuda_graph = _PRESENT, _PRESENT + 1
        after = row(info, device="cpu").tolist()
        if len(after) != len(before):
            return None
        return Columns(after.index(_PRESENT), after.index(_PRESENT + 1))
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
