"""The state of one worker and what follows from it alone. All changes go through
:class:`~.registry.Registry`."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import field

from sglang_sbs.router.workers.boot_identity import (
    MAX_REMEMBERED,
    SILENT_AFTER_S,
    BootIdentity,
)
from sglang_sbs.router.workers.breaker import Breaker
from sglang_sbs.router.workers.host_spelling import host_for_decode
from sglang_sbs.router.workers.kv_addresses import KvEndpoints
from sglang_sbs.router.workers.rank_contract import pick_bootstrap_room
from sglang_sbs.router.workers.served_ranks import ServedRanks
from sglang_sbs.router.workers.server_info import WorkerInfo, ranks_in_reach, server_url
from sglang_sbs.scheduling.events import Event, InstanceRole
from sglang_sbs.scheduling.prefill.stalled_work import StalledWork
from sglang_sbs.wire.gangs import GangPart

logger = logging.getLogger(__name__)

_UNKNOWN = WorkerInfo()
LOG_AGAIN_S = 300.0
"""Shortest interval between equal log lines about a worker; ``/workers`` always shows the state."""


class WorkerFacts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Facts about an engine instance shared by all processes of a router, and sent between them
    unchanged (``processes/messages.py``)."""

    url: str
    """Normalised URL, which is the scheduler's instance id."""
    role: InstanceRole
    id: str
    configured_bootstrap_port: int | None = field(default=None, name="bootstrap_port")
    """Bootstrap port set for this worker; ``None``: use the port that the engine reports."""
    info: WorkerInfo | None = None
    """Facts from its ``/server_info``; ``None``: not read yet."""
    healthy: bool = False
    draining: bool = False
    """The worker gets no new requests; those running continue."""
    dispatches: int = 0
    failures: int = 0
    # SGLang fault: refused-room-stays
    rooms_left: int = 0
    """Bootstrap rooms that refused requests may have left in a prefill engine's memory since its
    start; it never frees them (sglang #39428)."""
    priority: int = 50
    cost: float = 1.0
    labels: dict[str, str] = field(default_factory=dict)
    """Labels set with ``PUT /workers/{id}`` for people and tools; placement ignores them."""
    problems: dict[str, str] = field(default_factory=dict)
    """Current problems by kind, for the log and ``GET /workers``."""
    rank_is_a_hint: bool = False
    """The engine chooses DP ranks itself, so no rank is sent (``served_ranks``); prefill only."""
    spelled: int = 0
    """Number of the current spelling of its host (``host_spelling``); 0: as given."""


