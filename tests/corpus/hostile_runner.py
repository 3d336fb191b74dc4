"""Sends hostile inputs to a running router and says what was wrong about how each ended.

The rules for every input, whatever its kind: it ends exactly once, with an answer or a closed
connection; no answer is a 500; nothing in the log is an error, has a traceback or several lines;
the router serves the request that comes next; and no request stays in its books. Beyond that, an
input of the corpus has to end as its table says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import h11
import msgspec
from harness.kv_cluster import publishing
from hostile_inputs import Input, agrees, bytes_of
from hostile_oracles import PATIENCE_S, Oracles, oracles, quiet
from router_harness import Cluster, cluster, until

from sglang_sbs.scheduling import Scheduler, SchedulerConfig
from sglang_sbs.wire import encode_endforward
from tools.stand_ins.mock_engine import MockEngine

_PROBE = b'{"text": "probe"}'
_PLAIN = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 17\r\n\r\n" + _PROBE
_MAX_ERROR_BYTES = 4096
_OWN_FAULT = b'"internal_error"'
"""The code of the router's own 500; an engine's goes by another."""
_FLAGS = (
    *("--disable-retries", "--disable-circuit-breaker", "--log-level", "debug"),
    *("--max-payload-size", "1000000"),
)


class Complaints(logging.Handler):
    """Collects log records that no input may cause."""

    _NAMES = ("sglang_sbs", "asyncio")  # what aiohttp logs itself is of the scripted engines

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __enter__(self) -> Complaints:
        for name in self._NAMES:
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._NAMES:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.endswith(".loop_watch"):  # this machine may be busy
            return
        text = record.getMessage()
        of_status = record.name == "sglang_sbs.access"  # a line per answer, an error for each 5xx
        bad = record.levelno >= logging.ERROR and not of_status
        if record.exc_info or bad or "\n" in text:
            error = record.exc_info[1] if record.exc_info else ""
            self.found.append(f"{record.name} logs {text[:300]!r} {error!r:.300}")

    def taken(self) -> list[str]:
        found, self.found = self.found, []
        return found


class Stage:
    """A router for inputs of one kind: :meth:`faults` sends one, :func:`stage` sets it up."""

    flags: tuple[str, ...] = _FLAGS
    prefill, decode = 1, 1
    real = False
    """True: the scheduler of ``--policy sbs`` runs."""

    def __init__(self, here: Cluster, complaints: Complaints) -> None:
        self.here = here
        self._complaints = complaints

    async def open(self, stack: AsyncExitStack) -> None:
        """Open the resources that the kind needs."""

    async def send(self, given: Input) -> list[str]:
        """Send it and wait for its end; what is not as expected."""
        raise NotImplementedError

    async def faults(self, given: Input) -> list[str]:
        """Return the defects of this input's end; empty: none."""
        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                found = await self.send(given)
                found += await self._probe()
        except TimeoutError:
            found = ["it does not end"]
        return found + self._complaints.taken()

    async def _probe(self) -> list[str]:
        status, answer = await self.here.generate(text="probe")
        await until(lambda: self.here.server.in_flight.client_requests == 0)
        await self.here.settled()
        self.here.check_books()
        return [] if status == 200 else [f"the next request is answered {status}: {answer}"]


class HttpStage(Stage):
    """Bytes on a connection of the serving port."""

    async def open(self, stack: AsyncExitStack) -> None:
        self.oracles: Oracles = await stack.enter_async_context(oracles())

    async def send(self, given: Input) -> list[str]:
        found = []
        wanted = given.expected.get("answers")
        then = given.expected.get("then")
        reader, writer = await asyncio.open_connection("127.0.0.1", self.here.server.port)
        received = bytearray()
        ended = False

        async def receive() -> None:
            nonlocal ended
            try:
                while piece := await reader.read(1 << 16):
                    received.extend(piece)
            except ConnectionError:
                pass
            ended = True

        receiving = asyncio.create_task(receive())
        try:
            writer.write(given.data)
            await self._still(received)
            if wanted is not None:
                if then != "waits":
                    await until(lambda: ended or len(_answers(given.data, received)) >= len(wanted))
                    await self._still(received)
                statuses = _answers(given.data, received)
                if len(statuses) != len(wanted) or not all(map(agrees, statuses, wanted)):
                    found.append(f"answers are {statuses}, not {wanted}: {bytes(received[:300])!r}")
                if then == "kept" and not found:
                    if ended:
                        return ["the connection is closed"]
                    before = len(received)
                    writer.write(_PLAIN)
                    await until(lambda: ended or _answers(_PLAIN, received[before:]))
                    if _answers(_PLAIN, received[before:]) != [200]:
                        found.append("the connection no longer serves")
                elif then == "closed":
                    async with asyncio.timeout(PATIENCE_S):
                        await receiving
            if not ended:
                writer.write_eof()
            async with asyncio.timeout(PATIENCE_S):
                await receiving
        except ConnectionError:
            pass
        finally:
            receiving.cancel()
            writer.close()
        try:
            statuses = _answers(given.data, received)
        except h11.RemoteProtocolError as error:
            statuses, found = [], [*found, f"the answer is no HTTP: {error}: {received[:300]!r}"]
        if 500 in statuses and (given.expected or _OWN_FAULT in received):
            found.append(f"a 500: {bytes(received[:300])!r}")
        disagreement = await self.oracles.disagreement(given.data)
        if bool(disagreement) != given.fields.get("oracles_differ", False):
            found.append(disagreement or "the oracles agree")
        return found

    async def _still(self, received: bytearray) -> None:
        here = self.here
        engines = here.prefill + here.decode
        await quiet(
            lambda: (
                len(received),
                here.server.in_flight.client_requests,
                here.server.dispatcher.open,
                [len(engine.requests) for engine in engines],
            )
        )


