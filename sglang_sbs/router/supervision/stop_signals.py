"""Which signals end a router: gracefully, the first time."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

logger = logging.getLogger(__name__)


def end_on_signals(stopping: asyncio.Event) -> None:
    """Set ``stopping`` on SIGTERM and SIGINT, and on the first SIGHUP: a terminal that is closed
    sends several, and a second signal cuts off what is in flight. Under ``nohup`` it is ignored.
    """
    loop = asyncio.get_running_loop()
    # Log rotation and other tools send these to whatever runs; left alone they end a process.
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
    """Wait until one of them is done, the event is set, or the time is over."""
    ending = asyncio.create_task(unless.wait())
    await asyncio.wait({ending, *work}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
