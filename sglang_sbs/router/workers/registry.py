"""The workers: what is known of each, and which of them the scheduler may use.

Owns worker state and the ``InstanceUp`` / ``InstanceDown`` events that follow from it. Must not
know sockets: probes, polls and messages are made elsewhere and reported here.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from sglang_sbs.router.engines.urls import (
    alias_key,
    bracketed,
    normalise_worker_url,
    rank_url,
    respelled,
    split_worker_url,
)
from sglang_sbs.router.errors import LegFailure
from sglang_sbs.router.signals.kv_addresses import KvEndpoints, RefusedAddress, told_endpoints
from sglang_sbs.router.workers.breaker import Breaker, BreakerConfig
from sglang_sbs.router.workers.server_info import (
    PLUGIN_VERSION,
    WorkerInfo,
    node_of_rank,
    parse_version,
)
from sglang_sbs.scheduling.events import (
    Event,
    InstanceDown,
    InstanceRole,
    InstanceUp,
    PrefixSource,
    RankChoice,
)
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.endforward import GATE_ALONE, GATE_ERRORS

logger = logging.getLogger(__name__)

SILENT_AFTER_S = 5.0
"""No EndForward for this long (heartbeats come every second): the signal counts as lost."""
QUIET_S = 2.0
"""Nothing heard for this long from a worker that should say something: it is asked."""
MISSED_AFTER_S = 20.0
"""Decode ranks miss a prefill instance after two failed heartbeats 5 s apart; one that was away for
longer is asked for its ports anew anyway."""
LOG_AGAIN_S = 300.0
"""A problem that comes and goes is logged at most this often; ``/workers`` always shows it."""
RECHECK_EVERY_S = 5.0
"""``/server_info`` is read at most this often because of EndForward of an unknown boot."""
_AS_REPORTED = "as its EndForward says"
BARRIER_S = 10.0
"""What EndForward says of the barrier is taken in at most this often, per worker."""
_GATE_FAULTS = {
    GATE_ALONE: "the gang gate does not hear other processes of the engine: batches come apart. Is "
    "the plugin on every node, with the same SGLANG_SBS_GANG_GATE_MS?",
    GATE_ERRORS: "the gang gate turned itself off after errors: see the engine's log",
}
_MAX_REMEMBERED = 256
_MAX_PROBLEM_CHARS = 2048
MUTE_AFTER_DISPATCHES = 3
"""Dispatches without any EndForward after which the missing signal is reported."""
PrefixWish = Literal["auto", "events", "approximate", "off"]
"""``auto``: events where they can be had, else approximate."""


@dataclass(eq=False)
class Worker:
    """One engine instance. ``url`` is its normalised URL and the scheduler's instance id."""

    url: str
    role: InstanceRole
    breaker: Breaker
    configured_bootstrap_port: int | None = None
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    info: WorkerInfo | None = None
    healthy: bool = False
    draining: bool = False
    announced: bool = False
    """The scheduler was told ``InstanceUp`` last."""
    active: int = 0
    """Legs in flight here."""
    active_everywhere: int | None = None
    """The same over all front ends, where another process counts them."""
    dispatches: int = 0
    failures: int = 0
    successes: int = 0
    priority: int = 50
    cost: float = 1.0
    labels: dict[str, str] = field(default_factory=dict)
    """As ``PUT /workers/{id}`` set them, for people and tools: placement does not look at them."""
    problems: dict[str, str] = field(default_factory=dict)
    """What is wrong, by kind; for people, in the log and in ``GET /workers``."""
    boots: dict[int, str] = field(default_factory=dict)
    barrier_told_s: float = float("-inf")
    gates_at_fault: dict[int, str] = field(default_factory=dict)
    """DP ranks whose gang gate does not do what it should."""
    retired_boots: set[str] = field(default_factory=set)
    stranger: str = ""
    """A boot id that claims to be this worker and that ``/server_info`` has not confirmed."""
    restarted_s: float = -math.inf
    """When another boot was believed last."""
    recheck: bool = False
    """``/server_info`` must be read again before the worker is trusted."""
    kv_events_missing: bool = False
    """It publishes KV events, but not so that they arrive."""
    kv_endpoints: dict[int, KvEndpoints] = field(default_factory=dict)
    """Where its present boot publishes those of DP ranks on other nodes than the first."""
    kv_refused: dict[int, str] = field(default_factory=dict)
    """Why what such a rank said last about that is not followed."""
    rechecked_s: float = -math.inf
    logged_s: dict[tuple[str, str], float] = field(default_factory=dict)
    heard_s: float = 0.0
    """When it last answered a probe or a poll, or was asked to."""
    last_report_s: dict[int, float] = field(default_factory=dict)
    reports: dict[int, int] = field(default_factory=dict)
    spelling: int = 0
    """Which way of writing its host engines are told."""

    @property
    def bootstrap_host(self) -> str:
        """What decode is told. It keeps what it knows of a prefill instance by how that is spelled
        (SGLang, ``disaggregation/common/conn.py``: ``prefill_info_table``, ``connection_pool``).
        """
        return bracketed(respelled(split_worker_url(self.url)[1], self.spelling))

    @property
    def bootstrap_port(self) -> int | None:
        """As configured, else as the engine says; ``None`` lets SGLang use its default.

        With SGLang's Rust server the engine knows better: its registry is on its HTTP port.
        """
        if self.rust_server and self.info is not None and self.info.bootstrap_port is not None:
            return self.info.bootstrap_port
        if self.configured_bootstrap_port is not None:
            return self.configured_bootstrap_port
        return self.info.bootstrap_port if self.info is not None else None

    @property
    def coupled(self) -> bool:
        """Its release couples prefill and decode ranks (``rank_contract``)."""
        return self.info is not None and self.info.coupled

    @property
    def rust_server(self) -> bool:
        """Each of its DP ranks is to be spoken to at its own address."""
        return self.info is not None and self.info.rust_server

    def url_of(self, rank: int) -> str:
        """Where requests for that DP rank go."""
        return rank_url(self.url, rank) if self.rust_server else self.url

    @property
    def server_urls(self) -> list[str]:
        """Its HTTP servers, that of DP rank 0 first."""
        return [self.url_of(rank) for rank in range(self.dp_size if self.rust_server else 1)]

    @property
    def rank_choice(self) -> RankChoice:
        return self.info.rank_choice if self.info is not None else "free"

    @property
    def dp_size(self) -> int:
        return self.info.dp_size if self.info is not None else 1

    @property
    def load(self) -> int:
        """Legs in flight there, as far as is known."""
        return self.active if self.active_everywhere is None else self.active_everywhere

    @property
    def usable(self) -> bool:
        return (
            self.info is not None
            and self.healthy
            and not self.draining
            and self.breaker.state != "open"
        )

    def report_age_s(self, now_s: float) -> float | None:
        """Since the last EndForward of any rank; ``None`` if there never was one."""
        return now_s - max(self.last_report_s.values()) if self.last_report_s else None

    def quiet_s(self, now_s: float) -> float:
        """Since the last EndForward of any rank, or since another boot was believed."""
        return now_s - max([self.restarted_s, *self.last_report_s.values()])

    def reporting(self, now_s: float) -> bool:
        age_s = self.report_age_s(now_s)
        return age_s is not None and age_s < SILENT_AFTER_S


