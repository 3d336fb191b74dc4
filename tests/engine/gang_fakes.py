"""Scheduler processes with the hold in them, their queues, and what they hear of each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

from sglang_sbs.engine.gang_board import Board, Word
from sglang_sbs.engine.gang_gather import Columns, GatherBoard
from sglang_sbs.engine.gang_hold import GangHold
from sglang_sbs.wire.gangs import SIZED_RID_PREFIX, GangPart, gang_room

GATE_MS = 20.0
TURN_S = 0.001
WAITING, READY = 1, 2


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Req:
    """A request in the handshake: ``state`` is what its sender's poll says."""

    def __init__(self, rid: str, part: GangPart | None = None, state: int = READY) -> None:
        self.rid = rid if part is None else SIZED_RID_PREFIX + rid
        self.bootstrap_room = 12345 if part is None else gang_room(part, 1, 0)
        self.state = state
        self.polls = 0
        self.disagg_kv_sender = Sender(self)


class Sender:
    """``CommonKVSender``."""

    def __init__(self, req: Req) -> None:
        self._req = req

    def poll(self) -> int:
        self._req.polls += 1
        return self._req.state


class Queue:
    """``PrefillBootstrapQueue``: pops what is not in the handshake any more."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.queue: list[Req] = []

    def pop_bootstrapped(self) -> list[Req]:
        ready = [req for req in self.queue if req.state != WAITING]
        self.queue = [req for req in self.queue if req.state == WAITING]
        return ready


class Place(Board):
    """One process's place on a board; what the others sent arrives on listening."""

    def __init__(self, hearsay: Hearsay, said: Board, rank: int) -> None:
        super().__init__(rank=rank)
        self.is_open = True
        self._hearsay, self._said = hearsay, said

    def publish(self, tag: int, word: Word) -> None:
        self.publish_later(tag, word)
        self._note(tag, self._rank, word)

    def publish_later(self, tag: int, word: Word) -> None:
        self._said._note(tag, self._rank, word)

    def _take_in(self) -> bool:
        news = False
        for tag in () if self._hearsay.deaf else list(self._said._words):
            for who, word in self._said.words_of(tag).items():
                news |= self.words_of(tag).get(who) != word
                self._note(tag, who, word)
        return news


class Hearsay:
    """The boards of all processes, by name."""

    def __init__(self) -> None:
        self.said: dict[str, Board] = {}
        self.opened: list[tuple[str, int]] = []
        self.deaf = False

    def board(self, name: str, rank: int) -> Board:
        self.opened.append((name, rank))
        return Place(self, self.said.setdefault(name, Board()), rank)


class Rank:
    """A scheduler process: ``turn`` is one turn of its event loop."""

    def __init__(
        self,
        clock: Clock,
        *,
        rank: int = 0,
        ranks: int = 1,
        attn_tp: int = 1,
        attn_tp_rank: int = 0,
        pipeline: int = 1,
        nodes: int = 1,
        gate_ms: float | None = GATE_MS,
        hearsay: Hearsay | None = None,
        columns: Columns | None = None,
    ) -> None:
        """``columns``: SGLang gathers numbers that words can ride on."""
        self.clock = clock
        self.gather = GatherBoard(lambda: columns)
        ps = SimpleNamespace(
            dp_rank=None,
            dp_size=1,
            attn_dp_rank=rank,
            attn_dp_size=ranks,
            pp_rank=0,
            pp_size=pipeline,
            attn_tp_rank=attn_tp_rank,
            attn_tp_size=attn_tp,
            attn_cp_rank=0,
            attn_cp_size=1,
        )
        args = SimpleNamespace(nnodes=nodes, tp_size=ranks * attn_tp)
        scheduler = SimpleNamespace(ps=ps, server_args=args, waiting_queue=[], chunked_req=None)
        self.queue = Queue(scheduler)
        self.hold = GangHold(
            gate_ms,
            "boot",
            clock=clock,
            open_board=lambda name, rank, *_: (hearsay or Hearsay()).board(name, rank),
            gather=self.gather,
        )

    def pop(self) -> list[str]:
        popped = self.hold.around_pop_bootstrapped(Queue.pop_bootstrapped, self.queue)
        return [req.rid.removeprefix(SIZED_RID_PREFIX) for req in popped]

    def turn(self, after_s: float = TURN_S) -> list[str]:
        self.clock.now_s += after_s
        popped = self.pop()
        self.hold.before_next_batch(self.queue.scheduler)
        return popped

    def takes_in(self, *reqs: Req) -> None:
        """Decode does, while a pass runs or not."""
        for req in reqs:
            req.state = READY
            self.hold.after_update_status(None, None, req.bootstrap_room, READY)

    def ends_pass(self, *, is_awaited: bool = True) -> None:
        done = SimpleNamespace(synchronize=lambda: None) if is_awaited else None
        result = SimpleNamespace(copy_done=done)
        around = self.hold.around_process_batch_result
        around(lambda *_: None, self.queue.scheduler, None, result)

    def turns_until_pop(self) -> int:
        for number in range(1, 1000):
            if self.turn():
                return number
        raise AssertionError("it is held for ever")


