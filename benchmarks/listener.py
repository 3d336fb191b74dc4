"""Every EndForward message of the engines, whichever router is in front of them.

Engines get an address here beside the router's (``SGLANG_SBS_ROUTERS``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
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


class ReceivedMessage(msgspec.Struct, frozen=True):
    """A message and when it came, seconds of this process's monotonic clock."""

    at_s: float
    report: EndForward


class ReportListener:
    def __init__(self, bind: str, key_file: Path | None = None) -> None:
        """Opens a socket at ``bind``, where engines connect to.

        ``key_file``: the engines' SGLANG_SBS_ENDFORWARD_KEY_FILE.

        Raises:
            OSError: an endpoint cannot be used; the message names it.
            SecretError: the key cannot be used.
        """
        self.bind = bind
        keys = None if key_file is None else keys_in(key_file)
        self._plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context: zmq.asyncio.Context = zmq.asyncio.Context.shadow(self._plain)
        self._gatekeeper = None if keys is None else Gatekeeper(self._plain, keys)
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.SUB)
        self._received: list[ReceivedMessage] = []
        self._task: asyncio.Task[None] | None = None
        self._socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
        try:
            if keys is not None:
                keys.serve(cast("zmq.Socket[bytes]", self._socket))
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._close()
            raise OSError(error.errno, f"cannot listen at {bind}: {error.strerror}") from error

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._listen(), name="EndForward listener")
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._close()

    def _close(self) -> None:
        self._socket.close(0)
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._plain.term()

    def take(self) -> list[ReceivedMessage]:
        """What came since the last call."""
        received, self._received = self._received, []
        return received

    async def _listen(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            with suppress(MalformedMessage, ValueError):
                self._received.append(ReceivedMessage(monotonic(), decode_endforward(frames)))


def engine_clocks(received: Sequence[ReceivedMessage]) -> dict[str, float]:
    """What to add to an engine's clock to have ours, by ``boot_id``.

    The quickest message has the least delay in it; on one host the clocks are the same one.
    """
    offsets: dict[str, float] = {}
    for message in received:
        report = message.report
        if report.kind == "forward" and report.end_s:
            offset_s = message.at_s - report.age_s - report.end_s
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
