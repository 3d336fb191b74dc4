"""The fault matrix: every way a leg can go wrong, for either leg, streaming or not.

Each cell says what the client gets, and checks that the other leg was aborted, that no ledger of
the router or the (real) scheduler keeps anything, who is blamed, and that attempts are repeated
only before the first byte, with a new id and a new room. Two instances per role, in turn: the first
request finds the healthy pair, the second one meets the fault, the third one service as usual.

A slow reader here is an engine that does not read its request; clients that read slowly are in
``test_faults`` and ``test_hardening``, engines that stop altogether in ``test_stopped_engines``.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from router_harness import Cluster, cluster, sse_events, until

from sglang_sbs.scheduling import Scheduler, SchedulerConfig
from sglang_sbs.scheduling.events import Command, Event, RequestArrived, RequestEnded
from tools.stand_ins.mock_engine import Behaviour, MockEngine

CONFLICT = "bootstrap room conflict: follow_bootstrap_room expects another DP rank"


@dataclass(frozen=True)
class Fault:
    """A fault in one leg, and the result for a client without retries."""

    name: str
    status: int
    code: str
    """Without the leg's name, which goes in front unless it starts with ``=``."""
    behaviour: Behaviour | None = None
    """``None``: the address itself fails (``listening`` says how)."""
    listening: bool = False
    retried: bool = True
    blamed: bool = True
    """It counts against the worker."""
    after_first_byte: bool = False
    """True: in a decode stream it strikes after the first event."""
    padding: int = 0
    """Bytes added to the request."""

    def __str__(self) -> str:
        return self.name


BROKEN = "server_error"
TIMEOUT = "=request_timeout"

FAULTS = [
    Fault("refused", 502, BROKEN),
    Fault("tls_stall", 502, BROKEN, listening=True),
    Fault("4xx", 400, "bad_request", Behaviour(status=400), retried=False, blamed=False),
    Fault("5xx", 500, "internal_error", Behaviour(status=500)),
    Fault(
        *("hang_before_head", 504, TIMEOUT, Behaviour(fault="hang_before_head")),
        retried=False,
        blamed=False,
    ),
    Fault("reset_before_head", 502, BROKEN, Behaviour(fault="reset_before_head")),
    Fault(
        *("hang_mid_body", 504, TIMEOUT, Behaviour(fault="hang_mid_body")),
        retried=False,
        blamed=False,
        after_first_byte=True,
    ),
    Fault(
        *("reset_mid_body", 502, BROKEN, Behaviour(fault="reset_mid_body")), after_first_byte=True
    ),
    Fault("malformed", 502, BROKEN, Behaviour(garbage=b"<html>proxy says hello</html>")),
    Fault(
        *("malformed_tail", 502, BROKEN, Behaviour(garbage=b"{]", garbage_tail=b"data: {]\n\n")),
        after_first_byte=True,
    ),
    Fault(
        *("slow_reader", 504, TIMEOUT, Behaviour(fault="unread")),
        retried=False,
        blamed=False,
        padding=16 << 20,
    ),
    Fault("abort", 500, "internal_error", Behaviour(abort=True, tokens=1)),
    Fault("conflict", 500, "internal_error", Behaviour(status=500, message=CONFLICT)),
]


class Books:
    """The real scheduler, and the events it received."""

    def __init__(self) -> None:
        self._scheduler = Scheduler(SchedulerConfig(policy="round_robin"))
        self.events: list[Event] = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
        self.events.append(event)
        return self._scheduler.handle(event, now_s)

    def snapshot(self, now_s: float) -> Any:
        return self._scheduler.snapshot(now_s)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def check_ledgers(c: Cluster, books: Books) -> None:
    """Every submitted request ended exactly once, and nothing anywhere remembers one."""
    arrived = [event.rid for event in books.of(RequestArrived)]
    ended = [event.rid for event in books.of(RequestEnded)]
    assert sorted(arrived) == sorted(ended)
    assert len(set(arrived)) == len(arrived)
    state = books.snapshot(0.0)
    assert (state.queue_requests, state.queue_tokens, state.in_flight_requests) == (0, 0, 0)
    for instance in state.prefill:
        for rank in instance.ranks:
            assert (rank.flight_tokens, rank.queued_tokens, rank.outstanding_requests) == (0, 0, 0)
    for instance in state.decode:
        for rank in instance.ranks:
            assert (rank.running, rank.kv_tokens, rank.flight_requests) == (0, 0, 0)
    assert all(worker.active == 0 for worker in c.server.registry)
    assert len(c.server.in_flight) == c.server.in_flight.client_requests == 0
    assert c.server.admission.running == c.server.admission.queued == 0


