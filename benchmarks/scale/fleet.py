"""Many engines in one process, of which each DP rank speaks: what a large cluster sends a router.

``python -m benchmarks.scale.fleet`` reads its shape (:class:`FleetShape`, JSON) from the first line
of stdin, writes the ports of its instances, and ends with its stdin. The line ``finish`` lets every
stream end with its next token; ``counts`` is answered with JSON.

A prefill instance takes in what has come when a pass ends, computes up to a chunk per rank, and
answers when the pass with the last token of a prompt is over. A decode stream begins then.
"""

from __future__ import annotations

import asyncio
import functools
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import orjson
import uvloop
import zmq

from benchmarks.raw_engine import (
    COMPLETE,
    STREAM_HEAD,
    EngineConnection,
    control_answer,
    listen,
    server_info,
    tokens_asked,
)
from sglang_sbs.engine.publish import SEND_HWM
from sglang_sbs.scheduling.events import InstanceRole
from sglang_sbs.simulator.cluster.cost import PassCost
from sglang_sbs.simulator.cluster.engine import SimulatedPrefill
from sglang_sbs.simulator.cluster.spec import ClusterSpec, InstanceSpec
from sglang_sbs.wire import EndForward, encode_endforward

CHUNK_TOKENS = 3072
KV_TOKENS = 500_000
MAX_RUNNING = 1024
BYTES_PER_TOKEN = 4
_LIMITS: dict[str, Any] = {
    "kv_capacity_tokens": KV_TOKENS,
    "max_running_requests": MAX_RUNNING,
    "sglang_version": "0.5.23",
}
"""Limits of a rank, which are in each of its messages."""
_ENDED_AT_ONCE = 200
"""Streams that get their last token in one turn of the event loop."""


class FleetShape(msgspec.Struct, kw_only=True, frozen=True):
    """The engines of a fleet; one number of DP ranks per instance."""

    prefill: list[int]
    decode: list[int]
    endforward: str
    reports_per_s: float = 20.0
    """Messages of every rank: launches and ends of passes, decode steps, heartbeats of an idle
    rank."""
    token_s: float = 1.0

    @property
    def ranks(self) -> int:
        return sum(self.prefill) + sum(self.decode)


class FleetCounts(msgspec.Struct, kw_only=True):
    reports: int = 0
    dropped_reports: int = 0
    """Not taken by the socket: its queue was full."""
    late_s: float = 0.0
    """How far behind their own pace the engines ever were."""


class _Instance:
    """One engine: an HTTP port, and a publisher for each DP rank."""

    role: InstanceRole

    def __init__(self, fleet: Fleet, dp_size: int) -> None:
        self.fleet, self.dp_size = fleet, dp_size
        self.boot_id = uuid.uuid4().hex
        self.url = ""
        self._sockets = [fleet.publisher() for _ in range(dp_size)]

    def start(self, port: int, first_s: float) -> None:
        """``first_s``: when its reports begin, so that not all instances speak at once."""
        self.url = f"http://127.0.0.1:{port}"

    def serve(self, body: dict[str, Any], connection: _Connection) -> None:
        raise NotImplementedError

    def publish(self, report: EndForward) -> None:
        self.fleet.counts.reports += 1
        try:
            socket = self._sockets[report.dp_rank]
            socket.send_multipart(encode_endforward(report), zmq.NOBLOCK, copy=True)
        except zmq.Again:
            self.fleet.counts.dropped_reports += 1

    def control(self, path: bytes) -> bytes:
        """The answer to everything that is no inference."""
        info = server_info(
            self.role,
            MAX_RUNNING,
            dp_size=self.dp_size,
            enable_dp_attention=True,
            chunked_prefill_size=CHUNK_TOKENS,
            max_running_requests=MAX_RUNNING * self.dp_size,
            max_total_num_tokens=KV_TOKENS,
            max_req_input_len=131_072,
            disable_overlap_schedule=True,
            disable_radix_cache=True,
            sbs={"boot_id": self.boot_id, "routers": [self.fleet.shape.endforward]},
        )
        return control_answer(path, info)


