"""Keeps the state of all workers and decides which of them the scheduler may use. Probes, polls and
messages are handled elsewhere and reported here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from sglang_sbs.router.engines.urls import alias_key, normalise_worker_url
from sglang_sbs.router.errors import LegFailure
from sglang_sbs.router.options.config import BreakerConfig, MonitorConfig, PrefixWish
from sglang_sbs.router.workers.boot_identity import SILENT_AFTER_S, BootVerdict
from sglang_sbs.router.workers.breaker import Breaker
from sglang_sbs.router.workers.diagnosis import (
    AS_REPORTED,
    GATE_FAULTS,
    NO_KV_EVENTS,
    as_reported,
    why_mute,
    why_other_size,
    why_silent,
    why_stranger,
)
from sglang_sbs.router.workers.host_spelling import respell_all
from sglang_sbs.router.workers.kv_addresses import RefusedAddress, reported_endpoints
from sglang_sbs.router.workers.server_info import KvEventsBlock, WorkerInfo, node_of_rank
from sglang_sbs.router.workers.worker import Worker, WorkerEvents
from sglang_sbs.scheduling.events import InstanceDown, InstanceRole, InstanceUp, PrefixSource
from sglang_sbs.scheduling.prefill.stalled_work import StalledWork
from sglang_sbs.wire import EndForward

logger = logging.getLogger(__name__)

BARRIER_S = 10.0
"""Shortest interval between changes of a worker's barrier caused by reports."""
_ANNOUNCED = set(WorkerInfo.__struct_fields__) & set(InstanceUp.__struct_fields__)
_OF_PREFILL = {"captured_tokens", "overlap", "prefill_max_requests"}
_MAX_PROBLEM_CHARS = 2048
MUTE_AFTER_DISPATCHES = 3
"""Dispatches without any EndForward after which its absence is reported."""


