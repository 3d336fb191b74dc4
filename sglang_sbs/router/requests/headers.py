"""Separates the request headers that engines get from those that ask something of the router."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.requests.body_fields import bad_request
from sglang_sbs.router.requests.sessions import ALL_HEADERS, session_in_headers
from sglang_sbs.scheduling.queue.fairness import MOST_TENANT_CHARS

SLO_HEADER = "x-sgl-ttft-slo-ms"
TIMING_HEADER = "x-sbs-server-timing"
"""Header whose value 1 asks for the TTFT by part, which the response has in ``Server-Timing``."""

KEY_HEADER = "x-api-key"
"""Header in which clients of Anthropic's API send their key."""

_HEADER_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
"""Header values that may be forwarded: without line breaks, so a value stays one header. The HTTP
parser checks this as well."""

_ID_HEADER = "x-request-id"
_ID_PREFIX = "x-request-id-"
_FORWARDED_HEADERS = frozenset(
    {"authorization", "x-correlation-id", "traceparent", "tracestate", "x-smg-routing-key"}
)
MOST_FORWARDED_CHARS = 64 << 10
"""Limit on all headers forwarded to engines: twice that of one header, which is enough for the
largest ``Authorization`` and trace headers."""
_MILLISECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?")


Headers = Sequence[tuple[str, str]]
"""Headers of a request, with their names in lower case."""


def in_lower_case(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a request's headers as pairs of name (in lower case) and value."""
    return [(name.lower(), value) for name, value in headers.items()]


def forwarded_headers(headers: Headers, request_id: str) -> bytes:
    """Return the client's headers that engines get, as header lines. Others are dropped, among them
    ``X-Data-Parallel-Rank`` and ``x-override-*``, which would overrule the chosen rank. Raises:
    RouterError (431), they are too long: each request of a batch sends them twice."""
    lines: list[str] = []
    if _HEADER_VALUE.fullmatch(request_id):
        lines.append(f"{_ID_HEADER}: {request_id}\r\n")
    for name, value in headers:
        passes = name in _FORWARDED_HEADERS or name.startswith(_ID_PREFIX)
        if passes and _HEADER_VALUE.fullmatch(value):
            lines.append(f"{name}: {value}\r\n")
    size = sum(map(len, lines))
    if size > MOST_FORWARDED_CHARS:
        why = f"the headers that engines get have {size} characters; write at most"
        raise RouterError(431, "headers_too_large", f"{why} {MOST_FORWARDED_CHARS}")
    return "".join(lines).encode("utf-8", "surrogateescape")


def with_bearer(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers with ``Authorization`` added for clients of Anthropic's API, which send
    ``x-api-key`` instead; SGLang reads only ``Authorization``."""
    values = dict(headers)
    if "authorization" in values or KEY_HEADER not in values:
        return headers
    return [*headers, ("authorization", f"Bearer {values[KEY_HEADER]}")]


def is_text(value: str) -> bool:
    """Return whether a header's value was UTF-8. Other bytes are lone surrogates here, which no
    message to another process and no JSON can contain."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


class RouterHeaders(NamedTuple):
    """Settings of a request for the router, from its headers: SLO, tenant, timing and session."""

    ttft_slo_s: float | None = None
    tenant: str = ""
    timing: bool = False
    session: str = ""
    """Session id from a header; empty: none."""
    correlation: str = ""
    """Fallback session id (``x-correlation-id``), used if nothing else names the session."""


_ASKING = ALL_HEADERS | {SLO_HEADER, TIMING_HEADER}
_NOTHING_ASKED = RouterHeaders()


def asked_in(headers: Headers, tenant_header: str | None) -> RouterHeaders:
    """Return what the client asks of the router. ``tenant_header``: header with the tenant (in
    lower case), if configured. Raises: RouterError (400), naming the invalid header and what to
    write."""
    names = {name for name, _ in headers}
    if _ASKING.isdisjoint(names) and tenant_header not in names:  # as in most requests
        return _NOTHING_ASKED
    slo = _only(headers, SLO_HEADER) if SLO_HEADER in names else None
    tenant = _only(headers, tenant_header) if tenant_header in names else None
    if tenant is not None and len(tenant) > MOST_TENANT_CHARS:
        most = f"write at most {MOST_TENANT_CHARS}"
        raise bad_request(f"{tenant_header} has {len(tenant)} characters: {most}")
    if tenant is not None and not is_text(tenant):
        raise bad_request(f"{tenant_header} must be UTF-8")
    if slo is not None and (not _MILLISECONDS.fullmatch(slo) or float(slo) <= 0):
        raise bad_request(f"{SLO_HEADER} must be milliseconds above 0, as in 800, not {slo!r:.40}")
    timing = TIMING_HEADER in names and any(
        name == TIMING_HEADER and value.strip() == "1" for name, value in headers
    )
    slo_s = None if slo is None else float(slo) / 1e3
    if ALL_HEADERS.isdisjoint(names):
        return RouterHeaders(slo_s, tenant or "", timing)
    return RouterHeaders(slo_s, tenant or "", timing, *session_in_headers(headers))


def _only(headers: Headers, name: str | None) -> str | None:
    values = [value.strip() for key, value in headers if key == name]
    if len(values) > 1:
        raise bad_request(f"{name} is given {len(values)} times: give it once")
    return values[0] if values else None
