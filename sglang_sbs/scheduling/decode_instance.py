"""What the scheduler believes about one decode instance: ⟨B_i, K_i⟩ per DP rank.

Owns own dispatches not yet reported, the reported absolutes, and room for admission. Must not know
the rule that picks a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_sbs.scheduling.decode import UNLIMITED, DecodeLoad
from sglang_sbs.scheduling.events import InstanceId, InstanceUp
from sglang_sbs.scheduling.token_ledger import TokenLedger
from sglang_sbs.wire import EndForward


@dataclass(slots=True)
class DecodeRank:
    """One DP rank. Token counts of a request are its total length: prompt plus expected output."""

    flight: TokenLedger = field(default_factory=TokenLedger)
    """Dispatched and not yet accepted by the rank."""
    outstanding: TokenLedger = field(default_factory=TokenLedger)
    """Dispatched and not ended."""
    boot_id: str = ""
    last_seq: int = -1
    last_accepted: int = -1
    reported_s: float | None = None
    reported_requests: int = 0
    reported_kv_tokens: int = 0


class DecodeInstance:
    """Belief about one decode instance with ``dp_size`` ranks."""

    def __init__(self, up: InstanceUp) -> None:
        self.id: InstanceId = up.instance
        self.dp_size = up.dp_size
        self.kv_capacity_tokens = UNLIMITED
        self.max_running = UNLIMITED
        self.set_limits(up)
        self.ranks = [DecodeRank() for _ in range(up.dp_size)]

    def set_limits(self, up: InstanceUp) -> None:
        """Take over the limits per rank; unknown ones are not enforced."""
        self.kv_capacity_tokens = up.kv_capacity_tokens or UNLIMITED
        self.max_running = up.max_running_requests or UNLIMITED

    def loads(self) -> list[DecodeLoad]:
        """The state vectors, own dispatches included before any feedback."""
        return [self._load(rank) for rank in self.ranks]

    def dispatched(self, rid: str, rank: int, total_tokens: int) -> None:
        """A request leaves for a rank."""
        self.ranks[rank].flight.add(rid, total_tokens)
        self.ranks[rank].outstanding.add(rid, total_tokens)

    def ended(self, rid: str, rank: int) -> None:
        """The request is over, whatever state it was in."""
        self.ranks[rank].flight.pop(rid)
        self.ranks[rank].outstanding.pop(rid)

    def on_report(self, report: EndForward, now_s: float) -> None:
        """Replace belief by what a rank says. Old and duplicate messages change nothing."""
        if not 0 <= report.dp_rank < self.dp_size:
            return
        rank = self.ranks[report.dp_rank]
        if rank.boot_id != report.boot_id:
            if rank.boot_id:
                rank.flight.clear()
                rank.outstanding.clear()
            rank.boot_id, rank.last_seq, rank.last_accepted = report.boot_id, -1, -1
        if report.seq <= rank.last_seq:
            return
        gap = report.seq != rank.last_seq + 1
        rank.last_seq = report.seq
        rank.reported_s = now_s
        for rid in report.rids:
            rank.flight.pop(rid)
        if gap and rank.last_accepted >= 0:
            missing = report.accepted_requests - rank.last_accepted - len(report.rids)
            for rid in rank.flight.oldest(max(0, missing)):
                rank.flight.pop(rid)
        rank.last_accepted = report.accepted_requests
        rank.reported_requests = report.running_requests + report.kv_transfer_requests
        rank.reported_kv_tokens = report.kv_tokens
        if report.kv_capacity_tokens:
            self.kv_capacity_tokens = report.kv_capacity_tokens
        if report.max_running_requests:
            self.max_running = report.max_running_requests

    def on_load_poll(self, running: list[int], kv_tokens: list[int]) -> None:
        """Coarse fallback where the plugin is missing."""
        if len(running) != self.dp_size or len(kv_tokens) != self.dp_size:
            return
        for rank, requests, tokens in zip(self.ranks, running, kv_tokens, strict=True):
            if rank.boot_id == "":
                rank.reported_requests, rank.reported_kv_tokens = requests, tokens

    def _load(self, rank: DecodeRank) -> DecodeLoad:
        committed = rank.outstanding.total
        if rank.reported_s is None:
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
