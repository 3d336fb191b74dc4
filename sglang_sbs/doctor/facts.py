"""The gathered facts, before they are judged. All times in seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_sbs.doctor.options import DoctorOptions
from sglang_sbs.router.engines.urls import alias_key, normalise_worker_url
from sglang_sbs.router.workers.server_info import (
    PLUGIN_VERSION,
    SbsBlock,
    UnusableWorker,
    WorkerInfo,
    parse_version,
)
from sglang_sbs.scheduling.events import InstanceRole, LoadPolled
from sglang_sbs.wire import EndForward


@dataclass(eq=False)
class Failure(Exception):
    """Reason for a missing response. ``kind``: the last part of a finding's id (``reach.KIND``), or
    ``refused`` for a wrong key (401, 403)."""

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True)
class Bootstrap:
    host: str
    """Host of the bootstrap server as sent to decode engines; ``port`` likewise."""
    port: int
    failure: str = ""
    status: int = 0
    """HTTP status of ``GET /route`` for the whole engine; 503 while ranks are missing."""
    text: str = ""
    layout: dict[str, Any] = field(default_factory=dict)
    """``PrefillServerInfo`` of SGLang's ``disaggregation/common/conn.py``."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(slots=True)
class EngineFacts:
    """One engine and its responses. Fields without a response keep their defaults."""

    url: str
    role: InstanceRole
    """Role as given on the command line; the bootstrap port likewise."""
    given_port: int | None = None
    failure: Failure | None = None
    data: dict[str, Any] = field(default_factory=dict)
    """``/server_info`` without secrets."""
    admin_api_key: str = field(default="", repr=False)
    """Admin API key as shown by the engine, only for comparison: it is never written anywhere."""
    info: WorkerInfo | None = None
    """The parsed data; ``None``: the router could not use it."""
    unusable: UnusableWorker | None = None
    """Reason why the router could not use the engine; None: it could."""
    ready_status: int = 0
    """HTTP status of ``GET /ready``; 404 before SGLang 0.5.20."""
    rtts_s: list[float] = field(default_factory=list)
    """Round trip times of ``GET /ready``, in seconds."""
    loads: LoadPolled | None = None
    clock_offset_s: float | None = None
    """Engine's wall clock minus ours, accurate to half a round trip."""
    open_without_key: bool | None = None
    """The engine responds without a key; ``None``: not tested."""
    bootstrap: Bootstrap | None = None
    closed_kv_ports: list[str] = field(default_factory=list)
    """KV event ports that refuse connections from here, each with its rank."""
    hidden_kv_ranks: list[int] = field(default_factory=list)
    """DP ranks on other nodes that report no address for their KV events."""

    @property
    def known(self) -> WorkerInfo:
        """The parsed ``info``; call this only for a usable engine."""
        assert self.info is not None
        return self.info

    @property
    def sbs(self) -> SbsBlock | None:
        """The plugin's block of ``/server_info``, parsed; None if absent."""
        return self.info.sbs if self.info is not None else None

    @property
    def plugin(self) -> dict[str, Any]:
        """The plugin's block of ``/server_info``, unparsed; empty if absent."""
        block = self.data.get("sbs")
        return block if isinstance(block, dict) else {}


@dataclass(slots=True)
class RankReports:
    messages: int
    last: EndForward
    peer: str
    """IP address of the sender; empty for a Unix socket."""


