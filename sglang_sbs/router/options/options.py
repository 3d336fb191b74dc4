"""Parses the router's command line into :class:`~.router_options.RouterOptions`."""

from __future__ import annotations

import argparse
import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from sglang_sbs.console import extras
from sglang_sbs.router.options import config, keys
from sglang_sbs.router.options.arguments import FlagError, build_parser
from sglang_sbs.router.options.option import read
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.options.several import SeveralProcesses, is_local, several_of
from sglang_sbs.router.options.sources import Sourced, read_sources
from sglang_sbs.router.options.stock import IGNORED_FLAGS, NEAREST_POLICY, REFUSED_FLAGS
from sglang_sbs.router.options.table import GROUPS
from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.policy_registry import Policy, PolicyError, policy_names, require

_HEADER_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_TAKEN = frozenset({"authorization", "content-length", "content-type", "host", "connection"})


def parse_flags(argv: Sequence[str]) -> RouterOptions:
    """Parse a command line (without the program name), with environment and configuration file.
    Raises: FlagError, SystemExit, as :func:`read_flags`."""
    return read_flags(argv)[0]


def read_flags(argv: Sequence[str], prog: str | None = None) -> tuple[RouterOptions, Sourced]:
    """Return the options as :func:`parse_flags` does, and each flag's value with its source.
    Raises: FlagError, naming the flag and what to write instead; SystemExit, after ``--help``."""
    parser = build_parser(prog)
    try:
        _check_known(parser, argv)
        given = read_sources(parser, argv)
        return _options_of(argparse.Namespace(**vars(given.args)), given.former), given
    except ValueError as error:
        raise FlagError(str(error)) from None


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


def _key_files(args: argparse.Namespace) -> list[Path | None]:
    return [args.api_key_file, args.admin_api_key_file, args.control_plane_api_keys_file]


def _take_keys(args: argparse.Namespace) -> None:
    """Replace key flags that are missing by the keys in their files, in ``args``. Raises:
    ValueError, a file is unusable or both are given."""
    for flag, path in zip(("api-key", "admin-api-key"), _key_files(args), strict=False):
        name = flag.replace("-", "_")
        given = getattr(args, name)
        found = keys.keys_from(flag, [] if given is None else [given], path)
        if len(found) > 1:
            raise ValueError(f"--{flag}-file {path}: it contains more than one key")
        setattr(args, name, found[0] if found else None)
    given, path = args.control_plane_api_keys or (), args.control_plane_api_keys_file
    args.control_plane_api_keys = keys.keys_from("control-plane-api-keys", given, path)


def _options_of(args: argparse.Namespace, former: Sequence[str]) -> RouterOptions:
    """Return the options, after the checks that argparse cannot make. ``former``: warnings about
    former names. Raises: ValueError, naming the flag."""
    warnings = list(former)
    warnings += [
        f"--{name} has no effect here: {why}"
        for name, why in IGNORED_FLAGS.items()
        if getattr(args, name.replace("-", "_")) not in (None, False)
    ]
    _take_keys(args)
    fields = _fields(args)
    prefill, decode = fields[""]["prefill"], fields[""]["decode"]
    for url, times in Counter([*(url for url, _ in prefill), *decode]).items():
        if times > 1:
            raise ValueError(f"worker {url} is listed twice")
    _check_values(args, warnings)
    several = several_of(args, warnings)
    bind = _endforward_bind(args, several, warnings)
    warnings += [
        f"{path} can be read by other users of this machine: chmod 600 it"
        for path in (args.sbs_scheduler_key_file, args.sbs_endforward_key_file, *_key_files(args))
        if path is not None and path.exists() and path.stat().st_mode & 0o077
    ]
    policy = _policy(args.policy, warnings)
    discovery, jwt = _discovery(args, warnings), _jwt(args)
    starts_empty = args.pd_disaggregation and not (prefill or decode or discovery)
    if starts_empty and several.role != "front-end":
        warnings.append("no workers yet: POST /workers adds them, or --prefill and --decode")
    fields["scheduler"]["policy"] = policy
    fields["relay"]["gang_gate"] = args.sbs_gang_gate == "on"
    if args.disable_retries:
        fields["relay"]["max_attempts"] = 1
    fields[""]["endforward_bind"] = bind
    return RouterOptions(
        starts_empty=starts_empty,
        scheduler=SchedulerConfig(**fields["scheduler"]),
        relay=config.RelayConfig(**fields["relay"]),
        breaker=config.BreakerConfig(**fields["breaker"]),
        monitor=config.MonitorConfig(**fields["monitor"]),
        discovery=discovery,
        tenant_header=_tenant_header(args, warnings),
        jwt=jwt,
        several=several,
        otlp_endpoint=args.otlp_traces_endpoint if args.enable_trace else None,
        warnings=tuple(warnings),
        **fields[""],
    )


def _fields(args: argparse.Namespace) -> defaultdict[str, dict[str, Any]]:
    """Return values of option fields by part of :class:`RouterOptions` (empty for top-level fields)
    and field name."""
    found: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for option in chain(*GROUPS.values()):
        for path in option.fields.split():
            part, _, name = path.rpartition(".")
            found[part][name] = option.value_in(args)
    return found


