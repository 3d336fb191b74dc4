"""Sends a request to a running router for ``why``, ``policy`` and ``trial``, and defines the flags
that name the router, for ``top`` as well."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence

KEY_VARIABLE = "SGLANG_SBS_ADMIN_API_KEY"
_FORMER_VARIABLE = "SGLANG_SBS_ADMIN_KEY"
_TIMEOUT_S = 15.0
MOST_ERROR_BYTES = 4096


class NoAnswerError(Exception):
    """The router gave no usable answer; the text explains why and what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--router`` and ``--admin-api-key``."""
    where = "where the router serves (default: %(default)s)"
    parser.add_argument("--router", default="http://127.0.0.1:30000", metavar="URL", help=where)
    key = (
        "the router's --admin-api-key, or its --api-key if it has no admin's; better in the "
        f"environment variable {KEY_VARIABLE}, where other users do not see it"
    )
    parser.add_argument("--admin-api-key", metavar="KEY", help=key)


def key_of(args: argparse.Namespace) -> str | None:
    """Return the router's admin key: ``--admin-api-key``, otherwise ``SGLANG_SBS_ADMIN_API_KEY``
    (or its former name). None: neither is set."""
    found = args.admin_api_key or os.environ.get(KEY_VARIABLE) or os.environ.get(_FORMER_VARIABLE)
    return found or None


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    if not args.router.startswith(("http://", "https://")):
        parser.error(f"--router {args.router}: write http://HOST:PORT or https://HOST:PORT")
    return args


def ask(
    args: argparse.Namespace,
    path: str,
    body: bytes | None = None,
    *,
    absent: str,
    method: str | None = None,
) -> bytes:
    """Return the body of the response to ``GET path``, or with a ``body`` (JSON) to ``PUT path``,
    unless another ``method`` is given. ``absent``: text for a 404. Raises: NoAnswerError, no usable
    answer."""
    key = key_of(args)
    url = args.router.rstrip("/") + path
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        method = method or ("GET" if body is None else "PUT")
        asked = urllib.request.Request(url, data=body, headers=headers, method=method)
        with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as answer:
            read: bytes = answer.read()
            return read
    except urllib.error.HTTPError as error:
        body = error.read(MOST_ERROR_BYTES)
        raise NoAnswerError(refusal(error.code, url, key, absent, body)) from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        hint = "is the router there? --router URL"
        raise NoAnswerError(f"{args.router}: {reason} ({hint})") from error


def refusal(status: int, url: str, key: str | None, absent: str, body: bytes) -> str:
    """Explain an error response of a router. ``absent``: text for a 404."""
    if status in (401, 403):
        if key:
            return f"{url}: this key is not accepted ({status})"
        return f"{url}: the router wants a key: --admin-api-key KEY, or {KEY_VARIABLE}"
    if status == 404:
        return absent
    text = body.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    return f"{url}: {status} {text}"


def plain(text: str) -> str:
    """Replace control characters, which names given by clients and engines may contain."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
