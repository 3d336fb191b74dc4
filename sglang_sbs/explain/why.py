"""``sglang-sbs why``: why a request was held, sent where it was, and where its time went."""

from __future__ import annotations

import argparse
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sglang_sbs.explain.event_log import read
from sglang_sbs.explain.page import page
from sglang_sbs.scheduling.explained.stories import Story

KEY_VARIABLE = "SGLANG_SBS_ADMIN_KEY"
_TIMEOUT_S = 15.0


class NotToldError(Exception):
    """There is no explanation; the text says why and what to do."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="sglang-sbs why",
        description="One page about one request: why it was held, why it was sent where it was, "
        "what was predicted and what happened, and where the time to its first token went.",
        epilog="examples:\n"
        "  sglang-sbs why chatcmpl-5f2c0e --router http://router:30000\n"
        "  sglang-sbs why 5f2c0e9d --log router.events       # from --sbs-event-log\n"
        "  sglang-sbs why 5f2c0e9d --json | jq '.attempts[].parts'\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("id", metavar="ID", help="x-request-id, the answer's id, or the router's rid")
    where = "where the router serves (default: %(default)s)"
    made.add_argument("--router", default="http://127.0.0.1:30000", metavar="URL", help=where)
    log = "read an event log (--sbs-event-log) in place of asking a router"
    made.add_argument("--log", type=Path, metavar="EVENTS", help=log)
    key = (
        "the router's --admin-api-key, or its --api-key if it has no admin's; better in the "
        f"environment variable {KEY_VARIABLE}, where other users do not see it"
    )
    made.add_argument("--admin-api-key", metavar="KEY", help=key)
    made.add_argument("--json", action="store_true", help="as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 where the request is unknown or nobody can be asked; 2 for bad flags."""
    made = parser()
    args = made.parse_args(argv)
    if not args.router.startswith(("http://", "https://")):
        made.error(f"--router {args.router}: write http://HOST:PORT or https://HOST:PORT")
    began_s: float | None = None
    try:
        if args.log is not None:
            story, began_s = _from_log(args.log, args.id)
        else:
            key = args.admin_api_key or os.environ.get(KEY_VARIABLE)
            story = _from_router(args.router, args.id, key)
    except (NotToldError, OSError, ValueError) as error:
        print(f"sglang-sbs why: {_plain(str(error))}", file=sys.stderr)
        return 1
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(story), indent=2).decode())
    else:
        print(_plain(page(story, began_s)), end="")
    return 0


def _from_log(path: Path, name: str) -> tuple[Story, float]:
    """And when the log begins. Raises: NotToldError, OSError, ValueError."""
    log = read(path, replay=True)
    story = log.story(name)
    if story is None:
        raise NotToldError(f"{path} has no request {name}: give its rid, or its x-request-id")
    if log.differs_at:
        print(
            f"sglang-sbs why: this release decides differently than the one that wrote {path}, "
            f"from event {log.differs_at:,} on; reasons after that may be missing",
            file=sys.stderr,
        )
    return story, log.began_s


def _from_router(router: str, name: str, key: str | None) -> Story:
    """Raises: NotToldError."""
    url = f"{router.rstrip('/')}/requests/{urllib.parse.quote(name, safe='')}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        asked = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(), type=Story)
    except urllib.error.HTTPError as error:
        raise NotToldError(_refusal(error, name, url, key)) from error
    except msgspec.DecodeError as error:
        raise NotToldError(f"{url}: the answer is not one of this release: {error}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise NotToldError(f"{router}: {reason} (is the router there? --router URL)") from error


def _refusal(error: urllib.error.HTTPError, name: str, url: str, key: str | None) -> str:
    if error.code in (401, 403):
        if key:
            return f"{url}: this key is not accepted ({error.code})"
        return f"{url}: the router wants a key: --admin-api-key KEY, or {KEY_VARIABLE}"
    if error.code == 404:
        return (
            f"the router remembers no request {name}: it keeps the last few thousand; with "
            "--sbs-event-log FILE all can be explained later (why ID --log FILE)"
        )
    return f"{url}: {error.code} {error.read(300).decode('utf-8', 'replace')}"


def _plain(text: str) -> str:
    """Clients and engines name things: no control characters of theirs reach the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