class Registry:
    def __init__(
        self,
        events: WorkerEvents = WorkerEvents(),  # noqa: B008 - it is frozen
        breaker: BreakerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        expects_endforward: bool = True,
        monitor: MonitorConfig = MonitorConfig(),  # noqa: B008 - it is frozen
        prefix_source: PrefixWish = "off",
    ) -> None:
        """Create the registry. ``expects_endforward``: report missing EndForward as a problem.
        ``monitor``: times after which a silent or doubtful engine is asked again.
        ``prefix_source``: how the scheduler learns what prefill instances have cached."""
        self.connect(events)
        self._breaker = breaker or BreakerConfig()
        self._monitor = monitor
        self._clock = clock
        self._expects_endforward = expects_endforward
        self._prefix_source = prefix_source
        self.asks_peers = False
        """Look up the IP addresses of EndForward senders: an engine has ranks on several nodes."""
        self._workers: dict[str, Worker] = {}
        self._aliases: dict[tuple[str, int], str] = {}

    def connect(self, events: WorkerEvents) -> None:
        """Call these callbacks from now on, instead of earlier ones."""
        self._emit, self._removed = events.emit, events.removed
        self.doubted, self.silenced = events.doubted, events.silenced

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {list(self)}>"

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, url: str) -> Worker | None:
        return self._workers.get(url)

    def by_id(self, worker_id: str) -> Worker | None:
        return next((w for w in self._workers.values() if w.id == worker_id), None)

    def by_alias(self, url: str) -> Worker | None:
        """Find the worker for a URL written on another machine; ``None`` if unknown or not a
        URL."""
        try:
            normalised = normalise_worker_url(url)
        except ValueError:
            return None
        alias = self._aliases.get(alias_key(normalised), "")
        return self._workers.get(normalised) or self._workers.get(alias)

    def of_role(self, role: InstanceRole) -> list[Worker]:
        return [w for w in self._workers.values() if w.role == role]

    def usable(self, role: InstanceRole) -> list[Worker]:
        return [w for w in self._workers.values() if w.role == role and w.usable]

    @property
    def ready(self) -> bool:
        return bool(self.usable("prefill")) and bool(self.usable("decode"))

    def expect_endforward(self, expects: bool) -> None:
        self._expects_endforward = expects
        for worker in self._workers.values():
            if not expects and not worker.last_report_s:
                worker.problems.pop("signal", None)

    # Membership -------------------------------------------------------------------------------

    def add(self, url: str, role: InstanceRole, bootstrap_port: int | None = None) -> Worker:
        """Register a worker. Raises: ValueError, the URL is invalid or already registered."""
        url = normalise_worker_url(url)
        if url in self._workers:
            raise ValueError(f"worker {url} is already registered")
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
        """Remove a worker: it gets no new requests, and those in flight run to their end."""
        worker.draining = True
        self._workers.pop(worker.url, None)
        self.refresh(worker)
        self._aliases = {alias_key(url): url for url in reversed(self._workers)}
        logger.info("worker %s (%s) removed", worker.url, worker.role)
        self._removed(worker)

    def drain(self, worker: Worker, draining: bool) -> None:
        """Stop new requests to a worker, or (False) allow them again; those in flight continue."""
        if worker.draining != draining:
            worker.draining = draining
            logger.info("worker %s is %s", worker.url, "drained" if draining else "in use again")
            self.refresh(worker)

    # Reports ----------------------------------------------------------------------------------

    def described(self, worker: Worker, info: WorkerInfo) -> None:
        """Store a worker's facts from ``/server_info``, report problems found in them, and announce
        changes to the scheduler."""
        self.check_boot(worker, info)
        if worker.info is not None and worker.info.no_barrier == AS_REPORTED:
            info = as_reported(info)
        changed = worker.info != info
        if worker.info is not None and worker.info.dp_size != info.dp_size:
            worker.resized(info.dp_size)
        worker.info = info
        respell_all(self.of_role("prefill"), self.of_role("decode"))
        launch = {f"launch{number}": text for number, text in enumerate(info.warnings)}
        gone = {kind for kind in worker.problems if kind.startswith("launch")} - launch.keys()
        for solved in ("unusable", "unreachable", "bootstrap", *gone):
            worker.problems.pop(solved, None)
        if self.kv_events_of(worker) is None:
            worker.kv_events_missing = False  # the former engine's
        if not worker.kv_events_missing:
            lacking = self._prefix_source == "events" and info.radix_cache and not info.kv_events
            self.report_problem(worker, "kv_events", NO_KV_EVENTS if lacking else "")
        given, port = worker.configured_bootstrap_port, worker.bootstrap_port
        if info.rust_server and given is not None and given != port:
            text = (
                f"its KV registry is at port {port}, where it serves HTTP (SGLANG_RUST_SERVER=1), "
                f"and not at {given}: that port is used. Give it after --prefill URL, or none"
            )
            self.report_problem(worker, "bootstrap", text)
        for kind, text in launch.items():
            self.report_problem(worker, kind, text)
        if changed:
            self._announce_anew(worker)

    def check_boot(self, worker: Worker, info: WorkerInfo) -> None:
        """Check whether ``/server_info`` is from the same engine process as before. If not, treat
        the worker as restarted; report another engine that claims to be it as a problem."""
        is_another, claimant = worker.boot.confirm(worker.known.boot_id, info.boot_id)
        if is_another:
            self._restarted(worker)
        elif claimant:
            text = (
                f"EndForward of another boot ({claimant[:8]}) claims to be this worker and is "
                "ignored. Is SGLANG_SBS_INSTANCE_ID the same on two engines?"
            )
            self.report_problem(worker, "stranger", text)

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
        self.refresh(worker)

    def leg_failed(self, failure: LegFailure) -> None:
        """Count a failed leg against its worker, unless the client caused it."""
        worker = self._workers.get(failure.worker)
        if worker is None or not failure.counts_against_worker:
            return
        worker.failures += 1
        if failure.unreachable:
            elsewhere = worker.info is not None and worker.info.node_hosts
            why = failure.message if elsewhere else f"nothing listens at {worker.url}"
            self.set_healthy(worker, False, why)
        others = [w for w in self.usable(worker.role) if w is not worker]
        if worker.breaker.failed(self._clock(), may_open=bool(others)):
            logger.warning("worker %s: circuit breaker opened (%s)", worker.url, failure.message)
            self.refresh(worker)
        if failure.transport:
            self.doubted(worker)

    def room_left(self, url: str) -> None:
        """Count a request that the prefill worker at ``url`` refused although decode may have
        contacted it about the request: its bootstrap room may stay there (``rooms_left``)."""
        if worker := self._workers.get(url):
            worker.rooms_left += 1

    def leg_succeeded(self, url: str) -> None:
        if worker := self._workers.get(url):
            worker.successes += 1
            worker.breaker.succeeded()

    def tick(self) -> None:
        """Handle timers: half-open expired breakers, and check for silence."""
        now_s = self._clock()
        for worker in self._workers.values():
            if worker.breaker.try_half_open(now_s):
                logger.info("worker %s: circuit breaker half-open", worker.url)
                self.refresh(worker)
            self._check_signal(worker, now_s)
            self._check_quiet(worker, now_s)

    def reported(self, worker: Worker, report: EndForward) -> bool:
        """Record an EndForward; return False if it must be dropped. A new boot id of a rank means
        that the engine restarted (:class:`~.boot_identity.BootIdentity`), so everything in flight
        there is lost."""
        stranger = why_stranger(worker.info, report) if worker.info is not None else ""
        if stranger:
            worker.boot.strange_s = self._clock()
            if "dist_init_addr" not in worker.problems:  # one message is enough
                self.report_problem(worker, "dist_init_addr", stranger)
            return False
        rank, boot_id = report.dp_rank, report.boot_id
        confirmed = worker.known.boot_id
        match worker.boot.judge(rank, boot_id, confirmed, worker.quiet_s(self._clock())):
            case BootVerdict.UNCONFIRMED:
                self._ask_again(worker, claimant=boot_id)
                return False
            case BootVerdict.DROPPED:
                return False
            case BootVerdict.RESTARTED:
                self._restarted(worker)
        worker.boot.accept(rank, boot_id)
        is_own = boot_id in (confirmed, worker.boot.by_rank.get(rank))
        if report.role != worker.role:
            text = f"EndForward reports role {report.role}; its reports are ignored"
            self.report_problem(worker, "role", text)
            return False
        if worker.info is not None:
            if other_size := why_other_size(worker.info, report, is_own):
                self._ask_again(worker)
                self.report_problem(worker, "dp_size", other_size)
                return False
            self._on_barrier(worker, worker.info, report.barrier)
        self._on_gang_gate(worker, rank, report.gang_gate)
        if worker.role == "prefill":
            self._on_stalled_work(worker, report)
        worker.boot.by_rank[rank] = boot_id
        worker.last_report_s[rank] = self._clock()
        worker.reports[rank] = worker.reports.get(rank, 0) + 1
        worker.problems.pop("dp_size", None)
        worker.problems.pop("role", None)
        return True

    def _on_stalled_work(self, worker: Worker, report: EndForward) -> None:
        rank = worker.stalled.setdefault(report.dp_rank, StalledWork())
        rank.observe(report, self._clock())
        if rank.cause or "stalled" in worker.problems:
            causes = (stalled.cause for _, stalled in sorted(worker.stalled.items()))
            self.report_problem(worker, "stalled", next(filter(None, causes), ""))

    def accepted(self, worker: Worker, rid: str, named_rank: int, rank: int) -> None:
        """Record that DP rank ``rank`` accepted a request sent with ``named_rank``. If the engine
        turns out to treat ranks as a hint, report that and name none any more."""
        worker.served.accepted(rid, named_rank, rank)
        if not worker.rank_is_a_hint and (problem := worker.served.problem):
            worker.rank_is_a_hint = True
            self.report_problem(worker, "rank-is-a-hint", problem)

    def _on_gang_gate(self, worker: Worker, rank: int, state: str) -> None:
        if state in GATE_FAULTS:
            worker.gates_at_fault[rank] = state
        elif worker.gates_at_fault.pop(rank, None) is None:
            return
        first, fault = min(worker.gates_at_fault.items(), default=(0, ""))
        text = f"DP rank {first}: {GATE_FAULTS[fault]}" if fault else ""
        self.report_problem(worker, "gang_gate", text)

    def _on_barrier(self, worker: Worker, info: WorkerInfo, barrier: bool) -> None:
        reported = as_reported(info, barrier)
        now_s = self._clock()
        # A sender without a key may contradict the engine at any time.
        if reported.no_barrier != info.no_barrier and now_s >= worker.barrier_changed_s + BARRIER_S:
            worker.barrier_changed_s, worker.info = now_s, reported
            self._announce_anew(worker)

    # Cache contents ---------------------------------------------------------------------------

    def kv_events_of(self, worker: Worker) -> KvEventsBlock | None:
        """Return a worker's KV event settings; ``None``: events are unwanted or not published."""
        wanted = worker.known.radix_cache and self._prefix_source in ("auto", "events")
        return worker.known.kv_events if wanted else None

    def prefix_source_of(self, worker: Worker) -> PrefixSource:
        """Return how the scheduler learns what the worker has cached."""
        info = worker.info
        if info is None or not info.radix_cache:
            return "off"
        if self.kv_events_of(worker) is not None and not worker.kv_events_missing:
            return "events"
        return "approximate" if self._prefix_source in ("auto", "approximate") else "off"

    def on_kv_address(
        self, worker: Worker, report: EndForward, peer: str, *, has_key: bool
    ) -> None:
        """Store where a rank on another node publishes KV events according to its report, or the
        reason why that address is not used. ``peer``: the sender's IP address."""
        rank, address = report.dp_rank, report.kv_address
        if address is None or self.kv_events_of(worker) is None:
            return
        if node_of_rank(worker.known, rank) == 0:
            worker.kv_refused[rank] = "it is on the first node, which has the worker's own host"
            return
        try:
            worker.kv_endpoints[rank] = reported_endpoints(address, peer, has_key=has_key)
            worker.kv_refused.pop(rank, None)
        except RefusedAddress as error:
            worker.kv_refused[rank] = str(error)

    def set_kv_events_missing(self, worker: Worker, why: str) -> None:
        """Record that a worker's KV events do not arrive, or (empty ``why``) arrive again."""
        if why:
            self.report_problem(worker, "kv_events", why)
        else:
            self._solved(worker, "kv_events", "its KV events arrive again")
        if worker.kv_events_missing != bool(why):
            worker.kv_events_missing = bool(why)
            self._announce_anew(worker)

    def report_problem(self, worker: Worker, kind: str, text: str) -> None:
        """Show a problem in ``GET /workers`` and log it once, and again if it returns later. An
        empty text clears it."""
        text = text[:_MAX_PROBLEM_CHARS]
        if worker.problems.get(kind, "") == text:
            return
        if not text:
            del worker.problems[kind]
            return
        worker.problems[kind] = text
        self._log(logging.WARNING, worker, kind, text)

    def _solved(self, worker: Worker, kind: str, text: str) -> None:
        """Clear a problem, and log ``text`` if there was one."""
        if worker.problems.pop(kind, None) is not None:
            self._log(logging.INFO, worker, kind, text)

    def _log(self, level: int, worker: Worker, kind: str, text: str) -> None:
        if worker.is_news(kind, text, self._clock()):
            logger.log(level, "worker %s (%s): %s", worker.url, worker.role, text)

    # Inside -----------------------------------------------------------------------------------

    def _ask_again(self, worker: Worker, claimant: str = "") -> None:
        """Request another read of ``/server_info``. ``claimant``: an unconfirmed boot id."""
        if self.may_ask_again(worker):
            worker.boot.ask(claimant)
            self.doubted(worker)

    def may_ask_again(self, worker: Worker) -> bool:
        """Return whether ``/server_info`` of a healthy worker may be read now, at most once per
        ``recheck_every_s``; if so, store the time."""
        now_s = self._clock()
        if now_s - worker.boot.asked_s < self._monitor.recheck_every_s:
            return False
        worker.boot.asked_s = now_s
        return True

    def _restarted(self, worker: Worker) -> None:
        logger.warning("worker %s (%s) restarted", worker.url, worker.role)
        if worker.role == "prefill":
            worker.spelled += 1  # a boot id in /server_info decides otherwise
        worker.forget_boot(self._clock())
        worker.info = None
        worker.breaker.reset()
        self.refresh(worker)
        self.silenced(worker)
        self.doubted(worker)

    def refresh(self, worker: Worker) -> None:
        """Announce the worker to the scheduler as up, down or drained if that has changed."""
        resting = worker.draining and worker.sound and worker.url in self._workers
        if (worker.usable, resting) == (worker.announced, worker.resting):
            return
        worker.announced, worker.resting = worker.usable, resting
        self._announce_anew(worker)
        if not worker.announced:
            self._let_in(worker.role)
            self._emit(InstanceDown(instance=worker.url, drained=resting))

    def _let_in(self, role: InstanceRole) -> None:
        """Half-open breakers if no other worker of the role is left: a doubtful worker is better
        than none."""
        if self.usable(role):
            return
        for worker in self._workers.values():
            if worker.role == role and worker.healthy and worker.breaker.let_in():
                logger.warning("worker %s: the last of its role, breaker half-open", worker.url)
                self.refresh(worker)

    def _announce_anew(self, worker: Worker) -> None:
        if worker.announced:
            self._emit(self._instance_up(worker))

    def _instance_up(self, worker: Worker) -> InstanceUp:
        info = worker.info
        assert info is not None, "only described workers are announced"
        decode = worker.role == "decode"
        return InstanceUp(
            instance=worker.url,
            role=worker.role,
            prefix_source=self.prefix_source_of(worker),
            barrier=decode or not info.no_barrier,
            **{
                name: getattr(info, name)
                for name in (_ANNOUNCED - _OF_PREFILL if decode else _ANNOUNCED)
            },
        )

    @property
    def _probes_are_free(self) -> bool:
        """Whether probes run no forward pass. Only then may they follow from mere silence."""
        return self._monitor.health_endpoint is None

    def _check_quiet(self, worker: Worker, now_s: float) -> None:
        """Notice the silence of a stopped process (SIGSTOP, a hung host), which breaks no
        connection. An engine with the plugin reports every second; others report only while they
        have work."""
        expected = worker.load > 0 or bool(worker.last_report_s)
        if not self._probes_are_free or not worker.healthy or not expected:
            return
        last_message_s = max([worker.last_response_s, *worker.last_report_s.values()])
        if now_s - last_message_s >= self._monitor.quiet_s:
            worker.last_response_s = now_s
            self.doubted(worker)

    def _check_signal(self, worker: Worker, now_s: float) -> None:
        """Keep the diagnosis of missing or partial EndForward current."""
        if now_s - worker.boot.strange_s >= SILENT_AFTER_S:
            worker.problems.pop("dist_init_addr", None)
        if worker.info is None or not worker.healthy:
            return
        if not worker.last_report_s:
            if self._expects_endforward and worker.dispatches >= MUTE_AFTER_DISPATCHES:
                mute = f"no EndForward after {MUTE_AFTER_DISPATCHES} dispatches"
                text = f"{mute}, falling back to load polls and timers; {why_mute(worker.info)}"
                self.report_problem(worker, "signal", text)
            return
        last_s, ranks = worker.last_report_s, range(worker.info.dp_size)
        silent = [r for r in ranks if now_s - last_s.get(r, -1e9) >= SILENT_AFTER_S]
        if silent:
            self.report_problem(worker, "signal", why_silent(silent))
            if len(silent) == len(ranks) and self._probes_are_free:
                self.doubted(worker)
        else:
            self._solved(worker, "signal", "EndForward arrives again")