class Registry:
    """``emit`` takes scheduler events; every change of a worker goes through here."""

    def __init__(
        self,
        emit: Callable[[Event], None],
        breaker: BreakerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        expects_endforward: bool = True,
        prefix_source: PrefixWish = "off",
    ) -> None:
        """``expects_endforward``: its absence is a problem worth telling. ``prefix_source``: how
        the scheduler learns what prefill instances have cached."""
        self._emit = emit
        self._breaker = breaker or BreakerConfig()
        self._clock = clock
        self._expects_endforward = expects_endforward
        self._prefix_source = prefix_source
        self._workers: dict[str, Worker] = {}
        self._aliases: dict[tuple[str, int], str] = {}
        self.doubted: Callable[[Worker], None] = lambda worker: None
        """Called when something casts doubt on a worker: probe it now."""
        self.asks_cheaply = True
        """A probe costs an engine nothing, so that silence is reason enough for one."""
        self.silenced: Callable[[Worker], None] = lambda worker: None
        """Called when a worker answers nothing any more, or restarted: what it was doing is lost,
        though the connections may not know yet."""
        self.removed: Callable[[Worker], None] = lambda worker: None
        """Called when a worker was removed: what was counted for it may go."""

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, url: str) -> Worker | None:
        return self._workers.get(url)

    def by_id(self, worker_id: str) -> Worker | None:
        return next((w for w in self._workers.values() if w.id == worker_id), None)

    def by_alias(self, url: str) -> Worker | None:
        """The worker meant by a URL that another machine wrote; ``None`` if unknown or no URL."""
        try:
            normalised = normalise_worker_url(url)
        except ValueError:
            return None
        known = self._workers.get(normalised)
        if known is not None:
            return known
        return self._workers.get(self._aliases.get(alias_key(normalised), ""))

    def of_role(self, role: InstanceRole) -> list[Worker]:
        return [w for w in self._workers.values() if w.role == role]

    def usable(self, role: InstanceRole) -> list[Worker]:
        return [w for w in self._workers.values() if w.role == role and w.usable]

    @property
    def ready(self) -> bool:
        """At least one real prefill/decode pair can take a request."""
        return bool(self.usable("prefill")) and bool(self.usable("decode"))

    # Membership -------------------------------------------------------------------------------

    def add(self, url: str, role: InstanceRole, bootstrap_port: int | None = None) -> Worker:
        """Raises: ValueError for a bad URL or one that is there already."""
        url = normalise_worker_url(url)
        if url in self._workers:
            raise ValueError(f"worker {url} is registered already")
        worker = Worker(
            url=url,
            role=role,
            breaker=Breaker(self._breaker),
            configured_bootstrap_port=bootstrap_port if role == "prefill" else None,
        )
        self._workers[url] = worker
        self._aliases.setdefault(alias_key(url), url)
        return worker

    def remove(self, worker: Worker) -> None:
        """No new requests from now on; those in flight there run to their end."""
        worker.draining = True
        self._announce(worker)
        self._workers.pop(worker.url, None)
        self._aliases = {alias_key(url): url for url in reversed(self._workers)}
        logger.info("worker %s (%s) removed", worker.url, worker.role)
        self.removed(worker)

    # Reports ----------------------------------------------------------------------------------

    def described(self, worker: Worker, info: WorkerInfo) -> None:
        """``/server_info`` was read: the limits are known (or changed)."""
        self._check_boot(worker, info)
        if worker.info is not None and worker.info.no_barrier == _AS_REPORTED:
            info = _as_reported(info)
        changed = worker.info != info
        worker.info = info
        worker.problems.pop("unusable", None)
        worker.problems.pop("unreachable", None)
        self._check_prefix_source(worker)
        given = worker.configured_bootstrap_port
        worker.problems.pop("bootstrap", None)
        if info.rust_server and given is not None and given != worker.bootstrap_port:
            self.report_problem(
                worker,
                "bootstrap",
                f"its KV registry is at port {worker.bootstrap_port}, where it serves HTTP "
                f"(SGLANG_RUST_SERVER=1), and not at {given}: that port is used. Write it behind "
                "--prefill URL, or none",
            )
        for number, text in enumerate(info.warnings):
            self.report_problem(worker, f"launch{number}", text)
        if worker.announced and changed:
            self._emit(self._instance_up(worker))

    def set_healthy(self, worker: Worker, healthy: bool, why: str = "") -> None:
        if worker.healthy == healthy:
            return
        worker.healthy = healthy
        if healthy:
            worker.breaker.reset()
            worker.problems.pop("unhealthy", None)
        else:
            worker.problems["unhealthy"] = why[:_MAX_PROBLEM_CHARS]
        level = logging.INFO if healthy else logging.WARNING
        state = "is healthy" if healthy else f"is down: {why}"
        logger.log(level, "worker %s (%s) %s", worker.url, worker.role, state)
        self._announce(worker)

    def leg_failed(self, failure: LegFailure) -> None:
        """Blame for one failed leg; client errors blame nobody."""
        worker = self._workers.get(failure.worker)
        if worker is None or not failure.counts_against_worker:
            return
        worker.failures += 1
        if failure.unreachable:
            self.set_healthy(worker, False, f"nothing listens at {worker.url}")
        others = [w for w in self.usable(worker.role) if w is not worker]
        if worker.breaker.failed(self._clock(), may_open=bool(others)):
            logger.warning("worker %s: circuit breaker opened (%s)", worker.url, failure.message)
            self._announce(worker)
        if failure.transport:
            self.doubted(worker)

    def leg_succeeded(self, url: str) -> None:
        worker = self._workers.get(url)
        if worker is not None:
            worker.successes += 1
            worker.breaker.succeeded()

    def tick(self) -> None:
        """Let time pass: open breakers whose timeout ran out let traffic through again."""
        now_s = self._clock()
        for worker in self._workers.values():
            if worker.breaker.try_half_open(now_s):
                logger.info("worker %s: circuit breaker half-open", worker.url)
                self._announce(worker)
            self._check_signal(worker, now_s)
            self._check_quiet(worker, now_s)

    def reported(self, worker: Worker, report: EndForward) -> bool:
        """Book an EndForward; False if it must be dropped.

        A new ``boot_id`` of a rank means the engine restarted: everything in flight there is gone.
        Anybody can send such a message, so where ``/server_info`` tells the boot id it is asked
        first. (Not all ranks of an engine on several nodes have the boot id told there.) Where not,
        no other boot is believed while the present one speaks, and one that was taken to be over is
        when the present one does not.
        """
        rank, boot_id = report.dp_rank, report.boot_id
        told = worker.info.sbs.boot_id if worker.info and worker.info.sbs else ""
        is_told = boot_id == told
        if boot_id in worker.retired_boots and not (
            is_told or worker.quiet_s(self._clock()) >= SILENT_AFTER_S
        ):
            return False
        known = worker.boots.get(rank)
        if known is not None and known != boot_id:
            if known == told:
                self._suspect(worker, boot_id)
                return False
            if not is_told and worker.quiet_s(self._clock()) < QUIET_S:
                return False
            self._restarted(worker)
        if known != boot_id:
            worker.retired_boots.discard(boot_id)
        if report.role != worker.role:
            self.report_problem(
                worker, "role", f"EndForward says role {report.role}; its reports are ignored"
            )
            return False
        if worker.info is not None and report.dp_size != worker.info.dp_size:
            self.report_problem(
                worker,
                "dp_size",
                f"EndForward says dp_size {report.dp_size}, /server_info says "
                f"{worker.info.dp_size}; its reports are ignored. Is SGLANG_SBS_INSTANCE_ID of "
                "another engine set to this worker's URL?",
            )
            return False
        if worker.info is not None:
            self._hear_of_barrier(worker, worker.info, report.barrier)
        self._hear_of_gang_gate(worker, rank, report.gang_gate)
        worker.boots[rank] = boot_id
        worker.last_report_s[rank] = self._clock()
        worker.reports[rank] = worker.reports.get(rank, 0) + 1
        worker.problems.pop("dp_size", None)
        worker.problems.pop("role", None)
        return True

    def _hear_of_gang_gate(self, worker: Worker, rank: int, told: str) -> None:
        if told in _GATE_FAULTS:
            worker.gates_at_fault[rank] = told
        elif worker.gates_at_fault.pop(rank, None) is None:
            return
        first = min(worker.gates_at_fault, default=None)
        if first is None:
            worker.problems.pop("gang_gate", None)
        else:
            fault = _GATE_FAULTS[worker.gates_at_fault[first]]
            self.report_problem(worker, "gang_gate", f"DP rank {first}: {fault}")

    def _hear_of_barrier(self, worker: Worker, info: WorkerInfo, barrier: bool) -> None:
        as_told = _as_reported(info, barrier)
        now_s = self._clock()
        # Who speaks in its name without a key may contradict it all the time.
        if as_told.no_barrier != info.no_barrier and now_s >= worker.barrier_told_s + BARRIER_S:
            worker.barrier_told_s, worker.info = now_s, as_told
            if worker.announced:
                self._emit(self._instance_up(worker))

    # What is cached where ---------------------------------------------------------------------

    def listens_to_events(self, worker: Worker) -> bool:
        """Whether its KV events are wanted and, as far as it says, to be had."""
        info = worker.info
        return (
            info is not None
            and info.radix_cache
            and info.kv_events is not None
            and self._prefix_source in ("auto", "events")
        )

    def prefix_source_of(self, worker: Worker) -> PrefixSource:
        """How the scheduler learns what the worker has cached."""
        info = worker.info
        if info is None or not info.radix_cache:
            return "off"
        if self.listens_to_events(worker) and not worker.kv_events_missing:
            return "events"
        return "approximate" if self._prefix_source in ("auto", "approximate") else "off"

    def kv_address_told(
        self, worker: Worker, report: EndForward, peer: str, *, has_key: bool
    ) -> None:
        """A rank's message, which was booked, says where it publishes KV events."""
        info, told = worker.info, report.kv_address
        if info is None or told is None or not self.listens_to_events(worker):
            return
        rank = report.dp_rank
        if node_of_rank(info, rank) == 0:
            worker.kv_refused[rank] = "it is on the first node, which has the worker's own host"
            return
        try:
            worker.kv_endpoints[rank] = told_endpoints(told, peer, has_key=has_key)
            worker.kv_refused.pop(rank, None)
        except RefusedAddress as error:
            worker.kv_refused[rank] = str(error)

    def set_kv_events_missing(self, worker: Worker, why: str) -> None:
        """Its KV events do not arrive, or (empty) they do again."""
        if why:
            self.report_problem(worker, "kv_events", why)
        elif worker.problems.pop("kv_events", None):
            logger.info("worker %s: its KV events arrive", worker.url)
        if worker.kv_events_missing != bool(why):
            worker.kv_events_missing = bool(why)
            if worker.announced:
                self._emit(self._instance_up(worker))

    def _check_prefix_source(self, worker: Worker) -> None:
        info = worker.info
        if info is None or not info.radix_cache or self._prefix_source != "events":
            return
        if info.kv_events is None:
            self.report_problem(
                worker,
                "kv_events",
                "publishes no KV events, so that nothing is known of its cache: start it with "
                '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", '
                '"replay_endpoint": "tcp://*:5657"}\', or use --sbs-prefix-source auto',
            )

    def report_problem(self, worker: Worker, kind: str, text: str) -> None:
        """Show it in ``GET /workers``; log it once, and again if it is back after a while."""
        text = text[:_MAX_PROBLEM_CHARS]
        if worker.problems.get(kind) == text:
            return
        worker.problems[kind] = text
        now_s = self._clock()
        if now_s - worker.logged_s.get((kind, text), -math.inf) >= LOG_AGAIN_S:
            if len(worker.logged_s) >= _MAX_REMEMBERED:
                worker.logged_s.clear()
            worker.logged_s[kind, text] = now_s
            logger.warning("worker %s (%s): %s", worker.url, worker.role, text)

    # Inside -----------------------------------------------------------------------------------

    def _suspect(self, worker: Worker, boot_id: str) -> None:
        """Restarted, or somebody else speaks in its name: have ``/server_info`` read again."""
        now_s = self._clock()
        if now_s - worker.rechecked_s < RECHECK_EVERY_S:
            return
        worker.rechecked_s = now_s
        worker.stranger = boot_id
        worker.recheck = True
        self.doubted(worker)

    def _check_boot(self, worker: Worker, info: WorkerInfo) -> None:
        """``/server_info`` was read again: the same engine as before, or another?"""
        worker.recheck = False
        stranger, worker.stranger = worker.stranger, ""
        old = worker.info.sbs.boot_id if worker.info and worker.info.sbs else ""
        new = info.sbs.boot_id if info.sbs else ""
        if old and new and old != new:
            self._restarted(worker)
        elif stranger and stranger != new:
            self._retire(worker, [stranger])
            self.report_problem(
                worker,
                "stranger",
                f"EndForward of another boot ({stranger[:8]}) claims to be this worker and is "
                "ignored. Is SGLANG_SBS_INSTANCE_ID the same on two engines?",
            )

    @staticmethod
    def _retire(worker: Worker, boot_ids: Iterable[str]) -> None:
        if len(worker.retired_boots) >= _MAX_REMEMBERED:
            worker.retired_boots.clear()
        worker.retired_boots.update(boot_ids)

    def _restarted(self, worker: Worker) -> None:
        logger.warning("worker %s (%s) restarted", worker.url, worker.role)
        age_s = worker.report_age_s(self._clock())
        if worker.role == "prefill" and (age_s is None or age_s < MISSED_AFTER_S):
            # Decode may not have missed it and would go on talking to the old process's ports.
            worker.spelling += 1
        self._retire(worker, worker.boots.values())
        worker.boots.clear()
        worker.last_report_s.clear()
        worker.kv_endpoints.clear()
        worker.kv_refused.clear()
        worker.gates_at_fault.clear()
        worker.problems.pop("gang_gate", None)
        worker.restarted_s = self._clock()
        worker.info = None
        worker.breaker.reset()
        self._announce(worker)
        self.silenced(worker)
        self.doubted(worker)

    def _announce(self, worker: Worker) -> None:
        """Tell the scheduler if the worker's usability changed."""
        if worker.usable == worker.announced:
            return
        worker.announced = worker.usable
        if worker.usable:
            self._emit(self._instance_up(worker))
        else:
            self._let_in(worker.role)
            self._emit(InstanceDown(instance=worker.url))

    def _let_in(self, role: InstanceRole) -> None:
        """A doubtful worker beats none: with nobody else left, open breakers do not count."""
        if self.usable(role):
            return
        for worker in self._workers.values():
            if worker.role == role and worker.healthy and worker.breaker.let_in():
                logger.warning("worker %s: the last of its role, breaker half-open", worker.url)
                self._announce(worker)

    def refresh(self, worker: Worker) -> None:
        """Announce a worker whose description or health just became complete."""
        self._announce(worker)

    def _instance_up(self, worker: Worker) -> InstanceUp:
        info = worker.info
        assert info is not None, "only described workers are announced"
        return InstanceUp(
            instance=worker.url,
            role=worker.role,
            dp_size=info.dp_size,
            chunk_tokens=info.chunk_tokens,
            kv_capacity_tokens=info.kv_capacity_tokens,
            max_running_requests=info.max_running_requests,
            prefill_max_requests=info.prefill_max_requests if worker.role == "prefill" else 0,
            page_size=info.page_size,
            prefix_source=self.prefix_source_of(worker),
            rank_choice=info.rank_choice if worker.role == "decode" else "free",
            overlap=info.overlap and worker.role == "prefill",
            barrier=not info.no_barrier or worker.role != "prefill",
            captured_tokens=info.captured_tokens if worker.role == "prefill" else (),
            allocates_late=info.allocates_late,
        )

    def _check_quiet(self, worker: Worker, now_s: float) -> None:
        """A stopped process (SIGSTOP, a hung host) breaks no connection: notice its silence.

        An engine with the plugin reports at least every second; any other is only expected to say
        something while it has work.
        """
        expected = worker.load > 0 or bool(worker.last_report_s)
        if not self.asks_cheaply or not worker.healthy or not expected:
            return
        heard_s = max([worker.heard_s, *worker.last_report_s.values()])
        if now_s - heard_s >= QUIET_S:
            worker.heard_s = now_s
            self.doubted(worker)

    def _check_signal(self, worker: Worker, now_s: float) -> None:
        """Keep the diagnosis of a missing or partial EndForward signal current."""
        if worker.info is None or not worker.healthy:
            return
        if not worker.last_report_s:
            if self._expects_endforward and worker.dispatches >= MUTE_AFTER_DISPATCHES:
                where = _why_mute(worker.info)
                self.report_problem(
                    worker,
                    "signal",
                    f"no EndForward after {MUTE_AFTER_DISPATCHES} dispatches, falling back to "
                    f"load polls and timers; {where}",
                )
            return
        silent = [
            rank
            for rank in range(worker.info.dp_size)
            if now_s - worker.last_report_s.get(rank, -1e9) >= SILENT_AFTER_S
        ]
        if silent:
            ranks = ", ".join(map(str, silent[:16])) + (" …" if len(silent) > 16 else "")
            self.report_problem(worker, "signal", f"no EndForward from rank {ranks}")
            if len(silent) == worker.info.dp_size:
                self.doubted(worker)
        else:
            worker.problems.pop("signal", None)


