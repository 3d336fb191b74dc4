"""Parses ``--sbs-election``, the location of the lock.

``k8s://NAMESPACE/NAME``
    A Lease of the Kubernetes cluster that this process runs in, or of a kubeconfig.
``etcd://HOST:PORT[,HOST2:PORT...]/KEY``
    A key of etcd (3.4 or later). ``etcds://`` uses TLS, checked against the system's authorities or
    those of ``?cacert=FILE``; ``&cert=FILE&key=FILE`` adds a client certificate.

Both take ``lease``, ``renew`` and ``retry``, the fields of :class:`ElectionTimes` in seconds, as in
``?lease=6s&renew=5s``."""

from __future__ import annotations

import re
import ssl
from dataclasses import replace
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from sglang_sbs.router.election.campaign import Campaign
from sglang_sbs.router.election.candidate import ElectionTimes
from sglang_sbs.router.election.etcd import EtcdLock
from sglang_sbs.router.election.lease import KubernetesLease

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_FORMS = "k8s://NAMESPACE/NAME or etcd://HOST:2379/KEY"
_MAX_KEY = 512
_TIMES = {"lease": "lease_s", "renew": "renew_s", "retry": "retry_s"}
_SECONDS = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)s?")


def parse_election(url: str, identity: str, times: ElectionTimes) -> Campaign:
    """Return the election at ``url`` for the process with the address ``identity``, without
    contacting the store. ``times`` applies where the URL sets none. Raises: ValueError, the URL is
    invalid, or a file in it is unusable."""
    parts, times = _times_of(urlsplit(url), times)
    if parts.scheme == "k8s":
        return Campaign(_lease(parts, times), identity, times)
    if parts.scheme in ("etcd", "etcds"):
        return Campaign(_etcd(parts, times), identity, times)
    raise ValueError(f"{url!r}: write {_FORMS}")


def _times_of(parts: SplitResult, times: ElectionTimes) -> tuple[SplitResult, ElectionTimes]:
    """Return the URL without its times, and ``times`` changed by them. Raises: ValueError, a time
    or the name of a parameter is invalid."""
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    given = {}
    for name in _TIMES.keys() & query:
        found = _SECONDS.fullmatch(text := query.pop(name))
        if found is None:
            raise ValueError(f"{parts.geturl()!r}: {name}={text} is not a time, such as {name}=2s")
        given[_TIMES[name]] = float(found[1])
    files = {"cacert", "cert", "key"}
    if unknown := query.keys() - files:
        allowed = sorted(_TIMES.keys() | (files if parts.scheme == "etcds" else set()))
        raise ValueError(f"{parts.geturl()!r}: {min(unknown)!r} is not one of {', '.join(allowed)}")
    return parts._replace(query=urlencode(query)) if given else parts, replace(times, **given)


def _lease(parts: SplitResult, times: ElectionTimes) -> KubernetesLease:
    namespace, name = parts.netloc, parts.path.removeprefix("/")
    if not _DNS_LABEL.fullmatch(namespace) or not _DNS_NAME.fullmatch(name) or parts.query:
        raise ValueError(
            f"{parts.geturl()!r}: write k8s://NAMESPACE/NAME, with names as Kubernetes allows them"
        )
    return KubernetesLease(namespace, name, int(times.lease_s))


def _etcd(parts: SplitResult, times: ElectionTimes) -> EtcdLock:
    key = unquote(parts.path.removeprefix("/"))
    if not key or len(key) > _MAX_KEY:
        raise ValueError(f"{parts.geturl()!r}: write a KEY after the host, e.g. /sglang-sbs")
    scheme = "https" if parts.scheme == "etcds" else "http"
    hosts = [_endpoint(scheme, host, parts.geturl()) for host in parts.netloc.split(",")]
    return EtcdLock(hosts, key, int(times.lease_s), _tls(parts))


def _endpoint(scheme: str, text: str, url: str) -> str:
    try:
        parts = urlsplit(f"{scheme}://{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}") from error
    if not host or "@" in text:
        raise ValueError(f"{url!r}: {text!r} is not HOST:PORT")
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port or 2379}"


def _tls(parts: SplitResult) -> ssl.SSLContext | None:
    url, files = parts.geturl(), dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.scheme == "etcd":
        if parts.query:
            raise ValueError(f"{url!r}: certificates belong to etcds://")
        return None
    if ("cert" in files) != ("key" in files):
        raise ValueError(f"{url!r}: cert and key belong together")
    try:
        context = ssl.create_default_context(cafile=files.get("cacert"))
        if "cert" in files:
            context.load_cert_chain(files["cert"], files["key"])
    except OSError as error:
        raise ValueError(f"{url!r}: a file in it is unusable: {error}") from error
    return context