def _answers(sent: bytes, received: bytes | bytearray) -> list[int]:
    """Status of each whole answer, read strictly. Raises: RemoteProtocolError."""
    statuses: list[int] = []
    rest = bytes(received)
    while rest:
        # What is refused before it is read as a HEAD is answered with a body, and closed.
        refused = rest.startswith(b"HTTP/1.0 400")
        method = "HEAD" if sent.startswith(b"HEAD ") and not refused else "POST"
        connection = h11.Connection(h11.CLIENT)
        connection.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        connection.send(h11.EndOfMessage())
        connection.receive_data(rest)
        status = 0
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                return statuses
            if isinstance(event, h11.Response):
                status = event.status_code
        statuses.append(status)
        rest = connection.trailing_data[0]
    return statuses


class BodyStage(Stage):
    """A body of a well-formed request, to any endpoint."""

    async def send(self, given: Input) -> list[str]:
        server = self.here.server
        path = str(given.fields["path"])
        if "{worker}" in path:
            path = path.replace("{worker}", str(next(iter(server.registry)).id))
        method = given.fields.get("method", "POST")
        headers = {"Content-Type": "application/json", **given.fields.get("headers", {})}
        status: int | str = "closed"
        answer, code = b"", None
        try:
            async with self.here.client.request(
                method, self.here.url + path, data=given.data, headers=headers
            ) as response:
                status, code = response.status, response.headers.get("X-SMG-Error-Code")
                answer = await response.read()
        except aiohttp.ClientPayloadError:
            status = "cut"
        except aiohttp.ClientConnectionError:
            pass
        found = []
        if _OWN_FAULT in answer or not agrees(
            status, given.expected.get("status", ["2xx", "4xx", "5xx", "cut", "closed"])
        ):
            found.append(f"the status is {status}: {answer[:300]!r}")
        if isinstance(status, int) and status >= 400:
            if len(answer) > _MAX_ERROR_BYTES:
                found.append(f"the error has {len(answer)} bytes")
            shaped = code is not None or b'"error"' in answer
            if not shaped and status != 404:  # that is the gateway's, in plain text
                found.append(f"an error without the gateway's shape: {answer[:300]!r}")
        if len(server.registry) != 2:
            found.append("the workers are others")
        return found


class EndForwardStage(Stage):
    """Frames from whoever reaches the EndForward port, to a router with ``--policy sbs``."""

    flags = ()
    prefill, decode = 2, 2
    real = True

    async def open(self, stack: AsyncExitStack) -> None:
        server: Any = self.here.server
        self._listener = server.scheduler._watch._listener
        self._liar, self._witness = self.here.prefill
        self._decode_liar = self.here.decode[0]
        endpoint = str(server.endforward_endpoint)
        for engine in (self._liar, self._witness):
            engine.connect_publisher(endpoint)
            await self._until_received(engine)

    async def _until_received(self, engine: MockEngine) -> None:
        """The router has taken in all that this engine sent before."""
        counts, socket_s = self._listener.counts, 0.05
        before = counts["bound"]
        async with asyncio.timeout(PATIENCE_S):
            while counts["bound"] == before:
                engine.publish(self._witness.report(1, kind="heartbeat"))
                await asyncio.sleep(socket_s if before == 0 else 0.002)

    async def send(self, given: Input) -> list[str]:
        counts = self._listener.counts
        before = dict(counts)
        of_decode = given.fields.get("role") == "decode"
        engine = self._decode_liar if of_decode else self._liar
        fields = dict(given.fields.get("fields", {}))
        if fields.get("forward_s") == "nan":
            fields["forward_s"] = float("nan")
        rank = fields.pop("rank", 0)
        if "frames" in given.fields:
            frames = [bytes_of(frame) for frame in given.fields["frames"]] + [given.data] * bool(
                given.data
            )
        elif given.data:  # a mutated message
            frames = [b"sbs1", bytes(8), given.data]
        else:
            frames = encode_endforward(engine.report(rank, **fields))
        assert self._liar._publisher is not None
        for _ in range(given.fields.get("times", 1)):
            self._liar._publisher.send_multipart(frames)
        await self._until_received(self._liar)
        fate = given.expected.get("fate")
        if fate is not None and fate != "bound" and counts[fate] <= before.get(fate, 0):
            changed = {k: n - before.get(k, 0) for k, n in counts.items() if n != before.get(k, 0)}
            return [f"its fate is {changed}, not {fate}"]
        return []


