"""All settings of the router, taken from a checked command line."""

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
    """All settings of the router. Times are in seconds."""

    prefill: tuple[tuple[str, int | None], ...]
    """URL and bootstrap port of each prefill instance; ``None``: no bootstrap port was given."""
    decode: tuple[str, ...]
    scheduler: SchedulerConfig
    relay: config.RelayConfig
    breaker: config.BreakerConfig
    monitor: config.MonitorConfig
    discovery: config.DiscoveryConfig | None = None
    """Settings for finding workers as Kubernetes pods; ``None``: they are not looked for."""
    starts_empty: bool = False
    """``--pd-disaggregation`` is given without workers, because ``POST /workers`` adds them
    later."""
    host: str = "0.0.0.0"
    port: int = 30000
    prometheus_host: str = "0.0.0.0"
    prometheus_port: int = 29000
    prometheus_duration_buckets: tuple[float, ...] | None = None
    endforward_bind: str | None = "tcp://0.0.0.0:7600"
    event_log: Path | None = None
    trial: TrialSpec | None = None
    """Trial of ``--sbs-trial``, which begins with the first request."""
    tokenizer_path: Path | None = None
    chat_template: Path | None = None
    prefix_source: config.PrefixWish = "auto"
    """Where the router learns cached prefixes; ``auto`` uses events from instances that publish
    them."""
    forward_token_ids: ForwardTokenIds = "auto"
    tenant_header: str | None = None
    """Header, in lower case, that names a request's tenant; ``None``: requests have no tenants."""
    api_key: str | None = None
    admin_api_key: str | None = None
    control_plane_keys: tuple[ControlKey, ...] = ()
    control_plane_audit: bool = False
    jwt: JwtConfig | None = None
    """Identity provider whose tokens are accepted like control-plane keys."""
    max_concurrent_requests: int = -1
    queue_size: int = 100
    queue_timeout_s: float = 60
    rate_limit_per_s: float = 0.0
    """Refill of the token bucket per second; 0: ``max_concurrent_requests`` is a plain limit."""
    max_payload_bytes: int = config.MAX_PAYLOAD_BYTES
    shutdown_grace_s: float = 180
    request_id_headers: tuple[str, ...] = REQUEST_ID_HEADERS
    cors_allowed_origins: tuple[str, ...] = ()
    log_level: str = "info"
    log_dir: Path | None = None
    log_json: bool = False
    access_log: config.AccessLog = field(default_factory=config.AccessLog)
    otlp_endpoint: str | None = None
    """Endpoint of the OTLP collector; ``None`` disables tracing."""
    tls_cert_path: Path | None = None
    tls_key_path: Path | None = None
    client_cert_path: Path | None = None
    client_key_path: Path | None = None
    ca_cert_paths: tuple[Path, ...] = ()
    workers: int = 1
    """Number of front-end processes."""
    several: SeveralProcesses = field(default_factory=SeveralProcesses)
    endforward_keys: CurveKeys | None = None
    take_over: bool = False
    parent_fd: int | None = None
    """Descriptor of the socket to the supervisor, in child processes."""
    listen_fds: tuple[int, ...] = ()
    """Descriptors of listening sockets inherited from the supervisor."""
    warnings: tuple[str, ...] = ()
    """Warnings to log once logging is set up."""

    @property
    def role(self) -> Role:
        return self.several.role

    def names_blocks(self, policy: str) -> bool:
        """Return whether ``policy`` uses cached prefixes, so that prompts are divided into named
        blocks."""
        return self.prefix_source != "off" and reads_prefixes(policy)

    def sends_gangs(self, policy: str) -> bool:
        """Return whether requests describe their batch to engines under ``policy``
        (``--sbs-gang-gate on``)."""
        return policy == "sbs" and self.relay.gang_gate

    @property
    def roles_without_workers(self) -> list[str]:
        """Roles (``prefill``, ``decode``) that have no instance and can get none later."""
        found = self.discovery or config.DiscoveryConfig()
        prefill = self.prefill or found.prefill_selector or self.starts_empty
        decode = self.decode or found.decode_selector or self.starts_empty
        return [role for role, any_ in (("prefill", prefill), ("decode", decode)) if not any_]

    @property
    def worker_key(self) -> str | None:
        return self.admin_api_key or self.api_key

    def shown(self, policy: str = "") -> dict[str, Any]:
        """Return the enabled features for ``sbs_options`` in ``GET /server_info``, which the doctor
        reads. Never includes a key, a path or an address. Fields are only added, because the doctor
        may be of another release. ``policy``: the one in force; empty: that of the flag."""
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