def _as_reported(info: WorkerInfo, barrier: bool = False) -> WorkerInfo:
    """What EndForward says of the barrier is believed where /server_info, which nobody else can
    answer, does not say."""
    told = info.sbs is not None and info.sbs.barrier is not None
    if told or info.no_barrier not in ("", _AS_REPORTED) or info.dp_size == 1:
        return info
    return msgspec.structs.replace(info, no_barrier="" if barrier else _AS_REPORTED)


def _why_mute(info: WorkerInfo) -> str:
    """What to do about an engine that sends no EndForward."""
    version = parse_version(info.version)
    if info.sbs is None and version is not None and (0, 0, 0) < version < PLUGIN_VERSION:
        wanted = ".".join(map(str, PLUGIN_VERSION))
        return (
            f"SGLang {info.version} loads no plugins: install sglang-sbs next to it, run "
            "'sglang-sbs patch apply' there and set SGLANG_SBS_ROUTERS=tcp://ROUTER:7600, or "
            f"upgrade the engine to {wanted} or later"
        )
    if info.sbs is None:
        return (
            "the sglang-sbs plugin is not installed or not configured there: pip install . in a "
            "checkout of sglang-sbs, next to SGLang, and set SGLANG_SBS_ROUTERS=tcp://ROUTER:7600"
        )
    speaks = ", ".join(info.sbs.routers) or info.sbs.bind or "nothing"
    return (
        f"the plugin is there and speaks to {speaks}, but nothing arrives: check that "
        "SGLANG_SBS_ROUTERS names this router's --sbs-endforward-bind, that the port can be "
        "reached, and that SGLANG_SBS_KEY_FILE there and --sbs-endforward-key-file here are the "
        "same secret, or both unset"
    )
