"""Flags about what surrounds the router: Kubernetes and the identity provider.

Owns their names, help and checks. Must not know how either is used.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from sglang_sbs import extras
from sglang_sbs.router.options.config import (
    BOOTSTRAP_PORT_ANNOTATION,
    LWS_WORKER_INDEX,
    DiscoveryConfig,
    parse_selector,
)
from sglang_sbs.router.options.keys import JwtConfig, check_provider_url, parse_roles

Add = Callable[..., None]
"""``add(name, help, **kwargs)`` of the parser."""


def add_discovery_flags(add: Add, port_type: Callable[[str], int]) -> None:
    """The flags of worker discovery."""
    add(
        "service-discovery",
        "find workers as Kubernetes pods: those that are Running and Ready and match a selector. "
        f"Annotate prefill pods with {BOOTSTRAP_PORT_ANNOTATION}. Of a multi-node instance only "
        f"the pod of node rank 0 may match (pods with a label {LWS_WORKER_INDEX} other than 0 "
        "never do). Needs the extra 'kubernetes'",
        action="store_true",
    )
    for role in ("prefill", "decode"):
        add(
            f"{role}-selector",
            f"labels of {role} pods: app=sglang component={role}",
            nargs="+",
            default=(),
            metavar="KEY=VALUE",
        )
    add("service-discovery-port", "port the engines serve HTTP at", type=port_type, default=80)
    add(
        "service-discovery-namespace",
        "only pods of this namespace; without it of all, which needs a ClusterRole",
        metavar="NAME",
    )


def add_identity_flags(add: Add) -> None:
    """The flags of tokens for the control plane."""
    add(
        "jwt-issuer",
        "identity provider (OIDC) whose tokens open the endpoints of --control-plane-api-keys too, "
        "e.g. https://login.example.com/realms/ops. Needs the extra 'jwt'",
        metavar="URL",
    )
    add("jwt-audience", "what tokens must be meant for (aud)", metavar="NAME")
    add(
        "jwt-jwks-uri",
        "the provider's signing keys; without it its discovery document tells where they are",
        metavar="URL",
    )
    add(
        "jwt-role-mapping",
        "the provider's roles (claims roles, role, groups, group) that are admin or user here; "
        "without it they must be called so",
        nargs="*",
        default=(),
        metavar="ROLE=admin",
    )


def discovery_of(args: argparse.Namespace, warnings: list[str]) -> DiscoveryConfig | None:
    """What the flags say; ``None`` without ``--service-discovery``. Raises: ValueError."""
    selectors = {}
    for role in ("prefill", "decode"):
        words = getattr(args, f"{role}_selector")
        try:
            selectors[role] = parse_selector(words) if words else ""
        except ValueError as error:
            raise ValueError(f"--{role}-selector: {error}") from None
    if not args.service_discovery:
        warnings += [
            f"--{role}-selector has no effect without --service-discovery"
            for role, selector in selectors.items()
            if selector
        ]
        return None
    if not any(selectors.values()):
        raise ValueError(
            "--service-discovery needs to know the pods: --prefill-selector app=sglang "
            "component=prefill --decode-selector app=sglang component=decode"
        )
    if selectors["prefill"] == selectors["decode"]:
        raise ValueError("--prefill-selector and --decode-selector are the same")
    if install := extras.without_kubernetes():
        raise ValueError(f"--service-discovery needs a Kubernetes client: {install}")
    return DiscoveryConfig(
        prefill_selector=selectors["prefill"],
        decode_selector=selectors["decode"],
        port=args.service_discovery_port,
        namespace=args.service_discovery_namespace or None,
    )


def jwt_of(args: argparse.Namespace) -> JwtConfig | None:
    """What the flags say; ``None`` without them. Raises: ValueError."""
    issuer, audience, jwks_uri = args.jwt_issuer, args.jwt_audience, args.jwt_jwks_uri
    if not (issuer or audience or jwks_uri or args.jwt_role_mapping):
        return None
    if not issuer or not audience:
        raise ValueError("--jwt-issuer URL and --jwt-audience NAME belong together: give both")
    for flag, url in (("--jwt-issuer", issuer), ("--jwt-jwks-uri", jwks_uri)):
        try:
            if url is not None:
                check_provider_url(url)
        except ValueError as error:
            raise ValueError(f"{flag} {error}") from None
    try:
        roles = parse_roles(args.jwt_role_mapping)
    except ValueError as error:
        raise ValueError(f"--jwt-role-mapping {error}") from None
    if install := extras.without_jwt():
        raise ValueError(f"--jwt-issuer needs a JWT library: {install}")
    return JwtConfig(issuer, audience, jwks_uri, roles)
