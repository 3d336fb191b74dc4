"""The command line of the router.

Owns the checks that argparse cannot make, and the typed result. Must not know how an option is
used.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from sglang_sbs.router.engines.urls import normalise_worker_url
from sglang_sbs.router.options.arguments import FlagError, build_parser
from sglang_sbs.router.options.config import (
    MAX_PAYLOAD_BYTES,
    BreakerConfig,
    DiscoveryConfig,
    MonitorConfig,
    RelayConfig,
    default_bodies_bytes,
)
from sglang_sbs.router.options.keys import ControlKey, JwtConfig, parse_control_key
from sglang_sbs.router.options.platform import discovery_of, jwt_of
from sglang_sbs.router.options.request_classes import class_fields, tenant_header_of
from sglang_sbs.router.options.stock import IGNORED_FLAGS, NEAREST_POLICY, REFUSED_FLAGS
from sglang_sbs.scheduling.config import DecodeRule, SchedulerConfig, Trigger
from sglang_sbs.scheduling.policy_names import POLICIES, Policy, facts_of
from sglang_sbs.wire.curve import CurveKeys, SecretError, keys_in

Role = Literal["router", "scheduler", "front-end"]
PrefixSourceFlag = Literal["auto", "events", "approximate", "off"]
ForwardTokenIds = Literal["auto", "on", "off"]

_DEFAULT_HEALTH_ENDPOINT = "/health"
_REQUEST_ID_HEADERS = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")


@dataclass(frozen=True)
class RouterOptions:
    """The command line, checked. Times in seconds."""

    prefill: tuple[tuple[str, int | None], ...]
    """URL and bootstrap port."""
    decode: tuple[str, ...]
    scheduler: SchedulerConfig
    relay: RelayConfig
    breaker: BreakerConfig
    monitor: MonitorConfig
    discovery: DiscoveryConfig | None = None
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
    tokenizer_path: Path | None = None
    chat_template: Path | None = None
    prefix_source: PrefixSourceFlag = "auto"
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
    queue_timeout_s: float = 60.0
    rate_limit_per_s: float = 0.0
    """Tokens added per second; 0: none, a plain limit of requests at once."""
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    shutdown_grace_s: float = 180.0
    request_id_headers: tuple[str, ...] = _REQUEST_ID_HEADERS
    cors_allowed_origins: tuple[str, ...] = ()
    log_level: str = "info"
    log_dir: Path | None = None
    log_json: bool = False
    otlp_endpoint: str | None = None
    """Where spans go; ``None``: tracing is off."""
    tls_cert_path: Path | None = None
    tls_key_path: Path | None = None
    client_cert_path: Path | None = None
    client_key_path: Path | None = None
    ca_cert_paths: tuple[Path, ...] = ()
    workers: int = 1
    """Front-end processes."""
    role: Role = "router"
    scheduler_endpoint: str | None = None
    scheduler_keys: CurveKeys | None = None
    endforward_keys: CurveKeys | None = None
    take_over: bool = False
    parent_fd: int | None = None
    """Socket to the supervisor, in its children."""
    listen_fds: tuple[int, ...] = ()
    """Sockets that listen already, inherited from the supervisor."""
    warnings: tuple[str, ...] = ()
    """To be logged once logging is set up."""

    @property
    def names_blocks(self) -> bool:
        """Whether anybody looks for prefixes."""
        return self.prefix_source != "off" and facts_of(self.scheduler.policy).reads_prefixes

    @property
    def roles_without_workers(self) -> list[str]:
        """Those of which there is no instance, and none may come."""
        found = self.discovery or DiscoveryConfig()
        if self.starts_empty:
            return []
        known = {
            "prefill": self.prefill or found.prefill_selector,
            "decode": self.decode or found.decode_selector,
        }
        return [role for role, workers in known.items() if not workers]

    @property
    def worker_key(self) -> str | None:
        """The key for engines' admin endpoints (``/abort_request``)."""
        return self.admin_api_key or self.api_key


def parse_flags(argv: Sequence[str], prog: str | None = None) -> RouterOptions:
    """Parse and check a command line (without the program name).

    Raises:
        FlagError: naming the flag and what to write instead.
        SystemExit: after ``--help``.
    """
    parser = build_parser(prog) if prog else build_parser()
    _check_known(parser, argv)
    return options_of(parser.parse_args(list(argv)))


