"""Every EndForward message of the engines, whichever router is in front of them.

Engines get an address here beside the router's (``SGLANG_SBS_ROUTERS``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Self

import aiohttp
import msgspec

from sglang_sbs.router.signals.endforward_socket import EndForwardSocket
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.curve import keys_in

_TIMEOUT = aiohttp.ClientTimeout(total=10)


class ReceivedMessage(msgspec.Struct, frozen=True):
    """A message and when it came, seconds of this process's monotonic clock."""

    at_s: float
    report: EndForward


class ReportListener:
    """Keeps the messages of engines that connect to an endpoint here."""

    def __init__(self, bind: str, key_file: Path | None = None) -> None:
        """``key_file``: the engines' SGLANG_SBS_ENDFORWARD_KEY_FILE. Raises: SecretError."""
        self.bind = bind
        self._keys = None if key_file is None else keys_in(key_file)
        self._received: list[ReceivedMessage] = []
        self._socket = EndForwardSocket(self._receive, "--listen")

    async def __aenter__(self) -> Self:
        """Raises: OSError, the endpoint cannot be used; the message names it."""
        self._socket.open(self.bind, self._keys)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._socket.close()

    def take(self) -> list[ReceivedMessage]:
        """Return the messages since the last call."""
        received, self._received = self._received, []
        return received

    def _receive(self, report: EndForward, _peer: str) -> None:
        self._received.append(ReceivedMessage(monotonic(), report))


def engine_clocks(received: Sequence[ReceivedMessage]) -> dict[str, float]:
    """Return the difference between our clock and each engine's, by ``boot_id``.

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
