"""One worker: what is known of an engine instance, and what follows from it alone. Every change of
a worker goes through :class:`~.registry.Registry`."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import field

from sglang_sbs.router.engines.urls import bracketed, split_worker_url
from sglang_sbs.router.workers.boot_identity import (
    MAX_REMEMBERED,
    SILENT_AFTER_S,
    BootIdentity,
)
from sglang_sbs.router.workers.breaker import Breaker
from sglang_sbs.router.workers.host_spelling import respelled, spelling_for
from sglang_sbs.router.workers.kv_addresses import KvEndpoints
from sglang_sbs.router.workers.rank_contract import pick_bootstrap_room
from sglang_sbs.router.workers.served_ranks import ServedRanks
from sglang_sbs.router.workers.server_info import SbsBlock, WorkerInfo, ranks_in_reach, server_url
from sglang_sbs.scheduling.events import Event, InstanceRole
from sglang_sbs.scheduling.prefill.stalled_work import StalledWork
from sglang_sbs.wire.gangs import GangPart

logger = logging.getLogger(__name__)

_UNKNOWN = WorkerInfo()
LOG_AGAIN_S = 300.0
"""What comes and goes is logged at most this often; ``/workers`` always shows it."""


class WorkerFacts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is known of an engine instance in every process of a router. Between processes it
    travels as it is (``processes/messages.py``)."""

    url: str
    """Normalised; the scheduler's instance id."""
    role: InstanceRole
    id: str
    configured_bootstrap_port: int | None = field(default=None, name="bootstrap_port")
    """``None``: as the engine says."""
    info: WorkerInfo | None = None
    """``None``: not read yet."""
    healthy: bool = False
    draining: bool = False
    """No new requests; what runs there goes on."""
    dispatches: int = 0
    failures: int = 0
    # SGLang fault: refused-room-stays
    rooms_left: int = 0
    """Bootstrap rooms that refused requests may have left in the memory of a prefill engine since
    it started; it never frees them (sglang #39428)."""
    priority: int = 50
    cost: float = 1.0
    labels: dict[str, str] = field(default_factory=dict)
    """As ``PUT /workers/{id}`` set them, for people and tools: placement does not look at them."""
    problems: dict[str, str] = field(default_factory=dict)
    """What is wrong, by kind; for people, in the log and in ``GET /workers``."""
    rank_is_a_hint: bool = False
    """It chooses DP ranks itself, so none is named to it (``served_ranks``); prefill only."""
    spelled: int = 0
    """Which way of writing its host engines are told."""