def _check_known(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    known = {name for action in parser._actions for name in action.option_strings}
    for argument in argv:
        name = argument.partition("=")[0]
        if not name.startswith("--") or name in known or name == "--":
            continue
        bare = name.removeprefix("--").removeprefix("router-")
        if bare in REFUSED_FLAGS:
            raise FlagError(f"{name}: {REFUSED_FLAGS[bare]}")
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]}?" if near else "; see --help"
        raise FlagError(f"unknown flag {name}{hint}")


def options_of(args: argparse.Namespace) -> RouterOptions:
    """Check what the parser cannot. Raises: FlagError."""
    warnings: list[str] = []
    for key in vars(args):
        if key.startswith("ignored:"):
            name = key.removeprefix("ignored:")
            warnings.append(f"--{name} has no effect here: {IGNORED_FLAGS[name][1]}")
    prefill = tuple(_prefill(entry) for entry in args.prefill or ())
    decode = tuple(_url("--decode", entry[0]) for entry in args.decode or ())
    _check_workers([url for url, _ in prefill], list(decode))
    endpoint = args.health_check_endpoint
    if endpoint == _DEFAULT_HEALTH_ENDPOINT:
        warnings.append(
            "--health-check-endpoint /health runs a forward pass on DP rank 0 of an idle engine; "
            "leave the flag out for a check that costs nothing"
        )
    elif endpoint is not None and not endpoint.startswith("/"):
        raise FlagError(f"--health-check-endpoint {endpoint!r} must start with /, e.g. /ready")
    if (args.tls_cert_path is None) != (args.tls_key_path is None):
        raise FlagError("--tls-cert-path and --tls-key-path belong together: give both or none")
    if args.client_key_path is not None and args.client_cert_path is None:
        raise FlagError("--client-key-path is the key of --client-cert-path: give both or none")
    bind = args.sbs_endforward_bind
    if bind.lower() == "none":
        bind = None
    elif not bind.startswith(("tcp://", "ipc://")):
        raise FlagError(
            f"--sbs-endforward-bind {bind!r}: write tcp://HOST:PORT, e.g. tcp://0.0.0.0:7600, "
            "or none"
        )
    if bind is not None and not _is_local(bind) and args.sbs_endforward_key_file is None:
        warnings.append(
            f"--sbs-endforward-bind {bind} takes messages from whoever can reach it, without "
            "authentication: share a secret (--sbs-endforward-key-file, SGLANG_SBS_KEY_FILE on "
            "engines), keep that port inside the cluster, or bind an address that only engines "
            "reach (tcp://10.0.0.1:7600; ipc:///path on one machine)"
        )
    if args.retry_max_backoff_ms < args.retry_initial_backoff_ms:
        raise FlagError("--retry-max-backoff-ms must not be below --retry-initial-backoff-ms")
    if 1 <= args.max_concurrent_requests < args.workers:
        raise FlagError(
            f"--max-concurrent-requests {args.max_concurrent_requests} cannot be shared out among "
            f"--workers {args.workers}: write at least {args.workers}, or fewer workers"
        )
    if args.rate_limit_tokens_per_second and args.max_concurrent_requests < 1:
        warnings.append(
            "--rate-limit-tokens-per-second has no effect without --max-concurrent-requests, which "
            "is the size of the bucket"
        )
    warnings += [
        f"{path} can be read by other users of this machine: chmod 600 it"
        for path in (args.sbs_key_file, args.sbs_endforward_key_file)
        if path is not None and path.exists() and path.stat().st_mode & 0o077
    ]
    policy = _policy(args.policy, warnings)
    try:
        discovery, jwt = discovery_of(args, warnings), jwt_of(args)
        classes, tenant_header = class_fields(args), tenant_header_of(args, warnings)
    except ValueError as error:
        raise FlagError(str(error)) from None
    starts_empty = args.pd_disaggregation and not (prefill or decode or discovery)
    if starts_empty and args.sbs_role != "front-end":
        warnings.append("no workers yet: POST /workers adds them, or --prefill and --decode")
    return RouterOptions(
        prefill=prefill,
        decode=decode,
        starts_empty=starts_empty,
        scheduler=SchedulerConfig(
            policy=policy,
            trigger=cast(Trigger, args.sbs_trigger),
            decode_rule=cast(DecodeRule, args.sbs_decode),
            t_default_s=args.sbs_t_default_ms / 1000,
            n_limit=args.sbs_n_limit,
            iqr_k=args.sbs_iqr_k,
            max_queue_requests=args.sbs_max_queue_requests,
            max_queue_tokens=args.sbs_max_queue_tokens,
            default_timeout_s=args.sbs_queue_timeout_secs,
            max_hold_s=args.sbs_max_hold_ms / 1000,
            prefix_index_blocks=args.sbs_prefix_index_blocks,
            **classes,
        ),
        relay=RelayConfig(
            request_timeout_s=args.request_timeout_secs,
            max_attempts=1 if args.disable_retries else args.retry_max_retries,
            initial_backoff_s=args.retry_initial_backoff_ms / 1000,
            max_backoff_s=args.retry_max_backoff_ms / 1000,
            backoff_multiplier=args.retry_backoff_multiplier,
            jitter_factor=args.retry_jitter_factor,
            max_payload_bytes=args.max_payload_size,
            max_bodies_bytes=args.sbs_max_bodies_size or default_bodies_bytes(),
            max_samples=args.sbs_max_samples,
            max_units=args.sbs_max_batch,
            sends_gangs=policy == "sbs" and args.sbs_gang_gate == "on",
            low_priority_values_first=args.schedule_low_priority_values_first,
        ),
        breaker=BreakerConfig(
            enabled=not args.disable_circuit_breaker,
            failure_threshold=args.cb_failure_threshold,
            success_threshold=args.cb_success_threshold,
            timeout_s=args.cb_timeout_duration_secs,
            window_s=args.cb_window_duration_secs,
        ),
        monitor=MonitorConfig(
            startup_timeout_s=args.worker_startup_timeout_secs,
            startup_check_interval_s=args.worker_startup_check_interval,
            health_enabled=not args.disable_health_check,
            health_interval_s=args.health_check_interval_secs,
            health_timeout_s=args.health_check_timeout_secs,
            failure_threshold=args.health_failure_threshold,
            success_threshold=args.health_success_threshold,
            health_endpoint=endpoint,
            load_poll_interval_s=(
                MonitorConfig().load_poll_interval_s if facts_of(policy).reads_reports else None
            ),
            api_key=args.api_key,
        ),
        discovery=discovery,
        host=args.host,
        port=args.port,
        prometheus_host=args.prometheus_host,
        prometheus_port=args.prometheus_port,
        prometheus_duration_buckets=(
            tuple(sorted(args.prometheus_duration_buckets))
            if args.prometheus_duration_buckets
            else None
        ),
        endforward_bind=bind,
        event_log=args.sbs_event_log,
        tokenizer_path=args.tokenizer_path,
        chat_template=args.chat_template,
        prefix_source=cast(PrefixSourceFlag, args.sbs_prefix_source),
        forward_token_ids=cast(ForwardTokenIds, args.sbs_forward_token_ids),
        tenant_header=tenant_header,
        api_key=args.api_key,
        admin_api_key=args.admin_api_key,
        control_plane_keys=_control_keys(args.control_plane_api_keys),
        control_plane_audit=args.control_plane_audit_enabled,
        jwt=jwt,
        max_concurrent_requests=args.max_concurrent_requests,
        queue_size=args.queue_size,
        queue_timeout_s=args.queue_timeout_secs,
        rate_limit_per_s=args.rate_limit_tokens_per_second or 0.0,
        max_payload_bytes=args.max_payload_size,
        shutdown_grace_s=args.shutdown_grace_period_secs,
        request_id_headers=tuple(h.lower() for h in args.request_id_headers or ())
        or _REQUEST_ID_HEADERS,
        cors_allowed_origins=tuple(args.cors_allowed_origins),
        log_level=args.log_level,
        log_dir=args.log_dir,
        log_json=args.log_json,
        otlp_endpoint=args.otlp_traces_endpoint if args.enable_trace else None,
        tls_cert_path=args.tls_cert_path,
        tls_key_path=args.tls_key_path,
        client_cert_path=args.client_cert_path,
        client_key_path=args.client_key_path,
        ca_cert_paths=tuple(args.ca_cert_paths),
        workers=args.workers,
        role=cast(Role, args.sbs_role),
        scheduler_endpoint=args.sbs_scheduler,
        scheduler_keys=_scheduler_keys(args),
        endforward_keys=_keys_in("--sbs-endforward-key-file", args.sbs_endforward_key_file),
        take_over=args.sbs_take_over,
        parent_fd=args.sbs_parent_fd,
        listen_fds=tuple(int(fd) for fd in (args.sbs_listen_fds or "").split(",") if fd),
        warnings=tuple(warnings),
    )