class Worker(WorkerFacts, kw_only=True, eq=False):
    """A worker, with the state that each process of the router keeps about it for itself."""

    breaker: Breaker
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    announced: bool = False
    """The last event sent to the scheduler was ``InstanceUp``."""
    resting: bool = False
    """The last event sent to the scheduler was ``InstanceDown`` with ``drained``."""
    active: int = 0
    """Legs in flight from this process."""
    parked: int = 0
    """Cancelled requests that this process keeps until no KV can arrive (``relay/parking.py``)."""
    active_everywhere: int | None = None
    """Legs in flight from all front ends, as counted by another process; ``None``: none counts."""
    successes: int = 0
    boot: BootIdentity = field(default_factory=BootIdentity)
    barrier_changed_s: float = float("-inf")
    gates_at_fault: dict[int, str] = field(default_factory=dict)
    """Reported fault of the batch gate by DP rank (keys of ``diagnosis.GATE_FAULTS``)."""
    stalled: dict[int, StalledWork] = field(default_factory=dict)
    """Detects work that waits at a DP rank while no pass takes it; prefill only."""
    served: ServedRanks = field(default_factory=ServedRanks)
    """Compares the DP ranks of its recent requests with the named ones; prefill only."""
    called: dict[str, str] = field(default_factory=dict)
    """Boot id that this router has seen under each spelling of the host (``host_spelling``)."""
    kv_events_missing: bool = False
    """It publishes KV events, but they do not arrive."""
    kv_endpoints: dict[int, KvEndpoints] = field(default_factory=dict)
    """KV event endpoints of DP ranks on nodes other than the first, for the present boot."""
    kv_refused: dict[int, str] = field(default_factory=dict)
    """Reasons why reported KV event addresses are not used, by rank."""
    reports_from: dict[int, str] = field(default_factory=dict)
    """IP addresses that send the EndForward of the present boot, by DP rank. Set only for engines
    with the router's key, because requests are sent there."""
    logged_s: dict[tuple[str, str], float] = field(default_factory=dict)
    probe_path: str = ""
    """Path of the last successful probe; empty before the first."""
    last_response_s: float = 0.0
    """Monotonic time of the last response to a probe or poll, or of a probe after silence."""
    last_report_s: dict[int, float] = field(default_factory=dict)
    reports: dict[int, int] = field(default_factory=dict)
    engine_holds: dict[int, int] = field(default_factory=dict)
    """Requests on each reporting DP rank, as counted by the engine."""

    def __repr__(self) -> str:
        """Show no labels or texts of problems, which may contain text from outside."""
        flags = ("healthy", "draining", "announced", "resting")
        state = [name for name in flags if getattr(self, name)] or ["not healthy"]
        state += [f"breaker {self.breaker.state}"] * (self.breaker.state != "closed")
        state += ["not read"] * (self.info is None) + sorted(self.problems)
        return f"<Worker {self.url} ({self.role}): {', '.join(state)}; load={self.load}>"

    @property
    def bootstrap_host(self) -> str:
        """Host at which decode contacts this prefill worker, as currently spelled (``spelled``)."""
        return host_for_decode(self.url, self.spelled)

    @property
    def bootstrap_port(self) -> int | None:
        """The configured port, else the engine's; ``None`` uses SGLang's default. With SGLang's
        Rust server the engine's port wins: its registry is on the HTTP port."""
        given, reported = self.configured_bootstrap_port, self.known.bootstrap_port
        if given is None or (self.known.rust_server and reported is not None):
            return reported
        return given

    @property
    def known(self) -> WorkerInfo:
        """Facts from ``/server_info``, or defaults before it was read."""
        return self.info or _UNKNOWN

    def url_of(self, rank: int) -> str:
        return server_url(self.url, self.known, rank)

    @property
    def server_urls(self) -> list[str]:
        """URLs of its HTTP servers, that of DP rank 0 first."""
        ranks = ranks_in_reach(self.known) if self.known.rust_server else range(1)
        return [self.url_of(rank) for rank in ranks]

    @property
    def dp_size(self) -> int:
        return self.known.dp_size

    def forget_boot(self, now_s: float) -> None:
        """Drop all reports of the former engine process."""
        self.boot.restarted(now_s)
        self.served, self.rank_is_a_hint, self.rooms_left = ServedRanks(), False, 0
        of_ranks: tuple[dict[int, Any], ...] = (
            *(self.gates_at_fault, self.stalled, self.last_report_s),
            *(self.kv_endpoints, self.kv_refused, self.reports_from, self.engine_holds),
        )
        for by_rank in of_ranks:
            by_rank.clear()
        for kind in ("gang_gate", "stalled", "rank-is-a-hint"):
            self.problems.pop(kind, None)

    def resized(self, dp_size: int) -> None:
        """Drop the reports of DP ranks that left at runtime."""
        change = self.url, self.role, self.dp_size, dp_size
        logger.warning("worker %s (%s): DP ranks %d -> %d at runtime", *change)
        of_ranks: tuple[dict[int, Any], ...] = (
            *(self.boot.by_rank, self.gates_at_fault, self.stalled),
            *(self.kv_endpoints, self.kv_refused),
            *(self.reports_from, self.last_report_s, self.reports, self.engine_holds),
        )
        for by_rank in of_ranks:
            for rank in [rank for rank in by_rank if rank >= dp_size]:
                del by_rank[rank]
        for kind in ("gang_gate", "stalled", "dp_size"):  # remaining ranks report them again
            self.problems.pop(kind, None)

    def is_news(self, kind: str, text: str, now_s: float) -> bool:
        """Return whether a text about the worker should be logged now, at most once per
        ``LOG_AGAIN_S``; if so, store the time."""
        if now_s - self.logged_s.get((kind, text), -math.inf) < LOG_AGAIN_S:
            return False
        if len(self.logged_s) >= MAX_REMEMBERED:
            self.logged_s.clear()
        self.logged_s[kind, text] = now_s
        return True

    @property
    def load(self) -> int:
        """Legs in flight there, from all front ends if known, otherwise from this process."""
        return self.active if self.active_everywhere is None else self.active_everywhere

    @property
    def usable(self) -> bool:
        return self.sound and not self.draining

    @property
    def sound(self) -> bool:
        """Whether it is healthy and described, with a breaker that is not open."""
        return self.healthy and self.breaker.state != "open" and self.info is not None

    def report_age_s(self, now_s: float) -> float | None:
        """Seconds since the last EndForward of any rank; ``None`` if there was none."""
        return now_s - max(self.last_report_s.values()) if self.last_report_s else None

    def engine_requests(self, now_s: float) -> int | None:
        """Return the engine's own count of its requests; ``None`` unless every DP rank reports."""
        if self.info is None:
            return None  # the number of ranks is unknown
        last_s = self.last_report_s
        if not all(now_s - last_s.get(n, -math.inf) < SILENT_AFTER_S for n in range(self.dp_size)):
            return None
        return sum(self.engine_holds.values())

    def quiet_s(self, now_s: float) -> float:
        """Seconds since the last EndForward of any rank, or since a new boot was accepted."""
        return now_s - max([self.boot.restarted_s, *self.last_report_s.values()])

    def reporting(self, now_s: float) -> bool:
        age_s = self.report_age_s(now_s)
        return age_s is not None and age_s < SILENT_AFTER_S


def _ignore(_worker: Worker) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerEvents:
    """Callbacks by which the registry reports changes of workers."""

    emit: Callable[[Event], None] = lambda event: None
    """Receives ``InstanceUp`` and ``InstanceDown`` for the scheduler."""
    doubted: Callable[[Worker], None] = _ignore
    """The worker is in doubt: probe it now."""
    silenced: Callable[[Worker], None] = _ignore
    """The worker no longer responds, or has restarted: its requests are lost, although connections
    may still look open."""
    removed: Callable[[Worker], None] = _ignore
    """The worker was removed: drop its counters."""


class AttemptWorkers(msgspec.Struct, frozen=True):
    """Workers and ranks of one attempt at a request."""

    prefill: Worker
    prefill_rank: int
    decode: Worker
    decode_rank: int

    @property
    def prefill_origin(self) -> str:
        """URL to send the prefill request to: the worker's, or its DP rank's own."""
        return self.prefill.url_of(self.prefill_rank)

    @property
    def decode_origin(self) -> str:
        return self.decode.url_of(self.decode_rank)

    def pick_room(self, gang: GangPart | None) -> int:
        """Pick a bootstrap room that selects prefill's rank and encodes the batch, if any."""
        return pick_bootstrap_room(self.prefill_rank, self.prefill.dp_size, gang)
