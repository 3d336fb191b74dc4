"""Many engines in one process, of which each DP rank speaks: what a large cluster sends a router.

Owns prefill and decode instances that do in time what engines do, and cost next to nothing: passes,
decode steps, EndForward from every rank over a socket of its own, streams at a pace. Must not know
which router asks. ``python -m benchmarks.scale.fleet`` reads its shape (:class:`FleetShape`, JSON)
from the first line of stdin, writes the ports of its instances, and ends with its stdin. The line
``finish`` lets every stream end with its next token; ``counts`` is answered with JSON.

A prefill instance takes in what has come when a pass ends, computes up to a chunk per rank, and
answers when the pass with the last token of a prompt is over. A decode stream begins then.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import time
import uuid
from collections import deque
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
from sglang_sbs.wire import EndForward, encode_endforward

CHUNK_TOKENS = 3072
KV_TOKENS = 500_000
MAX_RUNNING = 1024
BYTES_PER_TOKEN = 4
_ENDED_AT_ONCE = 200
"""Streams that get their last token in one turn of the event loop."""


class FleetShape(msgspec.Struct, kw_only=True, frozen=True):
    """What there is; one number of DP ranks per instance."""

    prefill: list[int]
    decode: list[int]
    endforward: str
    """Where the ranks' messages go."""
    reports_per_s: float = 20.0
    """Of every rank: launches and ends of passes, decode steps, heartbeats of an idle rank."""
    token_s: float = 1.0
    """Between two tokens of a stream."""

    @property
    def ranks(self) -> int:
        return sum(self.prefill) + sum(self.decode)


class FleetCounts(msgspec.Struct, kw_only=True):
    """What the engines have seen so far."""

    reports: int = 0
    """EndForward messages sent."""
    dropped_reports: int = 0
    """Not taken by the socket: its queue was full."""
    prefills: int = 0
    passes: int = 0
    streams: int = 0
    hung_up: int = 0
    """Streams the router left before their end."""
    late_s: float = 0.0
    """How far behind their own pace the engines ever were."""


class _Prompt:
    __slots__ = ("answer", "left", "rid", "room", "tokens")

    def __init__(self, rid: str, room: int, tokens: int, answer: Callable[[bytes], None]) -> None:
        self.rid, self.room, self.tokens, self.left = rid, room, tokens, tokens
        self.answer = answer


class _Rank:
    """One DP rank and its publisher."""

    __slots__ = (
        *("accepted", "accepted_tokens", "computed", "instance", "new_rids", "number", "queue"),
        *("running", "seq", "socket", "streams"),
    )

    def __init__(self, instance: _Instance, number: int, socket: zmq.Socket[bytes]) -> None:
        self.instance, self.number, self.socket = instance, number, socket
        self.seq = self.accepted = self.accepted_tokens = self.computed = 0
        self.new_rids: list[str] = []
        self.queue: deque[_Prompt] = deque()
        self.running: list[_Prompt] = []
        """Prompts that end in the pass that runs."""
        self.streams: dict[_Connection, None] = {}

    def tell(self, kind: str, **fields: Any) -> None:
        instance, counts = self.instance, self.instance.fleet.counts
        report = EndForward(
            instance_id=instance.url,
            boot_id=instance.boot_id,
            role=instance.role,
            dp_rank=self.number,
            dp_size=instance.dp_size,
            seq=self.seq,
            kind=kind,  # type: ignore[arg-type]
            kv_capacity_tokens=KV_TOKENS,
            chunk_tokens=CHUNK_TOKENS,
            max_running_requests=MAX_RUNNING,
            accepted_requests=self.accepted,
            accepted_tokens=self.accepted_tokens,
            computed_tokens=self.computed,
            rids=self.new_rids,
            sglang_version="0.5.23",
            **fields,
        )
        self.seq += 1
        self.new_rids = []
        counts.reports += 1
        try:
            self.socket.send_multipart(encode_endforward(report), zmq.NOBLOCK, copy=True)
        except zmq.Again:
            counts.dropped_reports += 1

    def accept(self, rid: str, tokens: int) -> None:
        self.accepted += 1
        self.accepted_tokens += tokens
        self.new_rids.append(rid)