class _Prefill(_Instance):
    """The simulator's engine; each of its passes is a launch and an end from every rank."""

    role = "prefill"

    def __init__(self, fleet: Fleet, dp_size: int) -> None:
        super().__init__(fleet, dp_size)
        self._asked: dict[str, tuple[int, _Connection]] = {}
        """Room and waiting connection of each request id, until its prompt is computed."""
        self._busy = False

    def start(self, port: int, first_s: float) -> None:
        """See :class:`_Instance`."""
        super().start(port, first_s)
        self._engine = SimulatedPrefill(
            self.url,
            InstanceSpec(dp_size=self.dp_size, chunk_tokens=CHUNK_TOKENS),
            ClusterSpec(cost=self.fleet.cost),
            rng=random.Random(0),
            boot_id=self.boot_id,
        )
        self.fleet.loop.call_later(first_s, self._heartbeat)

    def serve(self, body: dict[str, Any], connection: _Connection) -> None:
        """A prompt came; it is taken in when the next pass is formed."""
        tokens = max(1, len(body["messages"][0]["content"]) // BYTES_PER_TOKEN)
        self._asked[body["rid"]] = (body["bootstrap_room"], connection)
        self._engine.deliver(body["rid"], body["routed_dp_rank"], tokens)
        if not self._busy:
            self._busy = True
            self.fleet.loop.call_soon(self._launch)

    def _launch(self) -> None:
        launched, messages = self._engine.step(time.monotonic())
        self._engine.waits_for(launched)
        self._say(messages)
        assert launched is not None, "it is called when something waits"
        self.fleet.loop.call_later(launched.end_s - launched.start_s, self._finish)

    def _finish(self) -> None:
        ended, messages = self._engine.finish()
        self._say(messages)
        for request in ended.completed:
            room, connection = self._asked.pop(request.rid)
            connection.answer(COMPLETE)
            self.fleet.computed(room)
        self._busy = bool(self._asked)
        if self._busy:
            self._launch()
        else:
            self._say(self._engine.messages("idle"))

    def _heartbeat(self) -> None:
        if not self._busy:
            self._say(self._engine.messages("heartbeat"))
        self.fleet.loop.call_later(self.fleet.report_s, self._heartbeat)

    def _say(self, messages: list[EndForward]) -> None:
        for message in messages:
            self.publish(msgspec.structs.replace(message, **_LIMITS))


class _DecodeRank:
    __slots__ = ("accepted", "new_rids", "seq", "streams")

    def __init__(self) -> None:
        self.accepted = self.seq = 0
        self.new_rids: list[str] = []
        self.streams: dict[_Connection, None] = {}


class _Decode(_Instance):
    role = "decode"

    def __init__(self, fleet: Fleet, dp_size: int) -> None:
        super().__init__(fleet, dp_size)
        self.ranks = [_DecodeRank() for _ in range(dp_size)]
        self._steps = 0
        self._token_turn = 0

    def start(self, port: int, first_s: float) -> None:
        """See :class:`_Instance`."""
        super().start(port, first_s)
        loop = self.fleet.loop
        loop.call_later(first_s, self._step, loop.time() + first_s)
        loop.call_later(first_s, self._tokens, loop.time() + first_s)

    def serve(self, body: dict[str, Any], connection: _Connection) -> None:
        connection.left = tokens_asked(body)
        rank = self.ranks[body["routed_dp_rank"]]
        rank.accepted += 1
        rank.new_rids.append(body["rid"])
        begin = functools.partial(connection.begin, rank.streams)
        self.fleet.when_computed(body["bootstrap_room"], begin)

    def _step(self, due_s: float) -> None:
        self._steps += 1
        now_s = time.monotonic()
        for number, rank in enumerate(self.ranks):
            running = len(rank.streams)
            report = EndForward(
                instance_id=self.url,
                boot_id=self.boot_id,
                role="decode",
                dp_rank=number,
                dp_size=self.dp_size,
                seq=rank.seq,
                kind="forward",
                forward_id=self._steps,
                mode="decode" if running else "idle",
                launch_s=now_s,
                end_s=now_s,
                batch_size=running,
                running_requests=running,
                kv_tokens=running * CHUNK_TOKENS // 2,
                chunk_tokens=CHUNK_TOKENS,
                accepted_requests=rank.accepted,
                rids=rank.new_rids,
                **_LIMITS,
            )
            rank.seq += 1
            rank.new_rids = []
            self.publish(report)
        due_s = max(self.fleet.loop.time(), due_s + self.fleet.report_s)
        self.fleet.loop.call_at(due_s, self._step, due_s)

    def _tokens(self, due_s: float) -> None:
        """A token to every stream of one rank; the ranks take turns."""
        now_s, counts = self.fleet.loop.time(), self.fleet.counts
        counts.late_s = max(counts.late_s, now_s - due_s)
        rank = self.ranks[self._token_turn]
        self._token_turn = (self._token_turn + 1) % self.dp_size
        for connection in [stream for stream in rank.streams if stream.token()]:
            rank.streams.pop(connection, None)
        due_s = max(now_s, due_s + self.fleet.shape.token_s / self.dp_size)
        self.fleet.loop.call_at(due_s, self._tokens, due_s)


class Fleet:
    def __init__(self, shape: FleetShape, loop: asyncio.AbstractEventLoop) -> None:
        self.shape, self.loop = shape, loop
        self.counts = FleetCounts()
        self.report_s = 1 / shape.reports_per_s
        self.cost = PassCost(fixed_s=2 * self.report_s)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, shape.ranks + 8)
        self._rooms: dict[int, Callable[[], None] | None] = {}
        """Prefilled and not yet asked of decode (None), or what decode does then."""
        self._instances: list[_Instance] = [
            *(_Prefill(self, dp_size) for dp_size in shape.prefill),
            *(_Decode(self, dp_size) for dp_size in shape.decode),
        ]

    async def start(self) -> list[int]:
        """Listen; the ports, prefill instances first."""
        ports = []
        for number, instance in enumerate(self._instances):
            port = await listen(self.loop, functools.partial(_Connection, instance))
            instance.start(port, self.report_s * number / len(self._instances))
            ports.append(port)
        return ports

    def publisher(self) -> zmq.Socket[bytes]:
        sock = self._context.socket(zmq.PUB)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, SEND_HWM)
        sock.connect(self.shape.endforward)
        return sock

    def computed(self, room: int) -> None:
        begin = self._rooms.pop(room, None)
        if begin is not None:
            begin()
        else:
            self._rooms[room] = None

    def when_computed(self, room: int, begin: Callable[[], None]) -> None:
        if room in self._rooms:
            del self._rooms[room]
            begin()
        else:
            self._rooms[room] = begin

    async def finish(self) -> None:
        """The next token of every stream is its last."""
        decode = [instance for instance in self._instances if isinstance(instance, _Decode)]
        streams = [
            stream for instance in decode for rank in instance.ranks for stream in rank.streams
        ]
        for first in range(0, len(streams), _ENDED_AT_ONCE):
            for connection in streams[first : first + _ENDED_AT_ONCE]:
                connection.left = 1
            await asyncio.sleep(0)


