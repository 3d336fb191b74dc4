"""Signals that stop a router, gracefully the first time."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

logger = logging.getLogger(__name__)


def end_on_signals(stopping: asyncio.Event) -> None:
    """Set ``stopping`` on SIGTERM and SIGINT, and on the first SIGHUP only: a closing terminal
    sends several, and a second signal would cut off requests in flight. SIGHUP is ignored under
    ``nohup``."""
    loop = asyncio.get_running_loop()
    # Log rotation and other tools send these signals, which would end the process by default.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        loop.add_signal_handler(number, logger.info, "%s does nothing here", number.name)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return

    def hung_up() -> None:
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
        stopping.set()

    loop.add_signal_handler(signal.SIGHUP, hung_up)


async def one_of(
    *work: asyncio.Future[Any], unless: asyncio.Event, limit_s: float | None = None
) -> None:
    """Wait until one of the futures is done, the event is set, or the time is over."""
    ending = asyncio.create_task(unless.wait())
    await asyncio.wait({ending, *work}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
