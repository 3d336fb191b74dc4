"""The dashboard over HTTP: the page's files, and the stream of frames.

The files need no key, because they contain nothing about the cluster. ``/dashboard/events``
requires the key of the control plane, in a header, so that the key is in no URL and no log. A
watcher that does not keep up is dropped, so frames are never buffered for it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

import orjson
from aiohttp import web

from sglang_sbs.dashboard.feed import Feed

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

EVENTS_PATH = "/dashboard/events"
WELL_PATH = "/well"
MAX_WATCHERS = 32
PENDING_FRAMES = 10
"""Number of queued frames (two seconds' worth) at which a slow watcher is dropped."""
SILENT_S = 10.0
"""Seconds without a frame after which the stream ends, so that clients reconnect."""

_SCRIPTS = (
    *("app.js", "page.js", "tip.js", "alerts.js", "slowest.js", "policy.js", "stream.js"),
    *("heatmap.js", "charts.js"),
)
_ASSETS = {
    "/dashboard": ("index.html", "text/html"),
    **{f"/dashboard/{name}": (name, "text/javascript") for name in _SCRIPTS},
    "/dashboard/style.css": ("style.css", "text/css"),
}
OPEN_PATHS = frozenset(_ASSETS)
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_EVENT_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Accel-Buffering": "no",
}


class NoRoom(RuntimeError):
    """There are too many watchers, or the router is stopping; the message has the remedy."""


class Dashboard:
    """HTTP handlers of the dashboard: ``routes`` for the serving port, ``close`` at its end."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.watchers: dict[_Watcher, None] = {}
        """Watchers, the longest open first."""
        self._closed = False
        self.dropped = 0
        """Number of watchers dropped because they were too slow."""

    def routes(self) -> list[tuple[str, str, Handler]]:
        pages = [("GET", path, _asset(*asset)) for path, asset in _ASSETS.items()]
        return [*pages, ("GET", EVENTS_PATH, self.events), ("GET", WELL_PATH, self.well)]

    def close(self) -> None:
        self._closed = True
        for watcher in self.watchers:
            watcher.end()

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send server-sent events: ``history`` first, then ``frame`` five times a second. Raises:
        NoRoom."""
        watcher = _Watcher(request.transport)
        if self._closed or not self._has_room(watcher):
            open_ones = f"{len(self.watchers)} dashboards are open"
            raise NoRoom(f"{open_ones} (the limit is {MAX_WATCHERS}): close one")
        response = web.StreamResponse(headers=_EVENT_HEADERS)
        self.watchers[watcher] = None
        stop = self._feed.watch(watcher.take)
        try:
            await response.prepare(request)
            while True:
                async with asyncio.timeout(SILENT_S):
                    event = await watcher.events.get()
                if event is None:
                    break
                await response.write(event)
        except (ConnectionError, TimeoutError):
            pass
        except asyncio.CancelledError:
            # Streams end this way when the watcher leaves, so do not log an error.
            if not response.prepared:
                raise
        finally:
            stop()
            self.watchers.pop(watcher, None)
            if watcher.lost:
                self.dropped += 1
                logger.info("a dashboard did not keep up and was dropped")
        return response

    async def well(self, request: web.Request) -> web.StreamResponse:
        """Return the cluster's state as JSON: ``level``, ``cause`` and ``todo``, all alerts, those
        of the last hour that are over, and the gain. Raises: NoRoom, the scheduler does not
        respond."""
        first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def take(payload: bytes, full: bool) -> None:
            if not first.done():
                first.set_result(payload)

        stop = self._feed.watch(take)
        try:
            async with asyncio.timeout(SILENT_S):
                frame = orjson.loads(await first)
        except TimeoutError:
            raise NoRoom("the scheduler does not answer: try again") from None
        finally:
            stop()
        zero_s = frame["time_s"] - frame["now_s"]
        answer = frame["well"] | {
            "alerts": [_dated(alert, zero_s, since_s="since") for alert in frame["alerts"]],
            "past": [
                _dated(alert, zero_s, began_s="from", ended_s="to")
                for alert in frame.get("past", [])
            ],
            "gain": frame["gain"],
        }
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    def _has_room(self, new: _Watcher) -> bool:
        """Return whether there is a place. When all are taken, the client with most of them gives
        one to a client with far fewer."""
        if len(self.watchers) < MAX_WATCHERS:
            return True
        places = Counter(watcher.address for watcher in self.watchers)
        address, most = places.most_common(1)[0]
        if places[new.address] + 1 >= most:
            return False
        oldest = next(watcher for watcher in self.watchers if watcher.address == address)
        del self.watchers[oldest]
        oldest.drop()
        return True


class _Watcher:
    """Connects the feed, which does not wait, with one connection."""

    def __init__(self, transport: asyncio.Transport | None) -> None:
        self.lost = False
        """True: the watcher was dropped because it was too slow."""
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()
        """Queued frames; ``None`` is the end."""
        self._transport = transport
        peer = transport.get_extra_info("peername") if transport is not None else None
        self.address = peer[0] if isinstance(peer, tuple) else ""

    def take(self, payload: bytes, full: bool) -> None:
        if self.events.qsize() >= PENDING_FRAMES:
            self.lost = True
            self.drop()
            return
        kind = b"history" if full else b"frame"
        self.events.put_nowait(b"event: " + kind + b"\ndata: " + payload + b"\n\n")

    def drop(self) -> None:
        """End the watcher now: its writer may be waiting for the connection."""
        while not self.events.empty():
            self.events.get_nowait()
        self.end()
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        self.events.put_nowait(None)


def _dated(alert: dict[str, Any], zero_s: float, **names: str) -> dict[str, Any]:
    """Replace times of the router's clock with dates (UTC). ``zero_s``: Unix time of its zero;
    ``names``: old and new field names."""
    dates = {
        new: f"{datetime.fromtimestamp(zero_s + alert[old], UTC):%Y-%m-%dT%H:%M:%SZ}"
        for old, new in names.items()
        if alert.get(old) is not None
    }
    return {key: value for key, value in alert.items() if key not in names} | dates


@cache
def _asset(name: str, kind: str) -> Handler:
    body = files("sglang_sbs.dashboard").joinpath("static", name).read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'

    async def handler(request: web.Request) -> web.StreamResponse:
        headers = _HEADERS | {"ETag": tag}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    return handler