class _Connection(EngineConnection):
    __slots__ = ("_instance", "_streams")

    def __init__(self, instance: _Instance) -> None:
        super().__init__()
        self._instance = instance
        self._streams: dict[_Connection, None] = {}
        """Streams of its rank; its own, empty ones before it began."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.pop(self, None)

    def request(self, path: bytes, body: bytes) -> None:
        if path != b"/v1/chat/completions":
            self._write(self._instance.control(path))
            return
        self._instance.serve(orjson.loads(body), self)

    def answer(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._write(data)

    def begin(self, streams: dict[_Connection, None]) -> None:
        """The KV has come: head and first token. ``streams`` are those of its rank."""
        if self._transport.is_closing():
            return
        self._streams = streams
        self._write(STREAM_HEAD)
        if not self.token():
            streams[self] = None


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    first = await loop.run_in_executor(None, sys.stdin.readline)
    fleet = Fleet(msgspec.json.decode(first, type=FleetShape), loop)
    print(*await fleet.start(), flush=True)
    over = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    def answer(line: str) -> None:
        if line == "finish":
            tasks.append(loop.create_task(fleet.finish()))
        print(msgspec.json.encode(fleet.counts).decode(), flush=True)

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(answer, line.strip())
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=listen, daemon=True).start()
    await over.wait()


if __name__ == "__main__":
    uvloop.run(_serve())