@dataclass(slots=True)
class ReceivedReports:
    """Result of listening for EndForward."""

    listened_s: float = 0.0
    bound: list[str] = field(default_factory=list)
    dialled: list[str] = field(default_factory=list)
    """Engines to which the doctor connects (``SGLANG_SBS_BIND``)."""
    busy: list[str] = field(default_factory=list)
    """Endpoints of this machine that another process uses."""
    elsewhere: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Errors by endpoint that could not be bound."""
    ranks: dict[str, dict[int, RankReports]] = field(default_factory=dict)
    """Reports by boot id and DP rank."""
    malformed: Counter[str] = field(default_factory=Counter)
    """Counts of malformed messages by error."""
    handshakes_failed: int = 0


@dataclass(slots=True)
class RouterFacts:
    url: str
    failure: Failure | None = None
    ready_status: int = 0
    workers: list[dict[str, Any]] = field(default_factory=list)
    scheduler: dict[str, Any] = field(default_factory=dict)
    """A front end's link to the scheduler process; empty if there is no other process."""
    state: dict[str, Any] = field(default_factory=dict)
    """The scheduler's snapshot (``sbs`` of ``/server_info``)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Effects of the router's flags (``sbs_options`` of ``/server_info``)."""

    def entry(self, url: str) -> dict[str, Any]:
        """Return the router's entry of an engine in ``/workers``; empty if it has none."""
        alias = alias_of(url)
        return next(
            (worker for worker in self.workers if alias_of(text(worker, "url")) == alias), {}
        )

    def problems(self, url: str) -> dict[str, Any]:
        """The router's problems with an engine, by kind."""
        reported = self.entry(url).get("problems")
        return reported if isinstance(reported, dict) else {}

    def instances(self, role: str) -> list[dict[str, Any]]:
        return objects(self.state.get(role))

    def ages_s(self, url: str) -> dict[int, float | None]:
        """Seconds since the last report of each DP rank, as seen by the scheduler; ``None``: no
        report yet."""
        instances = (*self.instances("prefill"), *self.instances("decode"))
        alias = alias_of(url)
        reported = next((it for it in instances if alias_of(text(it, "instance")) == alias), {})
        ages_s = [rank.get("age_s") for rank in objects(reported.get("ranks"))]
        return {
            rank: float(age_s) if isinstance(age_s, int | float) else None
            for rank, age_s in enumerate(ages_s)
        }


@dataclass(frozen=True, slots=True)
class ProbeResult:
    pair: str
    """URLs of the probed pair, as ``PREFILL -> DECODE``."""
    ranks: str
    failure: str
    """Error text; empty if the pair generated the token."""
    took_s: float


@dataclass(slots=True)
class ClusterFacts:
    options: DoctorOptions
    engines: list[EngineFacts]
    received: ReceivedReports | None = None
    """``None``: the doctor did not listen, because no report could come."""
    router: RouterFacts | None = None
    probes: list[ProbeResult] = field(default_factory=list)

    @property
    def usable(self) -> list[EngineFacts]:
        return [e for e in self.engines if e.info is not None]

    def of_role(self, role: InstanceRole) -> list[EngineFacts]:
        """Usable engines given as ``role``."""
        return [e for e in self.usable if e.role == role]


SHOWN_VERSION = (0, 5, 22)
"""First SGLang release that shows the plugin in ``/server_info``."""


def may_speak_unseen(facts: EngineFacts) -> bool:
    """Return whether the engine may have the plugin although ``/server_info`` cannot show it
    (before :data:`SHOWN_VERSION`), so that only EndForward can."""
    if facts.info is None or facts.info.sbs is not None:
        return False
    version = parse_version(facts.info.version)
    return version is None or version == (0, 0, 0) or PLUGIN_VERSION <= version < SHOWN_VERSION


def key_differs(options: DoctorOptions, facts: EngineFacts) -> bool:
    """Return whether only one of plugin and doctor has a CURVE secret, as far as the plugin reports
    it."""
    encrypted = facts.plugin.get("encrypted")
    return isinstance(encrypted, bool) and encrypted != (options.key_file is not None)


def alias_of(url: str) -> tuple[str, int] | None:
    """Return the host and port that URLs of one engine share; ``None``: not a URL."""
    try:
        return alias_key(normalise_worker_url(url))
    except ValueError:
        return None


# Answers may be anything, and lists long --------------------------------------------------------


def objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def number(data: Mapping[str, Any], name: str) -> int:
    """Return a field of an engine's response as a whole number; 0 if absent."""
    value = data.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def text(data: Mapping[str, Any], name: str) -> str:
    """Return a field of an engine's response as a string; empty if absent."""
    value = data.get(name)
    return value if isinstance(value, str) else ""


def in_ms(seconds: object) -> str:
    return f"{seconds * 1e3:.0f} ms" if isinstance(seconds, int | float) else "?"


def listed(items: Iterable[object], most: int = 8) -> str:
    """Format as ``a, b, …``."""
    words = list(map(str, items))
    return ", ".join(words[:most]) + (" …" if len(words) > most else "")