def end_patience(c: Cluster) -> None:
    """End the time limit of the last request now.

    How long it takes to write 16 MiB to two engines is the machine's business.
    """
    timeouts = c.server.relay._timeouts
    last = [*timeouts._due_s][-1]
    timeouts.discard(last)
    timeouts._expired(last)


@dataclass
class Scene:
    c: Cluster
    books: Books
    failing: MockEngine
    """The engine of the leg that fails; its twin has served one request already."""
    twins: list[MockEngine]
    others: list[MockEngine]
    """The engines of the other leg."""

    def worker_failures(self, engine: MockEngine) -> int:
        worker = self.c.server.registry.get(engine.url)
        assert worker is not None
        return worker.failures


@asynccontextmanager
async def scene(
    leg: str, fault: Fault, certificate: tuple[Path, Path], *flags: str
) -> AsyncIterator[Scene]:
    """A cluster one healthy request old, with the fault in place for the next one."""
    tls = None
    if fault.listening:
        cert, key = certificate
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(cert, key)
        flags = (*flags, "--ca-cert-paths", str(cert))
    books = Books()
    sizes = {"prefill": 2, "decode": 2, "prefill_dp": 2, "decode_dp": 1}
    # The policy of the books: no load polls, whose made-up numbers would get into them.
    flags = (*flags, "--policy", "round_robin")
    async with cluster(*flags, scheduler=books, tls=tls, **sizes) as c:
        assert (await c.generate(text="warm"))[0] == 200
        engines = c.prefill if leg == "prefill" else c.decode
        others = c.decode if leg == "prefill" else c.prefill
        (failing,) = (engine for engine in engines if not engine.requests)
        twins = [engine for engine in engines if engine is not failing]
        blocker = None
        if fault.behaviour is None:
            port = failing.port
            await failing.stop()
            if fault.listening:
                # What ends this request by itself; time enough to reach the healthy leg.
                c.server.pool.connect_timeout_s = 2.0
                blocker = await asyncio.start_server(_say_nothing, "127.0.0.1", port)
        else:
            failing.behaviours.append(fault.behaviour)
            failing.gate.close()
        for engine in others:
            engine.gate.close()
        try:
            yield Scene(c, books, failing, twins, others)
        finally:
            if blocker is not None:
                blocker.close()


async def _say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()  # the ClientHello and whatever follows, to the end of the connection
    writer.close()


async def send(s: Scene, fault: Fault, stream: bool) -> tuple[int, str, Any]:
    """One request that meets the fault; status, error code and events or body."""
    body: dict[str, Any] = {"text": "x", "stream": stream, "extra_key": "k" * fault.padding}
    async with s.c.post("/generate", body) as response:
        raw = await response.read()
        code = response.headers.get("X-SMG-Error-Code", "")
        streamed = response.headers["Content-Type"].startswith("text/event-stream")
        return response.status, code, events_of(raw) if streamed else orjson.loads(raw)


def events_of(raw: bytes) -> list[Any]:
    """The events of a stream; one that is no JSON, which is passed on unread, as bytes."""
    events: list[Any] = []
    for part in raw.split(b"\n\n")[:-1]:
        try:
            events += sse_events(part + b"\n\n")
        except orjson.JSONDecodeError:
            events.append(part)
    return events


def code_of(leg: str, fault: Fault) -> str:
    return fault.code[1:] if fault.code.startswith("=") else f"{leg}_{fault.code}"


async def strike(s: Scene, fault: Fault) -> None:
    """Both legs are on their engines; now the failing one goes on and meets its fault."""
    if fault.behaviour is None:
        return
    await until(lambda: sum(len(engine.requests) for engine in s.others) == 2)
    if fault.behaviour.fault == "unread":
        await until(lambda: s.failing.unread == 1)
        end_patience(s.c)
    else:
        await s.failing.gate.arrived(1)
    s.failing.gate.open()


async def check_other_leg_aborted(s: Scene, fault: Fault, attempts: list[RequestArrived]) -> None:
    """The leg that worked was aborted by id, and received nothing more."""
    first = attempts[0].rid
    reached = [r for engine in s.others for r in engine.requests if r.rid == first]
    # A connection that fails at once may fail before the other leg has left: nothing to abort.
    assert reached or fault.behaviour is None
    for engine in s.others:
        if any(r.rid == first for r in engine.requests):
            await engine.aborted(first)