class Worker(WorkerFacts, kw_only=True, eq=False):
    """The same in the process that asks it or hears it, and what only that needs."""

    breaker: Breaker
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    announced: bool = False
    """The scheduler was told ``InstanceUp`` last."""
    resting: bool = False
    """It was told last that the worker is drained, and works."""
    active: int = 0
    """Legs in flight here."""
    parked: int = 0
    """Cancelled requests this process keeps until no KV can arrive (``relay/parking.py``)."""
    active_everywhere: int | None = None
    """The same over all front ends, where another process counts them."""
    successes: int = 0
    boot: BootIdentity = field(default_factory=BootIdentity)
    barrier_told_s: float = float("-inf")
    gates_at_fault: dict[int, str] = field(default_factory=dict)
    """DP ranks whose gang gate does not do what it should."""
    stalled: dict[int, StalledWork] = field(default_factory=dict)
    """Whether work waits at its DP ranks while no pass takes it; prefill only."""
    served: ServedRanks = field(default_factory=ServedRanks)
    """On which DP ranks its last requests ran, and which were named; prefill only."""
    called: dict[str, str] = field(default_factory=dict)
    """The boot that each spelling of its host meant, as far as this router saw (``host_spelling``).
    """
    kv_events_missing: bool = False
    """It publishes KV events, but not so that they arrive."""
    kv_endpoints: dict[int, KvEndpoints] = field(default_factory=dict)
    """Where its present boot publishes those of DP ranks on other nodes than the first."""
    kv_refused: dict[int, str] = field(default_factory=dict)
    """Why what such a rank said last about that is not followed."""
    speaks_from: dict[int, str] = field(default_factory=dict)
    """The IP addresses that EndForward of its present boot's DP ranks comes from, by rank. Only
    where engines have the router's key: requests would be sent there."""
    logged_s: dict[tuple[str, str], float] = field(default_factory=dict)
    probe_path: str = ""
    """That it answered last; empty: none yet."""
    heard_s: float = 0.0
    """When it last answered a probe or a poll, or was asked to."""
    last_report_s: dict[int, float] = field(default_factory=dict)
    reports: dict[int, int] = field(default_factory=dict)
    engine_holds: dict[int, int] = field(default_factory=dict)
    """Requests on each DP rank that was heard of, as the engine counts them."""

    @property
    def bootstrap_host(self) -> str:
        """What decode is told (``host_spelling``)."""
        # SGLang fault: stale-prefill-ports
        return bracketed(respelled(split_worker_url(self.url)[1], self.spelled))

    def spell(self, decode: Sequence[SbsBlock | None]) -> None:
        """Choose how its host is called, by what the decode instances say of themselves."""
        sbs = self.info.sbs if self.info is not None else None
        if sbs is not None and sbs.boot_id:
            host = split_worker_url(self.url)[1]
            self.spelled = spelling_for(host, sbs, decode, self.called, self.spelled)

    @property
    def bootstrap_port(self) -> int | None:
        """As configured, else as the engine says; ``None`` lets SGLang use its default. With
        SGLang's Rust server the engine knows better: its registry is on its HTTP port."""
        given, told = self.configured_bootstrap_port, self.known.bootstrap_port
        if given is None or (self.known.rust_server and told is not None):
            return told
        return given

    @property
    def known(self) -> WorkerInfo:
        """What it says of itself; until it was asked, what most would say."""
        return self.info or _UNKNOWN

    def url_of(self, rank: int) -> str:
        return server_url(self.url, self.known, rank)

    @property
    def server_urls(self) -> list[str]:
        """Its HTTP servers, that of DP rank 0 first."""
        ranks = ranks_in_reach(self.known) if self.known.rust_server else range(1)
        return [self.url_of(rank) for rank in ranks]

    @property
    def dp_size(self) -> int:
        return self.known.dp_size

    def forget_boot(self, now_s: float) -> None:
        """Another engine process runs there now: what the one before it reported is over."""
        self.boot.restarted(now_s)
        self.served, self.rank_is_a_hint, self.rooms_left = ServedRanks(), False, 0
        of_ranks: tuple[dict[int, Any], ...] = (
            *(self.gates_at_fault, self.stalled, self.last_report_s),
            *(self.kv_endpoints, self.kv_refused, self.speaks_from),
        )
        for by_rank in of_ranks:
            by_rank.clear()
        for kind in ("gang_gate", "stalled", "rank-is-a-hint"):
            self.problems.pop(kind, None)

    def resized(self, dp_size: int) -> None:
        """DP ranks joined or left while it runs: forget the reports of those that left."""
        said = self.url, self.role, self.dp_size, dp_size
        logger.warning("worker %s (%s): DP ranks %d -> %d while it runs", *said)
        of_ranks: tuple[dict[int, Any], ...] = (
            *(self.boot.by_rank, self.gates_at_fault, self.stalled),
            *(self.kv_endpoints, self.kv_refused),
            *(self.speaks_from, self.last_report_s, self.reports, self.engine_holds),
        )
        for by_rank in of_ranks:
            for rank in [rank for rank in by_rank if rank >= dp_size]:
                del by_rank[rank]
        for kind in ("gang_gate", "stalled", "dp_size"):  # the ranks that are left say it again
            self.problems.pop(kind, None)

    def is_news(self, kind: str, text: str, now_s: float) -> bool:
        """Whether a text about it is to be logged, which then counts."""
        if now_s - self.logged_s.get((kind, text), -math.inf) < LOG_AGAIN_S:
            return False
        if len(self.logged_s) >= MAX_REMEMBERED:
            self.logged_s.clear()
        self.logged_s[kind, text] = now_s
        return True

    @property
    def load(self) -> int:
        """Legs in flight there, as far as is known."""
        return self.active if self.active_everywhere is None else self.active_everywhere

    @property
    def usable(self) -> bool:
        return self.sound and not self.draining

    @property
    def sound(self) -> bool:
        """It could take requests."""
        return self.healthy and self.breaker.state != "open" and self.info is not None

    def report_age_s(self, now_s: float) -> float | None:
        """Since the last EndForward of any rank; ``None`` if there never was one."""
        return now_s - max(self.last_report_s.values()) if self.last_report_s else None

    def quiet_s(self, now_s: float) -> float:
        """Since the last EndForward of any rank, or since another boot was believed."""
        return now_s - max([self.boot.restarted_s, *self.last_report_s.values()])

    def reporting(self, now_s: float) -> bool:
        age_s = self.report_age_s(now_s)
        return age_s is not None and age_s < SILENT_AFTER_S


def _nobody(_worker: Worker) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerEvents:
    """Who is told what becomes of workers; the registry is made with it."""

    emit: Callable[[Event], None] = lambda event: None
    """``InstanceUp`` and ``InstanceDown``: whether the scheduler may use it."""
    doubted: Callable[[Worker], None] = _nobody
    """Something casts doubt on it: probe it now."""
    silenced: Callable[[Worker], None] = _nobody
    """It answers nothing any more, or restarted: what it was doing is lost, though the connections
    may not know yet."""
    removed: Callable[[Worker], None] = _nobody
    """What was counted for it may go."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one attempt at a request goes."""

    prefill: Worker
    prefill_rank: int
    decode: Worker
    decode_rank: int

    @property
    def prefill_origin(self) -> str:
        """Where the leg goes: the worker's URL, or that of its DP rank."""
        return self.prefill.url_of(self.prefill_rank)

    @property
    def decode_origin(self) -> str:
        return self.decode.url_of(self.decode_rank)

    def pick_room(self, gang: GangPart | None) -> int:
        """A bootstrap room by which engines know their ranks, and ``gang`` if there is one."""
        ranks = (self.prefill_rank, self.prefill.dp_size)
        if self.decode.known.rank_choice == "by_room":
            return pick_bootstrap_room(*ranks, self.decode_rank, self.decode.dp_size, gang=gang)
        return pick_bootstrap_room(*ranks, gang=gang)