class _Instance:
    """One engine: an HTTP port and its ranks."""

    def __init__(self, fleet: Fleet, role: InstanceRole, dp_size: int) -> None:
        self.fleet, self.role, self.dp_size = fleet, role, dp_size
        self.boot_id = uuid.uuid4().hex
        self.url = ""
        self.ranks = [_Rank(self, number, fleet.publisher()) for number in range(dp_size)]
        self._pass = 0
        self._busy = False
        self._launched_s = 0.0
        self._token_turn = 0

    def start(self, port: int, first_s: float) -> None:
        """``first_s``: when its reports begin, so that not all instances speak at once."""
        self.url = f"http://127.0.0.1:{port}"
        loop = self.fleet.loop
        if self.role == "prefill":
            loop.call_later(first_s, self._heartbeat)
        else:
            loop.call_later(first_s, self._decode_step, loop.time() + first_s)
            loop.call_later(first_s, self._tokens, loop.time() + first_s)

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
            disable_radix_cache=True,
            sbs={"boot_id": self.boot_id, "routers": [self.fleet.shape.endforward]},
        )
        return control_answer(path, info)

    # Prefill ------------------------------------------------------------------------------------

    def prefill(self, body: dict[str, Any], answer: Callable[[bytes], None]) -> None:
        rank = self.ranks[body["routed_dp_rank"]]
        text = body["messages"][0]["content"]
        tokens = max(1, len(text) // BYTES_PER_TOKEN)
        rank.accept(body["rid"], tokens)
        rank.queue.append(_Prompt(body["rid"], body["bootstrap_room"], tokens, answer))
        self.fleet.counts.prefills += 1
        if not self._busy:
            self._busy = True
            self.fleet.loop.call_soon(self._launch)

    def _launch(self) -> None:
        self._pass += 1
        self.fleet.counts.passes += 1
        self._launched_s = time.monotonic()
        tokens, requests = [], []
        for rank in self.ranks:
            room, batch = CHUNK_TOKENS, 0
            while rank.queue and room > 0:
                prompt = rank.queue[0]
                part = min(room, prompt.left)
                prompt.left -= part
                room -= part
                batch += 1
                if prompt.left == 0:
                    rank.running.append(rank.queue.popleft())
            tokens.append(CHUNK_TOKENS - room)
            requests.append(batch)
            rank.computed += CHUNK_TOKENS - room
        for rank in self.ranks:
            self._tell_pass(rank, "launch", tokens, requests)
        # A launch and an end from every rank: two reports per pass.
        self.fleet.loop.call_later(self.fleet.pass_s, self._finish, tokens, requests)

    def _tell_pass(self, rank: _Rank, kind: str, tokens: list[int], requests: list[int]) -> None:
        now_s = time.monotonic()
        ended = kind == "forward"
        rank.tell(
            kind,
            forward_id=self._pass,
            mode="extend",
            launch_s=self._launched_s,
            end_s=now_s if ended else 0.0,
            age_s=0.0 if ended else now_s - self._launched_s,
            forward_s=now_s - self._launched_s if ended else 0.0,
            extend_tokens=tokens[rank.number],
            batch_size=requests[rank.number],
            tokens_per_rank=tokens,
            waiting_requests=len(rank.queue),
            waiting_tokens=sum([prompt.left for prompt in rank.queue]),
        )

    def _finish(self, tokens: list[int], requests: list[int]) -> None:
        for rank in self.ranks:
            self._tell_pass(rank, "forward", tokens, requests)
        for rank in self.ranks:
            over, rank.running = rank.running, []
            for prompt in over:
                prompt.answer(COMPLETE)
                self.fleet.computed(prompt.room)
        if any(rank.queue for rank in self.ranks):
            self._launch()
        else:
            self._busy = False

    def _heartbeat(self) -> None:
        if not self._busy:
            for rank in self.ranks:
                rank.tell("heartbeat", forward_id=self._pass)
        self.fleet.loop.call_later(self.fleet.report_s, self._heartbeat)

    # Decode -------------------------------------------------------------------------------------

    def decode(self, body: dict[str, Any], connection: _Connection) -> None:
        rank = self.ranks[body["routed_dp_rank"]]
        rank.accept(body["rid"], 0)
        self.fleet.counts.streams += 1
        self.fleet.when_computed(body["bootstrap_room"], lambda: connection.begin(rank))

    def _decode_step(self, due_s: float) -> None:
        self._pass += 1
        now_s = time.monotonic()
        for rank in self.ranks:
            running = len(rank.streams)
            rank.tell(
                "forward",
                forward_id=self._pass,
                mode="decode" if running else "idle",
                launch_s=now_s,
                end_s=now_s,
                batch_size=running,
                running_requests=running,
                kv_tokens=running * CHUNK_TOKENS // 2,
            )
        due_s = max(self.fleet.loop.time(), due_s + self.fleet.report_s)
        self.fleet.loop.call_at(due_s, self._decode_step, due_s)

    def _tokens(self, due_s: float) -> None:
        """A token to every stream of one rank; the ranks take turns."""
        now_s, counts = self.fleet.loop.time(), self.fleet.counts
        counts.late_s = max(counts.late_s, now_s - due_s)
        rank = self.ranks[self._token_turn]
        self._token_turn = (self._token_turn + 1) % self.dp_size
        for connection in [one for one in rank.streams if one.token()]:
            rank.streams.pop(connection, None)
        due_s = max(now_s, due_s + self.fleet.shape.token_s / self.dp_size)
        self.fleet.loop.call_at(due_s, self._tokens, due_s)


class Fleet:
    """All instances, on one event loop."""

    def __init__(self, shape: FleetShape, loop: asyncio.AbstractEventLoop) -> None:
        self.shape, self.loop = shape, loop
        self.counts = FleetCounts()
        self.report_s = 1 / shape.reports_per_s
        self.pass_s = 2 * self.report_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, shape.ranks + 8)
        self._rooms: dict[int, Callable[[], None] | None] = {}
        """Prefilled and not yet asked of decode (None), or what decode does then."""
        self._instances = [
            *(_Instance(self, "prefill", dp_size) for dp_size in shape.prefill),
            *(_Instance(self, "decode", dp_size) for dp_size in shape.decode),
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
        """A rank's socket, as the plugin's."""
        sock = self._context.socket(zmq.PUB)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, SEND_HWM)
        sock.connect(self.shape.endforward)
        return sock

    def computed(self, room: int) -> None:
        """The prompt of this room has been prefilled."""
        begin = self._rooms.pop(room, None)
        if begin is not None:
            begin()
        else:
            self._rooms[room] = None

    def when_computed(self, room: int, begin: Callable[[], None]) -> None:
        """Decode waits for the KV of this room."""
        if room in self._rooms:
            del self._rooms[room]
            begin()
        else:
            self._rooms[room] = begin

    async def finish(self) -> None:
        """The next token of every stream is its last."""
        streams = [
            one for instance in self._instances for rank in instance.ranks for one in rank.streams
        ]
        for first in range(0, len(streams), _ENDED_AT_ONCE):
            for connection in streams[first : first + _ENDED_AT_ONCE]:
                connection.left = 1
            await asyncio.sleep(0)


class _Connection(EngineConnection):
    __slots__ = ("_instance", "_rank")

    def __init__(self, instance: _Instance) -> None:
        super().__init__()
        self._instance = instance
        self._rank: _Rank | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._rank is not None and self._rank.streams.pop(self, self) is None:
            self._instance.fleet.counts.hung_up += 1
        self._rank = None

    def request(self, path: bytes, body: bytes) -> None:
        """A whole one came."""
        if path != b"/v1/chat/completions":
            self._write(self._instance.control(path))
            return
        asked = orjson.loads(body)
        if self._instance.role == "prefill":
            self._instance.prefill(asked, self.answer)
        else:
            self.left = tokens_asked(asked)
            self._instance.decode(asked, self)

    def answer(self, data: bytes) -> None:
        """Unless the router has hung up."""
        if not self._transport.is_closing():
            self._write(data)

    def begin(self, rank: _Rank) -> None:
        """The KV has come: head and first token."""
        if self._transport.is_closing():
            return
        self._rank = rank
        self._write(STREAM_HEAD)
        if not self.token():
            rank.streams[self] = None


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