def _scheduler_keys(args: argparse.Namespace) -> CurveKeys | None:
    """Check the flags of several processes; the keys of the secret they name, if any."""
    role, endpoint, path = args.sbs_role, args.sbs_scheduler, args.sbs_key_file
    if role == "router":
        if endpoint is not None:
            raise FlagError(
                "--sbs-scheduler needs --sbs-role scheduler (on the machine that schedules) or "
                "--sbs-role front-end (on the others); the processes of one machine find each other"
            )
        return None
    if endpoint is None:
        raise FlagError(f"--sbs-role {role} needs --sbs-scheduler tcp://HOST:PORT")
    if not endpoint.startswith(("tcp://", "ipc://")):
        raise FlagError(
            f"--sbs-scheduler {endpoint!r}: write tcp://HOST:PORT, e.g. tcp://10.0.0.1:7700"
        )
    if role == "scheduler" and args.workers > 1:
        raise FlagError("--workers is for front ends: --sbs-role scheduler serves no clients")
    if path is None and not _is_local(endpoint):
        raise FlagError(
            f"--sbs-scheduler {endpoint} can be reached from other machines: give both sides "
            "--sbs-key-file FILE with the same secret (openssl rand -hex 32 > FILE)"
        )
    return _keys_in("--sbs-key-file", path)


