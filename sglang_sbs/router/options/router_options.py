"""What the router is told, all of it: the command line, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sglang_sbs.router.options import config
from sglang_sbs.router.options.keys import ControlKey, JwtConfig
from sglang_sbs.router.options.several import Role, SeveralProcesses
from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.policy_registry import reads_prefixes
from sglang_sbs.trial.spec import TrialSpec
from sglang_sbs.wire.curve import CurveKeys

ForwardTokenIds = Literal["auto", "on", "off"]
REQUEST_ID_HEADERS = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")


@dataclass(frozen=True)
class RouterOptions:
    """The command line, checked. Times in seconds."""

    prefill: tuple[tuple[str, int | None], ...]
    """URL and bootstrap port."""
    decode: tuple[str, ...]
    scheduler: SchedulerConfig
    relay: config.RelayConfig
    breaker: config.BreakerConfig
    monitor: config.MonitorConfig
    discovery: config.DiscoveryConfig | None = None
    """Workers that are found as Kubernetes pods."""
    starts_empty: bool = False
    """``--pd-disaggregation`` without any worker: all of them come by ``POST /workers``."""
    host: str = "0.0.0.0"
    port: int = 30000
    prometheus_host: str = "0.0.0.0"
    prometheus_port: int = 29000
    prometheus_duration_buckets: tuple[float, ...] | None = None
    endforward_bind: str | None = "tcp://0.0.0.0:7600"
    event_log: Path | None = None
    trial: TrialSpec | None = None
    """Begins with the first request."""
    tokenizer_path: Path | None = None
    chat_template: Path | None = None
    prefix_source: config.PrefixWish = "auto"
    """How it is found out what ranks have cached; ``auto``: events where there are any."""
    forward_token_ids: ForwardTokenIds = "auto"
    tenant_header: str | None = None
    """In lower case."""
    api_key: str | None = None
    admin_api_key: str | None = None
    control_plane_keys: tuple[ControlKey, ...] = ()
    control_plane_audit: bool = False
    jwt: JwtConfig | None = None
    """Whose tokens are as good as such keys."""
    max_concurrent_requests: int = -1
    queue_size: int = 100
    queue_timeout_s: float = 60
    rate_limit_per_s: float = 0.0
    """Tokens added per second; 0: none, a plain limit of requests at once."""
    max_payload_bytes: int = config.MAX_PAYLOAD_BYTES
    shutdown_grace_s: float = 180
    request_id_headers: tuple[str, ...] = REQUEST_ID_HEADERS
    cors_allowed_origins: tuple[str, ...] = ()
    log_level: str = "info"
    log_dir: Path | None = None
    log_json: bool = False
    access_log: config.AccessLog = field(default_factory=config.AccessLog)
    otlp_endpoint: str | None = None
    """Where spans go; ``None``: tracing is off."""
    tls_cert_path: Path | None = None
    tls_key_path: Path | None = None
    client_cert_path: Path | None = None
    client_key_path: Path | None = None
    ca_cert_paths: tuple[Path, ...] = ()
    workers: int = 1
    """Front-end processes."""
    several: SeveralProcesses = field(default_factory=SeveralProcesses)
    endforward_keys: CurveKeys | None = None
    take_over: bool = False
    parent_fd: int | None = None
    """Socket to the supervisor, in its children."""
    listen_fds: tuple[int, ...] = ()
    """Sockets that listen already, inherited from the supervisor."""
    warnings: tuple[str, ...] = ()
    """To be logged once logging is set up."""

    @property
    def role(self) -> Role:
        return self.several.role

    def names_blocks(self, policy: str) -> bool:
        """Whether anybody looks for prefixes under that policy."""
        return self.prefix_source != "off" and reads_prefixes(policy)

    def sends_gangs(self, policy: str) -> bool:
        """Whether engines are told under that policy which requests were sent together."""
        return policy == "sbs" and self.relay.gang_gate

    @property
    def roles_without_workers(self) -> list[str]:
        """Those of which there is no instance, and none may come."""
        found = self.discovery or config.DiscoveryConfig()
        prefill = self.prefill or found.prefill_selector or self.starts_empty
        decode = self.decode or found.decode_selector or self.starts_empty
        return [role for role, any_ in (("prefill", prefill), ("decode", decode)) if not any_]

    @property
    def worker_key(self) -> str | None:
        return self.admin_api_key or self.api_key

    def shown(self, policy: str = "") -> dict[str, Any]:
        """Which features are on, as ``GET /server_info`` tells (``sbs_options``) for the doctor's
        table. Never a key, a path or an address. Fields are only ever added: a doctor may be of
        another release than the router. ``policy``: in force, if it is not that of the flags."""
        policy = policy or self.scheduler.policy
        return {
            "policy": policy,
            "trigger": self.scheduler.trigger,
            "role": self.role,
            "front_ends": self.workers,
            "endforward": self.endforward_bind is not None,
            "endforward_encrypted": self.endforward_keys is not None,
            "gang_gate": self.sends_gangs(policy),
            "prefix_source": self.prefix_source,
            "tokenizer": self.tokenizer_path is not None,
            "forward_token_ids": self.forward_token_ids,
            "low_priority_values_first": self.relay.low_priority_values_first,
            "tenants": self.tenant_header is not None,
            "admin_key": self.worker_key is not None,
            "service_discovery": self.discovery is not None,
        }
