"""What the scheduler believes about one decode instance: ⟨B_i, K_i⟩ per DP rank.

Owns own dispatches not yet reported, the reported absolutes, and room for admission. Must not know
the rule that picks a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from sglang_sbs.scheduling.decode import UNLIMITED, DecodeLoad
from sglang_sbs.scheduling.events import InstanceId, InstanceUp
from sglang_sbs.scheduling.report_cursor import ReportCursor
from sglang_sbs.scheduling.token_ledger import TokenLedger
from sglang_sbs.wire import EndForward


@dataclass(slots=True)
class DecodeRank:
    """One DP rank. Token counts of a request are its total length: prompt plus expected output."""

    flight: TokenLedger = field(default_factory=TokenLedger)
    """Dispatched and not yet accepted by the rank."""
    outstanding: TokenLedger = field(default_factory=TokenLedger)
    """Dispatched and not ended."""
    cursor: ReportCursor = field(default_factory=ReportCursor)
    reported_requests: int = 0
    reported_kv_tokens: int = 0
    doomed: list[str] | None = None
    """Dispatched before the instance went down, until its next report says whether it restarted."""

    def forget(self) -> None:
        """The engine restarted: what was dispatched to the one before is gone."""
        gone = self.outstanding.oldest() if self.doomed is None else self.doomed
        for rid in gone:
            self.flight.pop(rid)
            self.outstanding.pop(rid)


class DecodeInstance:
    """Belief about one decode instance with ``dp_size`` ranks."""

    def __init__(self, up: InstanceUp) -> None:
        self.id: InstanceId = up.instance
        self.dp_size = up.dp_size
        self.kv_capacity_tokens = UNLIMITED
        self.max_running = UNLIMITED
        self.ranks = [DecodeRank() for _ in range(up.dp_size)]
        self._loads: list[DecodeLoad | None] = [None] * up.dp_size
        """The state vectors as last worked out; None: changed since."""
        self._room_tokens: int | None = None
        self.set_limits(up)

    def set_limits(self, up: InstanceUp) -> None:
        """Take over the limits per rank; unknown ones are not enforced."""
        self.kv_capacity_tokens = up.kv_capacity_tokens or UNLIMITED
        self.max_running = up.max_running_requests or UNLIMITED
        self._all_changed()

    def loads(self) -> list[DecodeLoad]:
        """Copies of the state vectors, own dispatches included before any feedback."""
        return [load.copy() for load in self._known_loads()]

    @property
    def room_tokens(self) -> int:
        """The largest total length one of its ranks can admit."""
        if self._room_tokens is None:
            self._room_tokens = max(load.room_tokens for load in self._known_loads())
        return self._room_tokens

    @property
    def has_outstanding(self) -> bool:
        """Whether any dispatched request has not ended."""
        return any(len(rank.outstanding) for rank in self.ranks)

    def dispatched(self, rid: str, rank: int, total_tokens: int) -> None:
        """A request leaves for a rank."""
        self.ranks[rank].flight.add(rid, total_tokens)
        self.ranks[rank].outstanding.add(rid, total_tokens)
        self._changed(rank)

    def ended(self, rid: str, rank: int) -> None:
        """The request is over, whatever state it was in."""
        if rank >= self.dp_size:
            return  # it went to an instance of another size that had this name
        self.ranks[rank].flight.pop(rid)
        self.ranks[rank].outstanding.pop(rid)
        self._changed(rank)

    def down(self) -> None:
        """No answer from the instance: its next report tells whether what runs there survived."""
        for rank in self.ranks:
            rank.doomed = rank.outstanding.oldest()

    def on_report(self, report: EndForward, now_s: float) -> None:
        """Replace belief by what a rank says. Old and duplicate messages change nothing."""
        if not 0 <= report.dp_rank < self.dp_size:
            return
        rank = self.ranks[report.dp_rank]
        taken = rank.cursor.take(report, now_s)
        if taken is None:
            return
        if taken.restarted:
            rank.forget()
        rank.doomed = None
        for rid in report.rids:
            rank.flight.pop(rid)
        for rid in rank.flight.oldest(taken.lost_requests):
            rank.flight.pop(rid)
        rank.reported_requests = report.running_requests + report.kv_transfer_requests
        rank.reported_kv_tokens = report.kv_tokens
        self._changed(report.dp_rank)
        limits = (
            report.kv_capacity_tokens or self.kv_capacity_tokens,
            report.max_running_requests or self.max_running,
        )
        if limits != (self.kv_capacity_tokens, self.max_running):
            self.kv_capacity_tokens, self.max_running = limits
            self._all_changed()

    def on_load_poll(self, running: list[int], kv_tokens: list[int]) -> None:
        """Coarse fallback where the plugin is missing."""
        if len(running) != self.dp_size or len(kv_tokens) != self.dp_size:
            return
        for rank, requests, tokens in zip(self.ranks, running, kv_tokens, strict=True):
            if rank.cursor.reported_s is None:
                rank.reported_requests, rank.reported_kv_tokens = requests, tokens
        self._all_changed()

    def _changed(self, rank: int) -> None:
        self._loads[rank] = self._room_tokens = None

    def _all_changed(self) -> None:
        self._loads = [None] * self.dp_size
        self._room_tokens = None

    def _known_loads(self) -> list[DecodeLoad]:
        for index, load in enumerate(self._loads):
            if load is None:
                self._loads[index] = self._load(self.ranks[index])
        return cast(list[DecodeLoad], self._loads)

    def _load(self, rank: DecodeRank) -> DecodeLoad:
        committed = rank.outstanding.total
        if rank.cursor.reported_s is None:
            # No report: own books, unless a poll knows of more.
            requests = max(len(rank.outstanding), rank.reported_requests)
            kv_tokens = max(committed, rank.reported_kv_tokens)
        else:
            requests = rank.reported_requests + len(rank.flight)
            kv_tokens = rank.reported_kv_tokens + rank.flight.total
        return DecodeLoad(
            running=requests,
            kv_tokens=kv_tokens,
            committed_tokens=max(kv_tokens, committed),
            kv_capacity_tokens=self.kv_capacity_tokens,
            max_running=self.max_running,
        )