def _keys_in(flag: str, path: Path | None) -> CurveKeys | None:
    if path is None:
        return None
    try:
        return keys_in(path)
    except SecretError as error:
        raise FlagError(f"{flag}: {error}") from error


def _control_keys(texts: Sequence[str]) -> tuple[ControlKey, ...]:
    keys: dict[str, ControlKey] = {}
    for text in texts:
        try:
            key = parse_control_key(text)
        except ValueError as error:
            raise FlagError(f"--control-plane-api-keys: {error}") from None
        if key.id in keys:
            raise FlagError(f"--control-plane-api-keys: two keys have the id {key.id!r}")
        keys[key.id] = key
    return tuple(keys.values())


def _is_local(endpoint: str) -> bool:
    """Whether only this machine can reach a ZMQ endpoint."""
    if endpoint.startswith("ipc://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1", "lo") or host.startswith("127.")


def _policy(name: str, warnings: list[str]) -> Policy:
    normal = name.lower().replace("-", "_")
    if normal in NEAREST_POLICY:
        nearest = NEAREST_POLICY[normal]
        warnings.append(f"--policy {name} is not built here; using the nearest, {nearest}")
        return nearest
    if normal in POLICIES:
        return normal
    near = difflib.get_close_matches(normal, [*POLICIES, *NEAREST_POLICY], n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise FlagError(f"--policy {name!r} is not one of {', '.join(POLICIES)}{hint}")


def _prefill(entry: Sequence[str]) -> tuple[str, int | None]:
    url = _url("--prefill", entry[0])
    if len(entry) > 2:
        raise FlagError(
            f"--prefill {' '.join(entry)}: one URL and one port per --prefill; repeat the flag for "
            "further instances"
        )
    if len(entry) == 1 or entry[1].lower() == "none":
        return url, None
    if not (entry[1].isascii() and entry[1].isdigit() and 1 <= int(entry[1]) <= 65535):
        raise FlagError(
            f"--prefill {entry[0]} {entry[1]}: the bootstrap port must be a number in 1..65535 or "
            "'none'"
        )
    return url, int(entry[1])


def _url(flag: str, text: str) -> str:
    try:
        return normalise_worker_url(text)
    except ValueError as error:
        raise FlagError(f"{flag}: {error}") from error


def _check_workers(prefill: list[str], decode: list[str]) -> None:
    seen: set[str] = set()
    for url in [*prefill, *decode]:
        if url in seen:
            raise FlagError(f"worker {url} is listed twice")
        seen.add(url)
