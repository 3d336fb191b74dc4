"""Ground truth for scheduler tests and benchmarks: engines that do what SGLang does, and tell.

Owns small, exact models of a prefill instance (chunked prefill, first come first served per DP
rank, all ranks behind one barrier) and a decode instance, with the EndForward messages they send.
They know nothing of time: whoever drives them says when a pass starts and ends.

They do not use the simulator's engine, on purpose: that one shares code with the scheduler and is
what policies are tuned on. Here a second reading of SGLang checks the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_sbs.wire import EndForward
from sglang_sbs.wire.endforward import Kind

FIXED_S = 0.05
TOKEN_S = 8e-5
"""Forward time: fixed, and per token of the slowest rank."""


@dataclass
class PrefillRank:
    """One DP rank of a prefill engine."""

    waiting: list[tuple[str, int]] = field(default_factory=list)
    """Requests with the tokens no launched pass contains yet."""
    unreported: list[str] = field(default_factory=list)
    accepted_requests: int = 0
    seq: int = 0

    @property
    def queued_tokens(self) -> int:
        return sum(tokens for _, tokens in self.waiting)


class PrefillEngine:
    """A prefill instance; :meth:`accept`, then :meth:`launch` and :meth:`finish` in turn."""

    def __init__(
        self,
        name: str,
        dp_size: int,
        chunk_tokens: int,
        page: int = 1,
        most_requests: int = 0,
    ) -> None:
        """``page``: tokens per page, of which each request is charged whole ones.
        ``most_requests``: of a rank in one pass; 0: no limit."""
        self.name = name
        self.dp_size = dp_size
        self.chunk_tokens = chunk_tokens
        self.page = page
        self.most_requests = most_requests
        self.boots = 0
        self.start()

    def start(self) -> None:
        """A new boot: everything that was here is gone."""
        self.boots += 1
        self.ranks = [PrefillRank() for _ in range(self.dp_size)]
        self.running: list[int] | None = None
        self.completing: list[str] = []
        self.forward_id = 0

    @property
    def has_work(self) -> bool:
        return any(rank.waiting for rank in self.ranks)

    @property
    def forward_s(self) -> float:
        """Duration of the running pass."""
        assert self.running is not None
        return FIXED_S + TOKEN_S * max(self.running)

    def accept(self, rid: str, rank: int, tokens: int) -> None:
        """The rank takes in a request (between passes, says SGLang; the driver must see to it)."""
        self.ranks[rank].waiting.append((rid, tokens))
        self.ranks[rank].unreported.append(rid)
        self.ranks[rank].accepted_requests += 1

    def abort(self, rid: str) -> None:
        """The request is dropped unless a pass contains it."""
        for rank in self.ranks:
            rank.waiting = [entry for entry in rank.waiting if entry[0] != rid]

    def launch(self) -> list[EndForward]:
        """Form the next pass and hand it to the device. There must be work, and no pass running."""
        assert self.running is None and self.has_work
        self.running = []
        self.forward_id += 1
        for rank in self.ranks:
            room, taken, places = self.chunk_tokens, 0, self.most_requests or -1
            while rank.waiting and room >= self.page and places:
                places -= 1
                rid, tokens = rank.waiting[0]
                part = tokens if tokens <= room else room // self.page * self.page
                room -= -(-part // self.page) * self.page
                taken += part
                if part == tokens:
                    rank.waiting.pop(0)
                    self.completing.append(rid)
                else:
                    rank.waiting[0] = (rid, tokens - part)
            self.running.append(taken)
        return [self.message(d, "launch") for d in range(self.dp_size)]

    def finish(self) -> tuple[list[str], list[EndForward]]:
        """End the running pass: requests whose prefill is complete, and what the ranks say."""
        assert self.running is not None
        messages = [self.message(d, "forward") for d in range(self.dp_size)]
        done, self.completing, self.running = self.completing, [], None
        if not self.has_work:
            messages += [self.message(d, "idle") for d in range(self.dp_size)]
        return done, messages

    def message(self, index: int, kind: Kind) -> EndForward:
        """Return one rank's present report."""
        rank = self.ranks[index]
        rids, rank.unreported = rank.unreported, []
        seq, rank.seq = rank.seq, rank.seq + 1
        tokens = self.running or [0] * self.dp_size
        return EndForward(
            instance_id=self.name,
            boot_id=f"{self.name}-{self.boots}",
            role="prefill",
            dp_rank=index,
            dp_size=self.dp_size,
            seq=seq,
            kind=kind,
            forward_id=self.forward_id,
            forward_s=self.forward_s if kind == "forward" else 0.0,
            extend_tokens=tokens[index],
            tokens_per_rank=tokens,
            inflight_passes=1 if kind == "heartbeat" and self.running is not None else 0,
            waiting_requests=len(rank.waiting),
            waiting_tokens=rank.queued_tokens,
            chunk_tokens=self.chunk_tokens,
            accepted_requests=rank.accepted_requests,
            rids=rids,
        )


class DecodeEngine:
    """A decode instance: requests of some KV size on ranks."""

    def __init__(self, name: str, dp_size: int, kv_capacity_tokens: int = 0) -> None:
        self.name = name
        self.dp_size = dp_size
        self.kv_capacity_tokens = kv_capacity_tokens
        self.boots = 0
        self.start()

    def start(self) -> None:
        """A new boot: everything that was here is gone."""
        self.boots += 1
        self.running: list[dict[str, int]] = [{} for _ in range(self.dp_size)]
        self.accepted = [0] * self.dp_size
        self.unreported: list[list[str]] = [[] for _ in range(self.dp_size)]
        self.seq = [0] * self.dp_size

    @property
    def boot_id(self) -> str:
        return f"{self.name}-{self.boots}"

    def accept(self, rid: str, rank: int, tokens: int) -> None:
        self.running[rank][rid] = tokens
        self.unreported[rank].append(rid)
        self.accepted[rank] += 1

    def end(self, rid: str) -> None:
        for rank in self.running:
            rank.pop(rid, None)

    def message(self, index: int) -> EndForward:
        """Return one rank's present report."""
        rids, self.unreported[index] = self.unreported[index], []
        seq, self.seq[index] = self.seq[index], self.seq[index] + 1
        return EndForward(
            instance_id=self.name,
            boot_id=self.boot_id,
            role="decode",
            dp_rank=index,
            dp_size=self.dp_size,
            seq=seq,
            kind="forward",
            running_requests=len(self.running[index]),
            kv_tokens=sum(self.running[index].values()),
            kv_capacity_tokens=self.kv_capacity_tokens,
            accepted_requests=self.accepted[index],
            rids=rids,
        )