class SyncInfo:
    """``MLPSyncBatchInfo`` as far as words ride on it; the row has the two numbers last."""

    COLUMNS = Columns(pairs=2, vote=3)

    def __init__(self, attention_pairs: int, vote: bool) -> None:
        self.attention_pairs = attention_pairs
        self.can_run_draft_cuda_graph: Any = vote
        self.tp0_info_cpu: Any = None
        self.global_attention_pairs: list[int] = []

    def local_row(self) -> list[int]:
        return [7, 7, self.attention_pairs, int(self.can_run_draft_cuda_graph)]

    def take(self, rows: list[list[int]]) -> None:
        self.tp0_info_cpu = SimpleNamespace(tolist=lambda: rows)
        self.global_attention_pairs = [row[self.COLUMNS.pairs] for row in rows]
        self.can_run_draft_cuda_graph = bool(min(row[self.COLUMNS.vote] for row in rows))


def gathered(infos: Sequence[SyncInfo], boards: Sequence[GatherBoard | None]) -> list[list[int]]:
    """The collective operation of one turn; None: a rank without the plugin. The rows."""
    rows = [
        info.local_row() if board is None else board.around_local_row(SyncInfo.local_row, info)
        for info, board in zip(infos, boards, strict=True)
    ]
    assert {len(row) for row in rows} == {4}, "ranks would wait for each other for ever"
    for info, board in zip(infos, boards, strict=True):
        info.take(rows)
        if board is not None:
            board.after_gather(None, info)
    return rows


class Hosts:
    """The DP ranks of an engine on several hosts, in lockstep."""

    def __init__(self, ranks: int, *, without: Collection[int] = (), vote: bool = True) -> None:
        """``without``: ranks that have no plugin; ``vote``: of all ranks on draft CUDA graphs."""
        clock = Clock()
        self.ranks = [
            Rank(clock, rank=rank, ranks=ranks, nodes=2, columns=SyncInfo.COLUMNS)
            for rank in range(ranks)
        ]
        self._without = without
        self._vote = vote
        self.infos: list[SyncInfo] = []

    def turn(self, after_s: float = TURN_S) -> list[list[str]]:
        """Return the requests that each rank starts."""
        self.ranks[0].clock.now_s += after_s
        popped = []
        for number, rank in enumerate(self.ranks):
            if number in self._without:
                reqs = rank.queue.pop_bootstrapped()
                popped.append([req.rid.removeprefix(SIZED_RID_PREFIX) for req in reqs])
                continue
            popped.append(rank.pop())
            rank.hold.before_next_batch(rank.queue.scheduler)
        self.infos = [SyncInfo(1000 + number, self._vote) for number in range(len(self.ranks))]
        boards = [
            None if number in self._without else rank.gather
            for number, rank in enumerate(self.ranks)
        ]
        gathered(self.infos, boards)
        return popped