class KvEventsStage(Stage):
    """Frames from an engine whose KV events the router follows, live and in replays."""

    flags = ()
    real = True

    async def open(self, stack: AsyncExitStack) -> None:
        info: dict[str, Any] = {}
        self._publishers = await stack.enter_async_context(publishing(info))
        rooms = self.here.decode[0]._rooms
        engine = MockEngine("prefill", dp_size=2, server_info=info, rooms=rooms)
        await engine.start()
        stack.push_async_callback(engine.stop)
        body = {"url": engine.url, "worker_type": "prefill", "bootstrap_port": 9000}
        async with self.here.post("/workers", body) as response:
            assert response.status < 300, await response.text()
        await self._publishers[0].subscribed()
        server: Any = self.here.server
        self._counts = server.scheduler._watch._kv_events.counts_of(engine.url, 0)
        self._publishers[0].publish()
        await until(lambda: self._counts["events"])

    async def send(self, given: Input) -> list[str]:
        publisher = self._publishers[0]
        before = dict(self._counts)
        if "frames" in given.fields:
            frames = [bytes_of(frame) for frame in given.fields["frames"]] + [given.data] * bool(
                given.data
            )
            publisher.send(frames)
        else:
            payload = given.data
            if "batch" in given.fields:
                events = [_repeated(event) for event in given.fields["batch"]]
                payload = msgspec.msgpack.encode([publisher.now_s, events, 0])
            seq = given.fields.get("seq", publisher.seq)
            if seq == publisher.seq:
                publisher._sent.append(payload)  # it comes in replays, too
            publisher.send([b"", seq.to_bytes(8, "big"), payload])
        publisher.now_s += 1.0
        taken = self._counts["events"]
        async with asyncio.timeout(PATIENCE_S):
            while self._counts["events"] <= taken:
                publisher.publish()
                await asyncio.sleep(0.005)
        changed = {k: n - before.get(k, 0) for k, n in self._counts.items()}
        return [
            f"{count} {name}, not {wanted}: {changed}"
            for name, wanted in given.expected.get("counts", {}).items()
            if (count := changed.get(name, 0)) < wanted
        ]


def _repeated(event: Any) -> Any:
    """``repeat`` of an event: its blocks are that many."""
    if isinstance(event, dict) and "repeat" in event:
        event = dict(event)
        event["block_hashes"] = list(range(event.pop("repeat")))
    return event


class EngineStage(Stage):
    """The very bytes that one engine answers with."""

    async def send(self, given: Input) -> list[str]:
        role = str(given.fields["role"])
        engine = (self.here.prefill if role == "prefill" else self.here.decode)[0]
        ask = str(given.fields.get("ask", "/generate"))
        inference = ask in ("/generate", "/v1/completions", "/v1/chat/completions")
        asked = str(given.fields.get("engine_path", ask))
        engine.raw_answers[asked] = given.data
        for decode in self.here.decode:  # whatever prefill says, it sends no KV to wait for
            decode._rooms = None
        outcome: int | str = "closed"
        answer = b""
        try:
            if inference:
                body = {"text": "x", "stream": given.fields["stream"]}
                sending = self.here.post(ask, body)
            else:
                sending = self.here.get(ask)
            async with sending as response:
                outcome = response.status
                answer = await response.read()
        except aiohttp.ClientPayloadError:
            outcome = "cut"
        except aiohttp.ClientConnectionError:
            pass
        finally:
            del engine.raw_answers[asked]
        allowed: list[Any] = [200, "4xx", "5xx", "cut", "closed"]
        allowed = given.expected.get("outcomes", allowed)
        if inference and role == "prefill":
            allowed = [*allowed, 200]  # decode may have answered before
        if _OWN_FAULT in answer or not agrees(outcome, allowed):
            return [f"the client gets {outcome}: {answer[:300]!r}"]
        return []


_STAGES: dict[str, type[Stage]] = {
    "http": HttpStage,
    "bodies": BodyStage,
    "endforward": EndForwardStage,
    "kv_events": KvEventsStage,
    "engines": EngineStage,
}


@asynccontextmanager
async def stage(kind: str) -> AsyncIterator[Stage]:
    """A router that takes inputs of this kind until the end."""
    made = _STAGES[kind]
    scheduler = Scheduler(SchedulerConfig()) if made.real else None
    async with AsyncExitStack() as stack:
        complaints = stack.enter_context(Complaints())
        here = await stack.enter_async_context(
            cluster(
                *made.flags,
                prefill=made.prefill,
                decode=made.decode,
                sbs_block=made.real,
                scheduler=scheduler,
            )
        )
        found = made(here, complaints)
        await found.open(stack)
        complaints.taken()
        yield found
