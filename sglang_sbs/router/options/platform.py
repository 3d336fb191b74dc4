"""Flags about what surrounds the router: Kubernetes and the identity provider."""

from __future__ import annotations

import argparse

from sglang_sbs import extras
from sglang_sbs.router.options.config import DiscoveryConfig, parse_selector
from sglang_sbs.router.options.keys import JwtConfig, check_provider_url, parse_roles
from sglang_sbs.router.options.option import read


def discovery_of(args: argparse.Namespace, warnings: list[str]) -> DiscoveryConfig | None:
    """What the flags say; ``None`` without ``--service-discovery``. Raises: ValueError."""
    given = {"prefill": args.prefill_selector, "decode": args.decode_selector}
    selectors = {
        role: read(f"--{role}-selector", parse_selector, words) if words else ""
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
            "--service-discovery needs to know the pods: --prefill-selector app=sglang "
            "component=prefill --decode-selector app=sglang component=decode"
        )
    if selectors["prefill"] == selectors["decode"]:
        raise ValueError("--prefill-selector and --decode-selector are the same")
    if install := extras.without_kubernetes():
        raise ValueError(f"--service-discovery needs a Kubernetes client: {install}")
    port, namespace = args.service_discovery_port, args.service_discovery_namespace or None
    return DiscoveryConfig(selectors["prefill"], selectors["decode"], port, namespace)


def jwt_of(args: argparse.Namespace) -> JwtConfig | None:
    """What the flags say; ``None`` without them. Raises: ValueError."""
    issuer, audience, jwks_uri = args.jwt_issuer, args.jwt_audience, args.jwt_jwks_uri
    if not (issuer or audience or jwks_uri or args.jwt_role_mapping):
        return None
    if not issuer or not audience:
        raise ValueError("--jwt-issuer URL and --jwt-audience NAME belong together: give both")
    read("--jwt-issuer", check_provider_url, issuer, " ")
    if jwks_uri is not None:
        read("--jwt-jwks-uri", check_provider_url, jwks_uri, " ")
    roles = read("--jwt-role-mapping", parse_roles, args.jwt_role_mapping, " ")
    if install := extras.without_jwt():
        raise ValueError(f"--jwt-issuer needs a JWT library: {install}")
    return JwtConfig(issuer, audience, jwks_uri, roles)
