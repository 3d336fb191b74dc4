"""A router between mock engines, all in one event loop, for the tests of this folder."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import orjson
from harness.until import until

from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.server import RouterServer
from sglang_sbs.scheduling.events import (
    Command,
    Dispatch,
    Event,
    InstanceDown,
    InstanceUp,
    PrefillDone,
    Refuse,
    RequestArrived,
    RequestEnded,
)
from sglang_sbs.scheduling.snapshot import Snapshot
from tools.stand_ins.mock_engine import MockEngine, Rooms

TIMEOUT_S = 60.0
"""A test that waits longer has failed; nothing is expected to take anywhere near it."""


class FakeScheduler:
    """Immediate round robin, ranks cycling; ``hold`` keeps requests until ``let_go``."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.up: dict[str, InstanceUp] = {}
        self.hold = False
        self.refuse: deque[Refuse] = deque()
        self.held: dict[str, RequestArrived] = {}
        self._turn = 0
        self._changed = asyncio.Condition()

    def handle(self, event: Event, now_s: float) -> list[Command]:
        self.events.append(event)
        if isinstance(event, InstanceUp):
            self.up[event.instance] = event
        elif isinstance(event, InstanceDown):
            self.up.pop(event.instance, None)
        elif isinstance(event, RequestEnded):
            self.held.pop(event.rid, None)
        elif isinstance(event, RequestArrived):
            if self.refuse:
                refusal = self.refuse.popleft()
                return [
                    Refuse(
                        rid=event.rid,
                        cause=refusal.cause,
                        retry_after_s=refusal.retry_after_s,
                        message=refusal.message,
                    )
                ]
            if self.hold:
                self.held[event.rid] = event
                return []
            return [self._place(event)]
        return []

    def _place(self, event: RequestArrived) -> Command:
        prefill = self._pick("prefill", event.exclude)
        decode = self._pick("decode", event.exclude)
        if prefill is None or decode is None:
            cause = "no_prefill" if prefill is None else "no_decode"
            return Refuse(rid=event.rid, cause=cause, retry_after_s=1.0, message="none is up")
        turn = self._turn
        self._turn += 1
        return Dispatch(
            rid=event.rid,
            prefill=prefill.instance,
            prefill_rank=turn % prefill.dp_size,
            decode=decode.instance,
            decode_rank=(turn + 1) % decode.dp_size,
            batch=turn,
            held_s=0.0,
            reason="round robin",
        )

    def _pick(self, role: str, exclude: tuple[str, ...]) -> InstanceUp | None:
        of_role = [up for up in self.up.values() if up.role == role]
        wanted = [up for up in of_role if up.instance not in exclude] or of_role
        return wanted[self._turn % len(wanted)] if wanted else None

    def snapshot(self, now_s: float) -> Snapshot:
        return Snapshot(
            policy="fake",
            trigger="immediate",
            queue_requests=len(self.held),
            queue_tokens=0,
            in_flight_requests=0,
            oldest_wait_s=0.0,
            interval_s=0.0,
            mean_forward_s=0.0,
            latency_s=0.0,
            lead_s=None,
            throttled=False,
            batches=0,
            prefill=[],
            decode=[],
        )

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def ended(self) -> list[str]:
        return [event.outcome for event in self.of(RequestEnded)]