async def check_service_goes_on(s: Scene) -> None:
    for engine in (*s.others, s.failing):
        engine.gate.open()
    status, _ = await s.c.generate(text="after")
    assert status == 200


def patience(fault: Fault) -> str:
    """``--request-timeout-secs``: short only where it is what ends the request by itself.

    Long enough for a machine with other work to bring both legs to their engines before.
    """
    return "3" if fault.code == TIMEOUT and not fault.padding else "20"


CELLS = [
    pytest.param(leg, fault, stream, id=f"{leg}-{fault}-{'stream' if stream else 'whole'}")
    for leg in ("prefill", "decode")
    for fault in FAULTS
    for stream in (False, True)
]


@pytest.mark.parametrize(("leg", "fault", "stream"), CELLS)
async def test_without_retries(
    leg: str, fault: Fault, stream: bool, certificate: tuple[Path, Path]
) -> None:
    flags = ("--disable-retries", "--request-timeout-secs", patience(fault))
    async with scene(leg, fault, certificate, *flags) as s:
        task = asyncio.create_task(send(s, fault, stream))
        await strike(s, fault)
        status, code, body = await task
        if stream and leg == "decode" and fault.after_first_byte:
            assert status == 200
            assert body[0]["text"] == "t1"
            assert (body[-1]["error"]["status"], body[-1]["error"]["code"]) == (
                fault.status,
                code_of(leg, fault),
            )
        else:
            assert (status, code) == (fault.status, code_of(leg, fault))
            assert body["error"]["code"] == code
        await s.c.settled()
        _, attempt = s.books.of(RequestArrived)
        await check_other_leg_aborted(s, fault, [attempt])
        assert s.worker_failures(s.failing) == int(fault.blamed)
        assert all(s.worker_failures(engine) == 0 for engine in (*s.twins, *s.others))
        assert s.books.of(RequestEnded)[-1].outcome in ("failed", "aborted")
        check_ledgers(s.c, s.books)
        await check_service_goes_on(s)


@pytest.mark.parametrize(("leg", "fault", "stream"), CELLS)
async def test_with_retries(
    leg: str, fault: Fault, stream: bool, certificate: tuple[Path, Path]
) -> None:
    flags = ("--retry-max-retries", "3", "--request-timeout-secs", patience(fault))
    async with scene(leg, fault, certificate, *flags) as s:
        task = asyncio.create_task(send(s, fault, stream))
        await strike(s, fault)
        late = stream and leg == "decode" and fault.after_first_byte
        if fault.retried and not late:
            await until(lambda: len(s.books.of(RequestArrived)) == 3)
            for engine in s.others:
                engine.gate.open()
        status, _, body = await task
        await s.c.settled()
        _, *attempts = s.books.of(RequestArrived)
        legs = [r for e in (*s.twins, *s.others, s.failing) for r in e.requests]
        rooms = {r.rid: r.body["bootstrap_room"] for r in legs}
        if fault.retried and not late:
            assert status == 200
            assert (body[-2] if stream else body)["text"] == "t1 t2 t3"
            assert not stream or body[-1] == "[DONE]"
            first, second = attempts
            assert second.exclude == (s.failing.url,)
            assert first.rid != second.rid
            assert rooms[second.rid] != rooms.get(first.rid)
            assert len({r.body["bootstrap_room"] for r in legs if r.rid == second.rid}) == 1
            assert s.books.of(RequestEnded)[-1].outcome == "completed"
        else:
            assert status == (200 if late else fault.status)
            if late:
                assert body[-1]["error"]["status"] == fault.status
            assert len(attempts) == 1
        await check_other_leg_aborted(s, fault, attempts)
        assert s.worker_failures(s.failing) == int(fault.blamed)
        assert all(s.worker_failures(engine) == 0 for engine in (*s.twins, *s.others))
        check_ledgers(s.c, s.books)
        await check_service_goes_on(s)


