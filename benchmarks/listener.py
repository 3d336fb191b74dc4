"""Every EndForward message of the engines, whichever router is in front of them.

Owns the sockets and the place of a message in time, and asks engines which of them sent it. Must
not know what the messages are used for. Engines are told an address here beside the router's
(``SGLANG_SBS_ROUTERS``), or are asked at their own (``SGLANG_SBS_BIND``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Self, cast

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from sglang_sbs.wire import TOPIC, EndForward, MalformedMessage, decode_endforward
from sglang_sbs.wire.curve import Gatekeeper, keys_in

_TIMEOUT = aiohttp.ClientTimeout(total=10)
_QUEUED_MESSAGES = 100_000
_TURN_S = 0.2


class Heard(msgspec.Struct, frozen=True, rename={"at_s": "received_s"}):
    """A message and when it came, seconds of this process's monotonic clock."""

    at_s: float
    report: EndForward

    def line(self) -> bytes:
        """As a file of messages has it."""
        return msgspec.json.encode(self) + b"\n"


class ReportListener:
    """Collects messages while it is open."""

    def __init__(
        self, bind: str | None, key_file: Path | None = None, connect: Sequence[str] = ()
    ) -> None:
        """Opens a socket at ``bind``, where engines connect to, and one to each that binds.

        ``key_file``: the engines' SGLANG_SBS_ENDFORWARD_KEY_FILE.

        Raises:
            OSError: an endpoint cannot be used; the message names it.
            SecretError: the key cannot be used.
        """
        self.bind = bind
        keys = None if key_file is None else keys_in(key_file)
        self._plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context: zmq.asyncio.Context = zmq.asyncio.Context.shadow(self._plain)
        self._gatekeeper = None if keys is None or not bind else Gatekeeper(self._plain, keys)
        self._sockets: list[zmq.asyncio.Socket] = []
        self._heard: list[Heard] = []
        self._tasks: list[asyncio.Task[None]] = []
        for endpoint in [*([bind] if bind else []), *connect]:
            sock = self._context.socket(zmq.SUB)
            self._sockets.append(sock)
            sock.setsockopt(zmq.SUBSCRIBE, TOPIC)
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
            plain = cast("zmq.Socket[bytes]", sock)
            try:
                if endpoint == bind:
                    if keys is not None:
                        keys.serve(plain)
                    sock.bind(endpoint)
                else:
                    if keys is not None:
                        keys.connect(plain)
                    sock.connect(endpoint)
            except zmq.ZMQError as error:
                self._close()
                raise OSError(
                    error.errno, f"cannot listen at {endpoint}: {error.strerror}"
                ) from error

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._listen(sock), name="EndForward listener")
            for sock in self._sockets
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close()

    def _close(self) -> None:
        for sock in self._sockets:
            sock.close(0)
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._plain.term()

    def take(self) -> list[Heard]:
        """What came since the last call."""
        heard, self._heard = self._heard, []
        return heard

    async def _listen(self, sock: zmq.asyncio.Socket) -> None:
        while True:
            frames = await sock.recv_multipart()
            with suppress(MalformedMessage, ValueError):
                self._heard.append(Heard(monotonic(), decode_endforward(frames)))


async def listen_for(
    listener: ReportListener, seconds: float, on_progress: Callable[[float, int], None]
) -> list[Heard]:
    """Every message of that time; ``on_progress`` about once a second: seconds, messages so far."""
    heard: list[Heard] = []
    async with listener:
        started_s = told_s = monotonic()
        while (now_s := monotonic()) < started_s + seconds:
            if now_s - told_s > 1:
                told_s = now_s
                on_progress(now_s - started_s, len(heard))
            await asyncio.sleep(_TURN_S)
            heard += listener.take()
    return heard


def engine_clocks(heard: Sequence[Heard]) -> dict[str, float]:
    """What to add to an engine's clock to have ours, by ``boot_id``.

    The quickest message has the least delay in it; on one host the clocks are the same one.
    """
    offsets: dict[str, float] = {}
    for one in heard:
        report = one.report
        if report.kind == "forward" and report.end_s:
            offset_s = one.at_s - report.age_s - report.end_s
            known_s = offsets.get(report.boot_id, offset_s)
            offsets[report.boot_id] = min(known_s, offset_s)
    return offsets


async def boots(names: Mapping[str, str]) -> dict[str, str]:
    """``boot_id`` -> short name, asked of every engine (worker URL -> short name).

    Raises:
        RuntimeError: an engine does not run the hook.
    """
    found: dict[str, str] = {}
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        for url, name in names.items():
            try:
                async with session.get(f"{url}/server_info") as response:
                    response.raise_for_status()
                    info = await response.json()
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                raise RuntimeError(f"{url}/server_info does not answer: {error}") from error
            boot_id = (info.get("sbs") or {}).get("boot_id")
            if not boot_id:
                raise RuntimeError(
                    f"{url} does not report its passes: install sglang-sbs next to SGLang there "
                    "and set SGLANG_SBS_ROUTERS (docs/endforward.md)"
                )
            found[boot_id] = name
    return found