@dataclass
class Cluster:
    server: RouterServer
    scheduler: FakeScheduler
    prefill: list[MockEngine]
    decode: list[MockEngine]
    client: aiohttp.ClientSession
    url: str
    extra: dict[str, Any] = field(default_factory=dict)

    def post(self, path: str, body: Any, **kwargs: Any) -> Any:
        return self.client.post(self.url + path, json=body, **kwargs)

    def get(self, path: str, **kwargs: Any) -> Any:
        return self.client.get(self.url + path, **kwargs)

    async def generate(self, **body: Any) -> tuple[int, Any]:
        async with self.post("/generate", body) as response:
            return response.status, orjson.loads(await response.read())

    async def settled(self) -> None:
        """Until every request submitted to the scheduler has ended there, as it must."""
        await until(lambda: self.server.dispatcher.open == 0)

    def check_books(self) -> None:
        """Every submitted request ended exactly once (or was refused); nothing is left over."""
        arrived = [event.rid for event in self.scheduler.of(RequestArrived)]
        ended = [event.rid for event in self.scheduler.of(RequestEnded)]
        assert len(set(arrived)) == len(arrived)
        assert len(set(ended)) == len(ended)
        assert set(ended) <= set(arrived)
        done = [event.rid for event in self.scheduler.of(PrefillDone)]
        assert set(done) <= set(arrived)
        assert self.server.dispatcher.open == 0
        assert len(self.server.in_flight) == 0
        assert all(worker.active == 0 for worker in self.server.registry)


def options_for(
    prefill: Iterable[MockEngine], decode: Iterable[MockEngine], *flags: str
) -> RouterOptions:
    argv = [
        *("--host", "127.0.0.1", "--port", "0"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", "0"),
        *("--sbs-endforward-bind", "tcp://127.0.0.1:*"),
        *("--retry-initial-backoff-ms", "1", "--shutdown-grace-period-secs", "1"),
    ]
    for engine in prefill:
        argv += ["--prefill", engine.url, "9000"]
    for engine in decode:
        argv += ["--decode", engine.url]
    return parse_flags([*argv, *flags])


@asynccontextmanager
async def cluster(
    *flags: str,
    prefill: int = 1,
    decode: int = 1,
    prefill_dp: int = 2,
    decode_dp: int = 4,
    sbs_block: bool = False,
    wait: bool = True,
    scheduler: Any = None,
    real: bool = False,
    tls: ssl.SSLContext | None = None,
    prefill_says: dict[str, Any] | None = None,
    decode_says: dict[str, Any] | None = None,
    kind: type[MockEngine] = MockEngine,
    relay: dict[str, Any] | None = None,
    monitor: dict[str, Any] | None = None,
) -> AsyncIterator[Cluster]:
    """A running router with mock engines; everything is stopped at the end.

    ``real``: with the scheduler that the flags ask for. ``tls``: what the engines serve HTTPS with.
    ``prefill_says``, ``decode_says``: more of ``/server_info`` of the engines of that role.
    ``relay``, ``monitor``: fields of the options of that name which no flag sets, as times.
    """
    rooms = Rooms()
    prefills = [
        kind(
            "prefill",
            dp_size=prefill_dp,
            sbs_block=sbs_block,
            rooms=rooms,
            server_info=prefill_says,
        )
        for _ in range(prefill)
    ]
    decodes = [
        kind(
            "decode",
            dp_size=decode_dp,
            sbs_block=sbs_block,
            rooms=rooms,
            server_info=decode_says,
        )
        for _ in range(decode)
    ]
    for engine in prefills + decodes:
        await engine.start(tls=tls)
    fake = FakeScheduler()
    options = options_for(prefills, decodes, *flags)
    options = replace(
        options,
        relay=replace(options.relay, **relay or {}),
        monitor=replace(options.monitor, **{"fast_s": 0.05} | (monitor or {})),
    )
    server = RouterServer(options, None if real else scheduler or fake)
    await server.start()
    client = aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), connector=aiohttp.TCPConnector(limit=0)
    )
    try:
        if wait:
            everyone = prefill + decode
            await until(lambda: sum(w.usable for w in server.registry) == everyone)
        yield Cluster(server, fake, prefills, decodes, client, f"http://127.0.0.1:{server.port}")
    finally:
        await client.close()
        await server.stop(grace_s=0.0)
        for engine in prefills + decodes:
            await engine.stop()


def sse_events(raw: bytes) -> list[Any]:
    """The JSON of every event; the end mark as the string ``[DONE]``."""
    events: list[Any] = []
    for part in raw.split(b"\n\n"):
        if part.startswith(b"data:"):
            payload = part[5:].strip()
            events.append("[DONE]" if payload == b"[DONE]" else orjson.loads(payload))
    return events