# Batches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_one_failing_request_of_a_batch_ends_the_others_on_both_legs(
    leg: str, stream: bool
) -> None:
    books = Books()
    flags = ("--disable-retries", "--policy", "round_robin")
    async with cluster(*flags, scheduler=books) as c:
        failing, other = c.prefill[0], c.decode[0]
        if leg == "decode":
            failing, other = other, failing
        failing.behaviours.append(Behaviour(status=500))
        failing.gate.close()
        other.gate.close()
        body = {"text": ["x", "y", "z"], "stream": stream}
        task = asyncio.create_task(send_body(c, body))
        await failing.gate.arrived(3)
        await other.gate.arrived(3)
        failing.gate.release(1)
        status, answer = await task
        assert (status, answer["error"]["code"]) == (500, f"{leg}_internal_error")
        await c.settled()
        for request in other.requests:
            await other.aborted(request.rid)
        for request in failing.requests[1:]:
            await failing.aborted(request.rid)
        assert len({r.body["bootstrap_room"] for r in other.requests}) == 3
        outcomes = sorted(event.outcome for event in books.of(RequestEnded))
        assert outcomes == ["aborted", "aborted", "failed"]
        check_ledgers(c, books)


async def send_body(c: Cluster, body: dict[str, Any]) -> tuple[int, Any]:
    async with c.post("/generate", body) as response:
        return response.status, await response.json()


# Breakers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_breakers_open_for_the_leg_that_fails_and_never_on_the_last_worker(leg: str) -> None:
    books = Books()
    flags = ("--cb-failure-threshold", "1", "--disable-retries", "--policy", "round_robin")
    async with cluster(*flags, scheduler=books, prefill=2, decode=2) as c:
        failing = c.prefill if leg == "prefill" else c.decode
        for engine in failing:
            engine.behaviour = Behaviour(status=500)
        for _ in range(6):
            status, body = await c.generate(text="x")
            assert (status, body["error"]["code"]) == (500, f"{leg}_internal_error")
        states = {w.url: w.breaker.state for w in c.server.registry}
        assert sorted(states[engine.url] for engine in failing) == ["closed", "open"]
        others = c.decode if leg == "prefill" else c.prefill
        assert [states[engine.url] for engine in others] == ["closed", "closed"]
        # The one that is left serves as soon as it can.
        for engine in failing:
            engine.behaviour = Behaviour()
        assert (await c.generate(text="x"))[0] == 200
        await c.settled()
        check_ledgers(c, books)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_requests_that_no_engine_can_serve_open_no_breaker(leg: str) -> None:
    """Ten of them opened all but one."""
    books = Books()
    flags = ("--cb-failure-threshold", "3", "--policy", "round_robin")
    async with cluster(*flags, scheduler=books, prefill=3, decode=3) as c:
        failing = c.prefill if leg == "prefill" else c.decode
        for engine in failing:
            engine.behaviour = Behaviour(status=500)
        for _ in range(10):
            status, body = await c.generate(text="x")
            assert (status, body["error"]["code"]) == (500, f"{leg}_internal_error")
        assert {w.breaker.state for w in c.server.registry} == {"closed"}
        for engine in failing:
            engine.behaviour = Behaviour()
        assert (await c.generate(text="x"))[0] == 200
        await c.settled()
        check_ledgers(c, books)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_fails_what_others_serve_is_blamed_at_their_first_byte(
    stream: bool,
) -> None:
    books = Books()
    flags = ("--cb-failure-threshold", "3", "--policy", "round_robin")
    async with cluster(*flags, scheduler=books, prefill=2, decode=1) as c:
        broken = c.prefill[0]
        broken.behaviour = Behaviour(status=500)
        c.decode[0].token_gate.close()
        asked = [
            asyncio.create_task(send_any(c, {"text": "x", "stream": stream})) for _ in range(12)
        ]
        worker = c.server.registry.get(broken.url)
        assert worker is not None
        if stream:  # its streams are still under way
            await until(lambda: worker.breaker.state == "open")
        c.decode[0].token_gate.open()
        assert set(await asyncio.gather(*asked)) == {200}
        assert worker.breaker.state == "open"
        await c.settled()
        check_ledgers(c, books)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_retries_what_every_engine_fails_takes_no_second_one_out(role: str) -> None:
    flags = ("--disable-retries", "--cb-failure-threshold", "2", "--policy", "round_robin")
    async with cluster(*flags, scheduler=Books(), prefill=4, decode=4) as c:
        engines = c.prefill if role == "prefill" else c.decode
        for engine in engines:
            engine.behaviour = Behaviour(status=500)
        for _ in range(16):
            assert await send_any(c, {"text": "x"}) == 500
        workers = [c.server.registry.get(engine.url) for engine in engines]
        assert sum(worker is not None and worker.breaker.state == "open" for worker in workers) < 2


async def send_any(c: Cluster, body: dict[str, Any]) -> int:
    async with c.post("/generate", body) as response:
        await response.read()
        status: int = response.status
        return status