def _check_values(args: argparse.Namespace, warnings: list[str]) -> None:
    endpoint: str | None = args.health_check_endpoint
    if endpoint == "/health":
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
    if args.retry_max_backoff_ms < args.retry_initial_backoff_ms:
        raise FlagError("--retry-max-backoff-ms must not be below --retry-initial-backoff-ms")
    if 1 <= args.max_concurrent_requests < args.frontends:
        raise FlagError(
            f"--max-concurrent-requests {args.max_concurrent_requests} cannot be shared out among "
            f"--frontends {args.frontends}: write at least {args.frontends}, or fewer front ends"
        )
    if args.rate_limit_tokens_per_second and args.max_concurrent_requests < 1:
        missing = "--max-concurrent-requests, which is the size of the bucket"
        warnings.append(f"--rate-limit-tokens-per-second has no effect without {missing}")


def _endforward_bind(
    args: argparse.Namespace, several: SeveralProcesses, warnings: list[str]
) -> str | None:
    bind: str = args.sbs_endforward_bind
    if bind.lower() == "none":
        return None
    if not bind.startswith(("tcp://", "ipc://")):
        how = "write tcp://HOST:PORT, e.g. tcp://0.0.0.0:7600, or none"
        raise FlagError(f"--sbs-endforward-bind {bind!r}: {how}")
    if several.role == "front-end":
        return bind  # engines report to the scheduler
    if not is_local(bind) and args.sbs_endforward_key_file is None:
        warnings.append(
            f"--sbs-endforward-bind {bind} accepts messages from any host that can reach it, "
            "without authentication: share a secret (--sbs-endforward-key-file, on engines "
            "SGLANG_SBS_ENDFORWARD_KEY_FILE), keep that port inside the cluster, or bind an "
            "address that only engines reach (tcp://10.0.0.1:7600; ipc:///path on one machine)"
        )
    return bind


def _policy(name: str, warnings: list[str]) -> Policy:
    normal = name.lower().replace("-", "_")
    if normal in NEAREST_POLICY:
        nearest, why = NEAREST_POLICY[normal]
        warnings.append(
            f"--policy {name} is not available here; using the nearest, {nearest}: {why}"
        )
        return nearest
    try:
        return require(normal).name
    except PolicyError as error:
        near = difflib.get_close_matches(
            normal, [*policy_names(), *NEAREST_POLICY], n=1, cutoff=0.4
        )
        hint = f"; did you mean {near[0]}?" if near else ""
        raise FlagError(f"--policy {error}{hint}") from None


def _tenant_header(args: argparse.Namespace, warnings: list[str]) -> str | None:
    """Return the name of the tenant header in lower case; ``None`` without one. Raises: ValueError,
    it is not a usable header."""
    name = args.sbs_tenant_header
    if name is None:
        if args.sbs_tenant_weights is not None and args.sbs_role != "scheduler":
            warnings.append("--sbs-tenant-weights has no effect without --sbs-tenant-header")
        return None
    lower: str = name.lower()
    if not _HEADER_NAME.fullmatch(lower) or lower in _TAKEN:
        how = "write the name of a separate header, e.g. x-tenant-id"
        raise ValueError(f"--sbs-tenant-header {name!r}: {how}")
    return lower


def _discovery(args: argparse.Namespace, warnings: list[str]) -> config.DiscoveryConfig | None:
    """Return the discovery settings; ``None`` without ``--service-discovery``. Raises: ValueError,
    a selector is missing or invalid, or the client is not installed."""
    given = {"prefill": args.prefill_selector, "decode": args.decode_selector}
    selectors = {
        role: read(f"--{role}-selector", config.parse_selector, words) if words else ""
        for role, words in given.items()
    }
    if not args.service_discovery:
        warnings += [
            f"--{role}-selector has no effect without --service-discovery"
            for role, selector in selectors.items()
            if selector
        ]
        return None
    if not any(selectors.values()):
        raise ValueError(
            "--service-discovery needs a pod selector: --prefill-selector app=sglang "
            "component=prefill --decode-selector app=sglang component=decode"
        )
    if selectors["prefill"] == selectors["decode"]:
        raise ValueError("--prefill-selector and --decode-selector are the same")
    if install := extras.without_kubernetes():
        raise ValueError(f"--service-discovery needs a Kubernetes client: {install}")
    port, namespace = args.service_discovery_port, args.service_discovery_namespace or None
    return config.DiscoveryConfig(selectors["prefill"], selectors["decode"], port, namespace)


def _jwt(args: argparse.Namespace) -> keys.JwtConfig | None:
    """Return the JWT settings; ``None`` without JWT flags. Raises: ValueError, a flag is missing or
    invalid, or the library is not installed."""
    issuer, audience, jwks_uri = args.jwt_issuer, args.jwt_audience, args.jwt_jwks_uri
    if not (issuer or audience or jwks_uri or args.jwt_role_mapping):
        return None
    if not issuer or not audience:
        raise ValueError("--jwt-issuer URL and --jwt-audience NAME belong together: give both")
    read("--jwt-issuer", keys.check_provider_url, issuer, " ")
    if jwks_uri is not None:
        read("--jwt-jwks-uri", keys.check_provider_url, jwks_uri, " ")
    roles = read("--jwt-role-mapping", keys.parse_roles, args.jwt_role_mapping, " ")
    if install := extras.without_jwt():
        raise ValueError(f"--jwt-issuer needs a JWT library: {install}")
    return keys.JwtConfig(issuer, audience, jwks_uri, roles)
